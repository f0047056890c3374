"""Recurrent states of single timesteps, and how to rebuild the state at any other one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.utils.spaces.space_utils import batch as stack_items
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from connectors.validation import device_of


class StateSnapshot:
    """The recurrent state that one row of timesteps starts from.

    Episodes record, under `STATE_OUT` at each step, a reference to the snapshot of the step's row:
    one object for all steps of a row. Two snapshots may share arrays, but never refer to one
    another: a chain of them would pickle a whole episode recursively.

    Args:
        t: Timestep in the episode, counted from its reset, of the step that `state` precedes.
        state: Tree of numpy arrays without batch axis: the state before step `t`. None for the
            initial state, which the module knows.

    Attributes:
        t: See above.
        state: See above.
        end_t: Timestep after the row's last one; None until the row is full.
        end_state: State before step `end_t`; None until the row is full.
    """

    # A plain class: dm_tree must take a snapshot for a leaf.
    __slots__ = ("end_state", "end_t", "state", "t")

    def __init__(self, t: int, state: Any):
        self.t = t
        self.state = state
        self.end_t: int | None = None
        self.end_state: Any = None

    def finish(self, t: int, state: Any) -> None:
        """Records the state after the row's last step, `t` being the timestep that follows it."""
        self.end_t = t
        self.end_state = state

    def state_at(self, t: int) -> Any | None:
        """The state before step `t` if it is recorded here, else None."""
        if t == self.t:
            return self.state
        if t == self.end_t:
            return self.end_state
        return None

    def __repr__(self) -> str:
        return f"StateSnapshot(t={self.t}, end_t={self.end_t})"


def share_snapshot(piece: SingleAgentEpisode, block: SingleAgentEpisode) -> None:
    """Has all steps of `piece` refer to the snapshot of the first step of `block`.

    Args:
        piece: What follows the steps of `block`, or `block` itself. States of other kinds than
            snapshots are left alone.
        block: An episode of at least one step.
    """
    recorded = piece.extra_model_outputs.get(Columns.STATE_OUT)
    known = block.extra_model_outputs.get(Columns.STATE_OUT)
    if recorded is None or known is None or not isinstance(known[0], StateSnapshot):
        return
    snapshot = known[0]
    if piece is block:
        # Without the state after the row, which the next block has.
        snapshot = StateSnapshot(snapshot.t, own_memory(snapshot.state))
    references = np.empty(len(piece), dtype=object)
    references[:] = snapshot
    # A new buffer: the old one's array belongs to whoever sampled it.
    piece.extra_model_outputs[Columns.STATE_OUT] = InfiniteLookbackBuffer(references)


def copy_rows(states: Any, rows: Sequence[int]) -> list[Any]:
    """Copies rows of a batched state to numpy.

    Args:
        states: Tree of tensors with a leading batch axis.
        rows: Indices on that axis.

    Returns:
        One tree of numpy arrays a row, without batch axis and with the tensors' dtypes. Each has
        memory of its own: some rows are kept for long, others not.
    """
    leaves = tree.flatten(states)
    index = torch.as_tensor(rows, device=leaves[0].device)
    # `index_select` copies, so later in-place changes of the batched state cannot reach the rows.
    arrays = [leaf.detach().index_select(0, index).cpu().numpy() for leaf in leaves]
    return [
        tree.unflatten_as(states, [array[row].copy() for array in arrays])
        for row in range(len(rows))
    ]


def own_memory(arrays: Any) -> Any:
    """A tree with copies of the arrays that are views, which keep what they are part of alive."""
    return tree.map_structure(
        lambda leaf: leaf.copy() if getattr(leaf, "base", None) is not None else leaf, arrays
    )


@contextmanager
def eval_mode(module: Any) -> Iterator[None]:
    """Has all parts of a module in eval mode, and each in its own mode again afterwards."""
    parts = list(module.modules()) if isinstance(module, torch.nn.Module) else []
    modes = [part.training for part in parts]
    for part in parts:
        part.training = False
    try:
        yield
    finally:
        for part, mode in zip(parts, modes, strict=True):
            part.training = mode


def rebuild_states(
    module: RLModule,
    states: Sequence[Any],
    steps: Sequence[dict[str, Any]],
) -> list[Any]:
    """Runs the module over recorded steps to find the states that follow them.

    No pass is padded: a module that knows nothing of padding is served too. A sequence of 13 steps
    is run as 8, 4 and 1, so sequences of any lengths up to T share about `log2(T)` passes.

    Args:
        module: Module with memory; its `forward_inference` is called.
        states: One state a sequence (trees of numpy arrays without batch axis).
        steps: The columns of each sequence (`OBS` at least), leaves `(length, ...)`.

    Returns:
        One state a sequence, as `states`: that after the sequence's last step.
    """
    module = module.unwrapped()
    device = device_of(module)
    groups: dict[frozenset[str], list[int]] = defaultdict(list)
    lengths = [len(tree.flatten(columns[Columns.OBS])[0]) for columns in steps]
    for position, columns in enumerate(steps):
        groups[frozenset(columns)].append(position)

    rebuilt = list(states)
    # Eager: gaps of all lengths must not compile anything.
    with eval_mode(module), torch.no_grad(), torch.compiler.set_stance("force_eager"):
        for group in groups.values():
            longest = max(lengths[position] for position in group)
            for bit in reversed(range(longest.bit_length())):
                positions = [position for position in group if lengths[position] >> bit & 1]
                if not positions:
                    continue
                parts = [_steps_of_bit(steps[i], lengths[i], bit) for i in positions]
                inputs: Any = stack_items(parts)
                inputs[Columns.STATE_IN] = stack_items([rebuilt[i] for i in positions])
                inputs[Columns.SEQ_LENS] = np.full(len(positions), 1 << bit, dtype=np.int64)
                inputs = convert_to_torch_tensor(inputs, device=device)
                state_out = module.forward_inference(inputs)[Columns.STATE_OUT]
                rows = copy_rows(state_out, range(len(positions)))
                for position, row in zip(positions, rows, strict=True):
                    rebuilt[position] = row
    return rebuilt


def _steps_of_bit(columns: dict[str, Any], length: int, bit: int) -> dict[str, Any]:
    """The `2 ** bit` steps that follow those of the length's higher bits."""
    start = length >> (bit + 1) << (bit + 1)
    return tree.map_structure(lambda leaf: leaf[start : start + (1 << bit)], columns)
