"""What Learners measure of their batches and forward passes, where `MemoryMetrics` asks for it."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any

from ray.rllib.core import ALL_MODULES
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID

from connectors.learners.minibatches import RowMinibatches
from connectors.monitoring.measures import FORWARD_TIME, MEMORY, log_rows


class MeasuredUpdates(TorchLearner):
    """Logs rows before they are cut into minibatches, and how long forward passes take.

    Stands before the part that makes the minibatches.
    """

    measures_memory = False
    _update_started = 0.0

    @override(TorchLearner)
    def _create_iterator_if_necessary(self, **kwargs: Any) -> Iterable:
        minibatches = super()._create_iterator_if_necessary(**kwargs)
        if self.measures_memory and isinstance(minibatches, RowMinibatches):
            log_rows(self.metrics, minibatches.batch.policy_batches)
        return minibatches

    @override(TorchLearner)
    def _update(self, batch: dict[str, Any]) -> tuple[Any, Any, Any]:
        self._update_started = time.perf_counter()
        return super()._update(batch)

    @override(TorchLearner)
    def compute_losses(
        self, *, fwd_out: dict[str, Any], batch: dict[str, Any]
    ) -> dict[ModuleID, Any]:
        """Logs how long the forward pass took, and computes the losses from it."""
        if self.measures_memory:
            # Not synchronised: on a GPU the time to launch the pass.
            seconds = time.perf_counter() - self._update_started
            self.metrics.log_value((ALL_MODULES, MEMORY, FORWARD_TIME), seconds, reduce="mean")
        return super().compute_losses(fwd_out=fwd_out, batch=batch)
