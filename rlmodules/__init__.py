"""RLModules with memory for RLlib's new API stack."""

from rlmodules.actor_critic import MemoryRLModule
from rlmodules.configs import MemoryConfig
from rlmodules.linear_attention import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    DeepLinearAttentionSACRLModule,
    LinearAttentionConfig,
    LinearAttentionRLModule,
    LinearAttentionSACRLModule,
)
from rlmodules.sac import MemorySACRLModule

__all__ = [
    "DeepLinearAttentionConfig",
    "DeepLinearAttentionRLModule",
    "DeepLinearAttentionSACRLModule",
    "LinearAttentionConfig",
    "LinearAttentionRLModule",
    "LinearAttentionSACRLModule",
    "MemoryConfig",
    "MemoryRLModule",
    "MemorySACRLModule",
]
