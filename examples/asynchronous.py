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
With seeds 0 to 2, IMPALA reached a mean return of 0.9 after 62,016, 70,992 and 58,752 steps, APPO
after 44,880, 34,272 and 36,720: half a minute to two on two cores. How many steps a Learner passes
over before new weights reach the EnvRunner depends on the machine and what else it does, so none of
these runs is repeated exactly.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect, starting_point
from examples.runner import apply_arguments, make_parser, run
from rlmodules import DeepLinearAttentionConfig, MemoryRLModule

EPISODE_STEPS = 51
ALGORITHMS: dict[str, type[IMPALAConfig]] = {"IMPALA": IMPALAConfig, "APPO": APPOConfig}


def build_config(args: argparse.Namespace) -> AlgorithmConfig:
    """The config of either algorithm."""
    # A whole episode, and the step that RLlib appends.
    model_config: Any = DeepLinearAttentionConfig(max_seq_len=EPISODE_STEPS + 1)
    config = (
        starting_point(ALGORITHMS[args.algo]())
        .environment("popgym:popgym-RepeatPreviousEasy-v0")
        # An action changes nothing but its own reward.
        .training(gamma=0.5)
        .rl_module(
            rl_module_spec=RLModuleSpec(module_class=MemoryRLModule, model_config=model_config)
        )
        .reporting(min_time_s_per_iteration=5)
    )
    apply_arguments(config, args)
    # Fragments are V-trace's rows: here whole episodes.
    config.env_runners(rollout_fragment_length=EPISODE_STEPS)
    return connect(config)


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
