"""Several Learners update the same modules, in the same order."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from connectors.collectives import sum_over_learners
from connectors.monitoring.measures import MEMORY, NUM_SKIPPED_BATCHES


def keep_common_modules(
    learner: TorchLearner, batch: MultiAgentBatch
) -> tuple[MultiAgentBatch, float]:
    """Keeps the modules that each Learner has steps of, sorted by ID.

    Gradients are averaged over Learners module by module. One that has no steps of a module, as may
    happen with agents that act rarely, would leave the others waiting for ever. The others skip
    the module in this update, and count it.

    Args:
        learner: One of several. All call this for the same update, see `connectors.collectives`.
        batch: Its train batch.

    Returns:
        The batch of those modules, and the steps of the one that has the most, as the mean over
        Learners: from numbers that are the same on all, the same follows on all.
    """
    module_ids = sorted(learner.module.keys())
    batches: dict[str, Any] = batch.policy_batches
    mine = np.zeros((len(module_ids), 2), dtype=np.int64)
    for row, module_id in zip(mine, module_ids, strict=True):
        if module_id in batches:
            row[:] = _has_steps(batches[module_id]), len(batches[module_id])
    num_learners: Any = learner.config.num_learners
    owners, steps = sum_over_learners(mine, str(learner.device)).T
    common = {
        module_id: total / num_learners
        for module_id, count, total in zip(module_ids, owners, steps, strict=True)
        if count == num_learners
    }
    if len(module_ids) > 1:
        for module_id in batches:
            skipped = int(module_id not in common)
            key = (module_id, MEMORY, NUM_SKIPPED_BATCHES)
            learner.metrics.log_value(key, skipped, reduce="sum")
    kept = {module_id: batches[module_id] for module_id in common}
    return MultiAgentBatch(kept, len(batch) if kept else 0), max(common.values(), default=0.0)


def _has_steps(batch: SampleBatch) -> bool:
    """Whether there is a step to train on; bootstrap steps are none."""
    mask = batch.get(Columns.LOSS_MASK)
    return len(batch) > 0 and (mask is None or bool(mask.any()))
