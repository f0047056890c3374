"""Every memory of the package at equal parameter count, against RLlib's old GTrXL and an LSTM.

    python -m benchmarks memories [--json FILE] [--only gtrxl] [--device cuda] [--bf16]

Metrics: `step`, one step of 16 rows without gradient; `train`, forward and backward over 4,096
steps in rows of T; `bytes`, the state that a training row starts from. Names end in `-compiled`
where training passes are compiled, and in `-bf16` where ours and the peer run under autocast.
Peers: `lstm` and `gru`, torch's bare cells; in float32 on CPUs `legacy`, too, RLlib's `GTrXLNet` of
the old API stack. GTrXL keeps 64 past steps, `gtrxl-128` and its peer 128.
"""

import argparse
from typing import Any

import torch

from benchmarks.harness import (
    Record,
    add_seconds,
    alternate,
    check,
    check_close,
    machine_info,
    record,
    timed,
)
from benchmarks.memory_peers import (
    COMPILED,
    INPUT_DIM,
    MEMORIES,
    NUM_PARAMETERS,
    WINDOW,
    contestant,
    of_equal_size,
    peer,
)

NUM_ROWS = 16
STEPS_PER_PASS = 4096
LENGTHS = (64, 256, 1024)
# Memory, length, peer, and the ratio to reach: memory and chunk of 128 steps.
GOAL = ("gtrxl-128", 128, "legacy-128", 1.5)
# What ours may take of the bare cell's time.
CELLS = {"gru": 1 / 1.3, "lstm": 1 / 1.3}
# Memory and length: what training passes of the default may take of the LSTM's time.
DEFAULT = {("deep", 64): 1 / 2, ("deep-compiled", 64): 1 / 1.5}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--only", metavar="MEMORY", choices=MEMORIES, help="a single memory")
    parser.add_argument(
        "--bf16",
        action="store_true",
        help="autocast both sides to bfloat16; no targets (CPUs: with AVX-512 only)",
    )
    add_seconds(parser)


def run(args: argparse.Namespace) -> list[Record]:
    """Checks every memory, then measures it.

    Raises:
        CorrectnessError: If a memory computes something else step by step than at once, or if
            a size is off by more than a tenth.
    """
    memory, length, legacy, target = GOAL
    aims = args.device == "cpu" and not args.bf16
    # RLlib's old class knows nothing of autocast.
    peers = ("legacy", "lstm", "gru") if aims else ("lstm", "gru")
    compared = [
        (name, other)
        for name in MEMORIES
        for other in peers
        if name != memory and args.only in (None, name) and (other != "gru" or name == "gru")
    ]
    rounds = {"device": args.device, "bf16": args.bf16, "seconds": args.seconds}
    records = []
    for name, other in compared:
        check_memory(name, args.device)
        cell = CELLS[name] if aims and other == name else None
        if not name.endswith(COMPILED):
            records += [
                compare(name, other, "bytes", NUM_ROWS, 1, **rounds),
                compare(
                    *(name, other, "step", NUM_ROWS, 1),
                    min_runs=args.runs or 50,
                    target=cell,
                    **rounds,
                ),
            ]
        for T in LENGTHS:
            aim = DEFAULT.get((name, T)) if aims and other == "lstm" else None
            records.append(
                compare(
                    *(name, other, "train", STEPS_PER_PASS // T, T),
                    min_runs=args.runs or 5,
                    target=cell or aim,
                    **rounds,
                )
            )
    if args.only in (None, memory) and "legacy" in peers:
        rows, runs = STEPS_PER_PASS // length, args.runs or 9
        records.append(
            compare(memory, legacy, "train", rows, length, min_runs=runs, target=target, **rounds)
        )
    return records


def check_memory(name: str, device: str = "cpu") -> None:
    """Single steps equal a whole sequence.

    Raises:
        CorrectnessError: If they don't.
    """
    torch.manual_seed(0)
    memory: Any = of_equal_size(MEMORIES[name]).to(device)
    x = torch.randn(2, WINDOW + 8, INPUT_DIM, device=device)
    initial = {key: v.expand(2, *v.shape) for key, v in memory.initial_state().items()}
    state, steps = initial, []
    with torch.no_grad():
        for t in range(x.shape[1]):
            y, state = memory(x[:, t : t + 1], state)
            steps.append(y)
        check_close(torch.cat(steps, 1), memory(x, initial)[0], 1e-4, f"{name}, steps and sequence")


def compare(
    name: str,
    other: str,
    metric: str,
    num_rows: int,
    num_steps: int,
    *,
    device: str = "cpu",
    bf16: bool = False,
    min_runs: int = 5,
    seconds: float = 8.0,
    target: float | None = None,
) -> Record:
    """Measures one memory against one of the peers.

    Raises:
        CorrectnessError: If a size is off by more than a tenth, or an output has a wrong
            shape.
    """
    ours, theirs = contestant(name, num_rows, device), peer(other, num_rows, device)
    sizes = {name: ours.num_parameters, f"peer {other}": theirs.num_parameters}
    for who, size in sizes.items():
        check(abs(size / NUM_PARAMETERS - 1) < 0.1, f"{who} has {size:,} parameters")
    label = name + ("-bf16" if bf16 else "")
    facts = {
        "benchmark": "memories",
        "case": label if metric == "bytes" else f"{label} {num_rows}x{num_steps}",
        "peer": other,
        "metric": metric,
        "target": target,
        "machine": machine_info(device),
        "parameters": list(sizes.values()),
    }
    if metric == "bytes":
        return record(ours=[ours.state_bytes], theirs=[theirs.state_bytes], unit="bytes", **facts)
    x = torch.randn(num_rows, num_steps, INPUT_DIM, device=device)
    autocast = torch.autocast(device, torch.bfloat16, enabled=bf16)
    passes = {"ours": getattr(ours, metric), "theirs": getattr(theirs, metric)}
    passes = {who: autocast(function) for who, function in passes.items()}
    for who, function in passes.items():
        shape = tuple(function(x).shape[:2])
        check(shape == (num_rows, num_steps), f"{who} returns {shape} for {num_rows, num_steps}")
    times = alternate(
        {who: timed(lambda run=run: run(x), device) for who, run in passes.items()},
        min_runs=min_runs,
        seconds=seconds,
    )
    return record(ours=times["ours"], theirs=times["theirs"], unit="s", **facts)
