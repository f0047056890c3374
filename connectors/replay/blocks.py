"""What is stored of one module's agents: steps in blocks, with one recurrent state each."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter, deque
from collections.abc import Iterable
from typing import Any

import numpy as np
from ray.rllib.core import DEFAULT_AGENT_ID
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer

from connectors.rows.row_states import WARM_UP
from connectors.snapshots import own_memory, share_snapshot

Run = list[SingleAgentEpisode]
"""Blocks that follow one another without a gap: an episode, or what is stored of it."""

Counts = Counter[tuple[str, str]]
"""How many of what, by its name and the agent's."""


class Blocks:
    """Stores episodes of one module's agents in blocks of steps; draws slices of them.

    Args:
        capacity: Steps to store.
        max_seq_len: Slots T of a row: a slice has up to `T - 1` steps, a block T or more.
        burn_in_len: Steps that the module is run over before a row, where the episode has them.
        rng: For what is drawn.

    Attributes:
        num_steps: Steps stored.
        num_episodes: Episodes of which steps are stored.
    """

    def __init__(self, capacity: int, max_seq_len: int, burn_in_len: int, rng: np.random.Generator):
        self._capacity = capacity
        self._max_seq_len = max_seq_len
        self._burn_in_len = burn_in_len
        self._rng = rng
        # In the order of arrival, with the run that each belongs to.
        self._blocks: deque[tuple[Run, SingleAgentEpisode]] = deque()
        # Runs that may go on, by episode ID.
        self._open: dict[str, Run] = {}
        self.num_steps = 0
        self.num_episodes = 0

    # Storing.

    def add(self, chunks: Iterable[SingleAgentEpisode]) -> Counts:
        """Stores chunks of episodes, drops what is too old, and says how much of both."""
        counts: Counts = Counter()
        for chunk in chunks:
            agent = agent_name(chunk)
            for start in range(0, len(chunk), self._max_seq_len):
                stop = min(start + self._max_seq_len, len(chunk))
                piece = chunk.slice(slice(start, stop), len_lookback_buffer=0)
                counts["num_episodes_added", agent] += self._append(_owned_by(chunk, piece))
            counts["num_steps_added", agent] += len(chunk)
            self.num_steps += len(chunk)
            if chunk.is_done:
                self._open.pop(chunk.id_, None)
        self._evict(counts)
        return counts

    def _append(self, piece: SingleAgentEpisode) -> bool:
        """Adds up to T steps, to the last block of their episode if that is not full.

        Returns:
            Whether they begin a run.
        """
        run = self._open.get(piece.id_, [])
        is_new = not run or run[-1].t != piece.t_started
        if is_new:
            run = self._open[piece.id_] = []
            self.num_episodes += 1
        piece.to_numpy()
        if run and len(run[-1]) < self._max_seq_len:
            share_snapshot(piece, run[-1])
            run[-1].concat_episode(piece)
            return is_new
        share_snapshot(piece, piece)
        outputs = piece.extra_model_outputs.values()
        for buffer in (piece.observations, piece.actions, piece.rewards, *outputs):
            # The rest of the episode, or of what came with it from another process, goes.
            buffer.data = own_memory(buffer.data)
        run.append(piece)
        self._blocks.append((run, piece))
        return is_new

    def _evict(self, counts: Counts) -> None:
        """Drops the oldest blocks while there are too many steps."""
        while self.num_steps > self._capacity and len(self._blocks) > 1:
            run, block = self._blocks.popleft()
            run.pop(0)
            self.num_steps -= len(block)
            counts["num_steps_evicted", agent_name(block)] += len(block)
            if not run:
                if self._open.get(block.id_) is run:
                    del self._open[block.id_]
                self.num_episodes -= 1
                counts["num_episodes_evicted", agent_name(block)] += 1

    # Sampling.

    def draw(self, num_steps: int, lookback: int) -> list[SingleAgentEpisode]:
        """Draws slices until they have that many steps, warm-up not counted."""
        slices: list[SingleAgentEpisode] = []
        while num_steps > 0:
            run, t = self._draw_step()
            start, stop = self._place(run, t)
            slices.append(self._slice(run, start, stop, lookback))
            num_steps -= stop - start
        return slices

    def _draw_step(self) -> tuple[Run, int]:
        """One of the stored steps, each as likely as any other: its run and its timestep."""
        longest = 2 * self._max_seq_len - 1
        while True:
            run, block = self._blocks[int(self._rng.integers(len(self._blocks)))]
            # A place in the longest block there can be: shorter ones are hit less often.
            position = int(self._rng.integers(longest))
            if position < len(block):
                return run, block.t_started + position

    def _place(self, run: Run, t: int) -> tuple[int, int]:
        """First timestep of a slice around step `t`, and the timestep after its last."""
        length = self._max_seq_len - 1
        start = t - int(self._rng.integers(length))
        start = max(min(start, run[-1].t - length), run[0].t_started)
        return start, min(start + length, run[-1].t)

    def _slice(self, run: Run, start: int, stop: int, lookback: int) -> SingleAgentEpisode:
        """Steps `start` to `stop` with the warm-up before them."""
        first = run[_block_of(run, start - self._burn_in_len)].t_started
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
        return _owned_by(blocks[0], episode)

    # Saving.

    def get_state(self) -> list[tuple[int, dict[str, Any]]]:
        """The blocks, picklable, each with the number of its run and each state once."""
        indices = {id(run): i for i, run in enumerate(run for run, _ in self._blocks)}
        return [(indices[id(run)], block.get_state()) for run, block in self._blocks]

    def set_state(self, state: list[tuple[int, dict[str, Any]]]) -> None:
        """Restores what `get_state` returned. Episodes that were running are not continued."""
        runs: dict[int, Run] = {}
        self._blocks.clear()
        self._open.clear()
        for index, block_state in state:
            block = SingleAgentEpisode.from_state(block_state)
            run = runs.setdefault(index, [])
            run.append(block)
            self._blocks.append((run, block))
        self.num_steps = sum(len(block) for _, block in self._blocks)
        self.num_episodes = len(runs)


def steps_of(episode: SingleAgentEpisode) -> range:
    """The timesteps of a slice that are trained on: all but its warm-up."""
    warm_up = int(np.sum(episode.get_extra_model_outputs(WARM_UP)))
    return range(episode.t_started + warm_up, episode.t)


def agent_name(episode: SingleAgentEpisode) -> str:
    """What an agent is called in metrics."""
    return DEFAULT_AGENT_ID if episode.agent_id is None else str(episode.agent_id)


def _owned_by(whole: SingleAgentEpisode, part: SingleAgentEpisode) -> SingleAgentEpisode:
    """The part, as one of the same agent: RLlib's slices forget whose they are."""
    part.agent_id = whole.agent_id
    part.module_id = whole.module_id
    part.multi_agent_episode_id = whole.multi_agent_episode_id
    return part


def _block_of(run: Run, t: int) -> int:
    """Index of the block that holds timestep `t`; 0 for a timestep before the first block."""
    return max(bisect_right(run, t, key=lambda block: block.t_started) - 1, 0)
