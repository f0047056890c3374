"""Turns `benchmarks/results/*.json` into tables, all for `docs/benchmarks.md`, some elsewhere."""

import json
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import Any

Row = dict[str, Any]

HEADINGS = ("case", "peer", "metric", "ours", "theirs", "ratio", "at least")
# Seconds and bytes as people read them: factor and unit, the first that fits.
SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")),
}


def all_tables(folder: Path) -> str:
    """Markdown of all results: a section a benchmark, in it a table a file."""
    results = sorted(_read(folder), key=lambda result: result[:2])
    if not results:
        return "No results are committed yet. `make bench` prints them."
    parts = []
    for benchmark, tables in groupby(results, key=lambda result: result[0]):
        parts.append(f"### {benchmark}")
        for _, name, rows in tables:
            parts += [f"`benchmarks/results/{name}`. {_machine(rows[0])}", _table(rows)]
    return "\n\n".join(parts)


def table_of(folder: Path, benchmark: str, case: str) -> str:
    """Markdown of one benchmark's results for cases whose name is `case` or starts with it."""
    parts = []
    for found, name, rows in sorted(_read(folder), key=lambda result: result[:2]):
        rows = [row for row in rows if row["case"].split()[0] == case]
        if found == benchmark and rows:
            parts += [f"`benchmarks/results/{name}`. {_machine(rows[0])}", _table(rows)]
    if not parts:
        raise ValueError(f"No results of {benchmark!r} have the case {case!r}.")
    return "\n\n".join(parts)


def _read(folder: Path) -> Iterable[tuple[str, str, list[Row]]]:
    """Benchmark, file name and records, for each benchmark in each file."""
    for path in folder.glob("*.json"):
        records = json.loads(path.read_text())
        for benchmark in dict.fromkeys(record["benchmark"] for record in records):
            rows = [record for record in records if record["benchmark"] == benchmark]
            yield benchmark, path.name, rows


def _machine(row: Row) -> str:
    facts = row.get("machine", {}).items()
    return ", ".join(f"{key} {value}" for key, value in facts if isinstance(value, str | int))


def _table(rows: list[Row]) -> str:
    lines = [HEADINGS, ("---", "---", "---", "---:", "---:", "---:", "---:")]
    for row in rows:
        target = row.get("target")
        lines.append(
            (
                row["case"],
                row["peer"],
                row["metric"],
                value_text(row["ours"], row.get("ours_spread"), row["unit"]),
                value_text(row["theirs"], row.get("theirs_spread"), row["unit"]),
                "" if row["ratio"] is None else f"{row['ratio']:.2f}x",
                "" if target is None else f"{target:g}x",
            )
        )
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def value_text(value: float | None, spread: list[float] | None, unit: str) -> str:
    """A value with its quartiles, in a unit that needs few digits."""
    if value is None:
        return ""
    scales = SCALES.get(unit, ((1.0, unit),))
    factor, unit = next((scale for scale in scales if abs(value) >= scale[0]), scales[-1])
    text = f"{_number(value / factor)} {unit}"
    if spread is None or spread[0] == spread[1]:
        return text
    return f"{text} [{_number(spread[0] / factor)}, {_number(spread[1] / factor)}]"


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"
