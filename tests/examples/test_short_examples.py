"""The short examples: each runs, and each learns what it says."""

import ast
from pathlib import Path

import numpy as np
import pytest
import torch

from examples import (
    asynchronous,
    images,
    meta_rl_bandit,
    multi_agent,
    off_policy,
    own_memory,
    stateless_cartpole,
    two_learners,
)
from examples.meta_rl_bandit import TrialBandit
from examples.runner import MIN_EPISODES, RecentMeans, make_parser, train_until

# Examples whose iterations take some seconds at most, with arguments.
QUICK = {
    "own memory": (own_memory,),
    "StatelessCartPole": (stateless_cartpole,),
    "bandit": (meta_rl_bandit,),
    "images": (images,),
    "DQN": (off_policy,),
    "SAC": (off_policy, "--algo", "SAC"),
    "IMPALA": (asynchronous,),
    "APPO": (asynchronous, "--algo", "APPO"),
}
LONG = {"agents": (multi_agent,), "Learners": (two_learners,)}


@pytest.mark.ray
@pytest.mark.parametrize("name", QUICK)
def test_runs(name, capsys):
    """For an iteration, at the end of which the goal is not reached."""
    example, *arguments = QUICK[name]
    settings = ["--stop-iters", "1", "--num-threads", str(torch.get_num_threads())]
    assert example.main([*arguments, *settings]) == 1
    *_, iteration, outcome = capsys.readouterr().out.splitlines()
    assert iteration.startswith("iteration    1")
    assert outcome.endswith("NOT reached")


@pytest.mark.slow
@pytest.mark.ray
@pytest.mark.parametrize("name", LONG)
def test_trains_in_small(name):
    """On a part of an iteration's batch."""
    (example,) = LONG[name]
    num_learners = ["--num-learners", "2"] if name == "Learners" else []
    args = make_parser("").parse_args(
        ["--num-envs-per-env-runner", "2", "--stop-iters", "1", *num_learners]
    )
    config = example.build_config(args)
    config.training(train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1)
    training = train_until(config, args, getattr(example, "RETURNS", ["episode_return_mean"]))
    training.algo.stop()
    assert not training.reached
    assert np.isfinite(list(training.means.values())).all()


@pytest.mark.ray
@pytest.mark.learning
@pytest.mark.parametrize("seed", ["0", "1", "2"])
@pytest.mark.parametrize("name", [*QUICK, *LONG])
def test_learns(name, seed):
    example, *arguments = (QUICK | LONG)[name]
    assert example.main([*arguments, "--seed", seed]) == 0


def test_a_memory_in_60_lines():
    """Docstrings and empty lines included."""
    source = Path(own_memory.__file__).read_text()
    classes = {
        node.name: node.end_lineno - min(n.lineno for n in (node, *node.decorator_list)) + 1
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef)
    }
    names = ("MinimalGRU", "MinimalGRUConfig", "MinimalGRURLModule")
    assert sum(classes[name] for name in names) <= 60


def test_the_bandit_keeps_its_arm_for_a_trial():
    env = TrialBandit({"num_arms": 1000, "num_pulls": 3, "episodes_per_trial": 2})
    best = []
    for episode in range(6):
        env.reset(seed=episode)
        best.append(env.best)
        for t in range(3):
            _, _, over, _, info = env.step(env.best)
            assert over == (t == 2)
            assert info["episode_of_trial"] == episode % 2 + 1
    assert best[::2] == best[1::2]
    assert len(set(best)) == 3

    # As when an EnvRunner resets all its environments.
    env.reset(seed=6)
    env.step(0)
    env.reset(seed=7)
    assert env.best not in best
    assert [env.step(0)[4]["episode_of_trial"] for _ in range(3)] == [1, 1, 1]


def test_the_bandit_pays():
    env = TrialBandit({"num_arms": 2, "num_pulls": 1, "episodes_per_trial": 1000})
    env.reset(seed=0)
    for arm, probability in ((env.best, 0.9), (1 - env.best, 0.1)):
        rewards = []
        for _ in range(400):
            env.reset()
            rewards.append(env.step(arm)[1])
        assert np.mean(rewards) == pytest.approx(probability, abs=0.05)


def test_means_over_the_last_hundred_episodes():
    recent = RecentMeans(["a"])
    assert np.isnan(recent.means()["a"])
    recent.add({"num_episodes": 60, "a": 1.0})
    recent.add({})
    recent.add({"num_episodes": np.nan, "a": np.nan})
    assert recent.num_episodes == 60 < MIN_EPISODES
    recent.add({"num_episodes": 60, "a": 2.0})
    assert recent.means()["a"] == pytest.approx(1.5)
    recent.add({"num_episodes": 50, "a": 4.0})
    # Without the first 60 there are still 110.
    assert recent.num_episodes == 110
    assert recent.means()["a"] == pytest.approx((60 * 2 + 50 * 4) / 110)
