"""The docs' benchmark tables: without files, with known records, with the committed ones."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

RECORD = {
    "benchmark": "kernels",
    "case": "16x1x1024x15",
    "peer": "popgym",
    "metric": "time",
    "ours": 0.0015,
    "theirs": 3.0,
    "unit": "s",
    "ratio": 2000.0,
    "target": 5,
    "ours_spread": [0.001, 0.002],
    "theirs_spread": [3.0, 3.0],
    "machine": {"cpu": "two cores", "packages": {"torch": "2.13.0"}},
}


@pytest.fixture
def tables(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    return importlib.import_module("benchmark_tables")


@pytest.fixture
def results(tables, tmp_path, monkeypatch):
    """A folder of results that the tables are made from."""
    monkeypatch.setattr(importlib.import_module("result_files"), "RESULTS", tmp_path)
    return tmp_path


def test_no_results(tables, results) -> None:
    assert "No results" in tables.all_tables()
    results.rmdir()
    assert "No results" in tables.all_tables()


def test_known_records(tables, results) -> None:
    alone = RECORD | {"peer": "itself", "theirs": None, "ratio": None, "target": None}
    (results / "cpu.json").write_text(json.dumps([RECORD, alone]))
    text = tables.all_tables()
    assert "### kernels" in text
    assert "`benchmarks/results/cpu.json`. cpu two cores" in text
    assert "| 16x1x1024x15 | popgym | time | 1.5 ms [1, 2] | 3 s | 2000.00x | 5x |" in text
    assert "| 16x1x1024x15 | itself | time | 1.5 ms [1, 2] |  |  |  |" in text


def test_one_case(tables, results) -> None:
    others = [RECORD | {"case": "deep 16x1"}, RECORD | {"case": "deeper"}]
    (results / "cpu.json").write_text(json.dumps([RECORD, *others]))
    text = tables.table_of("kernels", "deep")
    assert "| deep 16x1 | popgym | time |" in text
    assert text.count("popgym") == 1
    with pytest.raises(ValueError, match="No results of 'kernels' have the case 'shallow'"):
        tables.table_of("kernels", "shallow")


def test_committed_results(tables) -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert f"`benchmarks/results/{path.name}`" in tables.all_tables()
