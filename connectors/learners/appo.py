"""APPO's Learner for modules with memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics import NUM_ENV_STEPS_TRAINED_LIFETIME

from connectors.collectives import sum_over_learners
from connectors.learners.impala import MemoryIMPALATorchLearner


class MemoryAPPOTorchLearner(MemoryIMPALATorchLearner, APPOTorchLearner):
    """APPO's Learner for modules with memory, set by `connect`: as IMPALA's.

    Several Learners also update their target networks at the same time.
    """

    @override(APPOTorchLearner)
    def after_gradient_based_update(self, *, timesteps: dict[str, Any]) -> None:
        """Updates target networks and coefficients."""
        if self.distributed:
            # A batch brings its time along, and each Learner's queue has an order of its own.
            mine = np.array([timesteps.get(NUM_ENV_STEPS_TRAINED_LIFETIME, 0), 1], dtype=np.int64)
            total, num_learners = sum_over_learners(mine, str(self.device)).tolist()
            timesteps = {**timesteps, NUM_ENV_STEPS_TRAINED_LIFETIME: total // num_learners}
        super().after_gradient_based_update(timesteps=timesteps)
