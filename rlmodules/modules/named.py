"""Modules that name their memory, where others take it from the config."""

from rlmodules.memories import DeepLinearAttentionConfig, GTrXLConfig, LinearAttentionConfig
from rlmodules.modules.actor_critic import MemoryRLModule


class LinearAttentionRLModule(MemoryRLModule):
    """A `MemoryRLModule` on one block of linear attention."""

    config_class = LinearAttentionConfig


class DeepLinearAttentionRLModule(MemoryRLModule):
    """A `MemoryRLModule` on a stack of linear-attention blocks."""

    config_class = DeepLinearAttentionConfig


class GTrXLRLModule(MemoryRLModule):
    """A `MemoryRLModule` on a Gated Transformer-XL."""

    config_class = GTrXLConfig
