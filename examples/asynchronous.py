"""IMPALA and APPO with memory: POPGym's RepeatPreviousEasy, sampled while the Learner learns.

What it shows
-------------
- The same module as for PPO; `connect` gives the algorithm the Learner that knows rows and states.
- Each row is corrected for the age of the policy that sampled it, V-trace, whichever way memory and
  rows are cut.

A card's suit has to be named four steps after it was shown. Without memory the mean return is -0.5.

How to run it
-------------
    python -m examples.asynchronous                 # IMPALA
    python -m examples.asynchronous --algo APPO

Results to expect
-----------------
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect, starting_point
from examples.runner import apply_arguments, make_parser, run
from rlmodules import DeepLinearAttentionConfig, MemoryRLModule

ALGORITHMS: dict[str, type[IMPALAConfig]] = {"IMPALA": IMPALAConfig, "APPO": APPOConfig}


def build_config(args: argparse.Namespace) -> IMPALAConfig:
    """The config of either algorithm."""
    # A whole episode, and the step that RLlib appends.
    model_config: Any = DeepLinearAttentionConfig(max_seq_len=52)
    config = (
        starting_point(ALGORITHMS[args.algo]())
        .environment("popgym:popgym-RepeatPreviousEasy-v0")
        # An action changes nothing but its own reward.
        .training(gamma=0.5)
        .rl_module(
            rl_module_spec=RLModuleSpec(module_class=MemoryRLModule, model_config=model_config)
        )
        .reporting(min_sample_timesteps_per_iteration=10_000, min_time_s_per_iteration=0)
    )
    return connect(apply_arguments(config, args))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 if the return was not reached.
    """
    parser = make_parser(__doc__, num_env_runners=1, stop_timesteps=1_000_000)
    parser.add_argument("--algo", choices=tuple(ALGORITHMS), default="IMPALA")
    args = parser.parse_args(argv)
    return run(build_config(args), args)


if __name__ == "__main__":
    sys.exit(main())
