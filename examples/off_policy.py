"""DQN and SAC with memory: a T-maze, whose right turn is shown at its entrance only.

What it shows
-------------
- `MemoryQRLModule` with DQN for discrete actions, `MemorySACRLModule`
  with SAC for continuous ones; the model's config is the same.
- `connect` puts a buffer of sequences in the place of RLlib's, with exact states for any slice.

The agent walks along a corridor of `--length` steps. At its entrance it sees which way to turn at
the end, and nothing afterwards. Without memory the mean return is 0 at best.

How to run it
-------------
    python -m examples.off_policy                 # DQN
    python -m examples.off_policy --algo SAC
    python -m examples.off_policy --length 20

Results to expect
-----------------
DQN reaches a mean return of 0.9 after 10,240, 10,240 and 11,264 steps with seeds 0 to 2, SAC after
20,480, 21,504 and 22,528: ten and twenty seconds on a free CPU core.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect, starting_point
from examples.runner import apply_arguments, make_parser, run
from rlmodules import (
    DeepLinearAttentionConfig,
    MemoryQRLModule,
    MemorySACRLModule,
)


class TMaze(gym.Env):
    """A corridor with a fork at its end.

    Observations are the right turn, -1 or 1 at the entrance and 0 after it, and whether this is the
    fork. Discrete actions turn left or right there, which earns -1 or 1. A continuous action is a
    direction between -1 and 1; its distance from the right one is subtracted from 1.

    Config:
        length: Steps from entrance to fork. Defaults to 10.
        continuous: Whether actions are. Defaults to False.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)

    def __init__(self, config: dict[str, Any] | None = None):
        super().__init__()
        config = config or {}
        self.length = config.get("length", 10)
        self.continuous = config.get("continuous", False)
        directions = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)
        self.action_space = directions if self.continuous else gym.spaces.Discrete(2)
        self.turn = self.t = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """At the entrance."""
        super().reset(seed=seed)
        self.turn = int(self.np_random.choice([-1, 1]))
        self.t = 0
        return np.array([self.turn, 0], np.float32), {}

    def step(self, action: Any) -> tuple:
        """One step on, or the turn."""
        fork = self.t == self.length
        self.t += 1
        reward = 0.0
        if fork:
            direction = float(action[0]) if self.continuous else 2 * int(action) - 1
            reward = 1.0 - abs(direction - self.turn)
        observation = np.array([0, self.t == self.length], np.float32)
        return observation, reward, fork, False, {}


def build_config(args: argparse.Namespace) -> AlgorithmConfig:
    """The config of either algorithm."""
    model_config: Any = DeepLinearAttentionConfig(
        max_seq_len=args.length + 2,  # an episode, and the slot of the observation after it
        d_model=32,
        num_heads=2,
        feedforward_dim=64,
        num_layers=1,
        fcnet_hiddens=[32],
        head_fcnet_hiddens=[32],
    )
    config: Any
    if args.algo == "SAC":
        config = starting_point(SACConfig())
        module_class: Any = MemorySACRLModule
    else:
        config = starting_point(DQNConfig()).training(num_steps_sampled_before_learning_starts=500)
        module_class = MemoryQRLModule
    config.environment(TMaze, env_config={"length": args.length, "continuous": args.algo == "SAC"})
    config.rl_module(
        rl_module_spec=RLModuleSpec(module_class=module_class, model_config=model_config)
    )
    config.training(replay_buffer_config={"capacity": 20_000})
    config.reporting(min_sample_timesteps_per_iteration=1000, min_time_s_per_iteration=0)
    apply_arguments(config, args).env_runners(rollout_fragment_length=8)
    return connect(config)


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 if the return was not reached.
    """
    parser = make_parser(__doc__, num_envs_per_env_runner=8, stop_timesteps=100_000)
    parser.add_argument("--algo", choices=("DQN", "SAC"), default="DQN")
    parser.add_argument("--length", type=int, default=10, help="steps from entrance to fork")
    args = parser.parse_args(argv)
    return run(build_config(args), args)


if __name__ == "__main__":
    sys.exit(main())
