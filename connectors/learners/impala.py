"""IMPALA's Learner for modules with memory."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import Learner
from ray.rllib.policy.sample_batch import MultiAgentBatch
from ray.rllib.utils.annotations import override

from connectors.learners.mixin import MemoryLearnerMixin


class MemoryIMPALATorchLearner(MemoryLearnerMixin, IMPALATorchLearner):
    """IMPALA's Learner for modules with memory, set by `connect`.

    The loss is RLlib's; that it bootstraps right is up to the rows (see `BuildTrainBatch`). Beyond
    `MemoryLearnerMixin`, rows may also be shuffled where an aggregator actor built them or where
    they were moved to a GPU.
    """

    # A private method of Ray 2.60: the only one that sees each batch after the conversions that
    # lose what is set here. A test shuffles what an aggregator actor built.
    @override(Learner)
    def _make_batch_if_necessary(self, training_data: Any) -> MultiAgentBatch:
        batch = super()._make_batch_if_necessary(training_data)
        for module_batch in batch.policy_batches.values():
            if Columns.STATE_IN in module_batch:
                module_batch.zero_padded = True
        return batch
