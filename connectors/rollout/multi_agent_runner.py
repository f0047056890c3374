"""The EnvRunner for several agents: RLlib's, without the work that it repeats at each step."""

from __future__ import annotations

from collections import Counter
from typing import Any

from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import (
    NUM_AGENT_STEPS_SAMPLED,
    NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_ENV_STEPS_SAMPLED,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
    NUM_EPISODES_LIFETIME,
    NUM_MODULE_STEPS_SAMPLED,
    NUM_MODULE_STEPS_SAMPLED_LIFETIME,
)

from connectors.rollout.divisible_episode import DivisibleEpisode
from connectors.rollout.tuples import TuplesFromLists

# What is counted, by the key of the count in a sample.
_LIFETIME = {
    NUM_ENV_STEPS_SAMPLED: NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES: NUM_EPISODES_LIFETIME,
    NUM_AGENT_STEPS_SAMPLED: NUM_AGENT_STEPS_SAMPLED_LIFETIME,
    NUM_MODULE_STEPS_SAMPLED: NUM_MODULE_STEPS_SAMPLED_LIFETIME,
}


class MemoryMultiAgentEnvRunner(MultiAgentEnvRunner):
    """RLlib's EnvRunner for several agents; its episodes can be shared out over Learners.

    It samples what RLlib's does and reports the same metrics, in less time: steps are counted at
    each step, but logged once a sample, and a finished episode is converted to numpy once.
    """

    def __init__(self, **kwargs: Any):
        self._counts: Counter[tuple[Any, ...]] = Counter()
        super().__init__(**kwargs)

    @override(MultiAgentEnvRunner)
    def make_env(self) -> None:
        """Makes the environments."""
        super().make_env()
        env: Any = self.env
        if env is not None:
            spaces = env.single_observation_spaces
            env.envs = [TuplesFromLists(each, spaces) for each in env.envs]

    # RLlib 2.60 has no public hook for any of this. Tests compare metrics and episodes with those
    # of RLlib's EnvRunner.
    @override(MultiAgentEnvRunner)
    def _sample(self, **kwargs: Any) -> list[DivisibleEpisode]:
        convert = self.episodes_to_numpy
        # Else RLlib converts all finished episodes again at each step of the environments.
        self.episodes_to_numpy = False
        try:
            episodes: list[Any] = super()._sample(**kwargs)
        finally:
            self.episodes_to_numpy = convert
            self._log_counts()
        for episode in episodes:
            if convert:
                episode.to_numpy()
            # RLlib's EnvRunner decides on the class of its episodes, and has no setting for it.
            episode.__class__ = DivisibleEpisode
        return episodes

    @override(MultiAgentEnvRunner)
    def _increase_sampled_metrics(
        self, num_steps: int, next_obs: dict[str, Any], episode: MultiAgentEpisode
    ) -> int:
        counts = self._counts
        counts[NUM_ENV_STEPS_SAMPLED,] += num_steps
        if episode.is_done:
            counts[NUM_EPISODES,] += 1
        for agent_id in next_obs:
            counts[NUM_AGENT_STEPS_SAMPLED, str(agent_id)] += 1
            counts[NUM_MODULE_STEPS_SAMPLED, episode.module_for(agent_id)] += 1
        return num_steps

    def _log_counts(self) -> None:
        for (name, *of), count in self._counts.items():
            lifetime: dict[str, Any] = {"reduce": "lifetime_sum"}
            if name == NUM_ENV_STEPS_SAMPLED:
                lifetime["with_throughput"] = True
            self.metrics.log_value((name, *of), count, reduce="sum")
            self.metrics.log_value((_LIFETIME[name], *of), count, **lifetime)
        self._counts.clear()
