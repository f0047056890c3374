"""Stacks of blocks: states lie in one tensor a kind, so that the whole has few tensors."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from rlmodules.compilation import call_block
from rlmodules.memories.memory import State


def stack_initial_states(blocks: Iterable[Any], counts_steps: bool) -> State:
    """The blocks' initial states stacked over the layers, so that a state has few tensors."""
    states = [block.initial_state() for block in blocks]
    state = {key: torch.stack([s[key] for s in states]) for key in states[0]}
    if counts_steps:
        state["t"] = torch.zeros((), dtype=torch.int64)
    return state


def run_blocks(
    blocks: nn.ModuleList,
    x: Tensor,
    state: State,
    *args: Tensor | None,
) -> tuple[Tensor, State]:
    """Runs blocks one after the other on their layers of a stacked state `(B, L, ...)`.

    Args:
        blocks: Modules that map `(x, layer_state, *args)` to an output and a state.
        x: Inputs of the first block, `(B, T, D)`.
        state: States of all layers; a step counter `t` is left out.
        args: What all blocks share.

    Returns:
        Outputs of the last block and the new states, stacked like `state`.
    """
    layers = {key: value.unbind(1) for key, value in state.items() if key != "t"}
    new_states = []
    for i, block in enumerate(blocks):
        layer_state = {key: values[i] for key, values in layers.items()}
        x, new_state = call_block(block, x, layer_state, *args)
        new_states.append(new_state)
    return x, {key: torch.stack([s[key] for s in new_states], 1) for key in layers}
