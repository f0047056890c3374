"""Forward and backward passes of the scan and the delta rule, and of what they are held against."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import normalize

from benchmarks.harness import Record, alternate, check_close, machine_info, record, timed
from rlmodules.kernels import (
    delta_rule,
    delta_rule_reference,
    linear_attention,
    scan,
    scan_reference,
)

Pass = Callable[[], list[Tensor]]

# Kernel and sizes, peer, and the ratio to reach on two CPU cores.
COMPARISONS: list[tuple[str, str, float | None]] = [
    ("scan-1x1024x128", "loop", 10),
    ("scan-16x1024x128", "loop", 10),
    ("scan-16x1024x128", "copy", 1 / 4),
    ("delta-16x4x256x32", "linear", 1 / 2.5),
    ("delta-8x4x1024x64", "linear", 1 / 2.5),
]


@dataclass(frozen=True)
class Passes:
    """A kernel's pass, its loop's, and that of another peer on the same data."""

    ours: Pass
    loop: Pass
    other: Pass


def passes(case: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Passes:
    """The passes of a case, from a name like scan-16x1024x128 or delta-8x4x1024x64."""
    kernel, _, sizes = case.partition("-")
    make = {"scan": _scan_passes, "delta": _delta_passes}[kernel]
    return make([int(size) for size in sizes.split("x")], device, dtype)


def check_recurrences(device: str) -> None:
    """Compares both kernels with their loops, in float64.

    Raises:
        CorrectnessError: If they differ.
    """
    for case in ("scan-2x150x5", "delta-2x2x150x5"):
        both = passes(case, device, torch.float64)
        for fast, slow in zip(both.ours(), both.loop(), strict=True):
            check_close(fast, slow, 1e-9, f"kernel against reference loop, {case}")


def compare(
    case: str,
    peer: str,
    device: str = "cpu",
    *,
    min_runs: int = 5,
    seconds: float = 8.0,
    target: float | None = None,
) -> Record:
    """Measures one peer on one case."""
    both = passes(case, device)
    times = alternate(
        {
            "ours": timed(both.ours, device),
            "theirs": timed(both.loop if peer == "loop" else both.other, device),
        },
        min_runs=min_runs,
        seconds=seconds,
    )
    return record(
        benchmark="kernels",
        case=case,
        peer=peer,
        metric="time",
        ours=times["ours"],
        theirs=times["theirs"],
        unit="s",
        target=target,
        machine=machine_info(device),
    )


def _scan_passes(sizes: list[int], device: str, dtype: torch.dtype) -> Passes:
    B, T, D = sizes
    rand = _generator(device, dtype)
    a, b, h0, grad = rand(B, T, D).sigmoid(), rand(B, T, D), rand(B, D), rand(B, T, D)
    h = torch.empty_like(b)
    leaves = [x.requires_grad_() for x in (a, b, h0)]

    def copy() -> list[Tensor]:
        # What the scan has to move: forward it reads a, b and writes h; backward it reads a, h,
        # grad and writes two gradients. In all five tensors are read and three written.
        with torch.no_grad():
            return [torch.add(a, b), torch.add(a, grad), h.clone()]

    return Passes(
        _differentiated(lambda: scan(*leaves), leaves, grad),
        _differentiated(lambda: scan_reference(*leaves), leaves, grad),
        copy,
    )


def _delta_passes(sizes: list[int], device: str, dtype: torch.dtype) -> Passes:
    B, H, T, K = sizes
    rand = _generator(device, dtype)
    q, k = (normalize(rand(B, H, T, K), dim=-1) for _ in range(2))
    v, beta, grad = rand(B, H, T, K), rand(B, H, T).sigmoid(), rand(B, H, T, K)
    S, z = q.new_zeros(B, H, K, K), q.new_zeros(B, H, K)
    leaves = [x.requires_grad_() for x in (q, k, v, beta)]
    return Passes(
        _differentiated(lambda: delta_rule(q, k, v, beta, S), leaves, grad),
        _differentiated(lambda: delta_rule_reference(q, k, v, beta, S), leaves, grad),
        _differentiated(lambda: linear_attention(q, k, v, (S, z)), leaves[:3], grad),
    )


def _differentiated(
    function: Callable[[], tuple[Tensor, object]], leaves: list[Tensor], grad: Tensor
) -> Pass:
    def run() -> list[Tensor]:
        out, _ = function()
        return [out, *torch.autograd.grad(out, leaves, grad)]

    return run


def _generator(device: str, dtype: torch.dtype) -> Callable[..., Tensor]:
    generator = torch.Generator().manual_seed(0)

    def rand(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(device, dtype)

    return rand
