"""Recurrences as pure functions on tensors, each beside its reference loop. Torch only."""

from rlmodules.kernels.delta_rule import delta_rule
from rlmodules.kernels.gru import gru
from rlmodules.kernels.linear_attention import linear_attention
from rlmodules.kernels.reference import (
    NEUTRAL_MAX,
    delta_rule_reference,
    gru_reference,
    linear_attention_reference,
    max_attention_reference,
    relative_attention_reference,
    scan_reference,
    short_convolution_reference,
)
from rlmodules.kernels.running_max import max_attention
from rlmodules.kernels.scan import complex_scan, scan
from rlmodules.kernels.short_convolution import short_convolution
from rlmodules.kernels.window_attention import relative_attention

__all__ = [
    "NEUTRAL_MAX",
    "complex_scan",
    "delta_rule",
    "delta_rule_reference",
    "gru",
    "gru_reference",
    "linear_attention",
    "linear_attention_reference",
    "max_attention",
    "max_attention_reference",
    "relative_attention",
    "relative_attention_reference",
    "scan",
    "scan_reference",
    "short_convolution",
    "short_convolution_reference",
]
