"""Episodes of several agents that can be shared out over several Learners."""

from __future__ import annotations

from typing import Any

from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.annotations import override


class DivisibleEpisode(MultiAgentEpisode):
    """Slices each agent's steps in the same proportion as the steps of the environment.

    Where agents act at different times RLlib's slices lose steps or raise: an agent may wait at the
    point of the cut, or have another lookback than the rest. A Learner sees each agent's steps by
    themselves, so an agent may as well be cut at its own step.
    """

    __slots__ = ()

    @override(MultiAgentEpisode)
    def slice(self, slice_: slice, *, len_lookback_buffer: int | None = None) -> DivisibleEpisode:
        """Returns a part of the episode, lookbacks counted in each agent's own steps."""
        start, stop, _ = slice_.indices(len(self))
        part = DivisibleEpisode(
            self.id_,
            env_t_started=self.env_t_started + start,
            agent_to_module_mapping_fn=self.agent_to_module_mapping_fn,
        )
        part.env_t = self.env_t_started + stop
        part.is_terminated = self.is_terminated and stop == len(self)
        part.is_truncated = self.is_truncated and stop == len(self)
        for agent_id, agent in self.agent_episodes.items():
            first, last = (len(agent) * step // len(self) for step in (start, stop))
            # RLlib's learner connectors expect at least one step of each agent.
            if first == last:
                continue
            steps: Any = agent.slice(slice(first, last), len_lookback_buffer=len_lookback_buffer)
            steps.agent_id = agent_id
            steps.module_id = agent.module_id
            steps.multi_agent_episode_id = self.id_
            part.agent_episodes[agent_id] = steps
        return part
