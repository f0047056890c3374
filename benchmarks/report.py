"""Records on the terminal and in a file."""

import json
import sys
from collections.abc import Iterable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.harness import Record


def print_records(records: Iterable[Record], console: Console | None = None) -> None:
    """Prints a table of the records; a ratio that misses its target is red."""
    table = Table(
        caption="Medians and quartiles. ratio > 1: we are better.", caption_justify="left"
    )
    for column in ("case", "peer", "metric"):
        table.add_column(column, no_wrap=True)
    for column in ("ours", "theirs", "ratio", "at least", "runs"):
        table.add_column(column, justify="right", no_wrap=True)
    for r in records:
        table.add_row(
            r["case"],
            r["peer"],
            r["metric"],
            _value(r["ours"], r["ours_spread"], r["unit"]),
            _value(r["theirs"], r["theirs_spread"], r["unit"]),
            _ratio(r["ratio"], r.get("target")),
            "" if r.get("target") is None else f"{r['target']:.3g}x",
            str(r["runs"]),
        )
    # A file or a pipe has no width; 80 columns are too few.
    console = console or Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)


def write_records(records: list[Record], path: str | Path) -> None:
    """Writes the records as a JSON list."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(records, indent=2, allow_nan=False) + "\n")


def _ratio(ratio: float | None, target: float | None) -> str:
    if ratio is None:
        return ""
    text = f"{ratio:.2f}x"
    if target is None:
        return text
    return f"[{'green' if ratio >= target else 'red'}]{text}[/]"


def _value(value: float | None, spread: list[float] | None, unit: str) -> str:
    if value is None:
        return ""
    factor, unit = _scale(abs(value), unit)
    text = f"{_digits(value * factor)} {unit}".rstrip()
    if spread is None or spread[0] == spread[1]:
        return text
    # The backslash keeps rich from reading the bracket as markup.
    return f"{text} \\[{_digits(spread[0] * factor)}, {_digits(spread[1] * factor)}]"


def _digits(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _scale(value: float, unit: str) -> tuple[float, str]:
    """A factor and a unit with which the value has few digits."""
    if unit == "s" and value < 1:
        return 1e3, "ms"
    if unit == "bytes" and value >= 1e6:
        return 1e-6, "MB"
    if unit == "bytes" and value >= 1e3:
        return 1e-3, "kB"
    return 1.0, unit
