"""Values of a train batch, without gradient and in bounded memory."""

from __future__ import annotations

from typing import Any, cast

import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI

from connectors.snapshots import eval_mode

# Timesteps that one pass takes at a time, and bytes of their observations on CPUs, unless a single
# row has more: what is larger than the caches comes from the system page by page. Values are twice
# as fast with 2,048 steps as with 32,768.
VALUE_STEPS = 2048
VALUE_BYTES = 2**24


def values_of_batch(module: ValueFunctionAPI, batch: dict[str, Any]) -> torch.Tensor:
    """The values that a module gives to each step of its batch.

    In eval mode, without gradient, and in blocks of rows, whoever wrote the module.

    Args:
        module: Module with a value function.
        batch: Its train batch, in rows where it has memory.

    Returns:
        `(B, T)`, or `(N,)` for a module without memory.
    """
    # A list of Python objects, in no order that blocks could follow.
    batch = {column: data for column, data in batch.items() if column != Columns.INFOS}
    leaves = tree.flatten(batch[Columns.OBS])
    num_rows = len(leaves[0])
    steps_per_row = leaves[0].shape[1] if Columns.STATE_IN in batch else 1
    rows_per_block = VALUE_STEPS // steps_per_row
    if leaves[0].device.type == "cpu":
        bytes_per_row = sum(leaf.nbytes for leaf in leaves) // num_rows
        rows_per_block = min(rows_per_block, VALUE_BYTES // max(1, bytes_per_row))
    rows_per_block = max(1, rows_per_block)
    with torch.no_grad(), eval_mode(module):
        blocks = [
            module.compute_values(_rows(batch, start, start + rows_per_block))
            for start in range(0, num_rows, rows_per_block)
        ]
    return torch.cat([cast("torch.Tensor", block) for block in blocks])


def _rows(batch: dict[str, Any], start: int, stop: int) -> dict[str, Any]:
    return tree.map_structure(lambda leaf: leaf[start:stop], batch)
