"""`python -m rlmodules compare`: what it reads, puts together and draws."""

import json

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from typer.testing import CliRunner

from rlmodules.tools.cli import app
from rlmodules.tools.curves import read_curves


def csv_run(folder, values, steps=(100, 200, 300)):
    folder.mkdir(parents=True)
    table = {"iteration": range(len(steps)), "env_steps": steps, "return_mean": values}
    pd.DataFrame(table).to_csv(folder / "metrics.csv", index=False)
    return folder


def tune_run(folder, values):
    """No episode has ended in the first iteration; the last line is being written."""
    folder.mkdir(parents=True)
    lines = [json.dumps({"num_env_steps_sampled_lifetime": 50, "env_runners": {}})]
    for i, value in enumerate(values):
        runners = {"episode_return_mean": value, "deep": {"x": 2 * value}}
        result = {"num_env_steps_sampled_lifetime": 100 * (i + 1), "env_runners": runners}
        lines.append(json.dumps(result))
    (folder / "result.json").write_text("\n".join([*lines, '{"num_env_']))
    return folder


def run(*args):
    return CliRunner().invoke(app, ["compare", *map(str, args)], catch_exceptions=False)


def test_seeds_are_one_curve(tmp_path):
    folders = [csv_run(tmp_path / f"deep-seed{i}", [0.0, i, 2.0 * i]) for i in range(3)]
    folders.append(csv_run(tmp_path / "gru-seed0", [np.nan, 1.0, 3.0]))
    curves = read_curves(folders)
    assert list(curves) == ["deep", "gru"]
    deep, gru = curves.values()
    assert (deep.num_runs, gru.num_runs) == (3, 1)
    np.testing.assert_allclose(np.interp([100, 150, 300], deep.steps, deep.mean), [0, 0.5, 2])
    interval = stats.t.interval(0.95, 2, loc=2.0, scale=stats.sem([0.0, 2.0, 4.0]))
    assert deep.mean[-1] + deep.half_width[-1] == pytest.approx(interval[1])
    assert gru.half_width is None
    assert list(gru.steps) == [200, 300]


def test_runs_of_unequal_lengths_are_compared_where_all_are(tmp_path):
    csv_run(tmp_path / "both" / "a", [0.0, 1.0, 2.0])
    csv_run(tmp_path / "both" / "b", [4.0, 5.0], steps=(150, 250))
    (curve,) = read_curves([tmp_path / "both"]).values()
    assert (curve.steps[0], curve.steps[-1]) == (150, 250)
    assert curve.mean[0] == pytest.approx((0.5 + 4) / 2)


def test_tunes_files(tmp_path):
    folder = tune_run(tmp_path / "trial", [1.0, 2.0])
    (curve,) = read_curves([folder]).values()
    assert (list(curve.steps), list(curve.mean)) == ([100, 200], [1, 2])
    (curve,) = read_curves([folder], "env_runners/deep/x").values()
    assert list(curve.mean) == [2, 4]


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for i in range(2):
        csv_run(tmp_path / f"deep-seed{i}", [0.0, i, 2.0 * i])
    tune_run(tmp_path / "experiment" / "trial", [1.0, 2.0])
    result = run("deep-seed0", "deep-seed1", "experiment", "--out", "pictures/a.png")
    assert result.exit_code == 0, result.output
    assert (tmp_path / "pictures" / "a.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert [line.split() for line in result.stdout.splitlines()[1:3]] == [
        ["deep", "2", "300", "1.000", "+-", "12.706"],
        ["experiment", "1", "200", "2.000"],
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nowhere"], "where no run has written metrics.csv or result.json"),
        (["run", "--metric", "speed"], "`--metric` is 'speed', but"),
        (["run", "--metric", "empty"], "has no value yet"),
        ([], "Missing argument"),
    ],
)
def test_what_cannot_be_compared(tmp_path, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    table = {"env_steps": [1, 2], "return_mean": [0.0, 1.0], "empty": [np.nan, np.nan]}
    (tmp_path / "run").mkdir()
    pd.DataFrame(table).to_csv("run/metrics.csv", index=False)
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.glob("*.png"))
