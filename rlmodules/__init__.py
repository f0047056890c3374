"""RLModules with memory for RLlib's new API stack."""

from rlmodules.actor_critic import MemoryRLModule
from rlmodules.configs import MemoryConfig
from rlmodules.contract import check_memory
from rlmodules.contract_module import check_module
from rlmodules.export import export_onnx, export_torch
from rlmodules.gtrxl import GTrXLConfig, GTrXLQRLModule, GTrXLRLModule, GTrXLSACRLModule
from rlmodules.gtrxl_legacy import load_legacy_weights
from rlmodules.linear_attention import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionQRLModule,
    DeepLinearAttentionRLModule,
    DeepLinearAttentionSACRLModule,
    LinearAttentionConfig,
    LinearAttentionQRLModule,
    LinearAttentionRLModule,
    LinearAttentionSACRLModule,
)
from rlmodules.q_learning import MemoryQRLModule
from rlmodules.sac import MemorySACRLModule

__all__ = [
    "DeepLinearAttentionConfig",
    "DeepLinearAttentionQRLModule",
    "DeepLinearAttentionRLModule",
    "DeepLinearAttentionSACRLModule",
    "GTrXLConfig",
    "GTrXLQRLModule",
    "GTrXLRLModule",
    "GTrXLSACRLModule",
    "LinearAttentionConfig",
    "LinearAttentionQRLModule",
    "LinearAttentionRLModule",
    "LinearAttentionSACRLModule",
    "MemoryConfig",
    "MemoryQRLModule",
    "MemoryRLModule",
    "MemorySACRLModule",
    "check_memory",
    "check_module",
    "export_onnx",
    "export_torch",
    "load_legacy_weights",
]
