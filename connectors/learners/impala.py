"""IMPALA's Learner for modules with memory."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import Learner
from ray.rllib.policy.sample_batch import MultiAgentBatch
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID, ParamDict

from connectors.learners.mixin import MemoryLearnerMixin


class MemoryIMPALATorchLearner(MemoryLearnerMixin, IMPALATorchLearner):
    """IMPALA's Learner for modules with memory, set by `connect`.

    The loss is RLlib's; that it bootstraps right is up to the rows (see `BuildTrainBatch`). Beyond
    `MemoryLearnerMixin`, rows may also be shuffled where an aggregator actor built them or where
    they were moved to a GPU; and modules that are not in a minibatch stay as they are.
    """

    _module_ids: Collection[ModuleID] = ()

    # A private method of Ray 2.60: the only one that sees each batch after the conversions that
    # lose what is set here. A test shuffles what an aggregator actor built.
    @override(Learner)
    def _make_batch_if_necessary(self, training_data: Any) -> MultiAgentBatch:
        batch = super()._make_batch_if_necessary(training_data)
        for module_batch in batch.policy_batches.values():
            if Columns.STATE_IN in module_batch:
                module_batch.zero_padded = True
        return batch

    @override(IMPALATorchLearner)
    def compute_losses(
        self, *, fwd_out: dict[str, Any], batch: dict[str, Any]
    ) -> dict[ModuleID, Any]:
        """The losses of the modules in the minibatch."""
        self._module_ids = batch.keys()
        return super().compute_losses(fwd_out=fwd_out, batch=batch)

    @override(IMPALATorchLearner)
    def postprocess_gradients_for_module(
        self, *, module_id: ModuleID, module_gradients_dict: ParamDict, **kwargs: Any
    ) -> ParamDict:
        """Clips a module's gradients; None for a module that was not in the minibatch."""
        # With several Learners and policies RLlib 2.60 puts zeros there, on which Adam would move
        # the weights by its momentum.
        if module_id not in self._module_ids:
            nothing: Any = dict.fromkeys(module_gradients_dict)
            return nothing
        return super().postprocess_gradients_for_module(
            module_id=module_id, module_gradients_dict=module_gradients_dict, **kwargs
        )
