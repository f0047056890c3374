"""What the example promises: its runs learn, with nearly every seed."""

import pytest

from examples.run_dir import RunDir
from examples.train_popgym import main


@pytest.mark.ray
@pytest.mark.learning
@pytest.mark.parametrize(("memory", "num_seeds", "needed"), [("deep", 5, 4), ("gtrxl", 3, 2)])
def test_runs_reach_their_goal(memory, num_seeds, needed, tmp_path):
    returns = []
    for seed in range(num_seeds):
        path = tmp_path / f"seed{seed}"
        settings = ["--memory", memory, "--seed", str(seed), "--run-dir", str(path)]
        assert main([*settings, "--no-baseline"]) == 0
        returns.append(RunDir(path).progress()["return_mean"])
    assert sum(value >= 0.9 for value in returns) >= needed, returns
