"""What single pages show of `benchmarks/results/*.json`, as Markdown tables."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmark_tables import value_text

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"

Row = dict[str, Any]


def memories() -> str:
    """State, step and training passes of all memories at equal size."""
    records = _load("memories")
    names = {
        "linear": "linear attention, one block",
        "deep": "deep linear attention",
        "popgym": "POPGym, one block",
        "popgym-deep": "POPGym, deep",
        "gtrxl": "GTrXL, 64 past steps",
    }
    columns = (("", "bytes"), (" 16x1", "step"), (" 64x64", "train"), (" 4x1024", "train"))
    lines = []
    for key, name in names.items():
        cells = [_find(records, key + size, "lstm", metric) for size, metric in columns]
        lines.append([name, *(value_text(cell["ours"], None, cell["unit"]) for cell in cells)])
    # It was measured beside each of the others.
    lstm = ["torch's LSTM"]
    for size, metric in columns:
        cells = [_find(records, key + size, "lstm", metric) for key in names]
        median = statistics.median(cell["theirs"] for cell in cells)
        lstm.append(value_text(median, None, cells[0]["unit"]))
    headings = ("", "state", "step of 16 rows", "training, 64 rows of 64", "4 rows of 1,024")
    return _table(headings, [*lines, lstm]) + _source("memories", records)


def lstm_iteration() -> str:
    """PPO with our default memory and with RLlib's LSTM, at equal parameter count."""
    records = _load("connectors")
    cells = [_find(records, "lstm-256", "rllib-lstm", m) for m in ("update", "iteration")]
    return _compare(("PPO, 4,096 steps", "ours", "RLlib's LSTM"), cells) + _source(
        "connectors", records
    )


def learning() -> str:
    """Steps and seconds to a return."""
    records = _load("learning")
    cells = [
        _find(records, "RepeatPreviousEasy", "rllib-lstm", metric)
        for metric in ("steps_to_0.9", "seconds_to_0.9")
    ]
    return _compare(("to 0.9", "ours", "RLlib's LSTM"), cells) + _source("learning", records)


def recall() -> str:
    """Accuracy of the study's supervised part, for the variants that a reader may choose."""
    records = _load("study")
    default = records[0]["default"]
    names = {
        default: "the default",
        "decay, identity conv, sine": '`"linear"` convolution, sine positions, sum',
        "decay, conv": "the default without positions, sum",
        "plain": "two plain blocks",
        "plain, 1 block": "one plain block",
        "LSTM 128": "torch's LSTM, 128 cells",
        "GRU 128": "torch's GRU, 128 cells",
    }
    lags = (4, 16, 32)
    lines = [
        [
            name,
            *(
                f"{_find(records, f'recall-{lag}', key, 'accuracy_after_400')['theirs']:.2f}"
                for lag in lags
            ),
        ]
        for key, name in names.items()
    ]
    return _table(("", *(f"lag {lag}" for lag in lags)), lines) + _source("study", records)


def snapshots() -> str:
    """What states stored once a row save against states stored once a step."""
    records = _load("connectors")
    metrics = {
        "bytes": "pickled episodes",
        "sampling": "sampling",
        "learner_connector": "learner connectors",
        "iteration": "iteration, one epoch",
    }
    states = {"state-4x64x64": "66 KB", "state-240": "960 bytes"}
    lines = []
    for case, state in states.items():
        for metric, name in metrics.items():
            cell = _find(records, case, "rllib", metric)
            lines.append([state, name, *_both(cell)])
    headings = ("a state has", "", "with `connect`", "RLlib's connectors", "ratio")
    return _table(headings, lines, num_names=2) + _source("connectors", records)


def compiling() -> str:
    """What compiling costs and gains."""
    records = _load("compile")
    names = {"train-pass-64x64": "training pass, 64 rows of 64", "ppo": "PPO update, 4,096 steps"}
    times = {"train-pass-64x64": "time", "ppo": "update"}
    lines = []
    for case, name in names.items():
        cold, warm = (_find(records, case, "eager", f"compile_{m}") for m in ("cold", "warm"))
        costs = [value_text(cell["ours"], None, cell["unit"]) for cell in (cold, warm)]
        lines.append([name, *_both(_find(records, case, "eager", times[case])), *costs])
    pays = [_find(records, "ppo", "eager", f"iterations_to_pay_{m}") for m in ("cold", "warm")]
    text = (
        f"It has paid for itself after {pays[0]['ours']:.0f} PPO iterations with an empty cache, "
        f"{pays[1]['ours']:.0f} with a filled one."
    )
    headings = ("", "compiled", "uncompiled", "ratio", "first call, empty cache", "filled cache")
    return _table(headings, lines) + f"\n\n{text}" + _source("compile", records)


def _load(name: str) -> list[Row]:
    return json.loads((RESULTS / f"{name}.json").read_text())


def _find(records: Iterable[Row], case: str, peer: str, metric: str) -> Row:
    """The one record with these names."""
    names = (case, peer, metric)
    (found,) = (r for r in records if (r["case"], r["peer"], r["metric"]) == names)
    return found


def _both(cell: Row) -> list[str]:
    """Ours, theirs, and the ratio of the two."""
    sides = [value_text(cell[side], None, cell["unit"]) for side in ("ours", "theirs")]
    return [*sides, f"{cell['ratio']:.3g}x"]


def _compare(headings: Sequence[str], cells: Iterable[Row]) -> str:
    names = (cell["metric"].split("_")[0] for cell in cells)
    lines = [[name, *_both(cell)] for name, cell in zip(names, cells, strict=True)]
    return _table((*headings, "ratio"), lines)


def _source(name: str, records: list[Row]) -> str:
    machine = records[0]["machine"]
    where = f"{machine['device']}, {machine['cpu']}, threads: {machine['threads']}"
    return f"\n\n`python -m benchmarks {name}` ({where})"


def _table(headings: Sequence[str], lines: Iterable[Sequence[str]], num_names: int = 1) -> str:
    """Markdown of a table whose first columns are names, the others numbers."""
    rules = ["---"] * num_names + ["---:"] * (len(headings) - num_names)
    return "\n".join("| " + " | ".join(line) + " |" for line in (headings, rules, *lines))
