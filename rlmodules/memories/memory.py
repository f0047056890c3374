"""The contract that every memory keeps, and what all of them do about padding and time."""

import abc
import copy
from typing import Any

import torch
from torch import Tensor, nn

State = dict[str, Tensor]


class Memory(nn.Module, abc.ABC):
    """A map from a sequence and a state to a sequence and a state.

    Promises, which [`check_memory`][rlmodules.check_memory] checks:

    1. T calls with one step equal one call with T steps.
    2. Any split of T into consecutive calls gives the same outputs and final state.
    3. Padding (`valid` False, to the right) changes no valid output, no gradient and not the
       returned state, whatever stands in it.
    4. A row with a reset equals two rows.
    5. The output at t depends on inputs up to t only.
    6. Outputs and states stay finite over 100,000 steps; states stay float32 under autocast.
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
        """The sub-modules that `torch.compile` pays for; equal ones share one graph."""
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
            ValueError: If the memory's output is no weighted sum of values.
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
            raise ValueError(
                f"`{type(self).__name__}` has no attention weights: none of its layers has a "
                "method `attention_weights`. They exist where outputs are weighted sums of values."
            )
        return torch.stack(weights, 1)


def mask_padding(x: Tensor, valid: Tensor | None) -> Tensor:
    """Zeros in the padding of `x (B, T, ...)`, so that not even a NaN in it reaches a gradient."""
    return x if valid is None else torch.where(valid[..., None], x, 0.0)


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
    steps = torch.arange(num_steps, device=t.device)
    counts = t[:, None] + steps
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


def unit_values(k: Tensor) -> Tensor:
    """Values of which a weighted sum is the weights: `(B, H, S, S)` for keys `(B, H, S, K)`."""
    num_keys = k.shape[2]
    unit = torch.eye(num_keys, dtype=k.dtype, device=k.device)
    return unit.expand(*k.shape[:2], num_keys, num_keys)
