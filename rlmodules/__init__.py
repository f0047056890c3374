"""RLModules with memory for RLlib's new API stack."""

from rlmodules.actor_critic import MemoryRLModule
from rlmodules.configs import MemoryConfig
from rlmodules.gtrxl import GTrXLConfig, GTrXLRLModule
from rlmodules.gtrxl_legacy import load_legacy_weights
from rlmodules.linear_attention import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionQRLModule,
    DeepLinearAttentionRLModule,
    LinearAttentionConfig,
    LinearAttentionQRLModule,
    LinearAttentionRLModule,
)
from rlmodules.q_learning import MemoryQRLModule

__all__ = [
    "DeepLinearAttentionConfig",
    "DeepLinearAttentionQRLModule",
    "DeepLinearAttentionRLModule",
    "GTrXLConfig",
    "GTrXLRLModule",
    "LinearAttentionConfig",
    "LinearAttentionQRLModule",
    "LinearAttentionRLModule",
    "MemoryConfig",
    "MemoryQRLModule",
    "MemoryRLModule",
    "load_legacy_weights",
]
