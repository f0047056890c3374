"""Ceilings of tasks against the environments, and against indices worked out by hand."""

import numpy as np
import pytest
import torch
from popgym import envs

from benchmarks import ceilings, pole_filter

EPISODES = 60


def played(task, policy):
    """Returns of a policy in the environment itself."""
    env = getattr(envs, task)()
    env.reset(seed=0)
    return [policy(env, env.reset()[0]) for _ in range(EPISODES)]


def assert_same_mean(ours, theirs):
    error = np.hypot(*(np.std(x) / len(x) ** 0.5 for x in (ours, theirs)))
    assert error < 0.04
    assert abs(np.mean(ours) - np.mean(theirs)) < 4 * error


def test_higher_lower_is_what_counting_earns():
    def count_cards(env, card):
        left, total, ended = np.full(ceilings.RANKS, ceilings.SUITS), 0.0, False
        while not ended:
            left[card] -= 1
            action = 0 if left[card + 1 :].sum() >= left[:card].sum() else 1
            card, reward, ended, _, _ = env.step(action)
            total += reward
        return total

    assert_same_mean(ceilings.higher_lower(1, 2000), played("HigherLowerEasy", count_cards))


def test_bandit_is_what_the_indices_earn():
    index = ceilings.arm_indices(200).numpy()

    def pull_by_index(env, _):
        counts, total = np.zeros((2, env.action_space.n), int), 0.0
        for left in range(200, 0, -1):
            arm = int(index[left - 1][counts[0], counts[1]].argmax())
            paid, reward, _, _, _ = env.step(arm)
            counts[1 - paid, arm] += 1
            total += reward
        return total

    assert_same_mean(ceilings.bandit(10, 200, 1000), played("MultiarmedBanditEasy", pull_by_index))


@pytest.mark.parametrize(
    ("left", "paid", "not_paid", "expected"),
    [
        (1, 0, 0, 1 / 2),  # The last pull is worth its chance.
        (1, 1, 0, 2 / 3),
        (2, 0, 0, 5 / 9),  # 2 x = 1/2 (1 + 2/3) + 1/2 x: after a failure the payoff is better.
        (2, 0, 1, 3 / 8),  # 2 x = 1/3 (1 + 1/2) + 2/3 x.
    ],
)
def test_indices(left, paid, not_paid, expected):
    index = ceilings.arm_indices(3)
    assert index[left - 1, paid, not_paid].item() == pytest.approx(expected, abs=0.006)


def test_an_index_grows_with_the_pulls_that_are_left():
    """What is learnt from a pull can be used for longer."""
    index = ceilings.arm_indices(30)
    assert (torch.diff(index[:, 0, 0].float()) >= 0).all()
    assert index[-1, 0, 0] > index[0, 0, 0] + 0.2


@pytest.mark.parametrize("task", pole_filter.NOISE)
def test_the_filter_sees_the_noise_of_the_environment(task):
    env = getattr(envs, task)()
    assert env.noise_sigma == pytest.approx(pole_filter.NOISE[task])
    assert env.max_episode_length == pole_filter.STEPS


def test_the_pole_moves_as_in_the_environment():
    env = envs.NoisyPositionOnlyCartPoleHard()
    env.reset(seed=0)
    env.unwrapped.state = state = np.array([0.3, -0.5, 0.1, 0.4])
    for action in (0, 1, 1, 0):
        state = pole_filter.moved(state, 2 * action - 1)
        env.step(action)
        np.testing.assert_allclose(env.unwrapped.state, state, rtol=1e-6)


def test_less_noise_earns_more():
    earned = [pole_filter.noisy_pole(sigma, 500).mean() for sigma in (1e-3, 0.1, 0.2, 0.3)]
    assert earned[0] == pytest.approx(1.0)
    assert earned == sorted(earned, reverse=True)
    assert earned[3] < 0.5
