"""What the short examples share: their command line, Ray, training until a return is reached."""

import argparse
import contextlib
import logging
import time
import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from typing import Any, TypeVar

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES,
)

# A mean over fewer episodes may be luck.
MIN_EPISODES = 100

Config = TypeVar("Config", bound=AlgorithmConfig)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Names defaults, and leaves the description's lines as they are."""


def make_parser(description: str | None, **defaults: Any) -> argparse.ArgumentParser:
    """A command line with RLlib's standard example arguments, to which an example adds its own.

    Args:
        description: What `--help` shows, for instance the example's docstring.
        defaults: The example's own defaults, by the arguments' names in Python.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=HelpFormatter)
    add_standard_arguments(parser)
    parser.set_defaults(**defaults)
    return parser


def add_standard_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds those of RLlib's standard example arguments that all examples have."""
    add = parser.add_argument
    add("--seed", type=int, default=0)
    add("--num-env-runners", type=int, default=0, help="0: the main process samples")
    add("--num-envs-per-env-runner", type=int, default=16)
    add("--num-learners", type=int, default=0, help="0: the main process learns")
    add("--num-gpus-per-learner", type=float, default=0)
    add(
        "--num-threads",
        type=int,
        default=1,
        help="torch's threads in the main process; a model this small hardly gains from more, and "
        "loses much where other processes want the cores",
    )
    add("--num-cpus", type=int, help="CPUs that Ray may use; None: all")
    add("--stop-reward", type=float, default=0.9, help="mean return that ends the training")
    add("--stop-timesteps", type=int, default=400_000, help="environment steps at most")
    add("--stop-iters", type=int, default=1_000, help="iterations at most")


def apply_arguments(config: Config, args: argparse.Namespace) -> Config:
    """Sets on an algorithm's config what the standard arguments say about it."""
    config.env_runners(
        num_env_runners=args.num_env_runners,
        num_envs_per_env_runner=args.num_envs_per_env_runner,
    )
    config.learners(num_learners=args.num_learners, num_gpus_per_learner=args.num_gpus_per_learner)
    config.debugging(seed=args.seed, log_level="ERROR", log_sys_usage=False)
    return config


@contextlib.contextmanager
def local_ray(args: argparse.Namespace) -> Iterator[None]:
    """Ray on this machine, unless it runs already, and stopped again."""
    torch.set_num_threads(args.num_threads)
    if ray.is_initialized():
        yield
        return
    start_ray(args.num_cpus)
    try:
        yield
    finally:
        ray.shutdown()


def start_ray(num_cpus: int | None = None) -> None:
    """Starts Ray on this machine, quietly: errors reach the terminal, warnings do not."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="gymnasium")
    ray.init(
        num_cpus=num_cpus,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
    )
    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)


@dataclass
class Training:
    """What `train_until` did.

    Attributes:
        algo: The algorithm, which the caller stops.
        reached: Whether the mean return was reached.
        means: The last means of the metrics.
        seconds: Time that training took, without building the algorithm.
    """

    algo: Algorithm
    reached: bool
    means: dict[str, float]
    seconds: float


def train_until(
    config: AlgorithmConfig,
    args: argparse.Namespace,
    metrics: Sequence[str] = (EPISODE_RETURN_MEAN,),
) -> Training:
    """Builds the algorithm and trains it until a stop criterion of the command line holds.

    Prints a line an iteration: means over the last `MIN_EPISODES` episodes or more. Those of RLlib
    2.60 are over the episodes of one iteration, in spite of `metrics_num_episodes_for_smoothing`.

    Args:
        config: The algorithm's config, `connect` included.
        args: Of these, `stop_reward`, `stop_timesteps` and `stop_iters` are used.
        metrics: Metrics of the EnvRunners to print; the first one is compared to `stop_reward`.
    """
    algo = config.build_algo()
    seconds, recent = 0.0, RecentMeans(metrics)
    while True:
        start = time.perf_counter()
        result = algo.train()
        seconds += time.perf_counter() - start
        iteration = result["training_iteration"]
        env_steps = int(result[NUM_ENV_STEPS_SAMPLED_LIFETIME])
        recent.add(result[ENV_RUNNER_RESULTS])
        values = recent.means()
        shown = "   ".join(f"{name.split('/')[-1]} {value:8.2f}" for name, value in values.items())
        print(f"iteration {iteration:>4}   {env_steps:>9,} steps   {shown}   {seconds:>6.1f} s")
        reached = recent.num_episodes >= MIN_EPISODES and values[metrics[0]] >= args.stop_reward
        if reached or env_steps >= args.stop_timesteps or iteration >= args.stop_iters:
            print(
                f"{metrics[0]} of {args.stop_reward:g}: {'reached' if reached else 'NOT reached'}"
            )
            return Training(algo, reached, values, seconds)


def run(
    config: AlgorithmConfig,
    args: argparse.Namespace,
    metrics: Sequence[str] = (EPISODE_RETURN_MEAN,),
) -> int:
    """Starts Ray and trains, see `train_until`.

    Returns:
        An exit code: 0 if the mean return was reached, else 1.
    """
    with local_ray(args):
        training = train_until(config, args, metrics)
        training.algo.stop()
    return 0 if training.reached else 1


class RecentMeans:
    """Means of metrics over the last iterations, as many as hold enough episodes.

    Args:
        metrics: The metrics' names, those of nested ones joined by slashes.
        min_episodes: Episodes that are enough.

    Attributes:
        num_episodes: Episodes that the means are over.
    """

    def __init__(self, metrics: Sequence[str], min_episodes: int = MIN_EPISODES):
        self.num_episodes = 0
        self._min_episodes = min_episodes
        self._metrics = metrics
        self._rows: deque[tuple[int, list[float]]] = deque()

    def add(self, runners: Mapping[str, Any]) -> None:
        """Adds an iteration's results of the EnvRunners."""
        # NaN where APPO and IMPALA got nothing from their EnvRunners in an iteration.
        if not runners.get(NUM_EPISODES, 0) > 0:
            return
        num_episodes = int(runners[NUM_EPISODES])
        values: list[Any] = [reduce(getitem, name.split("/"), runners) for name in self._metrics]
        self._rows.append((num_episodes, [float(value) for value in values]))
        self.num_episodes += num_episodes
        while self.num_episodes - self._rows[0][0] >= self._min_episodes:
            self.num_episodes -= self._rows.popleft()[0]

    def means(self) -> dict[str, float]:
        """The means by name; NaN before the first episode has ended."""
        totals = [sum(n * values[i] for n, values in self._rows) for i in range(len(self._metrics))]
        n = self.num_episodes or float("nan")
        return {metric: total / n for metric, total in zip(self._metrics, totals, strict=True)}
