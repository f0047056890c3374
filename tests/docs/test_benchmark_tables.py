"""The docs' benchmark tables: without files, with known records, with the committed ones."""

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location(
    "benchmark_tables", ROOT / "docs" / "benchmark_tables.py"
)
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)

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


def test_no_results(tmp_path) -> None:
    assert "No results" in tables.all_tables(tmp_path)
    assert "No results" in tables.all_tables(tmp_path / "missing")


def test_known_records(tmp_path) -> None:
    alone = RECORD | {"peer": "itself", "theirs": None, "ratio": None, "target": None}
    (tmp_path / "cpu.json").write_text(json.dumps([RECORD, alone]))
    text = tables.all_tables(tmp_path)
    assert "### kernels" in text
    assert "`benchmarks/results/cpu.json`. cpu two cores" in text
    assert "| 16x1x1024x15 | popgym | time | 1.5 ms [1, 2] | 3 s | 2000.00x | 5x |" in text
    assert "| 16x1x1024x15 | itself | time | 1.5 ms [1, 2] |  |  |  |" in text


def test_one_case(tmp_path) -> None:
    others = [RECORD | {"case": "deep 16x1"}, RECORD | {"case": "deeper"}]
    (tmp_path / "cpu.json").write_text(json.dumps([RECORD, *others]))
    text = tables.table_of(tmp_path, "kernels", "deep")
    assert "| deep 16x1 | popgym | time |" in text
    assert text.count("popgym") == 1
    with pytest.raises(ValueError, match="No results of 'kernels' have the case 'shallow'"):
        tables.table_of(tmp_path, "kernels", "shallow")


def test_committed_results() -> None:
    for path in (ROOT / "benchmarks" / "results").glob("*.json"):
        assert f"`benchmarks/results/{path.name}`" in tables.all_tables(path.parent)
