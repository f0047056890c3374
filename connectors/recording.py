"""Recording of episodes for offline training."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.offline_env_runner import OfflineSingleAgentEnvRunner
from ray.rllib.utils.annotations import override


class _SetStatesAside(SingleAgentEnvRunner):
    """Samples episodes without recurrent states, and remembers the states."""

    _states: list[Any]

    @override(SingleAgentEnvRunner)
    def sample(self, **kwargs: Any) -> list[SingleAgentEpisode]:
        episodes = super().sample(**kwargs)
        self._states = [
            episode.extra_model_outputs.pop(Columns.STATE_OUT, None) for episode in episodes
        ]
        return episodes


class RecordingEnvRunner(OfflineSingleAgentEnvRunner, _SetStatesAside):
    """RLlib's recording EnvRunner, for modules with memory: recurrent states stay out of the files.

    States belong to the weights that computed them. Offline training computes its own. The
    episodes that `sample` returns have their states. Each episode is written once.
    """

    @override(OfflineSingleAgentEnvRunner)
    def sample(self, **kwargs: Any) -> list[SingleAgentEpisode]:
        """Samples and records."""
        # RLlib's class records what the next one in line returns: `_SetStatesAside`.
        episodes = super().sample(**kwargs)
        for episode, states in zip(episodes, self._states, strict=True):
            if states is not None:
                episode.extra_model_outputs[Columns.STATE_OUT] = states
        if not self.output_max_rows_per_file:
            # Ray 2.60 keeps what it has written, and writes it again with each sample. There is no
            # public name for that list; the test of recording fails if Ray renames it.
            self._samples.clear()
        return episodes


def record_without_states(config: AlgorithmConfig) -> None:
    """Sets the recording EnvRunner where the config writes what it samples.

    Raises:
        ValueError: if it has an EnvRunner class of its own that writes states too.
    """
    current = config.env_runner_cls
    # RLlib refuses to record several agents itself.
    if not config.output or config.is_multi_agent:
        return
    if current is not None and issubclass(current, RecordingEnvRunner):
        return
    if current is not None and current is not OfflineSingleAgentEnvRunner:
        raise ValueError(
            f"`output` is {config.output!r} and `env_runner_cls` is `{current.__name__}`, which "
            "would write recurrent states into the files. Derive it from `RecordingEnvRunner`, or "
            "leave one of the two settings out."
        )
    config.env_runners(env_runner_cls=RecordingEnvRunner)
