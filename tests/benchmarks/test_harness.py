"""The harness: alternation, ratios, files, tables, the command line."""

import argparse
import json
import sys
import types

import pytest
import torch
from rich.console import Console

from benchmarks.__main__ import BENCHMARKS, main
from benchmarks.harness import (
    CorrectnessError,
    alternate,
    check,
    check_close,
    machine_info,
    record,
    timed,
)
from benchmarks.report import print_records, write_records

KEYS = {
    "benchmark", "case", "peer", "metric", "ours", "theirs", "unit", "ratio", "target",
    "ours_spread", "theirs_spread", "runs", "machine",
}  # fmt: skip


def make_record(**changes):
    values = {
        "benchmark": "kernels",
        "case": "1x1x8x4",
        "peer": "popgym",
        "metric": "time",
        "ours": [1.0, 2.0, 9.0],
        "theirs": [4.0, 8.0, 6.0],
        "unit": "s",
        "machine": {},
    }
    return record(**{**values, **changes})


def test_contestants_alternate_and_warmup_is_dropped():
    calls = []

    def contestant(name):
        return lambda: calls.append(name) or len(calls)

    values = alternate(
        {"ours": contestant("ours"), "theirs": contestant("theirs")}, min_runs=3, max_runs=3
    )
    assert calls == ["ours", "theirs"] * 4
    assert values == {"ours": [3, 5, 7], "theirs": [4, 6, 8]}


def test_rounds_stop_when_the_time_is_up():
    run = {"ours": lambda: 0.0}
    assert len(alternate(run, min_runs=2, max_runs=50, seconds=0)["ours"]) == 2


def test_timed_measures_seconds():
    assert 0 <= timed(lambda: None)() < 1


def test_record_has_medians_quartiles_and_all_keys():
    r = make_record()
    assert r.keys() == KEYS
    assert (r["ours"], r["theirs"], r["runs"]) == (2.0, 6.0, 3)
    assert (r["ours_spread"], r["theirs_spread"]) == ([1.5, 5.5], [5.0, 7.0])


def test_ratio_above_one_means_better():
    assert make_record()["ratio"] == 3.0
    assert make_record(higher_is_better=True)["ratio"] == pytest.approx(1 / 3)
    assert make_record(theirs=None)["ratio"] is None
    assert make_record(ours=None)["ratio"] is None


def test_checks_refuse_wrong_results():
    check(True, "unused")
    check_close(torch.ones(3), torch.ones(3) + 1e-7, 1e-5, "close")
    with pytest.raises(CorrectnessError, match="columns"):
        check(False, "columns differ")
    with pytest.raises(CorrectnessError, match="far"):
        check_close(torch.ones(3), torch.zeros(3), 1e-5, "far")
    with pytest.raises(CorrectnessError):
        check_close(torch.full((3,), torch.nan), torch.ones(3), 1e-5, "nan")


def test_machine_is_recorded():
    info = machine_info()
    assert {"cpu", "cores", "threads", "device", "torch", "ray"} <= info.keys()


def test_records_are_written_as_a_json_list(tmp_path):
    path = tmp_path / "new" / "results.json"
    records = [make_record(), make_record(ours=None, theirs=None)]
    write_records(records, path)
    assert json.loads(path.read_text()) == records


def test_table_shows_values_and_targets():
    console = Console(width=200, record=True, quiet=True)
    console.quiet = False
    with console.capture() as capture:
        print_records(
            [make_record(target=4), make_record(unit="bytes", ours=[2e6], theirs=None)], console
        )
    text = capture.get()
    assert "3.00x" in text
    assert "4x" in text
    assert "2 MB" in text
    assert "[1.5, 5.5]" in text


@pytest.fixture
def fake_benchmark(monkeypatch):
    module = types.ModuleType("fake_benchmark")
    monkeypatch.setitem(sys.modules, "fake_benchmark", module)
    monkeypatch.setitem(BENCHMARKS, "fake", ("fake_benchmark", "for this test"))
    threads = torch.get_num_threads()
    yield module
    torch.set_num_threads(threads)


def test_command_line_writes_records(fake_benchmark, tmp_path, capsys):
    def run(args: argparse.Namespace):
        assert (args.device, args.runs, args.flag) == ("cpu", 1, True)
        return [make_record()]

    fake_benchmark.run = run
    fake_benchmark.add_arguments = lambda parser: parser.add_argument("--flag", action="store_true")
    path = tmp_path / "out.json"
    assert main(["fake", "--json", str(path), "--runs", "1", "--flag"]) == 0
    assert json.loads(path.read_text())[0]["ratio"] == 3.0
    assert "popgym" in capsys.readouterr().out


def test_command_line_prints_no_number_after_a_failed_check(fake_benchmark, tmp_path, capsys):
    def run(args):
        raise CorrectnessError("not the same")

    fake_benchmark.run = run
    path = tmp_path / "out.json"
    assert main(["fake", "--json", str(path)]) == 1
    output = capsys.readouterr()
    assert output.out == ""
    assert "not the same" in output.err
    assert not path.exists()


@pytest.mark.parametrize("argv", [[], ["--help"]])
def test_without_a_name_the_help_lists_all(argv, capsys):
    assert main(argv) == 0
    output = capsys.readouterr().out
    assert all(name in output for name in BENCHMARKS)


def test_unknown_name_is_an_error(capsys):
    with pytest.raises(SystemExit) as error:
        main(["nothing"])
    assert error.value.code == 2
    assert "nothing" in capsys.readouterr().err
