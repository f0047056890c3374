"""What is known of a client between two acts: latest steps, states and actions of its agents."""

from __future__ import annotations

import copy
import uuid
from dataclasses import dataclass, field
from typing import Any

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from connectors.acting.loading import ActingParts

# What an episode of several agents has from the checkpoint, and need not be saved with it.
_FROM_CHECKPOINT = ("observation_space", "action_space", "agent_to_module_mapping_fn")


@dataclass
class Client:
    """What is known of one client.

    Attributes:
        episode: Its latest steps, as connectors want to see them.
        states: Recurrent states after the last steps, trees of numpy arrays, by agent: None where
            the policy has one agent. Of modules with memory only.
        actions: The last actions, as the modules gave them, by agent.
    """

    episode: Any
    states: dict[Any, Any] = field(default_factory=dict)
    actions: dict[Any, Any] = field(default_factory=dict)


def start(parts: ActingParts, observations: dict[Any, Any]) -> Client:
    """A client that has seen the first observations of its episode, by agent."""
    if not parts.is_multi_agent:
        episode = SingleAgentEpisode(
            observation_space=parts.observation_space, action_space=parts.action_space
        )
        episode.add_env_reset(observations[None])
        return Client(episode)
    several = MultiAgentEpisode(**_from_checkpoint(parts))
    several.add_env_reset(observations=observations)
    return Client(several)


def follow(
    known: Client, observations: dict[Any, Any], rewards: dict[Any, float], lookback: int
) -> Client:
    """A copy of the client that has seen what followed its last actions.

    Args:
        known: The client.
        observations: Of the agents that act next.
        rewards: By agent; 0 for those that are not in it.
        lookback: Steps that its episode holds at least, once they were taken.
    """
    # Holds no more than twice as many.
    if len(known.episode) >= lookback:
        episode = known.episode.cut(len_lookback_buffer=lookback)
    else:
        episode = copy_episode(known.episode)
    if isinstance(episode, MultiAgentEpisode):
        episode.add_env_step(
            observations=observations,
            actions=known.actions,
            rewards=dict.fromkeys(observations, 0.0) | rewards,
            extra_model_outputs={agent_id: {} for agent_id in known.actions},
        )
    else:
        episode.add_env_step(observations[None], known.actions[None], rewards.get(None, 0.0))
    return Client(episode, dict(known.states))


def end_agent(client: Client, agent_id: Any) -> None:
    """Forgets one of several agents, which may come back for an episode of its own."""
    # Ray 2.60 has no public way: an agent that is done stays in its episode until its last step
    # falls out of what a cut keeps. A test fails if the method is renamed.
    client.episode._del_agent(agent_id)
    client.states.pop(agent_id, None)
    client.actions.pop(agent_id, None)


def rename(episode: Any) -> None:
    """Gives an episode an ID that no other one has."""
    episode.id_ = uuid.uuid4().hex
    if isinstance(episode, MultiAgentEpisode):
        agents: Any = episode.agent_episodes.values()
        for agent in agents:
            agent.multi_agent_episode_id = episode.id_


def copy_episode(episode: Any) -> Any:
    """A copy that shares the steps; what is added to it or set in it is not in the original."""
    copied = copy.copy(episode)
    if isinstance(episode, MultiAgentEpisode):
        # All that it keeps by agent.
        for name in MultiAgentEpisode.__slots__:
            if isinstance(value := getattr(episode, name), dict):
                setattr(copied, name, copy.copy(value))
        for agent_id, agent in episode.agent_episodes.items():
            copied.agent_episodes[agent_id] = copy_episode(agent)
        for agent_id, steps in episode.env_t_to_agent_t.items():
            copied.env_t_to_agent_t[agent_id] = _copy_buffer(steps)
    else:
        for name in ("observations", "infos", "actions", "rewards"):
            setattr(copied, name, _copy_buffer(getattr(episode, name)))
    # Ray 2.60 has no public way to set it; its `cut` does the same. A test fails if it is renamed.
    copied._custom_data = copy.deepcopy(episode.custom_data)
    return copied


def _copy_buffer(buffer: Any) -> Any:
    copied = copy.copy(buffer)
    copied.data = list(buffer.data)
    return copied


def state_of(client: Client) -> dict[str, Any]:
    """All that is known of a client, for `from_state`."""
    episode = client.episode.get_state()
    if isinstance(client.episode, MultiAgentEpisode):
        # One is a function, which may not be picklable.
        for name in _FROM_CHECKPOINT:
            del episode[name]
    return copy.deepcopy({"episode": episode, "states": client.states, "actions": client.actions})


def from_state(parts: ActingParts, state: dict[str, Any]) -> Client:
    """The client that `state_of` was called for, in this process or another."""
    state = copy.deepcopy(state)
    if parts.is_multi_agent:
        episode = MultiAgentEpisode.from_state(state["episode"] | _from_checkpoint(parts))
    else:
        episode = SingleAgentEpisode.from_state(state["episode"])
    return Client(episode, state["states"], state["actions"])


def _from_checkpoint(parts: ActingParts) -> dict[str, Any]:
    spaces: Any = (parts.observation_space, parts.action_space)
    values = (dict(spaces[0]), dict(spaces[1]), parts.policy_mapping_fn)
    return dict(zip(_FROM_CHECKPOINT, values, strict=True))
