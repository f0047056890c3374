"""What the checks of the contract share: fixed inputs, and the words for a broken promise."""

import copy
from collections.abc import Sequence
from enum import Enum
from itertools import pairwise
from typing import Any, NoReturn

import torch
from torch import Tensor

from rlmodules.memories import Memory, State

ROWS = 3
# Relative to the largest entry, if that is above 1.
TOLERANCES = {torch.float64: 1e-10, torch.float32: 1e-5}


class Promise(Enum):
    """What a message calls a promise, and what to look at first where it is broken."""

    SHAPES = ("the shapes of `Memory.forward`", "Compare with the docstring of `Memory`.")
    STEPS = ("promise 1, steps", "Does the state hold all that a later step needs?")
    CUTS = ("promise 2, cuts", "Does the state hold all that a later call needs?")
    PADDING = (
        "promise 3, padding",
        "Are inputs masked with `torch.where` before they are used, and is the state that of the "
        "last valid step?",
    )
    RESETS = ("promise 4, resets", "Do resets reach all of the state, counters included?")
    CAUSALITY = (
        "promise 5, causality",
        "Does anything run over the time axis: a norm, a mean, a shift?",
    )
    BOUNDS = ("promise 6, bounds", "Is what is carried on multiplied by at most 1 a step?")
    DTYPES = ("promise 6, dtypes", "Is the state computed in the dtype of the incoming one?")
    GRADIENTS = ("promise 7, gradients", "Is anything detached or cast to float32 on the way?")
    ROWS_APART = ("promise 8, rows", "Does anything run over the batch axis, like BatchNorm?")
    INPUTS_KEPT = ("promise 8, inputs", "Is something changed in place, as `+=` and `x[:] =` do?")


class Case:
    """A copy of a memory with fixed inputs, on which one promise is checked.

    Args:
        memory: The memory.
        promise: The promise.
        num_steps: Steps T of the inputs `x (B, T, D)`.
        seed: Seed of the inputs.
        dtype: Of the memory, the inputs and the states.
    """

    def __init__(
        self,
        memory: Memory,
        promise: Promise,
        num_steps: int,
        seed: int,
        dtype: torch.dtype = torch.float64,
    ):
        self.memory = copy.deepcopy(memory).to("cpu")
        # Not `to(dtype)`, which drops what is imaginary.
        for tensor in (*self.memory.parameters(), *self.memory.buffers()):
            if tensor.is_complex():
                tensor.data = tensor.data.to(dtype.to_complex())
            elif tensor.is_floating_point():
                tensor.data = tensor.data.to(dtype)
        self.memory.zero_grad()
        self._name, self._hint = promise.value
        self._dtype = dtype
        self._generator = torch.Generator().manual_seed(seed)
        self.x = self._inputs(num_steps)
        self._case = f"{ROWS} rows of {num_steps} steps, seed {seed}, {dtype}"

    def run(self, x: Tensor, state: State, **masks: Tensor) -> tuple[Tensor, State]:
        """Calls the memory; an error that it raises says what was being checked."""
        try:
            return self.memory(x, state, **masks)
        except Exception as error:
            error.add_note(f"Raised while checking {self._name}: {self._case}.")
            raise

    def run_in_parts(self, x: Tensor, state: State, bounds: Sequence[int]) -> tuple[Tensor, State]:
        """Calls the memory for one part of the steps after the other."""
        outputs = []
        for start, end in pairwise(bounds):
            y, state = self.run(x[:, start:end], state)
            outputs.append(y)
        return torch.cat(outputs, 1), state

    def initial(self) -> State:
        """The initial state of all rows."""
        state = {}
        for key, value in self.memory.initial_state().items():
            dtype = self._dtype if value.is_floating_point() else value.dtype
            state[key] = value.detach().to(dtype).expand(ROWS, *value.shape).clone()
        return state

    def busy(self) -> State:
        """A state that something has been written to."""
        with torch.no_grad():
            _, state = self.run(self._inputs(11), self.initial())
        return {key: value.clone() for key, value in state.items()}

    def same(self, actual: Any, expected: Any, how: str, row: int = 0) -> None:
        """Fails unless pairs of outputs and states are equal.

        Args:
            actual: What the memory computed.
            expected: What it should be.
            how: Between which two ways of computing it there must be no difference.
            row: The number of the first row.
        """
        self.same_steps(actual[0], expected[0], how, row=row)
        self.same_states(actual[1], expected[1], how, row=row)

    def same_steps(
        self, actual: Tensor, expected: Tensor, how: str, *, row: int = 0, name: str = "output"
    ) -> None:
        """Fails unless two tensors `(B, T, ...)` are equal."""
        tolerance = TOLERANCES[self._dtype]
        if found := difference(actual, expected, tolerance, row=row, over_time=True):
            self.fail(f"the {name} {found}, between {how}")

    def same_states(self, actual: State, expected: State, how: str, *, row: int = 0) -> None:
        """Fails unless two states are equal."""
        for key, value in actual.items():
            tolerance = TOLERANCES[self._dtype]
            if found := difference(value, expected[key], tolerance, row=row):
                self.fail(f"the state `{key}` {found}, between {how}")

    def require(self, holds: bool, what: str) -> None:
        """Fails with `what` unless it holds."""
        if not holds:
            self.fail(what)

    def fail(self, what: str) -> NoReturn:
        """Raises the error."""
        raise AssertionError(
            f"{type(self.memory).__name__} breaks {self._name}: {what}. {self._hint} ({self._case})"
        )

    def _inputs(self, num_steps: int) -> Tensor:
        shape = (ROWS, num_steps, self.memory.input_dim)
        return torch.randn(shape, generator=self._generator, dtype=torch.float64).to(self._dtype)


def difference(
    actual: Tensor, expected: Tensor, tolerance: float, *, row: int = 0, over_time: bool = False
) -> str | None:
    """Says by how much and where two tensors differ.

    Args:
        actual: A tensor `(B, ...)`.
        expected: The tensor that it should be equal to.
        tolerance: What is allowed, relative to the largest entry of `expected` if that is above 1.
        row: The number of the first row.
        over_time: Whether the second axis is time.

    Returns:
        The words, or None if there is no difference.
    """
    if expected.numel() == 0:
        return None
    actual, expected = actual.detach().double(), expected.detach().double()
    tolerance *= max(1.0, expected.abs().max().item())
    lead = actual.shape[: 2 if over_time else 1]
    sizes = (actual - expected).abs().reshape(*lead, -1).amax(-1)
    wrong = ~(sizes <= tolerance)
    if not bool(wrong.any()):
        return None
    words = f"differs by up to {sizes.max().item():.2g} (allowed: {tolerance:.1g})"
    if not over_time:
        return f"{words}, first in row {row + int(wrong.int().argmax())}"
    step = int(wrong.any(0).int().argmax())
    return f"{words}, first at step {step} of row {row + int(wrong[:, step].int().argmax())}"


def row_of(tree: Any, b: int) -> Any:
    """One row of a tensor, a state or a pair of both, with its axis."""
    if isinstance(tree, tuple):
        return tuple(row_of(part, b) for part in tree)
    if isinstance(tree, dict):
        return {key: value[b : b + 1] for key, value in tree.items()}
    return tree[b : b + 1]


def with_gradients(state: State) -> State:
    """The state, its floating-point tensors as leaves that collect gradients."""
    return {k: v.requires_grad_() if v.is_floating_point() else v for k, v in state.items()}
