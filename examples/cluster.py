"""PPO on a cluster: EnvRunners on some machines, Learners on others, checkpoints on a shared disk.

What it shows
-------------
- `runtime_env` with `py_modules`: this package travels to the machines, which need not have it.
- Custom resources say which machine runs what. Each has as many of `runner` and `learner` as it was
  started with, see [GPUs and clusters](docs/how-to/gpus-and-clusters.md#start-the-machines).
- A machine with EnvRunners dies: the training goes on with the others, and with new ones where a
  machine has a `runner` to spare.
- A machine with a Learner dies: the training ends with an error. The same command again goes on
  from the last checkpoint, once there are as many `learner`s as before.

How to run it
-------------
    ray start --head --resources='{"learner": 2, "runner": 2}'    # or several machines
    python -m examples.cluster --storage runs/cluster
    ray stop

Results to expect
-----------------
Those of `examples.two_learners`, whose config this is. What dies costs the iteration under way.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.utils.metrics import ENV_RUNNER_RESULTS, NUM_ENV_STEPS_SAMPLED_LIFETIME

import connectors
import rlmodules
from examples import two_learners
from examples.run_dir import RunDir
from examples.runner import Config, RecentMeans, make_parser

RUNTIME_ENV = {"py_modules": [connectors, rlmodules]}
MEAN_RETURN = "episode_return_mean"


def build_config(args: argparse.Namespace) -> AlgorithmConfig:
    """The config of `examples.two_learners`, with a place for each process."""
    return place(two_learners.build_config(args), args)


def place(config: Config, args: argparse.Namespace) -> Config:
    """Sets which machines run what, and how long an iteration waits for those that are gone."""
    config.env_runners(custom_resources_per_env_runner={"runner": 1})
    config.learners(custom_resources_per_learner={"learner": 1})
    # An iteration waits so long for each EnvRunner that has no machine. RLlib's default is 30 s.
    config.fault_tolerance(env_runner_health_probe_timeout_s=args.probe_timeout)
    return config


def train(config: AlgorithmConfig, args: argparse.Namespace) -> bool:
    """Trains, with a checkpoint an iteration, from the last one if there is one.

    Returns:
        Whether the mean return was reached.
    """
    run = RunDir(Path(args.storage))
    run.checkpoints.mkdir(parents=True, exist_ok=True)
    last = run.last_checkpoint()
    algo = Algorithm.from_checkpoint(str(last)) if last else config.build_algo()
    print(f"from {last}" if last else "from the beginning", flush=True)
    recent = RecentMeans([MEAN_RETURN])
    env_steps, mean = 0, float("nan")
    while (
        not mean >= args.stop_reward
        and env_steps < args.stop_timesteps
        and algo.training_iteration < args.stop_iters
    ):
        result = algo.train()
        env_steps = int(result[NUM_ENV_STEPS_SAMPLED_LIFETIME])
        run.save(algo, {"iteration": algo.training_iteration, "env_steps": env_steps})
        recent.add(result[ENV_RUNNER_RESULTS])
        mean = recent.means()[MEAN_RETURN]
        runners: Any = algo.env_runner_group
        print(
            f"iteration {algo.training_iteration:>4}   {env_steps:>9,} steps   return {mean:6.2f}"
            f"   EnvRunners {runners.num_healthy_remote_workers()}",
            flush=True,
        )
    algo.stop()
    return mean >= args.stop_reward


def parse(argv: Sequence[str] | None = None) -> argparse.Namespace:
    """The command line."""
    parser = make_parser(__doc__, num_env_runners=2, num_learners=2, stop_timesteps=200_000)
    parser.add_argument("--address", default="auto", help="the cluster's; auto: that of this node")
    parser.add_argument("--storage", required=True, help="a folder that all machines see")
    parser.add_argument("--probe-timeout", type=float, default=1.0, help="seconds")
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 if the return was not reached.
    """
    args = parse(argv)
    torch.set_num_threads(args.num_threads)
    ray.init(args.address, runtime_env=RUNTIME_ENV, log_to_driver=False)
    return 0 if train(build_config(args), args) else 1


if __name__ == "__main__":
    sys.exit(main())
