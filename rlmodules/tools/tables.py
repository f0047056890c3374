"""Prints what `describe` returns, and the numbers of a memory map."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from rlmodules.tools.curves import Curve

Facts = dict[str, Any]


def print_description(description: Facts, console: Console) -> None:
    """Prints a description, a table a topic."""
    if description["algorithm"] is not None:
        console.print(_algorithm(description["algorithm"]))
    for module_id, module in description["modules"].items():
        console.print(_module(module_id, module))


def print_look_back(rows: list[Facts], console: Console) -> None:
    """Prints how far back heads look, a line a head, a table a kind of map."""
    for kind in dict.fromkeys(row["kind"] for row in rows):
        console.print(_look_back(kind, [row for row in rows if row["kind"] == kind]))


def print_curves(curves: dict[str, Curve], console: Console) -> None:
    """Prints where each curve ends, with its confidence interval."""
    table = _table("curve", "runs", "steps", "last", "95 %")
    for name, curve in curves.items():
        interval = "" if curve.half_width is None else f"+- {curve.half_width[-1]:.3f}"
        steps, last = f"{curve.steps[-1]:,.0f}", f"{curve.mean[-1]:.3f}"
        table.add_row(Text(name), str(curve.num_runs), steps, last, interval)
    console.print(table)


def _look_back(kind: str, rows: list[Facts]) -> Table:
    reaches = [key for key in rows[0] if key.startswith("share_within_")]
    names = (f"within {key.removeprefix('share_within_')}" for key in reaches)
    table = _table(kind, "head", "mean look-back", *names)
    for row in rows:
        shares = (f"{row[key]:.0%}" for key in reaches)
        head = str(row["head"]) if kind == "weights" else "all"
        table.add_row(row["layer"], head, f"{row['mean_look_back']:.1f}", *shares)
    return table


def _algorithm(facts: Facts) -> RenderableType:
    kind = "with `connect`" if facts["connected"] else "on RLlib's default connectors"
    shown = {key: facts[key] for key in facts if key not in ("algorithm", "connected")}
    return Group(Text(f"{facts['algorithm']}, {kind}", "bold"), _known(_pairs(), shown), "")


def _module(module_id: str, facts: Facts) -> RenderableType:
    tables = [_overview(facts), _parameters(facts["parameters"])]
    if facts["flops_per_step"] is not None:
        tables.append(_arithmetic(facts["flops_per_step"]))
    if facts["state"]["leaves"]:
        tables += [_state(facts["state"]), _stored(facts["stored_states"])]
    if "rows" in facts:
        rows = dict(facts["rows"])
        if rows["padding"] is not None:
            rows["padding"] = f"{rows['padding']:.0%} if no episode ends"
        tables.append(_known(_table("rows, of full fragments", ""), rows))
    if facts["settings"]:
        tables.append(_settings(facts["settings"]))
    spaced = [line for table in tables for line in (table, "")]
    return Group(Text(f"Module {module_id}", "bold"), *spaced)


def _overview(facts: Facts) -> Table:
    compiled = facts["compile"]
    return _known(
        _pairs(),
        {
            "class": facts["class"],
            "memory": facts["memory"] or "none",
            "observations": facts["observation_space"],
            "actions": facts["action_space"],
            "compile": compiled and f"{compiled['mode']}: {compiled['when']}",
        },
    )


def _parameters(facts: Facts) -> Table:
    table = _table("parameters", "")
    for name, number in facts["parts"].items():
        table.add_row(name, f"{number:,}")
    table.add_row("all", f"{facts['total']:,}")
    table.add_row("all on an EnvRunner", f"{facts['inference_only']:,}")
    return table


def _arithmetic(facts: Facts) -> Table:
    table = _table("matrix products and convolutions", "FLOPs a step")
    table.add_row("in the rollout", f"{facts['rollout']:,}")
    table.add_row("in a training pass, forward and backward", f"{facts['training']:,}")
    return table


def _state(facts: Facts) -> Table:
    table = _table("state", "shape", "dtype", "numbers", "bytes")
    for leaf in facts["leaves"]:
        shape, dtype = str(tuple(leaf["shape"])), leaf["dtype"]
        table.add_row(leaf["name"], shape, dtype, f"{leaf['numbers']:,}", f"{leaf['bytes']:,}")
    table.add_row("all", "", "", f"{facts['numbers']:,}", f"{facts['bytes']:,}")
    return table


def _stored(facts: Facts) -> Table:
    table = _table("bytes of states in episodes", "connect: one a row", "RLlib: one a step")
    for key, stored in facts.items():
        table.add_row(key.replace("_", " "), f"{stored['connect']:,}", f"{stored['rllib']:,}")
    return table


def _settings(settings: list[Facts]) -> Table:
    table = Table("setting", "value", "default, where it differs", **_STYLE)
    for setting in settings:
        value = setting["value"]
        changed = "default" in setting and setting["default"] != value
        default = _text(setting["default"]) if changed else ""
        table.add_row(Text(setting["name"], "bold" if changed else ""), _text(value), default)
    return table


_STYLE: Any = {"box": None, "pad_edge": False, "header_style": "underline"}


def _pairs() -> Table:
    return Table(show_header=False, **_STYLE)


def _table(first: str, *others: str) -> Table:
    """A table with numbers behind the first column."""
    table = Table(first, **_STYLE)
    for name in others:
        table.add_column(name, justify="right")
    return table


def _known(table: Table, facts: Facts) -> Table:
    """Adds what is known, a line a fact."""
    for key, value in facts.items():
        if value is not None:
            table.add_row(key, _text(value))
    return table


def _text(value: Any) -> Text:
    """As plain text: brackets are no markup."""
    return Text(f"{value:,}" if type(value) is int else str(value))
