"""How everything here is measured: alternating runs, median and spread, one record a number."""

import argparse
import os
import platform
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

Record = dict[str, Any]

PACKAGES = ("torch", "ray", "gymnasium", "numpy", "popgym", "flash-linear-attention")


class CorrectnessError(RuntimeError):
    """Two sides of a comparison do not compute the same; no number is worth printing then."""


def check(condition: bool, message: str) -> None:
    """Stops the benchmark.

    Raises:
        CorrectnessError: If the condition does not hold.
    """
    if not condition:
        raise CorrectnessError(message)


def check_close(ours: Any, theirs: Any, tolerance: float, what: str) -> None:
    """Compares tensors by their largest difference relative to their largest entry.

    Raises:
        CorrectnessError: If they differ by more than `tolerance`.
    """
    with torch.no_grad():
        error = ((ours - theirs).abs().max() / theirs.abs().max().clamp(min=1e-30)).item()
    check(error <= tolerance, f"{what}: differs by {error:.1e} (relative), allowed {tolerance:.0e}")


def timed(function: Callable[[], Any], device: str = "cpu") -> Callable[[], float]:
    """A function that runs `function` and returns the seconds that it took."""

    def run() -> float:
        _synchronize(device)
        start = time.perf_counter()
        function()
        _synchronize(device)
        return time.perf_counter() - start

    return run


def alternate(
    contestants: Mapping[str, Callable[[], float]],
    *,
    min_runs: int = 5,
    max_runs: int = 25,
    seconds: float = 10.0,
    warmup: int = 1,
) -> dict[str, list[float]]:
    """Measures contestants in turn, so that what else the machine does hits all of them.

    Args:
        contestants: What to run, by name. Each returns its measured value.
        min_runs: Rounds at least.
        max_runs: Rounds at most.
        seconds: No further round starts after this time, once `min_runs` are done.
        warmup: Rounds beforehand whose values are dropped.

    Returns:
        The values of each contestant, one a round.
    """
    for _ in range(warmup):
        for run in contestants.values():
            run()
    values: dict[str, list[float]] = {name: [] for name in contestants}
    start = time.perf_counter()
    for done in range(max_runs):
        if done >= min_runs and time.perf_counter() - start > seconds:
            break
        for name, run in contestants.items():
            values[name].append(run())
    return values


def record(
    *,
    benchmark: str,
    case: str,
    peer: str,
    metric: str,
    ours: Sequence[float] | None,
    theirs: Sequence[float] | None,
    unit: str,
    machine: Mapping[str, Any],
    higher_is_better: bool = False,
    target: float | None = None,
    **settings: Any,
) -> Record:
    """One comparison as it stands in the results file.

    Args:
        benchmark: Name of the benchmark.
        case: What was measured.
        peer: What it is compared with.
        metric: Which quantity.
        ours: Our values, one a run. None where the quantity does not exist.
        theirs: The peer's values. None where there is nothing to compare with.
        unit: Unit of the values.
        machine: What it ran on, from `machine_info`.
        higher_is_better: Whether larger values win.
        target: The ratio to reach, if there is one.
        settings: Further facts for the reader of the file.

    Returns:
        `ours` and `theirs` are medians, the spreads `[lower, upper]` quartiles. `ratio` > 1 means
        that we are better.
    """
    our_median = statistics.median(ours) if ours else None
    their_median = statistics.median(theirs) if theirs else None
    ratio = None
    if our_median is not None and their_median is not None:
        pair = (our_median, their_median) if higher_is_better else (their_median, our_median)
        ratio = pair[0] / pair[1] if pair[1] else None
    return {
        "benchmark": benchmark,
        "case": case,
        "peer": peer,
        "metric": metric,
        "ours": our_median,
        "theirs": their_median,
        "unit": unit,
        "ratio": ratio,
        "target": target,
        "ours_spread": _quartiles(ours) if ours else None,
        "theirs_spread": _quartiles(theirs) if theirs else None,
        "runs": len(ours or ()),
        **settings,
        "machine": dict(machine),
    }


def add_seconds(parser: argparse.ArgumentParser, default: float = 8.0) -> None:
    """Adds the option for the time that a number may take."""
    parser.add_argument(
        "--seconds",
        type=float,
        default=default,
        help="time for the rounds beyond `--runs`, a number (default: %(default)g)",
    )


def machine_info(device: str = "cpu") -> dict[str, Any]:
    """What the measurement runs on, with the versions of what it measures."""
    info: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "load": round(os.getloadavg()[0], 2),
        "platform": f"{platform.system()} {platform.machine()}",
        "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
        "python": platform.python_version(),
    }
    for package in PACKAGES:
        try:
            info[package] = version(package)
        except PackageNotFoundError:
            continue
    return info


def _cpu_model() -> str:
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _quartiles(values: Sequence[float]) -> list[float]:
    if len(values) == 1:
        return [values[0], values[0]]
    lower, _, upper = statistics.quantiles(values, n=4, method="inclusive")
    return [lower, upper]


def _synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()
