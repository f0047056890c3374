"""Reads `benchmarks/results/*.json`, and writes what stands in them as people read it."""

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

Row = dict[str, Any]

# Seconds and bytes as people read them: factor and unit, the first that fits.
SCALES = {
    "s": ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")),
    "bytes": ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "bytes")),
}


def load(name: str) -> list[Row]:
    """The records of one file."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def all_records() -> Iterable[tuple[str, str, list[Row]]]:
    """Benchmark, file name and records, for each benchmark in each file."""
    for path in RESULTS.glob("*.json"):
        records = load(path.stem)
        for benchmark in dict.fromkeys(record["benchmark"] for record in records):
            rows = [record for record in records if record["benchmark"] == benchmark]
            yield benchmark, path.name, rows


def markdown(headings: Sequence[str], lines: Iterable[Sequence[str]], num_names: int = 1) -> str:
    """A table whose first columns are names, the others numbers."""
    rules = ["---"] * num_names + ["---:"] * (len(headings) - num_names)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rules, *lines))


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
