"""PPO's Learner for modules with memory."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.algorithms.ppo.ppo import LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY, PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID

from connectors.learners.mixin import MemoryLearnerMixin


class MemoryPPOTorchLearner(MemoryLearnerMixin, PPOTorchLearner):
    """PPO's Learner for modules with memory, set by `connect`.

    Beyond `MemoryLearnerMixin` it measures `vf_explained_var` on the steps that are trained on;
    RLlib counts padding and bootstrap steps too.
    """

    @override(PPOTorchLearner)
    def compute_loss_for_module(
        self,
        *,
        module_id: ModuleID,
        config: PPOConfig,
        batch: dict[str, Any],
        fwd_out: dict[str, Any],
    ) -> Any:
        """PPO's loss, unchanged."""
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        if config.use_critic and Columns.LOSS_MASK in batch:
            module: Any = self.module[module_id].unwrapped()
            with torch.no_grad():
                values = module.compute_values(batch, embeddings=fwd_out.get(Columns.EMBEDDINGS))
            self.metrics.log_value(
                (module_id, LEARNER_RESULTS_VF_EXPLAINED_VAR_KEY),
                explained_variance(
                    batch[Postprocessing.VALUE_TARGETS], values, batch[Columns.LOSS_MASK]
                ),
                window=1,
            )
        return loss


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
