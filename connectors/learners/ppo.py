"""PPO's Learner for modules with memory."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.ppo.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID

from connectors.learners.explained_variance import log_explained_variance
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
        if config.use_critic:
            log_explained_variance(self, module_id, batch)
        return loss
