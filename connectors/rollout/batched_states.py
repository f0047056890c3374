"""Recurrent states that stay in the batches which the module's passes put them in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
import tree
from ray.rllib.core.rl_module.rl_module import RLModule

from connectors.validation import initial_state

State = tuple[Any, int]
"""A tree of batched tensors, and the row in it."""


def gather(states: Sequence[State | None], module: RLModule, device: str) -> Any:
    """States as one batch, which is the batch they are in where they are all of it, in order."""
    groups: dict[int, tuple[Any, list[int]]] = {}
    starts: list[int] = []
    for position, state in enumerate(states):
        if state is None:
            starts.append(position)
        else:
            groups.setdefault(id(state[0]), (state[0], []))[1].append(position)

    parts: list[Any] = []
    order: list[int] = []
    for batch, positions in groups.values():
        rows = [cast("State", states[position])[1] for position in positions]
        parts.append(_select(batch, rows))
        order += positions
    if starts:
        # Last: the others have the dtypes and the order of keys that the module returns.
        first = initial_state(module, device)
        parts.append(
            tree.map_structure(lambda leaf: leaf.expand(len(starts), *leaf.shape).clone(), first)
        )
        order += starts
    if len(parts) == 1:
        return parts[0]
    joined = tree.map_structure(
        lambda *leaves: torch.cat([leaf.to(leaves[0].dtype) for leaf in leaves]), *parts
    )
    return _select(joined, np.argsort(order).tolist())


def _select(states: Any, rows: list[int]) -> Any:
    leaf = tree.flatten(states)[0]
    if rows == list(range(len(leaf))):
        return states
    index = torch.tensor(rows, device=leaf.device)
    return tree.map_structure(lambda leaf: leaf.index_select(0, index), states)
