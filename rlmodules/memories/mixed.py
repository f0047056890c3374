"""Stacks of different mixers: a window for what is near, a recurrence for what is far."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from rlmodules.memories.cells import CellMixer
from rlmodules.memories.ffm import FFMConfig, FFMMixer
from rlmodules.memories.gated_delta import GatedDeltaConfig, GatedDeltaMixer
from rlmodules.memories.linear_attention import LinearAttentionConfig, LinearAttentionMixer
from rlmodules.memories.lru import LRUConfig, LRUMixer
from rlmodules.memories.min_gru import MinGRUConfig, MinGRUMixer
from rlmodules.memories.options import Count
from rlmodules.memories.residual import Mixer, Positions
from rlmodules.memories.window import WindowAttentionConfig, WindowAttentionMixer

Kind = Literal["window", "linear_attention", "gated_delta", "min_gru", "lru", "ffm", "gru", "lstm"]

_MIXERS: dict[Kind, Callable[[Any], Mixer]] = {
    "window": WindowAttentionMixer,
    "linear_attention": LinearAttentionMixer,
    "gated_delta": GatedDeltaMixer,
    "min_gru": MinGRUMixer,
    "lru": LRUMixer,
    "ffm": FFMMixer,
    "gru": lambda config: CellMixer("gru", config.d_model, config.d_model),
    "lstm": lambda config: CellMixer("lstm", config.d_model, config.d_model),
}


@dataclass(kw_only=True)
class MixedConfig(
    WindowAttentionConfig,
    LinearAttentionConfig,
    GatedDeltaConfig,
    MinGRUConfig,
    LRUConfig,
    FFMConfig,
):
    """Settings of a stack whose blocks have different mixers, each with its own settings below."""

    memory: Literal["mixed"] = "mixed"  # pyright: ignore
    """The memory's name."""

    layers: list[Kind] = field(default_factory=lambda: ["window", "gated_delta"])
    """The mixers, the first one next to the input."""

    num_layers: Count = 2
    """Follows from `layers`."""

    positions: Positions = "none"
    """See `StackConfig`. "rotary" is for "linear_attention" and "gated_delta"."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.layers = list(self.layers)
        if not self.layers:
            raise ValueError(
                "`layers` is [], but a stack has at least one block. Name its mixers, for example "
                "['window', 'gated_delta']."
            )
        if self.num_layers not in (2, len(self.layers)):
            raise ValueError(
                f"`num_layers` is {self.num_layers}, but `layers` has {len(self.layers)}. Leave "
                "`num_layers` out."
            )
        self.num_layers = len(self.layers)

    def build_mixer(self, layer: int) -> Mixer:
        """Builds the mixer of a block."""
        return _MIXERS[self.layers[layer]](self)
