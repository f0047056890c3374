"""The tables of single pages, from the committed results."""

import importlib
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TABLES = (
    "memories", "lstm_iteration", "learning", "study", "snapshots", "compiling", "scaling",
    "bytes_a_step", "footprint",
)  # fmt: skip


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
    monkeypatch.setattr(importlib.import_module("result_files"), "RESULTS", tmp_path)
    assert tables.learning().splitlines() == [
        "| to 0.9 | ours | RLlib's LSTM | ratio |",
        "| --- | ---: | ---: | ---: |",
        "| steps | 2 steps | 4 steps | 2x |",
        "| seconds | 2 s | 4 s | 2x |",
        "",
        "`python -m benchmarks learning` (cpu, two cores, threads: 1)",
    ]


def test_what_memories_learned(tables, tmp_path, monkeypatch) -> None:
    machine = {"cpu": "two cores", "device": "cpu", "threads": 1}
    won = {"memory": "deep", "task": "count", "ours": 0.96, "updates_to_goal": 150, "runs": 5}
    lost = {"memory": "gru", "task": "reverse", "ours": 0.31, "updates_to_goal": None, "runs": 3}
    common = {
        "state_bytes": 504,
        "rate": 0.003,
        "rates": [0.003, 0.01],
        "accuracies": {"100": 0.4, "400": 0.96},
        "machine": machine,
    }
    records = [r | common for r in (won, lost)]
    passes = [{"case": "deep 64x64", "peer": "lstm", "ours": 0.5}]
    (tmp_path / "study.json").write_text(json.dumps(records))
    (tmp_path / "memories.json").write_text(json.dumps(passes))
    monkeypatch.setattr(importlib.import_module("result_files"), "RESULTS", tmp_path)
    assert tables.study().splitlines()[:4] == [
        "|  | state | training pass | count | reverse |",
        "| --- | ---: | ---: | ---: | ---: |",
        "| deep linear attention, the default | 504 bytes | 1.0x | 150 updates |  |",
        "| GRU | 504 bytes |  |  | 0.31 <sup>3</sup> |",
    ]
    assert "the best of its learning rates: 0.003." in tables.study()
    assert tables.accuracies("count").splitlines()[:3] == [
        "| count | 100 updates | 400 updates |",
        "| --- | ---: | ---: |",
        "| deep linear attention, the default | 0.40 | 0.96 |",
    ]


def test_popgym_is_readable_without_results(tables, tmp_path) -> None:
    assert tables.popgym(tmp_path / "none.jsonl").startswith("No run is committed yet")
    assert tables.popgym_pictures(tmp_path) == ""
    for name in ("popgym-Autoencode.png", "popgym-memories.png"):
        (tmp_path / name).touch()
    assert tables.popgym_pictures(tmp_path).splitlines() == [
        "![memories](images/popgym-memories.png)",
        "",
        "![Autoencode](images/popgym-Autoencode.png)",
    ]
    (line,) = (row for row in tables.popgym_settings().splitlines() if "RepeatPrevious " in row)
    assert line.startswith("| RepeatPrevious | `gtrxl` | An action earns its own reward")
    assert line.endswith(" | 0.5 | 0.95 | 0.003 |  | the episode's |")


def run_of(task, memory, steps, returns):
    """A run with the settings of its task."""
    runs = importlib.import_module("benchmarks.popgym_runs")
    tasks = importlib.import_module("examples.popgym_tasks")
    return runs.Run(
        trial=runs.Trial(task, memory, 0, tasks.MODELS[memory].lr),
        settings=tasks.settings(task, memory),
        max_steps=steps[-1],
        steps=steps,
        returns=returns,
        solved=False,
        seconds=1.0,
        parameters=1,
        machine={},
    )


def test_easy_tasks_compares_memories_that_ran_on_all_of_them(tables, tmp_path) -> None:
    runs = importlib.import_module("benchmarks.popgym_runs")
    tasks = importlib.import_module("examples.popgym_tasks")
    path = tmp_path / "runs.jsonl"
    assert tables.easy_tasks(path) == "No memory has runs on all Easy tasks yet."
    easy = [task for task in tasks.tasks() if task.endswith("Easy")]
    for task, memory in [*((task, "gru") for task in easy), (easy[0], "lstm")]:
        runs.append(path, run_of(task, memory, [100_000, 302_000, 400_000], [0.1, 0.25, 0.9]))
    lines = tables.easy_tasks(path).splitlines()
    assert lines[0] == "| best return (seeds) | `gru` |"
    # What comes later counts no more.
    assert lines[2] == f"| {easy[0]} | 0.25 (1) |"
    assert lines[2 + len(easy)] == "| mean | 0.25 |"


def test_steps_of_rllibs_lstm_and_of_our_best_memory(tables, tmp_path) -> None:
    runs = importlib.import_module("benchmarks.popgym_runs")
    path = tmp_path / "runs.jsonl"
    assert tables.against_lstm(path).startswith("No task has runs")
    reached = {"rllib-lstm": [0.1, 0.5], "mlp": [0.0, 0.0], "gru": [0.5, 0.6]}
    missed = {**reached, "gru": [0.1, 0.1]}
    for task, curves in (("RepeatFirstEasy", reached), ("RepeatFirstHard", missed)):
        for memory, returns in curves.items():
            runs.append(path, run_of(task, memory, [1_000, 4_000], returns))
    assert tables.against_lstm(path).splitlines()[2:] == [
        "| RepeatFirstEasy | 0.50 | 4,000 | `gru` | 1,000 | 0.25 |",
        "| RepeatFirstHard | 0.50 | 4,000 |  | never |  |",
        "| median |  |  |  |  | never |",
    ]


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_result_that_a_reader_sees_is_a_committed_one(page) -> None:
    runs = importlib.import_module("benchmarks.popgym_runs").load()
    published = importlib.import_module("benchmarks.popgym_scores").PUBLISHED
    trial = ("RepeatPreviousHard", "gtrxl", 0)
    (run,) = (r for r in runs if (r.trial.task, r.trial.memory, r.trial.seed) == trial)
    text = " ".join((ROOT / page).read_text().split())
    assert run.solved
    assert f"solved in {run.seconds:.0f} seconds on one core" in text
    assert f"a mean return of {run.best:.3f} after {run.steps[-1]:,} steps" in text
    assert f"had {published[trial[0]]:.3f} after 15,000,000" in text


def test_popgym_with_one_run(tables, tmp_path) -> None:
    settings = importlib.import_module("examples.popgym_tasks").settings
    run = {
        "trial": {"task": "RepeatPreviousHard", "memory": "gtrxl", "seed": 0, "lr": 5e-4},
        "settings": settings("RepeatPreviousHard", "gtrxl"),
        "max_steps": 300_000, "steps": [10_000, 20_000], "returns": [-0.4, 0.5], "solved": False,
        "seconds": 7200, "parameters": 72_000,
        "machine": {"cpu": "two cores", "device": "cpu", "threads": 1},
    }  # fmt: skip
    path = tmp_path / "popgym.jsonl"
    path.write_text(json.dumps(run) + "\n" + json.dumps(run)[:50])
    assert tables.popgym(path).splitlines()[2:] == [
        "| RepeatPreviousHard | `gtrxl` | 0.500 | 1 | 20,000 | 0.191 | 0.191 | 20,000 |",
        "",
        "1 runs, 2.0 hours of training.",
        "",
        "`python -m benchmarks popgym` (cpu, two cores, threads: 1)",
    ]
