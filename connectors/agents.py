"""Single- and multi-agent episodes seen alike: which agents act, and for which module."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

Row = tuple[int, Any]
"""Position of the episode among those of the EnvRunner; ID of the agent, None if there is one."""


def is_multi_agent(episodes: list[Any]) -> bool:
    """Whether these are episodes of several agents."""
    return bool(episodes) and isinstance(episodes[0], MultiAgentEpisode)


def acting_agents(episodes: list[Any]) -> dict[str, list[tuple[Row, SingleAgentEpisode]]]:
    """The agents whose action the environments wait for, by the module that acts for them."""
    if not is_multi_agent(episodes):
        return {DEFAULT_MODULE_ID: [((i, None), episode) for i, episode in enumerate(episodes)]}
    agents = defaultdict(list)
    for i, episode in enumerate(episodes):
        to_act = episode.get_agents_to_act()
        # Not in the order of that set, which differs from process to process.
        for agent_id, agent in episode.agent_episodes.items() if to_act else ():
            if agent_id in to_act:
                agents[agent.module_id].append(((i, agent_id), agent))
    return dict(agents)


def agent_at(row: Row, episodes: list[Any]) -> SingleAgentEpisode | None:
    """The present episode of one agent, None if it has left."""
    position, agent_id = row
    episode = episodes[position]
    return episode if agent_id is None else episode.agent_episodes.get(agent_id)


def agents_by_module(episodes: list[Any]) -> dict[str, list[SingleAgentEpisode]]:
    """The episodes of all agents, by module."""
    if not is_multi_agent(episodes):
        return {DEFAULT_MODULE_ID: episodes}
    agents = defaultdict(list)
    for episode in episodes:
        # RLlib goes through a set of agent IDs, in an order that differs from process to process.
        for agent in episode.agent_episodes.values():
            agents[agent.module_id].append(agent)
    return dict(agents)


def batch_key(agent: SingleAgentEpisode) -> tuple:
    """The key that RLlib's connectors put this agent's items under."""
    if agent.agent_id is None:
        return (agent.id_,)
    return (agent.multi_agent_episode_id, agent.agent_id, agent.module_id)


def has_items(data: Any, agents: Sequence[SingleAgentEpisode]) -> bool:
    """False where a column holds items of other modules' agents only."""
    several = agents[0].agent_id is not None
    return not (several and isinstance(data, dict)) or any(batch_key(a) in data for a in agents)


def modules_by_id(rl_module: Any, module_ids: Iterable[str]) -> dict[str, RLModule]:
    """The modules with these IDs, unwrapped from DDP; those that do not exist are left out."""
    if not isinstance(rl_module, MultiRLModule):
        return {module_id: rl_module.unwrapped() for module_id in module_ids}
    return {
        module_id: rl_module[module_id].unwrapped()
        for module_id in module_ids
        if module_id in rl_module
    }
