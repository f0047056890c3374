"""Replaying sequences: a buffer for modules with memory, whatever the off-policy algorithm.

A train batch of replayed sequences holds `[B, T]` rows, `T` being `max_seq_len`. A row is one slice
of an episode: up to `T - 1` steps and the observation after the last of them.

- `OBS [B, T, ...]`: all observations of the slice. The observation after the step in slot `t`
  stands in slot `t + 1` of its row, so there is no `NEXT_OBS`: one pass over the row gives what the
  networks say about both.
- `ACTIONS`, `REWARDS`, `TERMINATEDS`, `TRUNCATEDS [B, T, ...]`: of the steps. `TERMINATEDS` is True
  where the episode ended and nothing follows. `TRUNCATEDS` is True on the last step of any other
  slice; the observation behind it is there to bootstrap from.
- `LOSS_MASK [B, T]`: True on the steps; False on the last observation and on padding.
- `SEQ_LENS (B,)`: observations of each row.
- `STATE_IN`, leaves `(B, ...)`: the state before each row's first step.

A slice may start at any step. The buffer keeps one recorded state a block of steps, and delivers a
slice from a block's beginning on: the steps before the row are its *warm-up*, marked in a column of
their own. `BuildTrainBatch` runs the module over them, without gradient and with the Learner's
weights, to get `STATE_IN`; they stand in no row. With the weights that sampled, this is the very
state of the rollout. Burn-in only makes the warm-up longer: it then starts at least `burn_in_len`
steps before the row.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import Any

import numpy as np
from ray.rllib.core import DEFAULT_AGENT_ID, DEFAULT_MODULE_ID
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.utils import force_list
from ray.rllib.utils.annotations import override
from ray.rllib.utils.replay_buffers.base import ReplayBufferInterface
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer

from connectors.row_states import WARM_UP
from connectors.snapshots import share_snapshot
from connectors.validation import check_replay_lengths

Run = list[SingleAgentEpisode]
"""Blocks that follow one another without a gap: an episode, or what is stored of it."""


_COUNTS = (
    "_num_episodes",
    "_num_episodes_evicted",
    "_num_timesteps",
    "_num_timesteps_added",
    "sampled_timesteps",
)


class SequenceReplayBuffer(EpisodeReplayBuffer):
    """Stores episodes in blocks of steps with one recurrent state each; samples slices of them.

    A block holds `batch_length_T` steps, more where fragments end inside it (fewer than twice as
    many), fewer at an episode's end. The oldest block leaves first, so capacity also bounds
    episodes that never end.

    A sampled slice lies around a step that is drawn uniformly, at a place drawn uniformly, and is
    moved inside the episode where it would hang over an end. Short episodes come whole. RLlib's
    buffer draws a slice's first step instead: with slices of L steps an episode's first step is
    then sampled L times less often than others, and what was seen there is hardly learned from.

    Args:
        capacity: Steps to store.
        batch_size_B: Steps that `sample` returns unless told otherwise.
        batch_length_T: Slots T of a row, the module's `max_seq_len`: a slice has up to `T - 1`
            steps.
        burn_in_len: Steps that the module is run over before a row, where the episode has them.
        lookback: Steps before a slice that it brings along at least, where they are stored.
        seed: For what `sample` draws. None: different in each run.
        **kwargs: See `EpisodeReplayBuffer`.

    Raises:
        ValueError: if `batch_length_T` is below 2 or `burn_in_len` below 0.
    """

    def __init__(
        self,
        capacity: int = 50_000,
        *,
        batch_size_B: int = 256,
        batch_length_T: int = 64,
        burn_in_len: int = 0,
        lookback: int = 1,
        seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            capacity, batch_size_B=batch_size_B, batch_length_T=batch_length_T, **kwargs
        )
        check_replay_lengths(batch_length_T, burn_in_len)
        self.burn_in_len = burn_in_len
        self.lookback = lookback
        self.rng = np.random.default_rng(seed)
        # In the order of arrival, with the run that each belongs to.
        self._blocks: deque[tuple[Run, SingleAgentEpisode]] = deque()
        # Runs that may go on, by episode ID.
        self._open: dict[str, Run] = {}
        self._num_episodes = 0

    # Storing.

    @override(EpisodeReplayBuffer)
    def add(self, episodes: list[SingleAgentEpisode] | SingleAgentEpisode) -> None:
        """Stores episodes or chunks of them; a chunk goes on where the one before it ended.

        Args:
            episodes: What an EnvRunner sampled. The episodes themselves are not changed.
        """
        chunks: Any = force_list(episodes)
        num_episodes, num_evicted = self._num_episodes, self._num_episodes_evicted
        for episode in chunks:
            for start in range(0, len(episode), self.batch_length_T):
                stop = min(start + self.batch_length_T, len(episode))
                piece = episode.slice(slice(start, stop), len_lookback_buffer=0)
                self._append(piece.to_numpy())
            if episode.is_done:
                self._open.pop(episode.id_, None)
        num_steps = sum(len(episode) for episode in chunks)
        self._num_timesteps += num_steps
        self._num_timesteps_added += num_steps
        num_added = self._num_episodes - num_episodes
        num_steps_evicted = self._evict()
        num_evicted = self._num_episodes_evicted - num_evicted
        self._update_add_metrics(
            num_episodes_added=num_added,
            num_env_steps_added=num_steps,
            num_episodes_evicted=num_evicted,
            num_env_steps_evicted=num_steps_evicted,
            **_per_agent_and_module(
                num_episodes_added=num_added,
                num_steps_added=num_steps,
                num_episodes_evicted=num_evicted,
                num_steps_evicted=num_steps_evicted,
            ),
        )

    def _append(self, piece: SingleAgentEpisode) -> None:
        """Adds up to T steps, to the last block of their episode if that is not full."""
        run = self._open.get(piece.id_)
        if not run or run[-1].t != piece.t_started:
            run = self._open[piece.id_] = []
            self._num_episodes += 1
        if run and len(run[-1]) < self.batch_length_T:
            share_snapshot(piece, run[-1])
            run[-1].concat_episode(piece)
            return
        share_snapshot(piece, piece)
        run.append(piece)
        self._blocks.append((run, piece))

    def _evict(self) -> int:
        """Drops the oldest blocks while there are too many steps; returns how many went."""
        num_steps = 0
        while self._num_timesteps > self.capacity and len(self._blocks) > 1:
            run, block = self._blocks.popleft()
            run.pop(0)
            self._num_timesteps -= len(block)
            num_steps += len(block)
            if not run:
                if self._open.get(block.id_) is run:
                    del self._open[block.id_]
                self._num_episodes -= 1
                self._num_episodes_evicted += 1
        return num_steps

    # Sampling.

    @override(EpisodeReplayBuffer)
    def sample(
        self,
        num_items: int | None = None,
        *,
        batch_size_B: int | None = None,
        lookback: int = 1,
        **kwargs: Any,
    ) -> list[SingleAgentEpisode]:
        """Draws slices until they have enough steps, warm-up not counted.

        Args:
            num_items: Steps to return at least.
            batch_size_B: The same under RLlib's other name.
            lookback: Steps before a slice that it brings along, where they are stored.
            **kwargs: RLlib's other arguments. They do not apply: the buffer knows the length of
                its slices, and Learners compute returns over several steps inside a row.

        Returns:
            Slices, each with its warm-up in front. The column `WARM_UP` is True there.
        """
        num_items = num_items or batch_size_B or self.batch_size_B
        slices: list[SingleAgentEpisode] = []
        num_steps = 0
        steps: set[tuple[str, int]] = set()
        while num_steps < num_items:
            run, t = self._draw_step()
            start, stop = self._place(run, t)
            # RLlib asks for one step; stacked frames need more.
            slices.append(self._slice(run, start, stop, max(lookback, self.lookback)))
            num_steps += stop - start
            steps.update((run[0].id_, t) for t in range(start, stop))
        self.sampled_timesteps += num_steps
        num_episodes = len({episode.id_ for episode in slices})
        self._update_sample_metrics(
            num_env_steps_sampled=num_steps,
            num_episodes_per_sample=num_episodes,
            num_env_steps_per_sample=len(steps),
            sampled_n_step=None,
            num_resamples=0,
            **_per_agent_and_module(
                num_steps_sampled=num_steps,
                num_episodes_per_sample=num_episodes,
                num_steps_per_sample=len(steps),
                num_resamples=0,
            ),
            agent_to_sampled_n_step={},
            module_to_sampled_n_step={},
        )
        return slices

    def _draw_step(self) -> tuple[Run, int]:
        """One of the stored steps, each as likely as any other: its run and its timestep."""
        longest = 2 * self.batch_length_T - 1
        while True:
            run, block = self._blocks[int(self.rng.integers(len(self._blocks)))]
            # A place in the longest block there can be: shorter ones are hit less often.
            position = int(self.rng.integers(longest))
            if position < len(block):
                return run, block.t_started + position

    def _place(self, run: Run, t: int) -> tuple[int, int]:
        """First timestep of a slice around step `t`, and the timestep after its last."""
        length = self.batch_length_T - 1
        start = t - int(self.rng.integers(length))
        start = max(min(start, run[-1].t - length), run[0].t_started)
        return start, min(start + length, run[-1].t)

    def _slice(self, run: Run, start: int, stop: int, lookback: int) -> SingleAgentEpisode:
        """Steps `start` to `stop` with the warm-up before them."""
        first = run[_block_of(run, start - self.burn_in_len)].t_started
        blocks = run[_block_of(run, first - lookback) : _block_of(run, stop - 1) + 1]
        # A slice of its own: what is stored must not change.
        joined = blocks[0].slice(slice(None), len_lookback_buffer=0)
        for block in blocks[1:]:
            joined.concat_episode(block)
        episode = joined.slice(
            slice(first - joined.t_started, stop - joined.t_started), len_lookback_buffer=lookback
        )
        lookback = episode.rewards.lookback
        warm_up = np.zeros(lookback + len(episode), dtype=bool)
        warm_up[lookback : lookback + start - first] = True
        episode.extra_model_outputs[WARM_UP] = InfiniteLookbackBuffer(warm_up, lookback=lookback)
        return episode

    # What RLlib asks a buffer for.

    @override(EpisodeReplayBuffer)
    def get_num_episodes(self, module_id: Any = None) -> int:
        """Episodes of which steps are stored."""
        return self._num_episodes

    @override(EpisodeReplayBuffer)
    def get_num_timesteps(self, module_id: Any = None) -> int:
        """Steps stored."""
        return self._num_timesteps

    @override(ReplayBufferInterface)
    def get_state(self) -> dict[str, Any]:
        """What is stored, picklable, with each recurrent state once."""
        indices = {id(run): i for i, run in enumerate(run for run, _ in self._blocks)}
        return {
            "blocks": [(indices[id(run)], block.get_state()) for run, block in self._blocks],
            "counts": {name: getattr(self, name) for name in _COUNTS},
        }

    @override(ReplayBufferInterface)
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned. Episodes that were running are not continued."""
        runs: dict[int, Run] = {}
        self._blocks.clear()
        self._open.clear()
        for index, block_state in state["blocks"]:
            block = SingleAgentEpisode.from_state(block_state)
            run = runs.setdefault(index, [])
            run.append(block)
            self._blocks.append((run, block))
        for name, count in state["counts"].items():
            setattr(self, name, count)


def _per_agent_and_module(**counts: int) -> dict[str, Any]:
    """RLlib's metrics of buffers: each number a second and a third time."""
    agents = {f"agent_to_{name}": {DEFAULT_AGENT_ID: n} for name, n in counts.items()}
    modules = {f"module_to_{name}": {DEFAULT_MODULE_ID: n} for name, n in counts.items()}
    return agents | modules


def _block_of(run: Run, t: int) -> int:
    """Index of the block that holds timestep `t`; 0 for a timestep before the first block."""
    return max(bisect_right(run, t, key=lambda block: block.t_started) - 1, 0)
