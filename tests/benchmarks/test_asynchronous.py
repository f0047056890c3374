"""APPO and IMPALA beside PPO: short iterations."""

from types import SimpleNamespace

import pytest

from benchmarks import asynchronous
from benchmarks.harness import CorrectnessError


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.parametrize("case", ["appo-1x1", "impala-2x1"])
def test_steps_a_second(case):
    record = asynchronous.compare(case, steps=1024, min_runs=1, seconds=2.0)
    assert (record["case"], record["peer"]) == (case, f"ppo-{case.split('-')[1]}")
    assert record["ratio"] == pytest.approx(record["ours"] / record["theirs"])


def test_an_iteration_that_trains_nothing_is_refused():
    idle = SimpleNamespace(
        config=SimpleNamespace(algo_class=int),
        metrics=SimpleNamespace(peek=lambda key, default: default),
        train=lambda: None,
    )
    with pytest.raises(CorrectnessError, match="int trained no step"):
        asynchronous.trained_a_second(idle)
