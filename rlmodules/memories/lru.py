"""LRU: a linear recurrence with a complex diagonal, as in S5."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor, nn

from rlmodules.kernels import complex_scan
from rlmodules.memories.memory import State
from rlmodules.memories.options import Count, Range
from rlmodules.memories.residual import Mixer, StackConfig


class LRUMixer(Mixer):
    """`s_t = lambda s_{t-1} + gamma B x_t` and `y_t = Re(C s_t) + D x_t`, with N complex channels.

    The state is `s (N, 2)`, real and imaginary parts. `lambda = exp(-exp(nu) + i exp(theta))` is
    trained, the same at all steps, and below 1 in size whatever the weights are.

    Args:
        config: Its settings.

    References:
        Orvieto et al. 2023, https://arxiv.org/abs/2303.06349, section 3. Differs: its initial
        radii and phases suit episodes of tens to hundreds of steps.
    """

    def __init__(self, config: LRUConfig):
        super().__init__()
        self.state_dim = N = config.state_dim
        radius = torch.linspace(config.r_min**2, config.r_max**2, N).sqrt()
        phase = config.max_phase * (torch.rand(N) * 0.999 + 0.001)
        self.log_rate = nn.Parameter((-radius.log()).log())
        self.log_phase = nn.Parameter(phase.log())
        # Columns of the real, then of the imaginary part.
        self.write = nn.Linear(config.d_model, 2 * N, bias=False)
        self.read = nn.Linear(2 * N, config.d_model, bias=False)
        self.skip = nn.Parameter(torch.randn(config.d_model))
        nn.init.normal_(self.write.weight, std=(2 * config.d_model) ** -0.5)
        nn.init.normal_(self.read.weight, std=N**-0.5)

    def initial_state(self) -> State:
        """Zeros."""
        return {"s": torch.zeros(self.state_dim, 2)}

    def forward(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Mixes, see `Mixer.forward`."""
        dtype = state["s"].dtype
        with torch.autocast(h.device.type, enabled=False):
            radius = torch.exp(-self.log_rate.to(dtype).exp())
            phase = self.log_phase.to(dtype).exp()
            decay = radius[:, None] * torch.stack([phase.cos(), phase.sin()], -1)
            # What keeps the state's size the same for all radii.
            gamma = (1 - radius**2).clamp(min=1e-8).sqrt()
        written = self.write(h).to(dtype).unflatten(-1, (2, self.state_dim)).mT * gamma[:, None]
        s, last = complex_scan(decay, written, state["s"], valid=valid, resets=resets)
        out = self.read(s.mT.flatten(-2).to(h.dtype))
        return out + h * self.skip, {"s": last}


@dataclass(kw_only=True)
class LRUConfig(StackConfig):
    """Settings of a stack of LRUs."""

    memory: Literal["lru"] = "lru"
    """The memory's name."""

    state_dim: Count = 128
    """Complex channels N of a block's recurrence. Its state has twice as many floats."""

    r_min: Annotated[float, Range(0, 1)] = 0.9
    """The smallest radius at the start, from 0 (forgets at once) to 1 (never forgets)."""

    r_max: Annotated[float, Range(0, 1)] = 0.999
    """The largest radius at the start."""

    max_phase: Annotated[float, Range(0, 2 * math.pi, above=True)] = 2 * math.pi
    """The largest angle by which a channel turns a step, at the start."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 < self.r_min < self.r_max < 1:
            raise ValueError(
                f"`r_min` is {self.r_min} and `r_max` is {self.r_max}, but both must lie between 0 "
                "and 1, `r_min` below `r_max`. Common values are 0.9 and 0.999."
            )

    def build_mixer(self, layer: int) -> Mixer:
        """Builds the mixer of a block."""
        return LRUMixer(self)
