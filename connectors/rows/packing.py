"""Short episodes share a row, told apart by resets. Pure numpy."""

from __future__ import annotations

from collections import deque
from functools import cached_property

import numpy as np
from ray.rllib.utils.annotations import override

from connectors.rows.layout import Layout


class PackedLayout(Layout):
    """The rows of another layout, moved together: several of them stand in one row.

    The first of them may start from any state, those behind it from the initial one. Each is put
    where it leaves the least room, the longest first, which takes time in proportion to their
    number. Where nothing can be moved, rows, and their order, are those of the other layout.

    Args:
        rows: The other layout, one piece of an episode a row.
        initial: `(rows.num_rows,)` bool: the pieces that start from the initial state.

    Attributes:
        heads: `(num_rows,)` int64: the piece that each row starts with.
        resets: `(num_rows, width)` bool: True where another piece starts inside of a row.
    """

    def __init__(self, rows: Layout, initial: np.ndarray):
        self._rows = rows
        self.width, self.num_steps = rows.width, rows.num_steps
        pieces = np.arange(rows.num_rows)
        row_of = _best_fit(rows.seq_lens, initial, rows.width)
        # Rows in the order of their earliest pieces: without shuffling, minibatches are of the same
        # episodes as without packing.
        earliest = pieces.copy()
        np.minimum.at(earliest, row_of, pieces)
        order = np.lexsort((pieces, initial, earliest[row_of]))

        lengths, row_of = rows.seq_lens[order], row_of[order]
        is_head = np.append(True, row_of[1:] != row_of[:-1])[: len(order)]
        first_steps = np.cumsum(lengths) - lengths
        numbers = np.cumsum(is_head) - 1
        first_slots = numbers * self.width + first_steps - first_steps[is_head][numbers]

        self.heads = order[is_head]
        self.num_rows = len(self.heads)
        self.seq_lens = np.bincount(numbers, lengths, self.num_rows).astype(np.int64)
        self.resets = np.zeros((self.num_rows, self.width), dtype=bool)
        self.resets.flat[first_slots[~is_head]] = True
        self._shifts = np.empty_like(first_slots)
        self._shifts[order] = first_slots - order * self.width

    @cached_property
    def index(self) -> np.ndarray:
        """See `Layout`."""
        return self._moved(self._rows.index)

    @cached_property
    @override(Layout)
    def copies(self) -> tuple[np.ndarray, np.ndarray] | None:
        copies = self._rows.copies
        return None if copies is None else (self._moved(copies[0]), self._moved(copies[1]))

    @cached_property
    @override(Layout)
    def real(self) -> np.ndarray | None:
        if self._rows.real is None:
            return None
        real = np.zeros((self.num_rows, self.width), dtype=bool)
        real.flat[self._moved(np.flatnonzero(self._rows.real))] = True
        return real

    def _moved(self, slots: np.ndarray) -> np.ndarray:
        """Where slots of the other layout are now."""
        return slots + self._shifts[slots // self.width]


def pack(rows: Layout, initial: np.ndarray, min_rows: int = 1) -> Layout:
    """Packs rows where that saves some.

    Args:
        rows: See `PackedLayout`.
        initial: See there.
        min_rows: How many rows have to be left.

    Returns:
        The packed layout, or `rows` itself.
    """
    has_room = rows.seq_lens < rows.width
    if not (initial & has_room).any() or has_room.sum() < 2:
        return rows
    packed = PackedLayout(rows, initial)
    return packed if min_rows <= packed.num_rows < rows.num_rows else rows


def minibatches_an_epoch(num_steps: float, minibatch_size: int | None) -> int:
    """Minibatches that a batch is cut into, each of about `minibatch_size` steps."""
    return max(1, round(num_steps / minibatch_size)) if minibatch_size else 1


def _best_fit(lengths: np.ndarray, initial: np.ndarray, width: int) -> np.ndarray:
    """The row of each piece, named by the piece that opened it."""
    row_of = np.arange(len(lengths))
    rows_by_room: list[deque[int]] = [deque() for _ in range(width + 1)]
    for piece in np.flatnonzero(~initial).tolist():
        rows_by_room[width - int(lengths[piece])].append(piece)
    # Bit n is set where a row with n free slots is open: the smallest is found in one operation.
    rooms = sum(1 << room for room, rows in enumerate(rows_by_room) if rows)
    movable = np.flatnonzero(initial)
    movable = movable[np.argsort(-lengths[movable], kind="stable")]
    for piece, length in zip(movable.tolist(), lengths[movable].tolist(), strict=True):
        row, room = piece, width
        if fitting := rooms >> length:
            room = length + (fitting & -fitting).bit_length() - 1
            row = rows_by_room[room].popleft()
            if not rows_by_room[room]:
                rooms ^= 1 << room
        row_of[piece] = row
        rows_by_room[room - length].append(row)
        rooms |= 1 << room - length
    return row_of
