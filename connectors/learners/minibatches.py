"""How a train batch is cut into minibatches: each row once an epoch."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch


class RowMinibatches:
    """Minibatches of whole rows, in which every row of every module comes up once an epoch.

    In place of RLlib's `MiniBatchCyclicIterator`. That one fills each minibatch to its size, from
    the batch's start where it ends, so that some rows are trained on more often than others; with
    several Learners it stops before all rows have come up in the last epoch; and of several modules
    it trains those with fewer steps for more epochs.

    With several Learners all of them take the same number of minibatches, and each minibatch holds
    rows of each module: they exchange gradients at every one. Only a module with fewer rows than
    there are minibatches repeats rows for that.

    Args:
        batch: Rows of each module, sliced by row.
        minibatch_size: Steps of a minibatch, about, of the module with the most steps. None: all.
        num_epochs: Passes over the rows.
        shuffle: Whether rows get a new order each epoch.
        num_total_minibatches: What RLlib wants all Learners to take, about; 0 with one Learner.
    """

    def __init__(
        self,
        batch: MultiAgentBatch,
        *,
        minibatch_size: int | None,
        num_epochs: int,
        shuffle: bool,
        num_total_minibatches: int,
    ):
        self._batch = batch
        self._num_epochs = num_epochs
        self._shuffle = shuffle
        self._together = num_total_minibatches > 0
        count = 1.0
        if self._together:
            count = num_total_minibatches / num_epochs
        elif minibatch_size is not None:
            count = max(len(rows) for rows in batch.policy_batches.values()) / minibatch_size
        self.num_minibatches = max(1, round(count))

    def __iter__(self) -> Iterator[MultiAgentBatch]:
        modules: dict[str, Any] = self._batch.policy_batches
        for _ in range(self._num_epochs):
            if self._shuffle:
                for rows in modules.values():
                    rows.shuffle()
            bounds = {name: self._bounds(num_rows(rows)) for name, rows in modules.items()}
            for index in range(self.num_minibatches):
                minibatch = {
                    name: rows[start:end]
                    for name, rows in modules.items()
                    for start, end in [bounds[name][index]]
                    if end > start
                }
                if minibatch:
                    yield MultiAgentBatch(minibatch, len(self._batch))

    def _bounds(self, total: int) -> list[tuple[int, int]]:
        """First row and end of each minibatch; sizes differ by one row at most."""
        if self._together and total < self.num_minibatches:
            firsts = np.arange(self.num_minibatches) % total
            return [(int(first), int(first) + 1) for first in firsts]
        edges = np.linspace(0, total, self.num_minibatches + 1).round().astype(int).tolist()
        return list(pairwise(edges))


def num_rows(batch: SampleBatch) -> int:
    """Rows of a module with memory, steps of one without."""
    seq_lens = batch.get(SampleBatch.SEQ_LENS)
    return len(batch) if seq_lens is None else len(seq_lens)
