"""What is measured of memories: the metrics' names, and what Learners and EnvRunners both compute.

All keys are `(module ID, MEMORY, name)`; what concerns all modules at once stands under RLlib's
`ALL_MODULES`. `docs/how-to/metrics.md` says what each means.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from rlmodules.modules.batches import RESETS

MEMORY = "memory"

# Always logged.
NUM_NONFINITE_GRADIENTS = "num_nonfinite_gradients"
NUM_REBUILT_ROWS = "num_rebuilt_rows"
NUM_SKIPPED_BATCHES = "num_skipped_batches"
NUM_STALE_ROWS = "num_stale_rows"

# Logged with `MemoryMetrics`.
EPISODE_STARTS_PER_STEP = "episode_starts_per_step"
FORWARD_TIME = "forward_time_s"
LARGEST_GRADIENT = "largest_gradient"
NUM_ROWS = "num_rows"
PADDING_SHARE = "padding_share"
PADDING_SHARE_UNPACKED = "padding_share_unpacked"
STATE_BYTES = "state_bytes"
STATE_NORM_MAX = "state_norm_max"
STATE_NORM_MEAN = "state_norm_mean"
STORED_BYTES_PER_STEP = "stored_bytes_per_step"

# Without a window RLlib reduces maxima one by one, which synchronises the device. More values than
# this never come together between two results.
_WINDOW = 10_000


def log_rows(metrics: MetricsLogger, batches: Mapping[str, Any]) -> None:
    """Logs what a train batch consists of, for each module with memory.

    Args:
        metrics: Of the Learner.
        batches: Columns by module ID, as tensors.
    """
    for module_id, batch in batches.items():
        if Columns.STATE_IN not in batch:
            continue
        mask = batch[Columns.LOSS_MASK]
        num_pieces = len(mask) + (batch[RESETS].sum() if RESETS in batch else 0)
        key = (module_id, MEMORY)
        metrics.log_value((*key, NUM_ROWS), len(mask), reduce="sum")
        for name, num_rows in ((PADDING_SHARE, len(mask)), (PADDING_SHARE_UNPACKED, num_pieces)):
            share = 1 - mask.sum() / (num_rows * mask.shape[1])
            metrics.log_value((*key, name), share, reduce="mean")
        log_state_norms(metrics, module_id, batch[Columns.STATE_IN])


def log_state_norms(metrics: MetricsLogger, module_id: str, states: Any) -> None:
    """Logs the Euclidean norms of states, leaf by leaf: their mean and their maximum.

    Args:
        metrics: Of a Learner or an EnvRunner.
        module_id: Whose states these are.
        states: Tree of tensors with a leading batch axis. Integers, step counters for instance,
            are left out.
    """
    for path, leaf in tree.flatten_with_path(states):
        if not leaf.is_floating_point():
            continue
        norms = torch.linalg.vector_norm(leaf.reshape(len(leaf), -1).float(), dim=1)
        name = tuple(map(str, path))
        key = (module_id, MEMORY)
        metrics.log_value((*key, STATE_NORM_MEAN, *name), norms.mean(), reduce="mean")
        metrics.log_value((*key, STATE_NORM_MAX, *name), norms.max(), reduce="max", window=_WINDOW)
