"""Which timestep of which episode stands in which `[row, t]` slot of a train batch. Pure numpy.

An episode of length L fills `ceil(L / T)` consecutive rows; only its last row is padded, on the
right. Rows of one episode follow one another, so its steps fill one contiguous range of slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from ray.rllib.utils.annotations import override

# From this mean episode length on, one copy an episode is faster than one scatter for all.
_LONG_EPISODE = 64


class Layout:
    """Where each of N concatenated steps stands in rows.

    Attributes:
        num_rows: Number B of rows.
        width: Slots of a row.
        num_steps: Number N of steps.
        index: `(N,)` int64: the slot (of `num_rows * width`) of each step.
        seq_lens: `(num_rows,)` int64: valid steps of each row.
        copies: Slots `(M,)` that repeat what stands in other slots `(M,)`, and those others; None
            if there are none.
        real: `(num_rows, width)` bool, False on slots that are bootstrapped from and on padding;
            None where rows need no such slots.
    """

    num_rows: int
    width: int
    num_steps: int
    index: np.ndarray
    seq_lens: np.ndarray
    copies: tuple[np.ndarray, np.ndarray] | None = None
    real: np.ndarray | None = None

    @cached_property
    def valid(self) -> np.ndarray:
        """`(num_rows, width)` bool: False on padding."""
        return np.arange(self.width) < self.seq_lens[:, None]

    def pad(self, steps: np.ndarray) -> np.ndarray:
        """Lays concatenated steps `(N, ...)` out as `(num_rows, width, ...)`, zeros elsewhere."""
        slots = np.zeros((self.num_rows * self.width, *steps.shape[1:]), dtype=steps.dtype)
        slots[self.index] = steps
        if self.copies is not None:
            slots[self.copies[0]] = slots[self.copies[1]]
        return slots.reshape(self.num_rows, self.width, *steps.shape[1:])

    def pad_parts(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Same as `pad`, from one array `(length, ...)` an episode."""
        return self.pad(np.concatenate(parts))

    def unpad(self, rows: np.ndarray) -> np.ndarray:
        """Takes the N concatenated steps back out of `(num_rows, width, ...)`."""
        return rows.reshape(-1, *rows.shape[2:])[self.index]


class RowLayout(Layout):
    """The `[num_rows, T]` layout of a list of episodes, as RLlib lays them out.

    Args:
        lengths: Steps per episode, the appended bootstrap step included.
        max_seq_len: Steps T of a row.

    Attributes:
        lengths: `(E,)` int64.
        max_seq_len: T.
        rows_per_episode: `(E,)` int64.
        first_rows: `(E,)` int64, each episode's first row.
    """

    def __init__(self, lengths: Sequence[int] | np.ndarray, max_seq_len: int):
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.max_seq_len = self.width = max_seq_len
        self.rows_per_episode = -(-self.lengths // max_seq_len)
        ends = np.cumsum(self.rows_per_episode)
        self.first_rows = ends - self.rows_per_episode
        self.num_rows = int(ends[-1]) if len(ends) else 0
        self.num_steps = int(self.lengths.sum())

    @cached_property
    def offsets(self) -> np.ndarray:
        """`(E,)` int64: where each episode starts among the N concatenated steps."""
        return np.cumsum(self.lengths) - self.lengths

    @cached_property
    def index(self) -> np.ndarray:
        """See `Layout`."""
        shift = self.first_rows * self.max_seq_len - self.offsets
        return np.arange(self.num_steps) + np.repeat(shift, self.lengths)

    @cached_property
    def seq_lens(self) -> np.ndarray:
        """See `Layout`."""
        seq_lens = np.full(self.num_rows, self.width, dtype=np.int64)
        nonempty = self.rows_per_episode > 0
        last_rows = (self.first_rows + self.rows_per_episode - 1)[nonempty]
        seq_lens[last_rows] = (self.lengths - (self.rows_per_episode - 1) * self.max_seq_len)[
            nonempty
        ]
        return seq_lens

    def starts(self, episode: int) -> range:
        """The steps of an episode that its rows start with."""
        num_rows = int(self.rows_per_episode[episode])
        return range(0, num_rows * self.max_seq_len, self.max_seq_len)

    @override(Layout)
    def pad_parts(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        if self.num_steps < _LONG_EPISODE * len(parts):
            return self.pad(np.concatenate(parts))
        shape = parts[0].shape[1:]
        dtype = np.result_type(*{part.dtype for part in parts})
        slots = np.zeros((self.num_rows * self.max_seq_len, *shape), dtype=dtype)
        for part, row in zip(parts, self.first_rows.tolist(), strict=True):
            start = row * self.max_seq_len
            slots[start : start + len(part)] = part
        return slots.reshape(self.num_rows, self.max_seq_len, *shape)
