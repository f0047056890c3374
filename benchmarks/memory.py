"""Peak memory of a function: bytes of tensors alive at once, as torch's allocator sees them."""

from collections.abc import Callable
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile


def peak_memory(function: Callable[[], Any], device: str = "cpu") -> int:
    """Bytes that `function` needs at its peak, on top of what is allocated already.

    Counts temporaries inside of operations and what the function returns, not the scratch space of
    libraries that allocate for themselves.
    """
    if device == "cuda":
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        function()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        result = function()  # noqa: F841  must not be freed before the profiler stops
    live = peak = 0
    for event in sorted(_memory_events(profiler), key=lambda event: event.start_ns()):
        live += event.nbytes()
        peak = max(peak, live)
    return peak


def _memory_events(profiler: profile) -> list[Any]:
    """Allocations (positive) and releases (negative bytes). Torch has no public way to them."""
    internals: Any = profiler.profiler
    return [event for event in internals.kineto_results.events() if event.name() == "[memory]"]
