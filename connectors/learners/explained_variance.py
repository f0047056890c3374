"""How much of the value targets the values explain, on the steps that are trained on."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.algorithms.ppo.ppo import LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.typing import ModuleID


def log_explained_variance(
    learner: TorchLearner, module_id: ModuleID, batch: dict[str, Any]
) -> None:
    """Replaces the number that RLlib's loss has logged, which counts padding too.

    The values are those that the targets were computed from: no module runs once more for this.
    """
    if Columns.LOSS_MASK not in batch or Columns.VF_PREDS not in batch:
        return
    columns = (Postprocessing.VALUE_TARGETS, Columns.VF_PREDS, Columns.LOSS_MASK)
    learner.metrics.log_value(
        (module_id, LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY),
        explained_variance(*(batch[column] for column in columns)),
        window=1,
    )


def explained_variance(
    targets: torch.Tensor, values: torch.Tensor, mask: torch.Tensor
) -> torch.Tensor:
    """`1 - var(targets - values) / var(targets)` over the masked-in steps, at least -1."""
    weights = mask.to(targets.dtype)

    def variance(x: torch.Tensor) -> torch.Tensor:
        # Sums instead of `x[mask]`: indexing by a mask synchronises the device.
        x = torch.where(mask, x, 0.0)
        mean = x.sum() / weights.sum()
        return (weights * (x - mean) ** 2).sum() / (weights.sum() - 1).clamp(min=1)

    ratio = variance(targets - values) / (variance(targets) + 1e-6)
    return (1 - ratio).clamp(min=-1.0)
