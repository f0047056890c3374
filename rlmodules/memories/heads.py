"""What mixers with a matrix state a head share: projections, convolution, decay, the way out."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlmodules.kernels import short_convolution
from rlmodules.memories.memory import State, unit_values
from rlmodules.memories.options import Count, Range
from rlmodules.memories.residual import Mixer, StackConfig


class HeadsMixer(Mixer):
    """Queries, keys and values of H heads; their state is `S (H, K, K)`.

    With a convolution the state has its last inputs too, `conv (W - 1, 3 H K)`. Subclasses say in
    `attend` what becomes of queries and keys, and how the state is written and read.

    Args:
        config: Its settings.
        has_write_gate: Whether a head computes for each step what share it writes, from 0 to 1.

    Attributes:
        head_norm: What normalises each head's output, or None. Subclasses set it.
    """

    head_norm: nn.RMSNorm | None

    def __init__(self, config: HeadsConfig, *, has_write_gate: bool):
        super().__init__()
        self.num_heads = config.num_heads
        self.head_dim = self.rotated_dim = config.head_dim
        self.short_conv_size = config.short_conv_size
        self.short_conv_activation = config.short_conv_activation
        width = config.num_heads * config.head_dim
        self.qkv = nn.Linear(config.d_model, 3 * width, bias=False)
        self.conv = None
        if config.short_conv_size:
            weight = torch.randn(config.short_conv_size, 3 * width) / config.short_conv_size**0.5
            if config.short_conv_activation == "linear":
                weight = torch.zeros(config.short_conv_size, 3 * width)
                weight[-1] = 1.0
            self.conv = nn.Parameter(weight)
        self.decay = None
        if config.decay:
            self.decay = nn.Linear(config.d_model, config.num_heads)
            nn.init.zeros_(self.decay.weight)
            # sigmoid(1) .. sigmoid(6): time constants from about 3 to 400 steps. A single head gets
            # the longest: from what is forgotten comes no gradient to keep it.
            with torch.no_grad():
                self.decay.bias.copy_(torch.linspace(6.0, 1.0, config.num_heads).flip(0))
        self.write_gate = nn.Linear(config.d_model, config.num_heads) if has_write_gate else None
        self.output_gate = nn.Linear(config.d_model, width) if config.output_gate else None
        self.out = nn.Linear(width, config.d_model, bias=False)

    def initial_state(self) -> State:
        """Zeros: nothing has been written yet."""
        H, K = self.num_heads, self.head_dim
        state = {"S": torch.zeros(H, K, K)}
        if self.short_conv_size:
            state["conv"] = torch.zeros(self.short_conv_size - 1, 3 * H * K)
        return state

    def forward(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Mixes, see `Mixer.forward`."""
        qk, v, new_state = self.project(h, state, valid, resets)
        out, written = self.attend(qk, v, h, state, turn, valid, resets)
        if self.head_norm is not None:
            out = self.head_norm(out.to(self.head_norm.weight.dtype))
        return self.leave(out, h), new_state | written

    def attention_weights(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> Tensor:
        """What heads give to the values of steps, `(B, H, T, T)`; arguments as in `forward`.

        These weights times the values are the heads' outputs, before their norm.
        """
        qk, v, _ = self.project(h, state, valid, resets)
        values = unit_values(v)
        S = values.new_zeros(*v.shape[:2], self.head_dim, h.shape[1])
        return self.attend(qk, values, h, state | {"S": S}, turn, valid, resets)[0]

    @abc.abstractmethod
    def attend(
        self,
        qk: Tensor,
        v: Tensor,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Writes values `(B, H, T, V)` and reads them.

        Args:
            qk: Queries with keys, `(2, B, H, T, K)`.
            v: Values.
            h: The block's input, `(B, T, D)`.
            state: That before the first step, its `S` `(B, H, K, V)`.
            turn: As in `Mixer.forward`.
            valid: As in `Mixer.forward`.
            resets: As in `Mixer.forward`.

        Returns:
            The heads' outputs `(B, H, T, V)` and what is new in the state.
        """

    def project(
        self, h: Tensor, state: State, valid: Tensor | None, resets: Tensor | None
    ) -> tuple[Tensor, Tensor, State]:
        """Queries with keys `(2, B, H, T, K)`, values `(B, H, T, K)`, the convolution's state."""
        qkv = self.qkv(h)
        new_state = {}
        if self.conv is not None:
            qkv, new_state["conv"] = short_convolution(
                qkv, self.conv, state["conv"], valid=valid, resets=resets
            )
            if self.short_conv_activation == "silu":
                qkv = F.silu(qkv)
        # One copy here; what follows is several times slower on permuted strides.
        qkv = (
            qkv.unflatten(2, (3, self.num_heads, self.head_dim)).permute(2, 0, 3, 1, 4).contiguous()
        )
        # `split`, not slices: the gradient of a slice fills a tensor of the whole's size.
        qk, v = qkv.split([2, 1])
        return qk, v.squeeze(0), new_state

    def log_decay(self, h: Tensor, S: Tensor) -> Tensor | None:
        """Logarithm of each head's decay `(B, H, T)`, in the state's dtype."""
        if self.decay is None:
            return None
        return F.logsigmoid(self.decay(h).to(S.dtype)).transpose(1, 2)

    def written_share(self, h: Tensor) -> Tensor:
        """What each head's write gate says, `(B, H, T)`."""
        assert self.write_gate is not None  # for pyright: only asked where there is one
        return torch.sigmoid(self.write_gate(h)).transpose(1, 2)

    def leave(self, out: Tensor, h: Tensor) -> Tensor:
        """From the heads' outputs `(B, H, T, K)` to the mixer's, `(B, T, D)`."""
        out = out.transpose(1, 2).flatten(2).to(h.dtype)
        if self.output_gate is not None:
            out = out * F.silu(self.output_gate(h))
        return self.out(out)


def unit_length(x: Tensor) -> Tensor:
    """Vectors of length 1; one of zeros stays as it is."""
    return F.normalize(x, dim=-1, eps=1e-6)


@dataclass(kw_only=True)
class HeadsConfig(StackConfig):
    """Settings that stacks of mixers with a matrix state a head share."""

    num_heads: Count = 4
    """Heads a block."""

    head_dim: Count = 16
    """Width of a head's queries, keys and values. A head's state holds its square in floats."""

    short_conv_size: Annotated[int, Range(0)] = 4
    """Steps that the short causal convolution over queries, keys and values sees. 0: none."""

    short_conv_activation: Literal["silu", "linear"] = "silu"
    """What follows the convolution: "silu", or "linear", which starts it at the identity."""

    decay: bool = True
    """Whether heads forget, at a rate that they compute from their input. At the start the heads'
    rates are spread from short to long memories; a single head has a long one."""

    output_gate: bool = False
    """Whether the heads' outputs are multiplied by a SiLU of the block's input."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.short_conv_size == 1:
            raise ValueError(
                "`short_conv_size` is 1, but must be 0 (no convolution) or at least 2: a "
                "convolution of width 1 sees no earlier step."
            )
