"""Sequences and a state in, sequences and a state out. Torch only.

A memory is one file: its mixer or network, and its config. Imports `kernels`; imported by
`modules`, `contract` and `tools`.
"""

from rlmodules.memories.cells import GRUConfig, LSTMConfig
from rlmodules.memories.config import MemoryConfig
from rlmodules.memories.ffm import FFMConfig
from rlmodules.memories.gated_delta import GatedDeltaConfig
from rlmodules.memories.gtrxl import GTrXL, GTrXLConfig
from rlmodules.memories.linear_attention import DeepLinearAttentionConfig, LinearAttentionConfig
from rlmodules.memories.lru import LRUConfig
from rlmodules.memories.memory import Memory, State
from rlmodules.memories.min_gru import MinGRUConfig
from rlmodules.memories.mixed import MixedConfig
from rlmodules.memories.popgym import POPGymLinearAttention, POPGymLinearAttentionConfig
from rlmodules.memories.residual import Mixer, ResidualStack, StackConfig
from rlmodules.memories.window import WindowAttentionConfig

__all__ = [
    "DeepLinearAttentionConfig",
    "FFMConfig",
    "GRUConfig",
    "GTrXL",
    "GTrXLConfig",
    "GatedDeltaConfig",
    "LRUConfig",
    "LSTMConfig",
    "LinearAttentionConfig",
    "Memory",
    "MemoryConfig",
    "MinGRUConfig",
    "MixedConfig",
    "Mixer",
    "POPGymLinearAttention",
    "POPGymLinearAttentionConfig",
    "ResidualStack",
    "StackConfig",
    "State",
    "WindowAttentionConfig",
]
