"""POPGym's `LinearAttention` and `DeepLinearAttention`, weight for weight."""

import math
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlmodules.kernels import NEUTRAL_MAX, linear_attention, max_attention
from rlmodules.memories.memory import Memory, State, count_steps, mask_padding, unit_values
from rlmodules.memories.stack import run_blocks, stack_initial_states
from rlmodules.positions import PositionalEncoding

Aggregator = Literal["sum", "max"]


class POPGymBlock(nn.Module):
    """POPGym's block: one head, a ReLU network behind it, a shortcut around both.

    The state is `S (1, h, h)` and `z (1, h)`.

    Args:
        input_dim: Features of the input.
        h: Width of queries, keys, values and output.
        S_aggregator: How `k v^T` is accumulated.
        z_aggregator: How the keys are accumulated.
    """

    def __init__(self, input_dim: int, h: int, S_aggregator: Aggregator, z_aggregator: Aggregator):
        super().__init__()
        self.h = h
        self.S_aggregator: Aggregator = S_aggregator
        self.z_aggregator: Aggregator = z_aggregator
        self.key = nn.Linear(input_dim, h, bias=False)
        self.query = nn.Linear(input_dim, h, bias=False)
        self.value = nn.Linear(input_dim, h, bias=False)
        self.norm = nn.LayerNorm(input_dim)
        self.ff = nn.Sequential(nn.Linear(h, h), nn.ReLU(), nn.Linear(h, h), nn.ReLU())
        self.shortcut = nn.Linear(input_dim, h)

    def initial_state(self) -> State:
        """Zeros for a sum; for a maximum a number below every product."""
        S = NEUTRAL_MAX if self.S_aggregator == "max" else 0.0
        z = NEUTRAL_MAX if self.z_aggregator == "max" else 0.0
        return {"S": torch.full((1, self.h, self.h), S), "z": torch.full((1, self.h), z)}

    def forward(
        self,
        x: Tensor,
        state: State,
        turn: None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Runs the block; arguments as in `Memory.forward`. It knows no rotation."""
        x = self.norm(x)
        v = self.value(x)[:, None]
        out, S, z = self._attend(x, v, state["S"], state["z"], valid, resets)
        out = out[:, 0].to(x.dtype)
        return self.ff(out) + self.shortcut(x), {"S": S, "z": z}

    def attention_weights(
        self,
        x: Tensor,
        state: State,
        turn: None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> Tensor:
        """What the head gives to the values of steps, `(B, 1, T, T)`; arguments as above.

        Raises:
            ValueError: If products of keys and values are not summed.
        """
        if self.S_aggregator != "sum":
            raise ValueError(
                f'`S_aggregator` is "{self.S_aggregator}", which has no attention weights: a '
                'running maximum is no weighted sum of values. They exist with "sum".'
            )
        values = unit_values(x[:, None])
        S = values.new_zeros(len(x), 1, self.h, x.shape[1])
        return self._attend(self.norm(x), values, S, state["z"], valid, resets)[0]

    def _attend(
        self,
        x: Tensor,
        v: Tensor,
        S: Tensor,
        z: Tensor,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Outputs `(B, 1, T, V)` and the new S and z, from normed `x` and values."""
        k = F.elu(self.key(x))[:, None] + 1
        q = F.elu(self.query(x))[:, None] + 1
        if self.S_aggregator == self.z_aggregator == "sum":
            out, (S, z) = linear_attention(q, k, v, (S, z), valid=valid, resets=resets)
            return out, S, z
        out, S = _aggregate(self.S_aggregator, q, k, v, S, valid, resets)
        ones = torch.ones_like(v[..., :1])
        norm, z = _aggregate(self.z_aggregator, q, k, ones, z[..., None], valid, resets)
        return out / (norm + 1e-5), S, z[..., 0]


class POPGymLinearAttention(Memory):
    """POPGym's memory as a whole: positions, a layer in front, blocks, a layer behind.

    State: `S (L, 1, h, h)`, `z (L, 1, h)` and, with positions, `t ()` int64, where
    `h = round(sqrt(hidden_size // L) - 1)`: `hidden_size` is a budget of state floats and the width
    of the output.

    Args:
        input_dim: Features of the input.
        hidden_size: Features of the output.
        num_layers: Blocks L.
        positions: One of POPGym's encodings, or "none".
        position_mode: "add" or "cat".
        position_size: Width of the encoding; None: that of the input.
        scale_positions: Whether the mix of input and encoding is learned.
        position_horizon: Steps that the encodings are laid out for, POPGym's `max_seq_len`.
        S_aggregator: "sum" or "max".
        z_aggregator: "sum" or "max".

    References:
        POPGym 1.0.7, https://arxiv.org/abs/2303.01859. Differs: "max" does not start from 0, which
        hides negative entries; positions work at any step; padding is not summed; bounded memory.
    """

    def __init__(
        self,
        input_dim: int,
        hidden_size: int = 256,
        num_layers: int = 1,
        *,
        positions: str = "sine",
        position_mode: Literal["add", "cat"] = "add",
        position_size: int | None = None,
        scale_positions: bool = True,
        position_horizon: int = 1024,
        S_aggregator: Aggregator = "sum",
        z_aggregator: Aggregator = "sum",
    ):
        super().__init__()
        if positions == "rotary":
            raise ValueError(
                '`positions` = "rotary" is not for `block` = "popgym". Set one of POPGym\'s '
                'encodings or "none", or build the config with `.popgym()`, which sets what POPGym '
                "does."
            )
        h = round(math.sqrt(hidden_size // num_layers) - 1)
        if h < 1:
            raise ValueError(
                f"`hidden_size` = {hidden_size} leaves no state for {num_layers} layers: it must "
                f"be at least {4 * num_layers}."
            )
        self.input_dim = input_dim
        self.output_dim = hidden_size
        self.positions = None
        width = input_dim
        if positions != "none":
            self.positions = PositionalEncoding(
                positions,
                input_dim,
                position_horizon,
                mode=position_mode,
                size=position_size,
                learn_scale=scale_positions,
            )
            width = self.positions.output_dim
        linear = nn.Linear(width, input_dim)
        nn.init.orthogonal_(linear.weight)
        self.preprocess = nn.Sequential(linear, nn.LeakyReLU())
        self.blocks = nn.ModuleList(
            POPGymBlock(h if layer else input_dim, h, S_aggregator, z_aggregator)
            for layer in range(num_layers)
        )
        self.unmap = nn.Linear(h, hidden_size)

    def initial_state(self) -> State:
        """The blocks' initial states, stacked, and the step counter at 0."""
        return stack_initial_states(self.blocks, self.positions is not None)

    def compilable(self) -> list[nn.Module]:
        """The blocks."""
        return list(self.blocks)

    def forward(
        self,
        x: Tensor,
        state: State,
        *,
        valid: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Runs the memory, see `Memory.forward`."""
        x = mask_padding(x, valid)
        new_state = {}
        if self.positions is not None:
            t, new_state["t"] = count_steps(state["t"], x.shape[1], valid, resets)
            x = self.positions(x, t)
        x, block_states = run_blocks(self.blocks, self.preprocess(x), state, None, valid, resets)
        return self.unmap(x), new_state | block_states


def _aggregate(
    aggregator: Aggregator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    S: Tensor,
    valid: Tensor | None,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Numerators of one aggregator, without a normaliser."""
    if aggregator == "max":
        return max_attention(q, k, v, S, valid=valid, resets=resets)
    state = (S, torch.zeros_like(S[..., 0]))
    out, (S, _) = linear_attention(q, k, v, state, valid=valid, resets=resets, normalize=False)
    return out, S
