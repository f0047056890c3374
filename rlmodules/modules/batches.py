"""What RLlib's batches are to our networks."""

from collections.abc import Mapping
from typing import Any

import torch
import tree
from ray.rllib.core.columns import Columns
from torch import Tensor

RESETS = "row_resets"
"""Column `(B, T)` bool of packed rows: True where a new episode starts inside the row."""


def module_inputs(batch: Mapping[str, Any]) -> tuple[Any, Any, Tensor | None, Tensor | None]:
    """Observations, incoming state, mask of real steps and resets of a batch."""
    obs, seq_lens = batch[Columns.OBS], batch.get(Columns.SEQ_LENS)
    resets = batch.get(RESETS)
    if seq_lens is None:
        return obs, batch[Columns.STATE_IN], None, resets
    leaf = tree.flatten(obs)[0]
    B, T = leaf.shape[:2]
    steps = torch.arange(T, device=leaf.device)
    # RLlib 2.60 may deliver lengths as float32 on the CPU.
    valid = steps < seq_lens.to(leaf.device)[:, None]
    # Whatever stands in the padding, even a NaN must not reach the encoder's gradients.
    obs = tree.map_structure(lambda x: x.where(valid.view(B, T, *[1] * (x.dim() - 2)), 0), obs)
    return obs, batch[Columns.STATE_IN], valid, resets


def check_rows(batch: Mapping[str, Any]) -> None:
    """Refuses a batch of replayed steps that RLlib's own connectors made.

    Raises:
        ValueError: If it is one.
    """
    if Columns.NEXT_OBS in batch:
        raise ValueError(
            "The train batch has a column `NEXT_OBS`, from which action values with memory cannot "
            "be learned: the states before those observations are unknown. Call "
            "`connect(config)` after all other settings."
        )
