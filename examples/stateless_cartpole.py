"""Balances a pole without seeing velocities, with RLlib's PPO and linear attention.

What it shows
-------------
- RLlib's StatelessCartPole, CartPole without the two velocities: they follow from what the policy
  remembers of the positions.
- `DeepLinearAttentionRLModule` and `connect` in a plain PPO config.

How to run it
-------------
    python -m examples.stateless_cartpole
    python -m examples.stateless_cartpole --seed 1 --num-env-runners 2 --stop-reward 300

Results to expect
-----------------
An episode ends after 500 steps, CartPole-v1's limit. The mean return reaches 450 after 126,575,
134,671 and 132,710 environment steps with seeds 0 to 2: 40 seconds of training on a free CPU core.
RLlib's own example of an LSTM on this task stops at 300. The exit code is 1 if it isn't reached.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from gymnasium.wrappers import TimeLimit
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.envs.classes.stateless_cartpole import StatelessCartPole

from connectors import connect
from examples.runner import apply_arguments, make_parser, run
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule


class StatelessCartPole500(TimeLimit):
    """RLlib's environment with the limit of CartPole-v1; it has none of its own."""

    def __init__(self, config: dict | None = None):
        super().__init__(StatelessCartPole(), max_episode_steps=500)


def build_config(args: argparse.Namespace) -> PPOConfig:
    """PPO with a memory of two linear-attention blocks."""
    model_config: Any = DeepLinearAttentionConfig(max_seq_len=32)
    config = (
        PPOConfig()
        .environment(StatelessCartPole500)
        .training(
            # 127 steps of 16 environments: RLlib's Learner appends one, and rows are full.
            train_batch_size_per_learner=16 * 127,
            minibatch_size=512,
            num_epochs=6,
            lr=[[0, 1e-3], [200_000, 2e-4]],
            lambda_=0.95,
            grad_clip=0.5,
            # Returns reach 500: their loss is large and must not drown that of the policy.
            vf_loss_coeff=0.001,
            vf_clip_param=1e6,
            use_kl_loss=False,
            clip_param=0.2,
        )
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=DeepLinearAttentionRLModule, model_config=model_config
            )
        )
    )
    connect(apply_arguments(config, args))
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 if the return was not reached.
    """
    defaults = {"stop_reward": 450.0, "stop_timesteps": 500_000}
    args = make_parser(__doc__, **defaults).parse_args(argv)
    return run(build_config(args), args)


if __name__ == "__main__":
    sys.exit(main())
