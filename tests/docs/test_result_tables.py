"""The tables of single pages, from the committed results."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = ("memories", "lstm_iteration", "learning", "recall", "snapshots", "compiling")


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("result_tables")


@pytest.mark.parametrize("name", TABLES)
def test_committed_results(tables, name) -> None:
    lines = getattr(tables, name)().splitlines()
    table = [line for line in lines if line.startswith("|")]
    assert len(table) > 3
    assert len({line.count("|") for line in table}) == 1
    assert lines[-1].startswith("`python -m benchmarks ")


def test_known_records(tables, tmp_path, monkeypatch) -> None:
    record = {
        "case": "RepeatPreviousEasy",
        "peer": "rllib-lstm",
        "ours": 2.0,
        "theirs": 4.0,
        "ratio": 2.0,
        "machine": {"cpu": "two cores", "device": "cpu", "threads": 1},
    }
    records = [
        record | {"metric": "steps_to_0.9", "unit": "steps"},
        record | {"metric": "seconds_to_0.9", "unit": "s"},
    ]
    (tmp_path / "learning.json").write_text(json.dumps(records))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    assert tables.learning().splitlines() == [
        "| to 0.9 | ours | RLlib's LSTM | ratio |",
        "| --- | ---: | ---: | ---: |",
        "| steps | 2 steps | 4 steps | 2x |",
        "| seconds | 2 s | 4 s | 2x |",
        "",
        "`python -m benchmarks learning` (cpu, two cores, threads: 1)",
    ]
