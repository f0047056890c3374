"""Turns `can_i_use.toml` into the tables of `can-i-use.md` and of the README."""

import tomllib
from pathlib import Path
from typing import Any, NamedTuple

DATA = Path(__file__).with_name("can_i_use.toml")
NOT_APPLICABLE = "-"
SIGNS = {"yes": "✓", "no": "✗", NOT_APPLICABLE: NOT_APPLICABLE}


class Cell(NamedTuple):
    """What a table says about an algorithm and a feature, and the test that shows it."""

    answer: str
    test: str | None


def load() -> dict[str, Any]:
    """The data."""
    return tomllib.loads(DATA.read_text())


def all_tests(data: dict[str, Any]) -> list[str]:
    """The tests of all cells, in the tables' order."""
    cells = [
        cell(row, algorithm)
        for table in data["table"]
        for row in table["row"]
        for algorithm in data["algorithms"]
    ]
    return [test for _, test in cells if test is not None] + list(data["refused"].values())


def cell(row: dict[str, Any], algorithm: str) -> Cell:
    """One cell of a row."""
    if algorithm in row.get("none", ()):
        return Cell(NOT_APPLICABLE, None)
    if algorithm in row.get("no", {}):
        return Cell("no", row["no"][algorithm])
    test = row.get("yes", {}).get(algorithm) or row["test"].format(algorithm)
    return Cell("yes", test)


def table(data: dict[str, Any], *names: str) -> str:
    """Markdown of the tables with these names, as one, and its notes."""
    algorithms = data["algorithms"]
    lines = [["", *algorithms], ["---"] + [":-:"] * len(algorithms)]
    notes = []
    for row in _rows(data, *names):
        line = [row["name"]]
        for algorithm in algorithms:
            text = SIGNS[cell(row, algorithm).answer]
            if algorithm in row.get("note", {}):
                notes.append(row["note"][algorithm])
                text += f" <sup>{len(notes)}</sup>"
            line.append(text)
        lines.append(line)
    text = "\n".join("| " + " | ".join(line) + " |" for line in lines)
    numbered = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, 1))
    return f"{text}\n\n{numbered}" if notes else text


def section(data: dict[str, Any], name: str) -> str:
    """A table and, folded, the tests behind its cells."""
    lines = [table(data, name), "", '??? note "Tests"']
    for row in _rows(data, name):
        # One line for the cells of the row's own test, one for each other test.
        algorithms_of: dict[str, list[str]] = {}
        for algorithm in data["algorithms"]:
            test = cell(row, algorithm).test
            if test is None:
                continue
            if test == row.get("test", "").format(algorithm):
                test = row["test"].format("*")
            algorithms_of.setdefault(test, []).append(algorithm)
        lines += [f"    - {row['name']}", ""]
        lines += [
            f"        - {', '.join(algorithms)}: `{test}`"
            for test, algorithms in algorithms_of.items()
        ]
    return "\n".join(lines)


def _rows(data: dict[str, Any], *names: str) -> list[dict[str, Any]]:
    return [row for part in data["table"] if part["name"] in names for row in part["row"]]
