"""What example and README promise: their runs learn, the example's with nearly every seed."""

import re
from pathlib import Path
from typing import Any

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


@pytest.mark.ray
@pytest.mark.learning
@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_first_block_of_a_page_learns(page):
    text = (Path(__file__).parents[2] / page).read_text()
    block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
    assert block is not None
    names: dict[str, Any] = {}
    exec(block.group(1), names)
    algo = names.get("algo") or names["config"].build_algo()
    means = []
    while not means or (means[-1] < 0.9 and len(means) < 40):
        means.append(algo.train()["env_runners"]["episode_return_mean"])
    algo.stop()
    assert means[-1] >= 0.9, means
