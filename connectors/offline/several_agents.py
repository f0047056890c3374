"""Episodes of several agents as rows of a file, and as episodes again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from connectors.trials import TRIAL, trial_of

AGENTS = "agent_episodes"
"""Key of a row that holds an episode of several agents: a list of states, one an agent."""

ModuleOf = Callable[[Any, Any, MultiAgentEpisode], str]
"""ID of an agent, of the module that it was recorded with, its episode -> module to train."""


def state_of(episode: MultiAgentEpisode) -> dict[str, Any]:
    """What is recorded of an episode: the steps that its agents completed, without states.

    `MultiAgentEpisode.get_state` holds functions and buffers, which msgpack doesn't know, to go on
    with the episode. For training the agents' own steps are enough.
    """
    agents = [agent.get_state() for agent in episode.agent_episodes.values() if len(agent)]
    for agent in agents:
        (agent["extra_model_outputs"] or {}).pop(Columns.STATE_OUT, None)
    return {
        "id_": episode.id_,
        "env_t_started": episode.env_t_started,
        "env_t": episode.env_t,
        "is_terminated": episode.is_terminated,
        "is_truncated": episode.is_truncated,
        TRIAL: trial_of(episode),
        AGENTS: agents,
    }


def episode_from(
    state: dict[str, Any],
    restore: Callable[[dict[str, Any], str], SingleAgentEpisode],
    module_of: ModuleOf,
) -> MultiAgentEpisode:
    """Makes an episode of what `state_of` returned.

    Args:
        state: That dict, as msgpack returns it.
        restore: Makes an agent's episode of its state, for this module.
        module_of: See `module_mapping`.
    """
    episode = MultiAgentEpisode(state["id_"], env_t_started=state["env_t_started"])
    episode.env_t = state["env_t"]
    episode.is_terminated, episode.is_truncated = state["is_terminated"], state["is_truncated"]
    if state.get(TRIAL) is not None:
        episode.custom_data[TRIAL] = state[TRIAL]
    for agent_state in state[AGENTS]:
        agent_id = agent_state["agent_id"]
        # msgpack has no tuples.
        agent_id = tuple(agent_id) if isinstance(agent_id, list) else agent_id
        module_id = module_of(agent_id, agent_state["module_id"], episode)
        agent: Any = restore(agent_state, module_id)
        agent.agent_id, agent.module_id = agent_id, module_id
        agent.multi_agent_episode_id = episode.id_
        episode.agent_episodes[agent_id] = agent
    return episode


def module_mapping(config: AlgorithmConfig) -> ModuleOf | None:
    """Which module is trained on an agent: the one that it was recorded with.

    Where the config has no such policy, the one that its `policy_mapping_fn` names. None for a
    config of one agent.
    """
    if not config.is_multi_agent:
        return None
    mapping: Any = config.policy_mapping_fn

    def module_of(agent_id: Any, recorded: Any, episode: MultiAgentEpisode) -> str:
        if recorded in config.policies:
            return recorded
        module_id = mapping(agent_id, episode)
        if module_id not in config.policies:
            raise ValueError(
                f"`policy_mapping_fn` returned {module_id!r} for the recorded agent "
                f"{agent_id!r}, but `policies` are {sorted(config.policies)}. Return one of them."
            )
        return module_id

    return module_of
