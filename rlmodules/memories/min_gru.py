"""minGRU: a GRU whose gate and candidate see the input alone, so that a row is one scan."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rlmodules.kernels import scan
from rlmodules.memories.memory import State
from rlmodules.memories.options import Count
from rlmodules.memories.residual import Mixer, StackConfig


class MinGRUMixer(Mixer):
    """`h_t = (1 - z_t) h_{t-1} + z_t c_t` for N channels; the state is `min_h (N)`.

    `O(T D N)` time, in the products; the recurrence itself is a scan.

    Args:
        config: Its settings.

    References:
        Feng et al. 2024, https://arxiv.org/abs/2410.01201, section 3.1. Differs: no log space,
        which a blocked scan does without; gates that start from two steps to hundreds.
    """

    def __init__(self, config: MinGRUConfig):
        super().__init__()
        self.state_dim = config.state_dim
        self.gate_and_candidate = nn.Linear(config.d_model, 2 * config.state_dim)
        self.out = nn.Linear(config.state_dim, config.d_model)
        with torch.no_grad():
            self.gate_and_candidate.bias[: config.state_dim] = torch.linspace(
                0.0, -6.0, config.state_dim
            )

    def initial_state(self) -> State:
        """Zeros."""
        return {"min_h": torch.zeros(self.state_dim)}

    def forward(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Mixes, see `Mixer.forward`."""
        gate, candidate = self.gate_and_candidate(h).to(state["min_h"].dtype).chunk(2, dim=-1)
        z = torch.sigmoid(gate)
        out, last = scan(1 - z, z * candidate, state["min_h"], valid=valid, resets=resets)
        return self.out(out.to(h.dtype)), {"min_h": last}


@dataclass(kw_only=True)
class MinGRUConfig(StackConfig):
    """Settings of a stack of minGRUs."""

    memory: Literal["min_gru"] = "min_gru"
    """The memory's name."""

    state_dim: Count = 128
    """Channels of a block's recurrence, and floats of its state."""

    def build_mixer(self, layer: int) -> Mixer:
        """Builds the mixer of a block."""
        return MinGRUMixer(self)
