"""What the example promises: its default run learns, with nearly every seed."""

import pytest

from examples.run_dir import RunDir
from examples.train_popgym import main

NEEDED, SEEDS = 4, range(5)


@pytest.mark.ray
@pytest.mark.learning
def test_default_run_reaches_its_goal(tmp_path):
    returns = []
    for seed in SEEDS:
        path = tmp_path / f"seed{seed}"
        assert main(["--seed", str(seed), "--run-dir", str(path), "--no-baseline"]) == 0
        returns.append(RunDir(path).progress()["return_mean"])
    assert sum(value >= 0.9 for value in returns) >= NEEDED, returns
