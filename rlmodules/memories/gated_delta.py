"""The gated delta rule: a step overwrites what its key held."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from rlmodules.kernels import delta_rule
from rlmodules.memories.heads import HeadsConfig, HeadsMixer, unit_length
from rlmodules.memories.memory import State
from rlmodules.memories.positions import rotate
from rlmodules.memories.residual import Mixer


class GatedDeltaMixer(HeadsMixer):
    """Heads replace what a key held by the share that their write gate says.

    Linear attention adds to what is there, so that two values of one key are read together. The
    state is that of `HeadsMixer`. `O(T)` in the sequence length, about twice the time of linear
    attention; a step costs `O(H K K)`.

    Args:
        config: Its settings.

    References:
        Yang et al. 2024, https://arxiv.org/abs/2412.06464. Without decay: the delta rule of fast
        weight programmers, Schlag et al. 2021, https://arxiv.org/abs/2102.11174.
    """

    def __init__(self, config: GatedDeltaConfig):
        super().__init__(config, has_write_gate=True)
        self.head_norm = nn.RMSNorm(config.head_dim)

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
        """Overwrites, see `HeadsMixer.attend`.

        What was overwritten has little attention weight or none, or a negative one.
        """
        qk = unit_length(qk)
        if turn is not None:
            qk = rotate(qk, turn)
        q, k = qk.unbind()
        out, S = delta_rule(
            q,
            k,
            v,
            self.written_share(h),
            state["S"],
            log_decay=self.log_decay(h, state["S"]),
            valid=valid,
            resets=resets,
        )
        return out, {"S": S}


@dataclass(kw_only=True)
class GatedDeltaConfig(HeadsConfig):
    """Settings of a stack of gated delta rules; `decay=False` makes it the plain delta rule."""

    memory: Literal["gated_delta"] = "gated_delta"
    """The memory's name."""

    def build_mixer(self, layer: int) -> Mixer:
        """Builds the mixer of a block."""
        return GatedDeltaMixer(self)
