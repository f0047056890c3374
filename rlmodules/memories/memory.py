"""The contract that every memory keeps, and what all of them do about padding and time."""

import abc
import copy
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


class NoWeightsError(ValueError):
    """Raised by `attention_weights` where outputs are no weighted sums of values."""


class Memory(nn.Module, abc.ABC):
    """A map from a sequence and a state to a sequence and a state.

    Promises, which [`check_memory`][rlmodules.check_memory] checks:

    1. T calls with one step equal one call with T steps.
    2. Any split of T into consecutive calls gives the same outputs and final state.
    3. Padding (`valid` False, to the right) changes no valid output, no gradient and not the
       returned state, whatever stands in it.
    4. A row with a reset equals two rows.
    5. The output at t depends on inputs up to t only.
    6. Outputs and states stay finite over 100,000 steps, where they are at most 4 times as large as
       after 50,000; states stay float32 under autocast.
    7. Gradients of inputs and incoming states are exact; where `detaches_state` is True, none flow
       into the latter.
    8. What a row gives depends on that row alone, and nothing that is passed in is changed.

    Attributes:
        input_dim: Features D that `forward` takes.
        output_dim: Features that it returns.
        detaches_state: Whether the incoming state is data, which no gradient flows into.
    """

    input_dim: int
    output_dim: int
    detaches_state: bool = False

    @abc.abstractmethod
    def initial_state(self) -> State:
        """The state before an episode's first step, without a batch axis. Cheap to call."""

    @abc.abstractmethod
    def forward(
        self,
        x: Tensor,
        state: State,
        *,
        valid: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Runs the memory over a batch of sequences.

        Args:
            x: Inputs, `(B, T, D)`.
            state: Each row's state before its first step: `initial_state` with a leading B.
            valid: False on right padding, `(B, T)` bool. None: every step is valid.
            resets: True where a new episode starts inside the row, `(B, T)` bool: the state is the
                initial one before that step.

        Returns:
            Outputs `(B, T, output_dim)` and the states after each row's last valid step.
        """

    def compilable(self) -> list[nn.Module]:
        """The sub-modules that `torch.compile` pays for; equal ones share their graphs."""
        return []

    @torch.no_grad()
    def attention_weights(self, x: Tensor, state: State) -> Tensor:
        """What each step takes of the values of each step, in every layer and head.

        Entry `[..., t, s]` is the weight that the value of step s has in a head's output at step t:
        for softmax attention a share, for linear attention the product of query and key with the
        decay between them, divided by the normaliser where there is one. A value may itself hold
        earlier steps, through convolutions and the layers before.

        Takes memory for `L H T^2` floats a row.

        Args:
            x: Inputs, `(B, T, D)`.
            state: As in `forward`. What it holds of earlier steps has weights too, which are left
                out: of an episode from its first step on, nothing is.

        Returns:
            `(B, L, H, T, T)`, in the order in which the layers run.

        Raises:
            NoWeightsError: If the output of one of its layers is no weighted sum of values.
        """
        # Hooks of a copy: it is not compiled, and nothing has to be undone.
        memory = copy.deepcopy(self)
        weights: list[Tensor] = []

        def record(block: Any, inputs: tuple) -> None:
            weights.append(block.attention_weights(*inputs))

        for block in memory.modules():
            if hasattr(block, "attention_weights") and not isinstance(block, Memory):
                block.register_forward_pre_hook(record)
        memory(x, state)
        if not weights:
            raise NoWeightsError(
                f"`{type(self).__name__}` has no attention weights: none of its layers has a "
                "method `attention_weights`. Use `gradient_map`, which all memories have."
            )
        return torch.stack(weights, 1)

    @torch.enable_grad()
    def gradient_map(self, x: Tensor, state: State) -> Tensor:
        """How much the output at each step changes with the input of each step.

        Entry `[..., t, s]` is the norm of the derivative of the output at step t by the input of
        step s, a matrix, over all of its entries. Wider outputs than 16 features are differentiated
        in 16 random directions, always the same, orthogonal to each other, from which the norm is
        estimated: mostly within a tenth. All directions would take eight times as long at 128.

        Takes T backward passes over `16 B` rows.

        Args:
            x: Inputs, `(B, T, D)`.
            state: As in `forward`. It is held fixed.

        Returns:
            `(B, T, T)`.
        """
        memory = copy.deepcopy(self).requires_grad_(False)  # a copy is not compiled
        directions = _directions(self.output_dim).to(x)
        # Rows do not mix: with a row for each direction, one pass differentiates in all of them.
        num = len(directions)
        x = x.detach().repeat_interleave(num, 0).requires_grad_()
        state = {key: leaf.detach().repeat_interleave(num, 0) for key, leaf in state.items()}
        y = memory(x, state)[0].unflatten(0, (-1, num))
        y = torch.einsum("bntd,nd->tbn", y, directions)
        norms = []
        for of_step in y:
            (gradient,) = torch.autograd.grad(of_step.sum(), x, retain_graph=True)
            norms.append(torch.linalg.vector_norm(gradient.unflatten(0, (-1, num)), dim=(1, 3)))
        return torch.stack(norms, 1)


def mask_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zeros in the padding of `x (B, T, ...)`, so that not even a NaN in it reaches a gradient."""
    return x if valid is None else torch.where(valid[..., None], x, 0.0)


def zero_steps() -> State:
    """The step counter `t` of an initial state."""
    return {"t": torch.zeros((), dtype=torch.int64)}


def count_steps(
    t: Tensor, num_steps: int, valid: Tensor | None, resets: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Steps since the episode began, for every step of a row and for the step after it.

    Args:
        t: The count at each row's first step, `(B,)` int64.
        num_steps: Length T of the rows.
        valid: False on right padding, `(B, T)` bool, or None.
        resets: True where a new episode starts, `(B, T)` bool, or None.

    Returns:
        The counts `(B, T)` and the count after the last valid step `(B,)`, both int64.
    """
    if num_steps == 1 and valid is None and resets is None:
        return t[:, None], t + 1
    steps = torch.arange(num_steps, device=t.device)
    counts = t[:, None] + steps
    if num_steps == 0:
        return counts, t
    if resets is not None:
        if valid is not None:
            resets = resets & valid
        last_reset = torch.where(resets, steps, -1).cummax(1).values
        counts = torch.where(last_reset >= 0, steps - last_reset, counts)
    if valid is None:
        return counts, counts[:, -1] + 1
    length = valid.sum(1)
    last = counts.gather(1, (length - 1).clamp(min=0)[:, None])[:, 0] + 1
    return counts, torch.where(length > 0, last, t)


def _directions(width: int) -> Tensor:
    """At most 16 orthogonal vectors `(N, width)`; their squares add up to `width`."""
    generator = torch.Generator().manual_seed(0)
    square = torch.randn(width, width, generator=generator, dtype=torch.float64)
    directions = torch.linalg.qr(square).Q[:16]
    return directions * (width / len(directions)) ** 0.5


def unit_values(k: Tensor) -> Tensor:
    """Values of which a weighted sum is the weights: `(B, H, S, S)` for keys `(B, H, S, K)`."""
    num_keys = k.shape[2]
    unit = torch.eye(num_keys, dtype=k.dtype, device=k.device)
    return unit.expand(*k.shape[:2], num_keys, num_keys)
