"""The kernels, forward and backward in float32, against their peers.

    python -m benchmarks kernels [--json FILE] [--device cuda] [--only 8x4x1024x64]

Peers: `popgym`, POPGym's own block; `lstm`, torch's LSTM of width H * K; `sdpa`, torch's causal
softmax attention; `matmul`, the kernel's own arithmetic at the speed of a 2048 x 2048 matrix
product; on CUDA also `fla`, flash-linear-attention's chunk kernel. The scan and the delta rule:
`benchmarks.recurrences`. Cost over length, rows and width: `benchmarks.proportions`, which
`--picture FILE` draws.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import proportions, recurrences
from benchmarks.harness import (
    Record,
    add_seconds,
    alternate,
    check_close,
    machine_info,
    record,
    timed,
)
from benchmarks.kernel_peers import (
    PEERS,
    SAME_FUNCTION,
    Case,
    Inputs,
    chunk_size_of,
    has_fla,
    multiply_adds,
    ours,
)
from benchmarks.memory import peak_memory
from rlmodules.kernels import linear_attention, linear_attention_reference

MATMUL_SIZE = 2048

# Case, peer, metric, and the ratio to reach on two CPU cores.
COMPARISONS: list[tuple[str, str, str, float | None]] = [
    ("16x1x1024x15", "popgym", "time", 5),
    ("16x4x1024x32", "popgym", "time", 40),
    ("8x4x1024x64", "popgym", "time", 80),
    ("8x4x1024x64", "popgym", "memory", 30),
    ("8x4x1024x64", "lstm", "time", 10),
    ("8x4x1024x64", "sdpa", "time", 2.5),
    ("4x4x4096x64", "sdpa", "time", 6),
    ("8x4x1024x64", "matmul", "time", 1 / 2.3),
    ("8x4x1024x64-decay", "lstm", "time", None),
    ("8x4x1024x64-decay", "matmul", "time", 1 / 3),
]
FLA_CASES = ("16x4x1024x32", "8x4x1024x64", "4x4x4096x64")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--only", metavar="TEXT", help='only comparisons "CASE PEER METRIC" with it'
    )
    parser.add_argument(
        "--picture", type=Path, metavar="FILE", help="draw cost over length, rows and width"
    )
    add_seconds(parser)


def run(args: argparse.Namespace) -> list[Record]:
    """Checks the kernel, then measures it.

    Raises:
        CorrectnessError: If the kernel or a peer that computes the same is wrong.
    """
    check_kernel(args.device)
    recurrences.check_recurrences(args.device)
    comparisons = list(COMPARISONS)
    if args.device == "cuda":
        # The targets are for CPUs.
        comparisons = [(case, peer, metric, None) for case, peer, metric, _ in comparisons]
        if has_fla():
            comparisons += [(case, "fla", "time", None) for case in FLA_CASES]
    only = args.only or ""
    rounds = {"min_runs": args.runs or 5, "seconds": args.seconds}
    records = [
        compare(Case.parse(case), peer, metric, args.device, target=target, **rounds)
        for case, peer, metric, target in comparisons
        if only in f"{case} {peer} {metric}"
    ]
    for axis, cases in proportions.AXES.items():
        wanted = [case for case in cases if only in f"{case} {proportions.PEER} time"]
        target = None if args.device == "cuda" else 1 / proportions.ALLOWED
        if wanted:
            records += proportions.compare(axis, wanted, args.device, target=target, **rounds)
    if args.picture:
        proportions.draw(records, args.picture)
    for case, peer, target in recurrences.COMPARISONS:
        if only in f"{case} {peer} time":
            target = None if args.device == "cuda" else target
            records.append(recurrences.compare(case, peer, args.device, target=target, **rounds))
    return records


def check_kernel(device: str) -> None:
    """Compares the kernel with the reference loop, in float64, with and without decay.

    Raises:
        CorrectnessError: If they differ.
    """
    for case in (Case(2, 2, 150, 5), Case(2, 2, 150, 5, decay=True)):
        inputs = Inputs(case, device, torch.float64)
        results = []
        for kernel in (linear_attention, linear_attention_reference):
            q, k, v = leaves = inputs.leaves(lambda x: x)
            state = q.new_ones(2, 2, 5, 5), q.new_ones(2, 2, 5)
            out, (S, z) = kernel(q, k, v, state, log_decay=inputs.log_decay)
            grads = torch.autograd.grad((out * inputs.grad).sum() + S.sum() + z.sum(), leaves)
            results.append([out, S, z, *grads])
        for fast, slow in zip(*results, strict=True):
            check_close(fast, slow, 1e-9, f"kernel against reference loop, {case}")


def compare(
    case: Case,
    peer: str,
    metric: str,
    device: str = "cpu",
    *,
    min_runs: int = 5,
    seconds: float = 8.0,
    target: float | None = None,
) -> Record:
    """Measures one peer on one case.

    Raises:
        CorrectnessError: If the peer should compute the same but does not.
    """
    inputs = Inputs(case, device)
    facts = {
        "benchmark": "kernels",
        "case": str(case),
        "peer": peer,
        "metric": metric,
        "target": target,
        "machine": machine_info(device),
        "chunk_size": chunk_size_of(case.K),
    }
    our_pass = ours(inputs)
    if peer == "matmul":
        times = alternate(
            {"ours": timed(our_pass, device), "theirs": _ideal(case, device)},
            min_runs=min_runs,
            seconds=seconds,
        )
        return record(ours=times["ours"], theirs=times["theirs"], unit="s", **facts)
    their_pass = PEERS[peer](inputs)
    if peer in SAME_FUNCTION:
        # fla multiplies in TF32.
        tolerance = 1e-2 if peer == "fla" else 1e-3
        for our_result, their_result in zip(our_pass(), their_pass(), strict=True):
            check_close(our_result, their_result, tolerance, f"{peer} on {case}")
    if metric == "memory":
        pair = ([peak_memory(function, device)] for function in (our_pass, their_pass))
        return record(ours=next(pair), theirs=next(pair), unit="bytes", **facts)
    times = alternate(
        {"ours": timed(our_pass, device), "theirs": timed(their_pass, device)},
        min_runs=min_runs,
        seconds=seconds,
    )
    return record(ours=times["ours"], theirs=times["theirs"], unit="s", **facts)


def _ideal(case: Case, device: str) -> Callable[[], float]:
    """Seconds of the kernel's multiply-adds at the speed of a large matrix product now."""
    matrix = torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device)
    run = timed(lambda: matrix @ matrix, device)
    share = multiply_adds(case) / MATMUL_SIZE**3
    return lambda: share * run()
