"""The example from end to end, with few sessions and for a moment."""

import os

import pytest
from ray import serve

from examples import pettingzoo_relay, serve_policy
from examples.popgym_setup import build_config
from examples.run_dir import RunDir


@pytest.fixture
def relay_dir(_ray_session, tmp_path):
    """A run of several agents."""
    path = tmp_path / "relay"
    arguments = ["--stop-iters=1", "--num-envs-per-env-runner=2", f"--run-dir={path}"]
    pettingzoo_relay.main(["--api=aec", *arguments])
    return path


@pytest.fixture(scope="module")
def run_dir(_ray_session, tmp_path_factory):
    """A run that has hardly been trained."""
    run = RunDir(tmp_path_factory.mktemp("runs") / "run")
    run.create({"env": "RepeatPreviousEasy"})
    algorithm = build_config("RepeatPreviousEasy", num_envs_per_env_runner=1).build_algo()
    run.save(algorithm, {"iteration": 1})
    algorithm.stop()
    return run.path


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize(
    ("run", "env"), [("run_dir", "RepeatPreviousEasy"), ("relay_dir", "relay")]
)
def test_serves_and_compares(run, env, request, capsys):
    path = request.getfixturevalue(run)
    args = serve_policy.parse(["--run-dir", str(path), "--sessions=4", "--seconds=0.5"])
    try:
        assert serve_policy.serve_and_play(args) == 0
    finally:
        serve.shutdown()
    printed = capsys.readouterr().out
    assert f"{env}: " in printed
    assert "0 episodes differ" in printed


def test_the_newest_run_is_served(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        serve_policy.parse([])
    assert "Train one first" in capsys.readouterr().err
    for time, name in enumerate(("newer", "older")):
        run = RunDir(tmp_path / "runs" / name)
        run.create({})
        checkpoint = run.checkpoints / "000001"
        checkpoint.mkdir()
        os.utime(checkpoint, (1000 - time, 1000 - time))
    (tmp_path / "runs" / "empty" / "checkpoints").mkdir(parents=True)
    assert serve_policy.parse([]).checkpoint == tmp_path / "runs" / "newer/checkpoints/000001"
