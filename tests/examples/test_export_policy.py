"""The example that exports: equal returns, exit codes, what it refuses."""

import shutil

import numpy as np
import pytest

from examples import export_policy
from examples.popgym_setup import build_config
from examples.run_dir import RunDir

# Continuous actions, which are unsquashed, in episodes of any length.
ENV = "PositionOnlyPendulumEasy"
TINY = {"fcnet_hiddens": [8], "d_model": 8, "num_heads": 2, "head_dim": 4, "feedforward_dim": 8}


def start_run(path, env):
    run = RunDir(path)
    run.create({"env": env})
    return run


@pytest.fixture(scope="module")
def run(_ray_session, tmp_path_factory):
    run = start_run(tmp_path_factory.mktemp("example") / "runs" / "pendulum", ENV)
    algo = build_config(ENV, "linear", num_envs_per_env_runner=1, model=TINY).build_algo()
    run.save(algo, {"iteration": 1})
    algo.stop()
    return run


@pytest.mark.slow
@pytest.mark.ray
def test_returns_are_equal_and_the_exit_code_says_so(run, monkeypatch, capsys):
    start_run(run.path.with_name("without-checkpoint"), ENV)
    monkeypatch.chdir(run.path.parents[1])
    arguments = ["--num-episodes", "3"]
    assert export_policy.main(arguments) == 0
    means = {line.split()[-1] for line in capsys.readouterr().out.splitlines()[-3:]}
    assert len(means) == 1
    assert float(means.pop()) > 0

    for export in ("export_onnx", "export_torch"):
        monkeypatch.setattr(export_policy, export, lambda module, path: None)
    monkeypatch.setattr(
        export_policy, "act_from", lambda policy: lambda seen, reset: np.zeros((len(seen), 1))
    )
    assert export_policy.main([*arguments, str(run.last_checkpoint())]) == 1


@pytest.mark.ray
def test_a_module_behind_connectors_is_refused(run, tmp_path, capsys):
    """As RLlib's LSTM is, which sees flattened observations."""
    other = start_run(tmp_path / "other", "RepeatPreviousEasy")
    checkpoint = other.checkpoints / "000001"
    shutil.copytree(run.last_checkpoint(), checkpoint)
    with pytest.raises(SystemExit):
        export_policy.main([str(checkpoint)])
    assert "behind connectors" in capsys.readouterr().err


def test_without_a_checkpoint(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit):
        export_policy.main([])
    assert "Train one" in capsys.readouterr().err
