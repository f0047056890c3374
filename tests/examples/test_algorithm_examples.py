"""The examples of algorithms and set-ups: each runs, and each learns what it says."""

import math

import pytest

from examples import images, multi_agent, off_policy, two_learners
from examples.runner import make_parser, train_until

pytestmark = pytest.mark.ray


@pytest.mark.parametrize(
    ("example", "arguments"),
    [(images, []), (off_policy, []), (off_policy, ["--algo", "SAC"])],
    ids=["images", "DQN", "SAC"],
)
def test_runs(example, arguments, capsys):
    """For an iteration, at the end of which the goal is not reached."""
    assert example.main([*arguments, "--stop-iters", "1", "--num-threads", "2"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("iteration    1")
    assert last == "episode_return_mean of 0.9: NOT reached"


@pytest.mark.parametrize(
    ("example", "num_learners"), [(multi_agent, 0), (two_learners, 2)], ids=["agents", "Learners"]
)
def test_trains_in_small(example, num_learners):
    """Steps enough for one episode; the whole batch of an iteration would take long."""
    args = make_parser("").parse_args(
        ["--num-envs-per-env-runner", "2", "--stop-iters", "1", "--num-learners", str(num_learners)]
    )
    config = example.build_config(args)
    config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1)
    metrics = getattr(example, "RETURNS", ["episode_return_mean"])
    training = train_until(config, args, metrics)
    try:
        assert not training.reached
        assert all(math.isfinite(mean) for mean in training.means.values())
    finally:
        training.algo.stop()


@pytest.mark.learning
@pytest.mark.parametrize("seed", ["0", "1", "2"])
@pytest.mark.parametrize(
    ("example", "arguments"),
    [
        (images, []),
        (multi_agent, []),
        (off_policy, []),
        (off_policy, ["--algo", "SAC"]),
        (two_learners, []),
    ],
    ids=["images", "agents", "DQN", "SAC", "Learners"],
)
def test_learns(example, arguments, seed):
    assert example.main([*arguments, "--seed", seed]) == 0
