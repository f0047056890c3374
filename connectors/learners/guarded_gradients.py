"""No step on gradients that are NaN or infinite."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.core import ALL_MODULES
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID, ParamDict

from connectors.monitoring.measures import LARGEST_GRADIENT, MEMORY, NUM_NONFINITE_GRADIENTS

logger = logging.getLogger("rllib_memory")


class GuardedGradients(TorchLearner):
    """Leaves out modules whose gradients hold a NaN or an infinity: weights and optimizers stay."""

    measures_memory = False
    _largest_raw: Mapping[ModuleID, torch.Tensor] = {}

    @override(TorchLearner)
    def build(self) -> None:
        """Builds the Learner without RLlib's own checks of gradients."""
        super().build()
        # RLlib's flag means "do not check": its checks synchronise twice a parameter, do not
        # protect the weights, and are made needless by ours. This is the Learner's own copy of the
        # config.
        self.config.torch_skip_nan_gradients = True

    @override(TorchLearner)
    def postprocess_gradients(self, gradients_dict: ParamDict) -> ParamDict:
        """Clips gradients and remembers their largest entries from before."""
        # Clipping by value turns an infinity into a valid number. Here and not where gradients are
        # computed: IMPALA's Learners have averaged them by now, so that all decide the same.
        self._largest_raw = {
            id_: _largest(found) for id_, found in self._by_module(gradients_dict).items()
        }
        return super().postprocess_gradients(gradients_dict)

    @override(TorchLearner)
    def apply_gradients(self, gradients_dict: ParamDict) -> None:
        """Steps the optimizers, except those of modules with a NaN or infinite gradient."""
        by_module = self._by_module(gradients_dict)
        # Loss scaling for float16 meets infinities by design and skips such steps itself.
        if self._grad_scalers is None and by_module:
            for module_id in self._nonfinite(by_module):
                logger.warning(
                    f"Skipped an update of module `{module_id}`: its gradients hold NaN or "
                    "infinite numbers."
                )
                # Optimizers pass over parameters without a gradient.
                skipped: Any = dict.fromkeys(by_module[module_id])
                gradients_dict = {**gradients_dict, **skipped}
        super().apply_gradients(gradients_dict)

    def _by_module(self, gradients: ParamDict) -> dict[ModuleID, ParamDict]:
        """The gradients of each module that has some."""
        by_module = {}
        for module_id in sorted(self.module.keys()):
            found: ParamDict = {}
            for _, optimizer in self.get_optimizers_for_module(module_id):
                found |= self.filter_param_dict_for_optimizer(gradients, optimizer)
            if found:
                by_module[module_id] = found
        return by_module

    def _nonfinite(self, by_module: Mapping[ModuleID, ParamDict]) -> list[ModuleID]:
        """The modules to leave out, counted."""
        largest = {id_: _largest(gradients) for id_, gradients in by_module.items()}
        largest = {
            id_: torch.maximum(x, self._largest_raw.get(id_, x)) for id_, x in largest.items()
        }
        # The only device synchronisation of an update.
        values = torch.stack([*largest.values()]).tolist()
        finite = [value for value in values if math.isfinite(value)]
        if self.measures_memory and finite:
            key = (ALL_MODULES, MEMORY, LARGEST_GRADIENT)
            self.metrics.log_value(key, max(finite), reduce="max")
        nonfinite = []
        # All Learners have the same gradients by now: one of them counts.
        counts = not self.distributed or torch.distributed.get_rank() == 0
        for module_id, value in zip(by_module, values, strict=True):
            left_out = not math.isfinite(value)
            if left_out:
                nonfinite.append(module_id)
            for key in (module_id, ALL_MODULES):
                self.metrics.log_value(
                    (key, MEMORY, NUM_NONFINITE_GRADIENTS), int(counts and left_out), reduce="sum"
                )
        return nonfinite


def _largest(gradients: ParamDict) -> torch.Tensor:
    """The largest absolute gradient: NaN or infinite if any is."""
    tensors: list = [gradient for gradient in gradients.values() if gradient is not None]
    return torch.nn.utils.get_total_norm(tensors, norm_type=float("inf"))
