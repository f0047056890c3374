"""Prints what `describe` returns, and the numbers of a memory map."""

from __future__ import annotations

from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

Facts = dict[str, Any]


def print_description(description: Facts, console: Console) -> None:
    """Prints a description, a table a topic."""
    if description["algorithm"] is not None:
        console.print(_algorithm(description["algorithm"]))
    for module_id, module in description["modules"].items():
        console.print(_module(module_id, module))


def print_look_back(rows: list[Facts], console: Console) -> None:
    """Prints how far back heads look, a line a head."""
    shares = [key for key in rows[0] if key.startswith("share_")]
    table = _table(
        "layer", "head", "mean look-back", *(key.split("_")[-1] + " back" for key in shares)
    )
    for row in rows:
        table.add_row(
            row["layer"],
            str(row["head"]),
            f"{row['mean_look_back']:.1f} steps",
            *(f"{row[key]:.0%}" for key in shares),
        )
    console.print(table)


def _algorithm(facts: Facts) -> RenderableType:
    kind = "with `connect`" if facts["connected"] else "on RLlib's default connectors"
    table = _pairs()
    for key, value in facts.items():
        if key not in ("algorithm", "connected"):
            table.add_row(key, _value(value))
    return _section(f"{facts['algorithm']}, {kind}", table)


def _module(module_id: str, facts: Facts) -> RenderableType:
    parts = [_overview(facts), _parameters(facts["parameters"])]
    if facts["state"]["leaves"]:
        parts += [_state(facts["state"]), _stored(facts["stored_states"])]
    if "rows" in facts:
        parts.append(_rows(facts["rows"]))
    parts.append(_settings(facts["settings"]))
    return _section(f"Module {module_id}", Group(*parts))


def _overview(facts: Facts) -> RenderableType:
    table = _pairs()
    table.add_row("class", facts["class"])
    table.add_row("memory", facts["memory"] or "none")
    table.add_row("observations", facts["observation_space"])
    table.add_row("actions", facts["action_space"])
    flops = facts["flops_per_step"]
    table.add_row(
        "arithmetic",
        f"{flops['rollout']:,} FLOPs a step of the rollout, {flops['training']:,} a step of a "
        "training pass, forward and backward (matrix products and convolutions)",
    )
    if facts["compile"] is not None:
        table.add_row("compile", f"{facts['compile']['mode']}: {facts['compile']['when']}")
    return table


def _parameters(facts: Facts) -> RenderableType:
    table = _table("parameters", "number")
    for name, number in facts["parts"].items():
        table.add_row(name, f"{number:,}")
    table.add_row("all", f"{facts['total']:,}")
    table.add_row("without what only training needs", f"{facts['inference_only']:,}")
    return table


def _state(facts: Facts) -> RenderableType:
    table = _table("state", "shape", "dtype", "numbers", "bytes")
    for leaf in facts["leaves"]:
        table.add_row(
            leaf["name"],
            str(tuple(leaf["shape"])),
            leaf["dtype"],
            f"{leaf['numbers']:,}",
            f"{leaf['bytes']:,}",
        )
    table.add_row("all", "", "", f"{facts['numbers']:,}", f"{facts['bytes']:,}")
    return table


def _stored(facts: Facts) -> RenderableType:
    table = _table("bytes of states in episodes", "connect, once a row", "RLlib, once a step")
    for key, stored in facts.items():
        table.add_row(key.replace("_", " "), f"{stored['connect']:,}", f"{stored['rllib']:,}")
    return table


def _rows(facts: Facts) -> RenderableType:
    table = _table("rows, from full fragments", "")
    for key, value in facts.items():
        if value is None:
            value = "depends on the data"
        table.add_row(
            key, f"{value:.0%}" if key == "padding" and value != str(value) else str(value)
        )
    return table


def _settings(settings: list[Facts]) -> RenderableType:
    table = _table("setting", "value", "default, where it differs")
    for setting in settings:
        name, value = setting["name"], setting["value"]
        changed = "default" in setting and setting["default"] != value
        default = _value(setting["default"]) if changed else ""
        table.add_row(Text(name, "bold" if changed else ""), _value(value), default)
    return table


def _section(title: str, body: RenderableType) -> RenderableType:
    return Group(Text(title, "bold"), body, "")


def _pairs() -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    return table


def _table(first: str, *others: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="underline")
    table.add_column(first, no_wrap=True)
    for name in others:
        table.add_column(name, overflow="fold", justify="left")
    return table


def _value(value: Any) -> str:
    return value if isinstance(value, str) else f"{value:,}" if type(value) is int else repr(value)
