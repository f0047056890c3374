"""The recurrent states of all agents of one module, between two passes of the module."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import tree
from ray.rllib.core.rl_module.rl_module import RLModule

from connectors.snapshots import copy_rows
from connectors.validation import initial_state


class StateBank:
    """One batched tensor a state leaf, a row an agent, on the module's device.

    While the same agents act in each pass, as sub-environments with a single agent do, the output
    of one pass is the input of the next as it is. Otherwise the rows of the agents that act are
    gathered before the pass and scattered back behind it.

    Next to the state after an agent's last step the bank holds the one before it: an agent may
    still wait for what its step leads to when its episode is cut, and that step then is the first
    of a row.

    Agents are known by the IDs of their `SingleAgentEpisode`s.

    Args:
        module: The module that the states belong to.
    """

    def __init__(self, module: RLModule):
        self._module = module
        self._ids: list[str] = []
        self._rows: dict[str, int] = {}
        # Trees of tensors with a leading axis of `len(self._ids)`.
        self._before: Any = None
        self._after: Any = None
        # False where the tensors are a pass's own and must not be written into.
        self._owned = False
        # The pass to come: its agents, and their rows unless it has all of them in order.
        self._running: tuple[list[str], torch.Tensor | None] = ([], None)

    def take(
        self,
        ids: list[str],
        starts: Sequence[int],
        live_ids: Callable[[], Collection[str]],
        device: str,
        *,
        heirs: Mapping[int, tuple[str, bool]] | None = None,
    ) -> Any:
        """The states that a pass starts from.

        Args:
            ids: The agents that act, one a row of the batch.
            starts: Rows to start from the initial state; those of unknown agents do so anyway.
            live_ids: Returns the agents that may act later.
            device: Where the batch is.
            heirs: Rows of new agents that take over the state of another agent: whose, and whether
                it is the one before its last step instead of the one after it.

        Returns:
            Tree of tensors `(len(ids), ...)`.
        """
        first = None
        inherited = self._inherited(heirs) if heirs else None
        if ids != self._ids:
            unknown = [row for row, id_ in enumerate(ids) if id_ not in self._rows]
            if unknown:
                starts = sorted({*starts, *unknown})
                first = initial_state(self._module, device)
                self._make_room([ids[row] for row in unknown], {*ids, *live_ids()}, first)
        if ids == self._ids:
            rows, states = None, self._after
        else:
            rows = torch.tensor([self._rows[id_] for id_ in ids], device=device)
            states = _select(self._after, rows)
        if starts:
            first = initial_state(self._module, device) if first is None else first
            states = _replace(states, starts, first)
        if heirs:
            index = torch.tensor(list(heirs), device=device)
            states = tree.map_structure(
                lambda leaf, new: leaf.index_copy(0, index, new.to(leaf.dtype)), states, inherited
            )
        self._running = (ids, rows)
        return states

    def put(self, state_in: Any, state_out: Any) -> None:
        """Keeps the states before and after the pass that `take` was called for."""
        ids, rows = self._running
        if len(ids) == len(self._ids):
            if rows is not None:
                self._assign(ids)
            self._before, self._after, self._owned = state_in, state_out, False
            return
        if not self._owned:
            self._before, self._after = tree.map_structure(torch.clone, (self._before, self._after))
            self._owned = True
        tree.map_structure(
            lambda leaf, new: leaf.index_copy_(0, rows, new.to(leaf.dtype)),
            (self._before, self._after),
            (state_in, state_out),
        )

    def states_after(self, ids: Sequence[str]) -> list[Any]:
        """Copies of the states after the last step of some agents, as trees of numpy arrays."""
        return copy_rows(self._after, [self._rows[id_] for id_ in ids])

    def states_before(self, ids: Sequence[str]) -> list[Any]:
        """Copies of the states before the last step of some agents, as trees of numpy arrays."""
        return copy_rows(self._before, [self._rows[id_] for id_ in ids])

    def _inherited(self, heirs: Mapping[int, tuple[str, bool]]) -> Any:
        states = [
            tree.map_structure(
                lambda leaf, row=self._rows[id_]: leaf[row], self._before if before else self._after
            )
            for id_, before in heirs.values()
        ]
        return tree.map_structure(lambda *leaves: torch.stack(leaves), *states)

    def _make_room(self, new: list[str], kept: Collection[str], first: Any) -> None:
        """Gives new agents rows: those of agents that are gone, then further ones."""
        gone = [row for row, id_ in enumerate(self._ids) if id_ not in kept]
        ids = list(self._ids)
        for row, id_ in zip(gone, new, strict=False):
            ids[row] = id_
        further, unused = new[len(gone) :], set(gone[len(new) :])
        if unused:
            left = [row for row in range(len(ids)) if row not in unused]
            ids = [ids[row] for row in left]
            index = torch.tensor(left, device=tree.flatten(first)[0].device)
            self._before, self._after = _select((self._before, self._after), index)
            self._owned = True
        if further:
            ids += further
            rows = _expand(first, len(further))
            if self._ids:
                self._before, self._after = (
                    tree.map_structure(
                        lambda leaf, row: torch.cat([leaf, row.to(leaf.dtype)]), states, rows
                    )
                    for states in (self._before, self._after)
                )
            else:
                self._before, self._after = rows, rows
            self._owned = bool(self._ids)
        self._assign(ids)

    def _assign(self, ids: list[str]) -> None:
        self._ids = list(ids)
        self._rows = {id_: row for row, id_ in enumerate(ids)}


def _select(states: Any, rows: torch.Tensor) -> Any:
    return tree.map_structure(lambda leaf: leaf.index_select(0, rows), states)


def _expand(state: Any, num_rows: int) -> Any:
    return tree.map_structure(lambda leaf: leaf.expand(num_rows, *leaf.shape).clone(), state)


def _replace(states: Any, rows: Sequence[int], state: Any) -> Any:
    """A copy with one state in the given rows."""
    leaves = tree.flatten(states)
    replaced = torch.zeros(len(leaves[0]), dtype=torch.bool)
    replaced[list(rows)] = True
    replaced = replaced.to(leaves[0].device)
    return tree.map_structure(
        lambda leaf, new: torch.where(
            replaced.view(-1, *(1,) * new.ndim), new.to(leaf.dtype), leaf
        ),
        states,
        state,
    )
