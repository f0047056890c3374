"""Turns `benchmarks/results/*.json` into tables, all for `docs/benchmarks.md`, some elsewhere."""

from itertools import groupby

from result_files import Row, all_records, markdown, value_text

HEADINGS = ("case", "peer", "metric", "ours", "theirs", "ratio", "at least")


def all_tables() -> str:
    """Markdown of all results: a section a benchmark, in it a table a file."""
    results = sorted(all_records(), key=lambda result: result[:2])
    if not results:
        return "No results are committed yet. `make bench` prints them."
    parts = []
    for benchmark, tables in groupby(results, key=lambda result: result[0]):
        parts.append(f"### {benchmark}")
        for _, name, rows in tables:
            parts += [f"`benchmarks/results/{name}`. {_machine(rows[0])}", _table(rows)]
    return "\n\n".join(parts)


def table_of(benchmark: str, case: str) -> str:
    """Markdown of one benchmark's results for cases whose name is `case` or starts with it."""
    parts = []
    for found, name, rows in sorted(all_records(), key=lambda result: result[:2]):
        rows = [row for row in rows if row["case"].split()[0] == case]
        if found == benchmark and rows:
            parts += [f"`benchmarks/results/{name}`. {_machine(rows[0])}", _table(rows)]
    if not parts:
        raise ValueError(f"No results of {benchmark!r} have the case {case!r}.")
    return "\n\n".join(parts)


def _machine(row: Row) -> str:
    facts = row.get("machine", {}).items()
    return ", ".join(f"{key} {value}" for key, value in facts if isinstance(value, str | int))


def _table(rows: list[Row]) -> str:
    lines = []
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
                "" if target is None else f"{target:.3g}x",
            )
        )
    return markdown(HEADINGS, lines, num_names=3)
