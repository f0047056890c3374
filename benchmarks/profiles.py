"""Where a function's time goes, as tables on the terminal."""

import cProfile
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

NUM_ENTRIES = 15

Entry = tuple[str, int, float]
"""What ran, how often, and how many seconds it took by itself."""


def print_profile(
    title: str,
    function: Callable[..., Any],
    arguments: Callable[[], tuple] = tuple,
    device: str = "cpu",
    console: Console | None = None,
) -> None:
    """Runs a function under Python's profiler and under torch's, and prints both.

    Args:
        title: What the tables are about.
        function: What to run.
        arguments: Makes its arguments for each of the two runs, outside of the profile.
        device: Whose time torch's operators are counted in.
        console: Where to print.
    """
    # A file or a pipe has no width; 80 columns are too few.
    console = console or Console(width=None if sys.stdout.isatty() else 120)
    for what, entries in (
        ("Python functions", python_functions),
        ("torch operators", torch_operators),
    ):
        found = entries(function, arguments(), device)
        console.print(f"{title}: {what}, {sum(seconds for *_, seconds in found):.2f} s")
        console.print(_table(found))


def python_functions(function: Callable[..., Any], arguments: tuple, device: str) -> list[Entry]:
    """Python and built-in functions."""
    profiler = cProfile.Profile()
    profiler.runcall(function, *arguments)
    return [(_name(e.code), e.callcount, e.inlinetime) for e in profiler.getstats()]


def torch_operators(function: Callable[..., Any], arguments: tuple, device: str) -> list[Entry]:
    """Operators of torch, those of backward passes and compiled graphs too."""
    activities = [ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        function(*arguments)
    time = "self_device_time_total" if device == "cuda" else "self_cpu_time_total"
    return [(e.key, e.count, getattr(e, time) * 1e-6) for e in profiler.key_averages()]


def _table(entries: Iterable[Entry]) -> Table:
    entries = sorted(entries, key=lambda entry: entry[2], reverse=True)
    total = sum(seconds for _, _, seconds in entries)
    table = Table(expand=True)
    table.add_column("own time", justify="right", no_wrap=True)
    table.add_column("share", justify="right", no_wrap=True)
    table.add_column("calls", justify="right", no_wrap=True)
    # A ratio: this column is what is cut where names are long, not the numbers.
    table.add_column("", overflow="ellipsis", no_wrap=True, ratio=1)
    for name, calls, seconds in entries[:NUM_ENTRIES]:
        # The backslash keeps rich from reading a bracket as markup.
        name = name.replace("[", "\\[")
        share = seconds / total if total else 0.0
        table.add_row(f"{1e3 * seconds:.1f} ms", f"{share:.0%}", f"{calls:,}", name)
    return table


def _name(code: Any) -> str:
    if isinstance(code, str):
        return code
    file = "/".join(Path(code.co_filename).parts[-3:])
    return f"{code.co_qualname} ({file}:{code.co_firstlineno})"
