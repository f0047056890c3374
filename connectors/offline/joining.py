"""Recorded parts of episodes, joined to whole ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import tree
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

Parts = dict[int, Any]
"""Parts of one episode by the timestep that they start from."""


def join_parts(recorded: Iterable[Any]) -> Iterator[Any]:
    """Joins what was recorded of each episode, in whatever order it comes, and drops what repeats.

    An episode comes out as soon as all of it is there; one whose end was not recorded comes last,
    cut where the recording stopped. So only episodes that lack a part are held in memory.

    Args:
        recorded: Episodes and parts of them, with numpy data, of one agent or of several.

    Raises:
        ValueError: if steps of an episode are missing at the end.
    """
    whole: set[str] = set()
    waiting: dict[str, Parts] = {}
    for part in recorded:
        if part.id_ in whole or not len(part):
            continue
        parts = waiting.setdefault(part.id_, {})
        _add(parts, part)
        if _is_whole(parts):
            whole.add(part.id_)
            yield _join(waiting.pop(part.id_))
    while waiting:
        yield _join(waiting.pop(next(iter(waiting))))


def _add(parts: Parts, part: Any) -> None:
    start = _start(part)
    if start not in parts or len(parts[start]) < len(part):
        parts[start] = part


def _start(part: Any) -> int:
    return part.env_t_started if isinstance(part, MultiAgentEpisode) else part.t_started


def _end(part: Any) -> int:
    return part.env_t if isinstance(part, MultiAgentEpisode) else part.t


def _is_whole(parts: Parts) -> bool:
    end = next((_end(part) for part in parts.values() if part.is_done), None)
    # Few are whole: this looks at their order only then.
    if end is None or sum(map(len, parts.values())) < end:
        return False
    return _missing(parts) is None


def _missing(parts: Parts) -> tuple[int, int] | None:
    """The first timestep that no part holds, and the next one that a part holds."""
    t = 0
    for start in sorted(parts):
        if start > t:
            return t, start
        t = max(t, _end(parts[start]))
    return None


def _check_whole(parts: Parts) -> None:
    missing = _missing(parts)
    if missing is not None:
        start, stop = missing
        raise ValueError(
            f"Recorded episode {next(iter(parts.values())).id_} lacks its steps {start} to "
            f"{stop - 1}. They are needed for the policy's states and for returns. Point `input_` "
            "to all files of the recording, or take the episode's other parts out of them."
        )


def _join(parts: Parts) -> Any:
    """One episode of its parts."""
    _check_whole(parts)
    if len(parts) == 1:
        return next(iter(parts.values()))
    if isinstance(parts[0], MultiAgentEpisode):
        return _join_agents(parts)
    return _concatenate_parts(list(_chain(parts)))


def _join_agents(parts: Parts) -> MultiAgentEpisode:
    """Joins each agent's steps by themselves: it may have waited where the episode was cut."""
    last = max(parts.values(), key=_end)
    episode = MultiAgentEpisode(last.id_)
    episode.env_t = last.env_t
    episode.is_terminated, episode.is_truncated = last.is_terminated, last.is_truncated
    episode.custom_data.update(last.custom_data)
    agents: dict[Any, Parts] = {}
    for start in sorted(parts):
        for agent_id, agent in parts[start].agent_episodes.items():
            _add(agents.setdefault(agent_id, {}), agent)
    for agent_id, agent_parts in agents.items():
        agent = episode.agent_episodes[agent_id] = _join(agent_parts)
        agent.multi_agent_episode_id = last.id_
    return episode


def _chain(parts: Parts) -> Iterator[SingleAgentEpisode]:
    """The parts in order, each from where the one before ends."""
    t = 0
    for start in sorted(parts):
        part = parts[start]
        if part.t > t:
            yield part if start == t else part[t - start :]
            t = part.t


def _concatenate_parts(parts: list[SingleAgentEpisode]) -> SingleAgentEpisode:
    """One episode of parts that follow one another."""
    *before, last = parts
    # The observation after a part's last step is the next part's first one.
    observations = [part.get_observations(slice(0, len(part))) for part in before]
    infos = [part.get_infos(slice(0, len(part))) for part in before]
    episode = SingleAgentEpisode(
        id_=last.id_,
        agent_id=last.agent_id,
        module_id=last.module_id,
        observation_space=last.observation_space,
        action_space=last.action_space,
        observations=_concatenate([*observations, last.get_observations()]),
        actions=_concatenate([part.get_actions() for part in parts]),
        rewards=_concatenate([part.get_rewards() for part in parts]),
        infos=[info for some in [*infos, last.get_infos()] for info in some],
        terminated=last.is_terminated,
        truncated=last.is_truncated,
        len_lookback_buffer=0,
    )
    episode.custom_data.update(last.custom_data)
    return episode


def _concatenate(parts: list[Any]) -> Any:
    return tree.map_structure(lambda *leaves: np.concatenate(leaves), *parts)
