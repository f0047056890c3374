"""Recording of episodes for offline training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ray.data
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.offline.offline_env_runner import OfflineSingleAgentEnvRunner
from ray.rllib.utils.annotations import override

from connectors.offline.several_agents import state_of
from connectors.rollout.divisible_episode import DivisibleEpisode
from connectors.rollout.multi_agent_runner import MemoryMultiAgentEnvRunner


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
    episodes that `sample` returns have their states. Each episode is written once, and none is
    lost: with `output_max_rows_per_file` all full files are written, and what is left when the
    EnvRunner stops goes into a smaller one. What cannot be written is an error.
    """

    @override(OfflineSingleAgentEnvRunner)
    def __init__(self, *, config: AlgorithmConfig, **kwargs: Any):
        super().__init__(config=config, **kwargs)
        # Ray 2.60 writes one of several full files, logs errors instead of raising them, and, if it
        # is to write at once, writes what it has written again. So it only collects.
        self.output_max_rows_per_file = None
        self.write_data_this_iter = False

    @override(OfflineSingleAgentEnvRunner)
    def sample(self, **kwargs: Any) -> list[SingleAgentEpisode]:
        """Samples and records."""
        # RLlib's class records what the next one in line returns: `_SetStatesAside`.
        episodes = super().sample(**kwargs)
        for episode, states in zip(episodes, self._states, strict=True):
            if states is not None:
                episode.extra_model_outputs[Columns.STATE_OUT] = states
        self._write_files(self.config.output_max_rows_per_file or len(self._samples))
        return episodes

    @override(OfflineSingleAgentEnvRunner)
    def stop(self) -> None:
        """Writes what is left and stops."""
        self._write_files(len(self._samples))
        super().stop()

    def _write_files(self, num_rows: int) -> None:
        """There is no public name in Ray 2.60 for the rows and the count of samples.

        The tests of recording fail if it renames them.
        """
        folder = f"{self.worker_path}-{self._sample_counter:05}"
        _write(self._samples, num_rows, self.config, Path(self.subdir_path, folder))


class RecordingMultiAgentEnvRunner(MemoryMultiAgentEnvRunner):
    """The EnvRunner for several agents, which records as `RecordingEnvRunner` does.

    A row of a file is an episode, or what a sample has of it, with the steps of all its agents.
    RLlib 2.60 has no recorder for several agents.
    """

    def __init__(self, **kwargs: Any):
        self._rows: list[bytes] = []
        self._num_samples = 0
        super().__init__(**kwargs)

    @override(MultiAgentEnvRunner)
    def sample(self, **kwargs: Any) -> list[DivisibleEpisode]:
        """Samples and records."""
        # Here, as RLlib does it: Ray does not install `msgpack_numpy`.
        import msgpack
        import msgpack_numpy

        episodes: list[Any] = super().sample(**kwargs)
        self._num_samples += 1
        self._rows += [
            msgpack.packb(state_of(episode), default=msgpack_numpy.encode)
            for episode in episodes
            if len(episode)
        ]
        self._write_files(self.config.output_max_rows_per_file or len(self._rows))
        return episodes

    @override(MultiAgentEnvRunner)
    def stop(self) -> None:
        """Writes what is left and stops."""
        self._write_files(len(self._rows))
        super().stop()

    def _write_files(self, num_rows: int) -> None:
        env: Any = self.env
        if not self._rows or env is None:
            return
        name = type(env.envs[0].unwrapped).__name__.lower()
        folder = f"run-{self.worker_index or 0:06}-{self._num_samples:05}"
        _write(self._rows, num_rows, self.config, Path(name, folder))


def _write(rows: list[Any], num_rows: int, config: Any, folder: Path) -> None:
    """Moves rows into files of `num_rows` while there are so many."""
    path = Path(config.output, folder).as_posix()
    while 0 < num_rows <= len(rows):
        # One block is one file.
        block = ray.data.from_items(rows[:num_rows], override_num_blocks=1)
        getattr(block, config.output_write_method)(path, **config.output_write_method_kwargs)
        del rows[:num_rows]


def record_without_states(config: AlgorithmConfig) -> None:
    """Sets the recording EnvRunner where the config writes what it samples.

    Raises:
        ValueError: if it has an EnvRunner class of its own that writes states too, or none; or, for
            several agents, settings that only RLlib's recorder knows.
    """
    if not config.output:
        return
    ours, replaced = RecordingEnvRunner, {None, OfflineSingleAgentEnvRunner}
    if config.is_multi_agent:
        _check_several_agents(config)
        ours = RecordingMultiAgentEnvRunner
        replaced = {None, MultiAgentEnvRunner, MemoryMultiAgentEnvRunner}
    current: Any = config.env_runner_cls
    if current in replaced:
        config.env_runners(env_runner_cls=ours)
        return
    if not issubclass(current, ours):
        raise ValueError(
            f"`output` is {config.output!r} and `env_runner_cls` is `{current.__name__}`, which "
            "would write recurrent states into the files, or nothing. Derive it from "
            f"`{ours.__name__}`, or leave one of the two settings out."
        )


def _check_several_agents(config: AlgorithmConfig) -> None:
    if not config.output_write_episodes:
        raise ValueError(
            "`output_write_episodes` is False, but must be True to record several agents: single "
            "steps of theirs have no order. Set "
            "`config.offline_data(output_write_episodes=True)`."
        )
    if config.output_filesystem is not None:
        raise ValueError(
            f"`output_filesystem` is {config.output_filesystem!r}, which only RLlib's recorder for "
            "one agent knows. Pass the filesystem itself: "
            '`config.offline_data(output_write_method_kwargs={"filesystem": ...})`.'
        )
