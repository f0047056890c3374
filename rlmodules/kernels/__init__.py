"""Recurrences as pure functions on tensors, each beside its reference loop. Torch only."""

from rlmodules.kernels.linear_attention import linear_attention
from rlmodules.kernels.max_attention import max_attention
from rlmodules.kernels.reference import (
    NEUTRAL_MAX,
    linear_attention_reference,
    max_attention_reference,
    relative_attention_reference,
    short_convolution_reference,
)
from rlmodules.kernels.relative_attention import relative_attention
from rlmodules.kernels.short_convolution import short_convolution

__all__ = [
    "NEUTRAL_MAX",
    "linear_attention",
    "linear_attention_reference",
    "max_attention",
    "max_attention_reference",
    "relative_attention",
    "relative_attention_reference",
    "short_convolution",
    "short_convolution_reference",
]
