"""PPO on two Learners, each a process of its own, which share out the episodes.

What it shows
-------------
- `num_learners=2`: the two exchange gradients at every minibatch (DDP; gloo on CPUs, nccl on GPUs).
- Episodes that are cut between them, in the middle of a row: the state at the cut is computed from
  the nearest recorded one, so both train on exact states. The metric
  [`num_rebuilt_rows`](docs/how-to/metrics.md) counts them.
- What is different in the config: the batch size is that of one Learner, the rest is as ever.

How to run it
-------------
    python -m examples.two_learners
    python -m examples.two_learners --num-gpus-per-learner 1    # two GPUs
    python -m examples.two_learners --num-learners 4

Results to expect
-----------------
A mean return of 0.9 after 61,440 and 57,344 steps with seeds 0 and 1, in 21 seconds on two cores.
One Learner needs 57,344 steps and 22 seconds on one core with seed 0: models of this size gain
nothing from a second Learner on CPUs.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect, starting_point
from examples.popgym_setup import HYPERPARAMETERS
from examples.runner import apply_arguments, make_parser, run
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule

MAX_SEQ_LEN = 64
# Steps of an iteration, on all Learners together.
BATCH_SIZE = 4096
MINIBATCH_SIZE = 1024


def build_config(args: argparse.Namespace) -> AlgorithmConfig:
    """The config for any number of Learners; each gets its share of every batch."""
    num_learners = max(1, args.num_learners)
    model_config: Any = DeepLinearAttentionConfig(max_seq_len=MAX_SEQ_LEN)
    config = (
        starting_point(PPOConfig())
        .environment("popgym:popgym-RepeatPreviousEasy-v0")
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=DeepLinearAttentionRLModule, model_config=model_config
            )
        )
        .training(
            train_batch_size_per_learner=BATCH_SIZE // num_learners,
            **{**HYPERPARAMETERS, "minibatch_size": MINIBATCH_SIZE // num_learners},
        )
    )
    return connect(apply_arguments(config, args))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 if the return was not reached.
    """
    parser = make_parser(__doc__, num_learners=2, stop_timesteps=200_000)
    args = parser.parse_args(argv)
    return run(build_config(args), args)


if __name__ == "__main__":
    sys.exit(main())
