"""A run's directory survives a crash at any point."""

import math
import pickle
from pathlib import Path

import pytest

from examples.reporting import draw_curves
from examples.run_dir import NUM_CHECKPOINTS, RunDir


class FakeAlgorithm:
    """Writes files where an algorithm's Learner writes its own; may crash half-way."""

    def __init__(self, crash=False):
        self.crash = crash

    def save_to_path(self, path):
        learner = Path(path) / "learner_group" / "learner"
        modules = learner / "rl_module"
        modules.mkdir(parents=True)
        (modules / "module_state.pkl").write_bytes(pickle.dumps({}))
        if self.crash:
            raise RuntimeError("crash")
        (learner / "state.pkl").write_bytes(pickle.dumps({}))


@pytest.fixture
def run(tmp_path):
    run = RunDir(tmp_path / "run")
    run.create({"env": "RepeatFirstEasy"})
    return run


def row(iteration):
    return {"iteration": iteration, "env_steps": 10 * iteration, "return_mean": float("nan")}


def test_a_new_run_has_settings_and_no_progress(run):
    assert run.settings() == {"env": "RepeatFirstEasy"}
    assert run.progress() == {"iteration": 0, "env_steps": 0, "seconds": 0.0}
    assert run.last_checkpoint() is None
    assert run.read_rows() == []


def test_an_earlier_run_is_moved_aside(run, tmp_path):
    run.append_row(row(1))
    moved = RunDir(tmp_path / "run").create({"env": "other"})
    assert moved is not None
    assert RunDir(moved).settings() == {"env": "RepeatFirstEasy"}
    assert len(RunDir(moved).read_rows()) == 1
    assert run.settings() == {"env": "other"}


def test_settings_of_no_run(tmp_path):
    with pytest.raises(FileNotFoundError):
        RunDir(tmp_path / "none").settings()


def test_only_the_newest_checkpoints_stay(run):
    for iteration in (1, 2, 9, 10, 100):
        run.save(FakeAlgorithm(), row(iteration))
    names = sorted(path.name for path in run.checkpoints.iterdir())
    assert names == ["000010", "000100"]
    assert len(names) == NUM_CHECKPOINTS
    assert run.progress()["iteration"] == 100
    assert run.last_checkpoint() == run.checkpoints / "000100"


def test_a_crash_while_saving_leaves_the_last_checkpoint(run):
    for iteration in (1, 2, 3):
        run.append_row(row(iteration))
    run.save(FakeAlgorithm(), row(2))
    with pytest.raises(RuntimeError, match="crash"):
        run.save(FakeAlgorithm(crash=True), row(3))
    assert run.progress()["iteration"] == 2
    with (run.path / "metrics.csv").open("a") as file:
        file.write("4,4")

    run.repair()
    assert [path.name for path in run.checkpoints.iterdir()] == ["000002"]
    rows = run.read_rows()
    assert [r["iteration"] for r in rows] == [1, 2]
    assert math.isnan(rows[0]["return_mean"])
    # The next row fits behind the repaired ones.
    run.append_row(row(3))
    text = (run.path / "metrics.csv").read_text()
    assert text.splitlines()[-1] == "3,30,nan"
    assert len(run.read_rows()) == 3


def test_a_crash_before_the_first_checkpoint_starts_over(run):
    run.append_row(row(1))
    run.repair()
    assert run.read_rows() == []


def test_the_picture_is_drawn_without_returns_too(tmp_path):
    path = tmp_path / "curve.png"
    draw_curves({"deep": [row(1)], "mlp": []}, path, title="env", goal=0.9)
    assert path.read_bytes().startswith(b"\x89PNG")
    assert [p.name for p in tmp_path.iterdir()] == ["curve.png"]
