"""Rows for V-trace, each complete in itself: up to T steps and, behind them, a bootstrap slot.

RLlib's V-trace runs along a row and needs the value of the observation after its last step. Here
that observation stands in the row itself, so rows may be shuffled and cut into minibatches.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.utils.annotations import override

from connectors.rows.layout import RowLayout

# Rollout log-probability of slots that are no real steps: their importance ratio is exactly 0 in
# float32, whatever the policy says. A log-density of 50, say, is nothing unusual for many sharp
# Gaussians. Not infinite, so that nothing becomes infinity minus infinity.
NEUTRAL_LOGP = 1e4


class VTraceLayout(RowLayout):
    """Rows of `T + 1` slots: up to T steps, then a copy of the step that follows them.

    That step is the first of the episode's next row or, after its last row, the bootstrap step
    that RLlib appends, which starts no row of its own. A row starts every T steps, where the
    rollout left a snapshot of the state.

    Args:
        lengths: Steps per episode, the appended bootstrap step included.
        max_seq_len: Real steps T of a row.
    """

    def __init__(self, lengths: Sequence[int], max_seq_len: int):
        all_lengths = np.asarray(lengths, dtype=np.int64)
        # A row each where there is nothing but the bootstrap step.
        super().__init__(np.maximum(all_lengths - 1, all_lengths > 0), max_seq_len)
        self.lengths = all_lengths
        self.num_steps = int(all_lengths.sum())
        self.width = max_seq_len + 1

    @cached_property
    @override(RowLayout)
    def index(self) -> np.ndarray:
        T = self.max_seq_len
        steps = np.arange(self.num_steps) - np.repeat(self.offsets, self.lengths)
        # Each row before a step's own row has one slot more than it has steps.
        rows_before = np.minimum(steps // T, np.repeat(self.rows_per_episode - 1, self.lengths))
        return np.repeat(self.first_rows, self.lengths) * self.width + steps + rows_before

    @cached_property
    @override(RowLayout)
    def real(self) -> np.ndarray:
        return np.arange(self.width) < self.seq_lens[:, None] - 1

    @cached_property
    @override(RowLayout)
    def copies(self) -> tuple[np.ndarray, np.ndarray]:
        continued = np.ones(self.num_rows, dtype=bool)
        continued[(self.first_rows + self.rows_per_episode - 1)[self.rows_per_episode > 0]] = False
        following = (np.flatnonzero(continued) + 1) * self.width
        return following - 1, following

    @override(RowLayout)
    def pad_parts(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        return self.pad(np.concatenate(parts))


def neutralize(columns: dict[str, Any], real: np.ndarray) -> None:
    """Takes every effect but that of their value from slots that are no real steps, in place.

    With the mask RLlib's discount is 0 there, with `NEUTRAL_LOGP` the importance ratio is. So the
    V-trace target of a bootstrap slot is its own value, which the step before it bootstraps from,
    and what RLlib takes for the value behind the row counts nothing. The same holds for steps that
    a connector has masked out.

    Args:
        columns: `LOSS_MASK`, `ACTION_LOGP`, `REWARDS`, `TERMINATEDS` and `TRUNCATEDS`, each
            `(num_rows, width)`; others are left alone.
        real: `(num_rows, width)` bool, the slots of real steps.

    Raises:
        ValueError: if no log-probabilities were recorded.
    """
    if Columns.ACTION_LOGP not in columns:
        raise ValueError(
            f"`{Columns.ACTION_LOGP}` was not recorded in the rollout, but APPO and IMPALA weigh "
            "each step by it. A module that samples its actions itself must return their "
            "log-probabilities under this name, too."
        )
    # A connector's mask may hold numbers.
    mask = columns[Columns.LOSS_MASK] = columns[Columns.LOSS_MASK].astype(bool) & real
    columns[Columns.ACTION_LOGP][~mask] = NEUTRAL_LOGP
    for column in (Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS):
        columns[column][~mask] = 0
