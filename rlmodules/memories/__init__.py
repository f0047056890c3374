"""Memories: sequence in, sequence out, with a state. Torch only."""

from rlmodules.memories.gtrxl import GTrXL
from rlmodules.memories.linear_attention import (
    DeepLinearAttention,
    LinearAttention,
    LinearAttentionBlock,
)
from rlmodules.memories.memory import Memory, State
from rlmodules.memories.popgym import POPGymLinearAttention

__all__ = [
    "DeepLinearAttention",
    "GTrXL",
    "LinearAttention",
    "LinearAttentionBlock",
    "Memory",
    "POPGymLinearAttention",
    "State",
]
