"""FFM, fast and forgetful memory: sums that decay and turn at many rates."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rlmodules.kernels import complex_scan
from rlmodules.memories.memory import State
from rlmodules.memories.options import Count
from rlmodules.memories.residual import Mixer, StackConfig


class FFMMixer(Mixer):
    """Each of m gated features is summed up with c rhythms; the state is `traces (m c, 2)`.

    `s_t = exp(-|alpha_m| + i omega_c) s_{t-1} + x_t sigmoid(i_t)`, and the output is a mix of all
    parts, gated against the input.

    Args:
        config: Its settings.

    References:
        Morad et al. 2023, https://arxiv.org/abs/2310.04128, eq. 2 to 11. Differs: the decay of a
        step is a number below 1 in a scan, where the published code multiplies by growing
        exponentials, in float64; it stands in the residual frame.
    """

    def __init__(self, config: FFMConfig):
        super().__init__()
        self.num_traces, self.num_rhythms = m, c = config.num_traces, config.num_rhythms
        # Half of what was seen is left after one step, or after `horizon`.
        half_lives = torch.logspace(0, math.log10(config.horizon), m)
        self.alpha = nn.Parameter(math.log(2) / half_lives)
        self.omega = nn.Parameter(2 * math.pi / torch.linspace(2, config.horizon, c))
        self.input = nn.Linear(config.d_model, 2 * m)
        self.mix = nn.Linear(2 * m * c, config.d_model)
        self.mix_norm = nn.LayerNorm(config.d_model, elementwise_affine=False)
        self.output_gate = nn.Linear(config.d_model, 2 * config.d_model)

    def initial_state(self) -> State:
        """Zeros."""
        return {"traces": torch.zeros(self.num_traces * self.num_rhythms, 2)}

    def forward(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Mixes, see `Mixer.forward`."""
        dtype = state["traces"].dtype
        with torch.autocast(h.device.type, enabled=False):
            size = torch.exp(-self.alpha.to(dtype).abs())[:, None, None]
            angle = self.omega.to(dtype)
            decay = (size * torch.stack([angle.cos(), angle.sin()], -1)).flatten(0, 1)
        x, gate = self.input(h).to(dtype).chunk(2, dim=-1)
        written = (x * torch.sigmoid(gate)).repeat_interleave(self.num_rhythms, -1)
        written = torch.stack([written, torch.zeros_like(written)], -1)
        s, last = complex_scan(decay, written, state["traces"], valid=valid, resets=resets)
        mixed = self.mix_norm(self.mix(s.flatten(-2).to(h.dtype)))
        gate, skip = self.output_gate(h).chunk(2, dim=-1)
        gate = torch.sigmoid(gate)
        return mixed * gate + skip * (1 - gate), {"traces": last}


@dataclass(kw_only=True)
class FFMConfig(StackConfig):
    """Settings of a stack of fast and forgetful memories."""

    memory: Literal["ffm"] = "ffm"
    """The memory's name."""

    num_traces: Count = 32
    """Features m that are summed up, each with a decay of its own."""

    num_rhythms: Count = 4
    """Rhythms c with which each is summed up. The state has 2 m c floats."""

    horizon: Count = 1024
    """Steps after which the slowest trace has lost half, at the start; and the longest period."""

    def build_mixer(self, layer: int) -> Mixer:
        """Builds the mixer of a block."""
        return FFMMixer(self)
