"""RLModules with memory for RLlib's new API stack."""

from rlmodules.actor_critic import MemoryRLModule
from rlmodules.configs import MemoryConfig
from rlmodules.gtrxl import GTrXLConfig, GTrXLRLModule
from rlmodules.gtrxl_legacy import load_legacy_weights
from rlmodules.linear_attention import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    LinearAttentionConfig,
    LinearAttentionRLModule,
)

__all__ = [
    "DeepLinearAttentionConfig",
    "DeepLinearAttentionRLModule",
    "GTrXLConfig",
    "GTrXLRLModule",
    "LinearAttentionConfig",
    "LinearAttentionRLModule",
    "MemoryConfig",
    "MemoryRLModule",
    "load_legacy_weights",
]
