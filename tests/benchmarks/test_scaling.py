"""The scaling benchmark on short iterations, one run each."""

import argparse

import numpy as np
import pytest
from ray.rllib.core.columns import Columns

from benchmarks import scaling
from benchmarks.harness import CorrectnessError

STEPS = 16 * 64


def arguments(only):
    return argparse.Namespace(only=only, runs=1, steps=STEPS)


@pytest.fixture(scope="module")
def alone(_ray_session):
    trainer = scaling.Trainer(scaling.ALONE, STEPS)
    yield trainer
    trainer.stop()


@pytest.mark.ray
@pytest.mark.parametrize(
    ("case", "metrics"),
    [
        ("0x0", ["iteration", "sampling", "update"]),
        pytest.param("2x0", ["iteration", "sampling"], marks=pytest.mark.slow),
        pytest.param("0x2", ["iteration", "update"], marks=pytest.mark.slow),
    ],
)
def test_cases(alone, case, metrics):
    records = scaling.compare(case, alone, min_runs=1, seconds=0.0)
    assert [r["metric"] for r in records] == metrics
    for r in records:
        assert (r["benchmark"], r["case"], r["peer"]) == ("scaling", case, "0x0")
        assert r["unit"] == "steps/s"
        if case == scaling.ALONE:
            assert r["theirs"] is None
        else:
            # Steps a second: more is better.
            assert r["ratio"] == pytest.approx(r["ours"] / r["theirs"])


@pytest.mark.ray
def test_bytes(alone):
    (to_driver, to_learners) = scaling.bytes_a_step(alone)
    # Pickling adds to the arrays, and never much where each snapshot is written once.
    assert to_driver["theirs"] < to_driver["ours"] < 2 * to_driver["theirs"]
    assert to_learners["ours"] > to_driver["ours"]
    assert to_learners["theirs"] is None


@pytest.mark.ray
def test_arrays_are_counted_once(alone):
    episodes = alone.sample()
    num_bytes = scaling.bytes_of_arrays(episodes)
    # The same arrays again.
    assert scaling.bytes_of_arrays(episodes + episodes) == num_bytes
    logp = episodes[0].extra_model_outputs[Columns.ACTION_LOGP]
    logp.data = np.concatenate([logp.data, np.zeros(10, np.float32)])
    assert scaling.bytes_of_arrays(episodes) == num_bytes + 40


@pytest.mark.ray
def test_learners_that_differ_are_refused(alone, monkeypatch):
    sums = iter([1.0, 2.0])

    class Result:
        def get(self):
            return next(sums)

    monkeypatch.setattr(alone.algo.learner_group, "foreach_learner", lambda _: [Result()] * 2)
    with pytest.raises(CorrectnessError, match="weights differ"):
        alone.check_learners()


@pytest.mark.ray
def test_only_selects():
    assert {r["case"] for r in scaling.run(arguments("bytes"))} == {"bytes"}
