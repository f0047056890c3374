"""Several Learners update the same modules in the same order."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from torch import distributed

from connectors.measures import MEMORY, NUM_SKIPPED_BATCHES
from connectors.validation import device_of


class KeepCommonModules(ConnectorV2):
    """Keeps the modules that each Learner has steps of, sorted by ID.

    Gradients are averaged over Learners module by module. One that has no steps of a module, as may
    happen with agents that act rarely, would leave the others waiting for ever. The others skip
    the module in this update, and count it.
    """

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[str, Any],
        episodes: list[Any],
        explore: bool | None = None,
        shared_data: dict | None = None,
        metrics: MetricsLogger | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns the batches of those modules."""
        module_ids = sorted(rl_module.keys())
        device = device_of(rl_module[module_ids[0]].unwrapped())
        present = torch.tensor([int(id_ in batch) for id_ in module_ids], device=device)
        distributed.all_reduce(present, op=distributed.ReduceOp.MIN)
        common = [id_ for id_, kept in zip(module_ids, present.tolist(), strict=True) if kept]
        if metrics is not None:
            for module_id in batch:
                skipped = int(module_id not in common)
                key = (module_id, MEMORY, NUM_SKIPPED_BATCHES)
                metrics.log_value(key, skipped, reduce="sum")
        return {module_id: batch[module_id] for module_id in common}
