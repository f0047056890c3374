"""How a train batch is cut into minibatches: each row once an epoch."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.annotations import override

from connectors.learners.common_modules import keep_common_modules
from connectors.rows.packing import minibatches_an_epoch


class RowMinibatches:
    """Minibatches of whole rows, in which every row of every module comes up once an epoch.

    In place of RLlib's `MiniBatchCyclicIterator`. That one fills each minibatch to its size, from
    the batch's start where it ends, so that some rows are trained on more often than others; with
    several Learners it stops before all rows have come up in the last epoch; and of several modules
    it trains those with fewer steps for more epochs.

    With several Learners each minibatch holds rows of each module: they exchange gradients at every
    one. Only a module with fewer rows than there are minibatches repeats rows for that.

    Args:
        batch: Rows of each module, sliced by row. Without any module it is the only minibatch.
        num_minibatches: Minibatches an epoch.
        num_epochs: Passes over the rows.
        shuffle: Whether rows get a new order each epoch.
        together: Whether there are several Learners.
    """

    def __init__(
        self,
        batch: MultiAgentBatch,
        *,
        num_minibatches: int,
        num_epochs: int,
        shuffle: bool,
        together: bool,
    ):
        self.batch = batch
        self.num_minibatches = num_minibatches
        self._num_epochs = num_epochs
        self._shuffle = shuffle
        self._together = together

    def __iter__(self) -> Iterator[MultiAgentBatch]:
        modules: dict[str, Any] = self.batch.policy_batches
        if not modules:
            yield self.batch
            return
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
                    yield MultiAgentBatch(minibatch, len(self.batch))

    def _bounds(self, total: int) -> list[tuple[int, int]]:
        """First row and end of each minibatch; sizes differ by one row at most."""
        if self._together and total < self.num_minibatches:
            firsts = np.arange(self.num_minibatches) % total
            return [(int(first), int(first) + 1) for first in firsts]
        edges = np.linspace(0, total, self.num_minibatches + 1).round().astype(int).tolist()
        return list(pairwise(edges))


class EqualMinibatches(TorchLearner):
    """Trains on every row of a batch equally often, see `RowMinibatches`.

    Several Learners take the same modules and equally many minibatches: minibatches of about
    `minibatch_size` steps, on average over Learners, of the module with the most.
    """

    @override(TorchLearner)
    def _create_iterator_if_necessary(
        self,
        *,
        training_data: TrainingData,
        num_total_minibatches: int = 0,
        num_epochs: int = 1,
        minibatch_size: int | None = None,
        shuffle_batch_per_epoch: bool = False,
        **kwargs: Any,
    ) -> Iterable:
        """Replaces RLlib's minibatches by `RowMinibatches`.

        Private in Ray 2.60, where the class of the minibatches can't be chosen. A test fails if Ray
        no longer calls it.
        """
        if training_data.data_iterators:
            return super()._create_iterator_if_necessary(
                training_data=training_data,
                num_total_minibatches=num_total_minibatches,
                num_epochs=num_epochs,
                minibatch_size=minibatch_size,
                shuffle_batch_per_epoch=shuffle_batch_per_epoch,
                **kwargs,
            )
        # Without a minibatch size RLlib's iterator yields the whole batch, once; nothing where none
        # of its modules is to be trained. An empty minibatch updates nothing, where RLlib's
        # `update` fails without any.
        whole = super()._create_iterator_if_necessary(training_data=training_data, **kwargs)
        batch = next(iter(whole), MultiAgentBatch({}, 0))
        if self.distributed:
            batch, num_steps = keep_common_modules(self, batch)
        else:
            num_steps = max(map(len, batch.policy_batches.values()), default=0)
        return RowMinibatches(
            batch,
            num_minibatches=minibatches_an_epoch(num_steps, minibatch_size),
            num_epochs=num_epochs,
            shuffle=shuffle_batch_per_epoch and num_epochs > 1,
            together=self.distributed,
        )


def num_rows(batch: SampleBatch) -> int:
    """Rows of a module with memory, steps of one without."""
    seq_lens = batch.get(SampleBatch.SEQ_LENS)
    return len(batch) if seq_lens is None else len(seq_lens)
