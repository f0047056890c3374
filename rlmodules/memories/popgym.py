"""POPGym's `LinearAttention` and `DeepLinearAttention`, weight for weight."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlmodules.kernels import NEUTRAL_MAX, linear_attention, max_attention
from rlmodules.memories.config import MemoryConfig
from rlmodules.memories.memory import (
    Memory,
    NoWeightsError,
    State,
    count_steps,
    mask_padding,
    unit_values,
    zero_steps,
)
from rlmodules.memories.options import Count
from rlmodules.memories.positions import PositionalEncoding
from rlmodules.memories.residual import BlockStack

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
            NoWeightsError: If products of keys and values are not summed.
        """
        if self.S_aggregator != "sum":
            raise NoWeightsError(
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
        config: Settings.

    Raises:
        ValueError: If an encoding that is added is wider than the input.

    References:
        POPGym 1.0.7, https://arxiv.org/abs/2303.01859. Differs: "max" does not start from 0, which
        hides negative entries; positions work at any step; padding is not summed; bounded memory.
    """

    def __init__(self, input_dim: int, config: POPGymLinearAttentionConfig):
        super().__init__()
        self.input_dim = input_dim
        self.output_dim = config.hidden_size
        self.positions = None
        width = input_dim
        if config.positions != "none":
            self.positions = PositionalEncoding(
                config.positions,
                input_dim,
                config.position_horizon,
                mode=config.position_mode,
                size=config.position_size,
                learn_scale=config.scale_positions,
            )
            width = self.positions.output_dim
        linear = nn.Linear(width, input_dim)
        nn.init.orthogonal_(linear.weight)
        self.preprocess = nn.Sequential(linear, nn.LeakyReLU())
        h = config.block_width
        self.blocks = BlockStack(
            POPGymBlock(h if layer else input_dim, h, config.S_aggregator, config.z_aggregator)
            for layer in range(config.num_layers)
        )
        self.unmap = nn.Linear(h, config.hidden_size)

    def initial_state(self) -> State:
        """The blocks' initial states, stacked, and the step counter at 0."""
        return self.blocks.initial_state() | ({} if self.positions is None else zero_steps())

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
        x, block_states = self.blocks.run(self.preprocess(x), state, None, valid, resets)
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


@dataclass(kw_only=True)
class POPGymLinearAttentionConfig(MemoryConfig):
    """Settings of POPGym's models. The defaults are its `LinearAttention` in the paper's size."""

    memory: Literal["popgym_linear_attention"] = "popgym_linear_attention"
    """The memory's name."""

    fcnet_hiddens: list[Count] = field(default_factory=lambda: [128])
    """As in the paper."""

    fcnet_activation: str | None = "linear"
    """As in the paper."""

    fcnet_norm: bool = True
    """As in the paper."""

    head_fcnet_hiddens: list[Count] = field(default_factory=lambda: [128, 128])
    """As in the paper."""

    head_fcnet_activation: str | None = "leaky_relu"
    """As in the paper."""

    hidden_size: Count = 256
    """Budget of state floats for all blocks, and width of the memory's output."""

    num_layers: Count = 1
    """Blocks."""

    positions: Literal[
        "none", "learned", "fixed", "sine", "scaled_sine", "simple_scaled", "perceptron", "base2",
        "time2vec",
    ] = "sine"  # fmt: skip
    """How the memory knows what time it is."""

    position_horizon: Count = 1024
    """Steps that the encodings are laid out for, POPGym's `max_seq_len`."""

    position_mode: Literal["add", "cat"] = "add"
    """Whether the encoding is added to the features or set beside them."""

    position_size: Count | None = None
    """Width of the encoding. None: that of the features."""

    scale_positions: bool = True
    """Whether the mix of features and encoding is learned."""

    S_aggregator: Aggregator = "sum"
    """How products of keys and values are accumulated."""

    z_aggregator: Aggregator = "sum"
    """How keys are accumulated."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.block_width < 1:
            raise ValueError(
                f"`hidden_size` is {self.hidden_size}, which leaves no state for "
                f"{self.num_layers} layers: it must be at least {4 * self.num_layers}."
            )

    @classmethod
    def deep(cls, **settings: Any) -> Self:
        """POPGym's `DeepLinearAttention` with the paper's widths: four blocks, no positions."""
        return cls(**{"num_layers": 4, "positions": "none", **settings})

    @property
    def block_width(self) -> int:
        """Width h of a block, whose state has about the square of it in floats."""
        return round(math.sqrt(self.hidden_size // self.num_layers) - 1)

    def build_memory(self, input_dim: int) -> Memory:
        """Builds the blocks."""
        return POPGymLinearAttention(input_dim, self)
