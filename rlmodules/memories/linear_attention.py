"""Linear attention: its mixer, and the configs of one block and of a stack."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rlmodules.kernels import linear_attention
from rlmodules.memories.heads import HeadsConfig, HeadsMixer, unit_length
from rlmodules.memories.memory import State
from rlmodules.memories.options import Count
from rlmodules.memories.positions import rotate
from rlmodules.memories.residual import Mixer, Positions


class LinearAttentionMixer(HeadsMixer):
    """Linear attention over a matrix state: heads write products of keys and values, and read them.

    The state is that of `HeadsMixer`, with the sum normaliser also `z (H, K)`. `O(T)` in the
    sequence length; a step costs `O(H K K)`.

    Args:
        config: Its settings.

    References:
        Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236. Differs: heads, convolution,
        decay, rotary positions, a norm of each head's output, gates.
    """

    def __init__(self, config: LinearAttentionConfig):
        super().__init__(config, has_write_gate=config.write_gate)
        self.normalizer = config.normalizer
        self.feature_map = config.feature_map
        self.head_norm = nn.RMSNorm(config.head_dim) if config.normalizer == "rms" else None

    def initial_state(self) -> State:
        """Zeros: nothing has been written yet."""
        state = super().initial_state()
        if self.normalizer == "sum":
            state["z"] = torch.zeros(self.num_heads, self.head_dim)
        return state

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
        """Adds to what is there, see `HeadsMixer.attend`."""
        qk = F.elu(qk) + 1 if self.feature_map == "elu" else unit_length(qk)
        if turn is not None:
            qk = rotate(qk, turn)
        if self.write_gate is not None:
            v = v * self.written_share(h)[..., None]
        S, normalize = state["S"], self.normalizer == "sum"
        q, k = qk.unbind()
        out, (new_S, z) = linear_attention(
            q,
            k,
            v,
            (S, state["z"] if normalize else S[..., 0]),
            log_decay=self.log_decay(h, S),
            valid=valid,
            resets=resets,
            normalize=normalize,
        )
        return out, {"S": new_S, "z": z} if normalize else {"S": new_S}


@dataclass(kw_only=True)
class LinearAttentionConfig(HeadsConfig):
    """Settings of linear attention: one residual block, unless `num_layers` says more."""

    memory: Literal["linear_attention"] = "linear_attention"  # pyright: ignore
    """The memory's name."""

    num_layers: Count = 1
    """Blocks."""

    positions: Positions = "rotary"
    """See `StackConfig`. "rotary" needs the normaliser "rms" and an even `head_dim`."""

    normalizer: Literal["sum", "rms"] = "rms"
    """"sum": divide by the keys' sum as the paper does. "rms": normalise each head's output."""

    feature_map: Literal["elu", "unit"] = "elu"
    """What becomes of queries and keys: "elu", the paper's `elu + 1`; "unit", length 1, so that
    keys of different steps are less alike. "unit" needs the normaliser "rms"."""

    write_gate: bool = False
    """Whether a head computes for each step what share of its value it writes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        for setting, value in (("positions", "rotary"), ("feature_map", "unit")):
            if getattr(self, setting) == value and self.normalizer != "rms":
                raise ValueError(
                    f"`{setting}` is {value!r} with `normalizer` {self.normalizer!r}: products of "
                    "queries and keys may then be negative and cannot normalise a sum. Set "
                    f'`normalizer="rms"` or another `{setting}`.'
                )

    def build_mixer(self, layer: int) -> Mixer:
        """Builds the mixer of a block."""
        return LinearAttentionMixer(self)


@dataclass(kw_only=True)
class DeepLinearAttentionConfig(LinearAttentionConfig):
    """Settings of a stack of linear-attention blocks, two unless `num_layers` says otherwise."""

    memory: Literal["deep_linear_attention"] = "deep_linear_attention"  # pyright: ignore
    """The memory's name."""

    num_layers: Count = 2
    """Blocks."""
