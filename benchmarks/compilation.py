"""What compiling the default model costs, what it gains, and when it has paid for itself.

    python -m benchmarks compile [--json FILE]

The model is the default `DeepLinearAttentionRLModule`, peer `eager` the same model uncompiled.
Cases: `train-pass-64x64`, one forward and backward pass over 64 rows of 64 steps; `ppo`, a PPO
update on 4,096 steps. Metrics:

- `compile_cold`, `compile_warm`: seconds that the first call takes beyond a later one, in a fresh
  process with an empty and with a filled Inductor cache;
- `time`, `update`: seconds once compiled;
- `iterations_to_pay_cold`, `iterations_to_pay_warm`: PPO iterations after which the gain of the
  updates has made up for compiling; null where an update gains nothing.

Each cold and warm start is a process of its own.
"""

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import Record, alternate, check_close, machine_info, record, timed
from benchmarks.rigs import MAX_SEQ_LEN, Rig, memory_config
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule

ROWS = 64
PASS, UPDATE = f"train-pass-{ROWS}x{MAX_SEQ_LEN}", "ppo"


def run(args: argparse.Namespace) -> list[Record]:
    """Measures a cold and a warm start, then alternates compiled and eager passes.

    Raises:
        CorrectnessError: If the compiled model computes something else.
    """
    with tempfile.TemporaryDirectory() as cache:
        cold = _start(args, cache, compare=False)
        warm = _start(args, cache, compare=True)
    return make_records(cold, warm, args.device)


def make_records(cold: dict[str, Any], warm: dict[str, Any], device: str) -> list[Record]:
    """Records from what the two processes measured."""
    machine = machine_info(device)

    def entry(case: str, metric: str, ours: list[float] | None, unit: str = "s") -> Record:
        theirs = warm[case]["theirs"] if metric in ("time", "update") else None
        return record(
            benchmark="compile",
            case=case,
            peer="eager",
            metric=metric,
            ours=ours,
            theirs=theirs,
            unit=unit,
            machine=machine,
        )

    records = []
    # The update comes after the pass: what it compiles comes on top.
    totals = {"cold": 0.0, "warm": 0.0}
    for case, metric in ((PASS, "time"), (UPDATE, "update")):
        later = statistics.median(warm[case]["ours"])
        for start, results in (("cold", cold), ("warm", warm)):
            cost = max(0.0, results[case]["first"] - later)
            totals[start] += cost
            records.append(entry(case, f"compile_{start}", [cost]))
        records.append(entry(case, metric, warm[case]["ours"]))
    gain = statistics.median(warm[UPDATE]["theirs"]) - statistics.median(warm[UPDATE]["ours"])
    for start, total in totals.items():
        iterations = [math.ceil(total / gain)] if gain > 0 else None
        records.append(entry(UPDATE, f"iterations_to_pay_{start}", iterations, "iterations"))
    return records


def measure(
    device: str,
    *,
    compare: bool,
    fragment: int = 256,
    min_runs: int = 7,
    seconds: float = 20.0,
) -> dict[str, Any]:
    """What one process measures.

    Args:
        device: Where the Learner runs.
        compare: Whether to alternate with an uncompiled model after the first calls.
        fragment: Steps an environment and sample.
        min_runs: Rounds at least.
        seconds: Time for the rounds beyond those.

    Returns:
        For both cases the seconds of the `first` call and, if `compare`, the lists `ours`,
        `theirs`.

    Raises:
        CorrectnessError: If the compiled model computes something else.
    """
    sides = {"ours": True, "theirs": False} if compare else {"ours": True}
    rigs = {side: _rig(compiled, fragment, device) for side, compiled in sides.items()}
    recorded = rigs["ours"].record_sample()
    batches = {side: _batch(rig, device) for side, rig in rigs.items()}
    passes = {
        PASS: {side: timed(_train_pass(rigs[side], batches[side]), device) for side in rigs},
        UPDATE: {side: recorded.timed(rigs[side].update, device) for side in rigs},
    }
    results: dict[str, Any] = {}
    for case, contestants in passes.items():
        results[case] = {"first": contestants["ours"]()}
        if compare:
            if case == PASS:
                rigs["theirs"].copy_weights(rigs["ours"])
                ours, theirs = (_train_pass(rigs[side], batches[side])() for side in rigs)
                check_close(ours, theirs, 1e-4, "compiled against eager pass")
            results[case] |= alternate(contestants, min_runs=min_runs, seconds=seconds)
    return results


def _rig(compiled: bool, fragment: int, device: str) -> Rig:
    config = DeepLinearAttentionConfig(max_seq_len=MAX_SEQ_LEN, compile=compiled)
    return Rig(
        memory_config(
            DeepLinearAttentionRLModule, config, connected=True, fragment=fragment, device=device
        )
    )


def _batch(rig: Rig, device: str) -> dict[str, Any]:
    """A full batch of random observations, as a Learner sees it."""
    generator = torch.Generator().manual_seed(0)
    state = rig.module.get_initial_state()
    return {
        "obs": torch.randint(0, 4, (ROWS, MAX_SEQ_LEN), generator=generator).to(device),
        "state_in": {
            key: value.expand(ROWS, *value.shape).contiguous().to(device)
            for key, value in state.items()
        },
        "seq_lens": torch.full((ROWS,), MAX_SEQ_LEN),
    }


def _train_pass(rig: Rig, batch: dict[str, Any]) -> Callable[[], torch.Tensor]:
    """Forward and backward; returns the logits."""

    def run() -> torch.Tensor:
        rig.module.zero_grad()
        outputs = rig.module.forward_train(batch)
        values = rig.module.compute_values(batch, embeddings=outputs["embeddings"])
        logits = outputs["action_dist_inputs"]
        (logits.square().mean() + values.square().mean()).backward()
        return logits

    return run


def _start(args: argparse.Namespace, cache: str, *, compare: bool) -> dict[str, Any]:
    """Runs `measure` in a fresh process that uses this cache."""
    options = json.dumps({"device": args.device, "compare": compare, "min_runs": args.runs or 7})
    command = [sys.executable, "-m", "benchmarks.compilation", str(args.threads), options]
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "PYTHONWARNINGS": "ignore"}
    process = subprocess.run(
        command, env=environment, stdout=subprocess.PIPE, text=True, check=True
    )
    return json.loads(process.stdout.splitlines()[-1])


def _main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    print(json.dumps(measure(**json.loads(sys.argv[2]))))


if __name__ == "__main__":
    _main()
