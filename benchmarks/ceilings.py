"""The most that a policy can earn in tasks whose chances are known.

    python -m benchmarks ceilings [--json FILE] [--episodes 20000]

HigherLower: the exact optimum, that of a player who counts all cards. An action changes nothing but
its own reward, so guessing the likelier side at each card is optimal; what is averaged is what that
guess earns on average.

MultiarmedBandit: a policy that pulls the arm of the highest index for the pulls that are left, the
strongest that we know of and can compute, though no proven optimum; and, out of reach for all, what
the best arm earns from the first pull on.

NoisyPositionOnlyCartPole: a player who knows the pole's physics, estimates its state by a Kalman
filter and pushes as if the estimate were right. Close to the best there is, though not proven.

Cases are named `TASK KIND`. The peer is the best published return, and `error` in the results is
the standard error of our mean over episodes.
"""

import argparse

import numpy as np
import torch
from torch import Tensor

from benchmarks.harness import Record, machine_info, record
from benchmarks.pole_filter import NOISE, noisy_pole
from benchmarks.popgym_scores import PUBLISHED

RANKS, SUITS = 13, 4
DECKS = {"HigherLowerEasy": 1, "HigherLowerMedium": 2, "HigherLowerHard": 3}
# Arms and pulls.
BANDITS = {
    "MultiarmedBanditEasy": (10, 200),
    "MultiarmedBanditMedium": (20, 400),
    "MultiarmedBanditHard": (30, 600),
}
OPTIMUM, INDEX, BEST_ARM = "optimum", "index policy", "best arm known"
FILTER = "Kalman filter"
TASKS = [*DECKS, *BANDITS, *NOISE]
# Sure payoffs that an arm is compared with: its index is known to half the distance of two.
NUM_PAYOFFS = 200
PAYOFFS_AT_ONCE = 20


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--episodes", type=int, default=20_000, help="(default: %(default)s)")
    parser.add_argument("--tasks", nargs="+", choices=TASKS, metavar="TASK")


def run(args: argparse.Namespace) -> list[Record]:
    """Computes the ceilings of all tasks: two minutes on two cores, most for the largest bandit."""
    records = []
    for task in args.tasks or TASKS:
        if task in DECKS:
            found = {OPTIMUM: higher_lower(DECKS[task], args.episodes)}
        elif task in NOISE:
            found = {FILTER: noisy_pole(NOISE[task], args.episodes)}
        else:
            arms, pulls = BANDITS[task]
            found = {
                INDEX: bandit(arms, pulls, args.episodes),
                BEST_ARM: np.full(1, 2 * arms / (arms + 1) - 1),
            }
        records += [_record(task, kind, returns) for kind, returns in found.items()]
    return records


def higher_lower(num_decks: int, episodes: int) -> np.ndarray:
    """What the best guesses earn on average, for each of some shuffles of the cards.

    Args:
        num_decks: Decks of 52 cards.
        episodes: Shuffles.

    Returns:
        Returns `(episodes,)`.
    """
    deck = np.tile(np.arange(RANKS), SUITS * num_decks)
    cards = np.random.default_rng(0).permuted(np.tile(deck, (episodes, 1)), axis=1)
    left = np.full((episodes, RANKS), SUITS * num_decks)
    earned = np.zeros(episodes)
    ranks = np.arange(RANKS)
    for shown in cards.T[:-1, :, None]:
        np.put_along_axis(left, shown, np.take_along_axis(left, shown, 1) - 1, 1)
        higher, lower = (left * (ranks > shown)).sum(1), (left * (ranks < shown)).sum(1)
        earned += np.abs(higher - lower) / left.sum(1)
    return earned / len(deck)


def bandit(arms: int, pulls: int, episodes: int) -> np.ndarray:
    """What the index policy earns.

    Args:
        arms: Arms; how often each pays is uniform between 0 and 1.
        pulls: Pulls an episode. One earns 1 or -1, divided by `pulls`.
        episodes: Episodes.

    Returns:
        Returns `(episodes,)`.
    """
    index = arm_indices(pulls)
    generator = torch.Generator().manual_seed(0)
    chances = torch.rand(episodes, arms, generator=generator)
    paid = torch.zeros(2, episodes, arms, dtype=torch.int64)
    earned = torch.zeros(episodes)
    rows = torch.arange(episodes)
    for left in range(pulls, 0, -1):
        # Any of the arms of equal index.
        ties = 1e-6 * torch.rand(episodes, arms, generator=generator)
        arm = (index[left - 1][paid[0], paid[1]] + ties).argmax(1)
        success = torch.rand(episodes, generator=generator) < chances[rows, arm]
        paid[1 - success.long(), rows, arm] += 1
        earned += success.float() * 2 - 1
    return (earned / pulls).numpy()


def arm_indices(pulls: int) -> Tensor:
    """How much a sure payoff a pull has to be to be as good as an arm, for the pulls left.

    Backward induction over the pulls left, for many payoffs at once: the arm's value where one may
    change to the payoff for good at any time. The index is the payoff at which that stops to be
    worth more. With an unbounded discounted future instead it is Gittins' index.

    Args:
        pulls: Pulls an episode.

    Returns:
        `(pulls, pulls, pulls)`: by pulls left minus one, times an arm has paid and has not.

    References:
        Lattimore 2016, https://arxiv.org/abs/1511.06014: the same index for a finite horizon.
    """
    # float16: the largest table would take 1 GB, and the payoffs lie five steps of it apart.
    index = torch.zeros(pulls, pulls, pulls, dtype=torch.float16)
    counts = torch.arange(pulls)
    # How often an arm will pay, from a uniform prior.
    mean = (counts[:, None] + 1) / (counts[:, None] + counts + 2)
    payoffs = (torch.arange(NUM_PAYOFFS) + 0.5) / NUM_PAYOFFS
    for some in payoffs.split(PAYOFFS_AT_ONCE):
        some = some.view(-1, 1, 1)
        value = torch.zeros(len(some), pulls + 1, pulls + 1)
        for left in range(1, pulls + 1):
            # No more outcomes have been seen than pulls are over.
            seen = pulls - left + 1
            p = mean[:seen, :seen]
            going_on = p * (1 + value[:, 1 : seen + 1, :seen])
            going_on += (1 - p) * value[:, :seen, 1 : seen + 1]
            index[left - 1, :seen, :seen] += (going_on > left * some).sum(0) / NUM_PAYOFFS
            value[:, :seen, :seen] = going_on.maximum(left * some)
    return index


def _record(task: str, kind: str, returns: np.ndarray) -> Record:
    return record(
        benchmark="ceilings",
        case=f"{task} {kind}",
        peer="published",
        metric="return",
        ours=[float(returns.mean())],
        theirs=[PUBLISHED[task]],
        unit="",
        machine=machine_info(),
        higher_is_better=True,
        task=task,
        kind=kind,
        error=float(returns.std() / np.sqrt(len(returns))),
    )
