"""What the Learners of all algorithms share: guarded weights, our advantages."""

from __future__ import annotations

import logging
from typing import Any

import torch
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core import ALL_MODULES
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID, ParamDict

from connectors.advantages import ComputeAdvantages
from connectors.learners.common_modules import KeepCommonModules

logger = logging.getLogger("rllib_memory")

NUM_NONFINITE_GRADIENTS = "num_nonfinite_gradients"


class MemoryLearnerMixin(TorchLearner):
    """What every Learner needs for modules with memory; put it before RLlib's Learner class.

    - An update whose gradients hold a NaN or an infinity is skipped: weights and optimizer stay as
      they are, and the metric `num_nonfinite_gradients` (under `__all_modules__`) counts it.
      RLlib would set such gradients to 0 or a huge number and step.
    - RLlib's advantage connector is replaced by `ComputeAdvantages`.
    - Several Learners update the same modules, see `KeepCommonModules`.
    """

    _largest_raw_gradient: torch.Tensor | None = None

    @override(TorchLearner)
    def build(self) -> None:
        """Builds the Learner and swaps the advantage connector."""
        super().build()
        # RLlib's flag means "do not check": its checks synchronise twice a parameter, do not
        # protect the weights, and are made needless by ours. This is the Learner's own copy of the
        # config.
        self.config.torch_skip_nan_gradients = True
        pipeline = self._learner_connector
        if pipeline is not None and pipeline[GeneralAdvantageEstimation]:
            config: Any = self.config
            pipeline.insert_after(
                GeneralAdvantageEstimation,
                ComputeAdvantages(gamma=config.gamma, lambda_=config.lambda_),
            )
            pipeline.remove(GeneralAdvantageEstimation)
        if pipeline is not None and self.distributed and len(self.module) > 1:
            pipeline.append(KeepCommonModules())

    @override(TorchLearner)
    def compute_gradients(self, loss_per_module: dict[ModuleID, Any], **kwargs: Any) -> ParamDict:
        """Computes gradients and remembers their largest entry."""
        gradients = super().compute_gradients(loss_per_module, **kwargs)
        # Before clipping: clipping by value turns an infinity into a valid number.
        self._largest_raw_gradient = _largest(gradients)
        return gradients

    @override(TorchLearner)
    def apply_gradients(self, gradients_dict: ParamDict) -> None:
        """Steps the optimizers, unless a gradient is NaN or infinite."""
        # Loss scaling for float16 meets infinities by design and skips such steps itself.
        if self._grad_scalers is not None:
            super().apply_gradients(gradients_dict)
            return
        largest = _largest(gradients_dict)
        if self._largest_raw_gradient is not None:
            largest = torch.stack([largest, self._largest_raw_gradient])
        # The only device synchronisation of an update.
        finite = bool(torch.isfinite(largest).all())
        self.metrics.log_value(
            (ALL_MODULES, NUM_NONFINITE_GRADIENTS), int(not finite), reduce="sum"
        )
        if not finite:
            logger.warning("Skipped an update: its gradients hold NaN or infinite numbers.")
            return
        super().apply_gradients(gradients_dict)


def _largest(gradients: ParamDict) -> torch.Tensor:
    """The largest absolute gradient: NaN or infinite if any is."""
    tensors: list[Any] = [gradient for gradient in gradients.values() if gradient is not None]
    return torch.nn.utils.get_total_norm(tensors, norm_type=float("inf"))
