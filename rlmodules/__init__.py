"""RLModules with memory for RLlib's new API stack."""

from rlmodules.actor_critic import MemoryRLModule
from rlmodules.configs import MemoryConfig
from rlmodules.linear_attention import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    LinearAttentionConfig,
    LinearAttentionRLModule,
)

__all__ = [
    "DeepLinearAttentionConfig",
    "DeepLinearAttentionRLModule",
    "LinearAttentionConfig",
    "LinearAttentionRLModule",
    "MemoryConfig",
    "MemoryRLModule",
]
