"""What Learners log of their rows."""

import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from connectors.monitoring.measures import log_rows
from rlmodules.modules.batches import RESETS


@pytest.mark.parametrize(
    ("resets", "unpacked"), [(None, 1 - 7 / 8), ([[0, 0, 1, 0], [0, 1, 0, 1]], 1 - 7 / 20)]
)
def test_padding_with_and_without_packing(resets, unpacked):
    """Rows of 4 slots: two of them, which hold five pieces where there are resets."""
    batch = {
        Columns.STATE_IN: {"h": torch.zeros(2, 3)},
        Columns.LOSS_MASK: torch.tensor([[1, 1, 1, 1], [1, 1, 0, 1]], dtype=torch.bool),
    }
    if resets is not None:
        batch[RESETS] = torch.tensor(resets, dtype=torch.bool)
    metrics = MetricsLogger(root=True)
    log_rows(metrics, {"default_policy": batch})
    found = metrics.peek(("default_policy", "memory"))
    assert found["num_rows"] == 2
    assert found["padding_share"] == pytest.approx(1 - 7 / 8)
    assert found["padding_share_unpacked"] == pytest.approx(unpacked)
