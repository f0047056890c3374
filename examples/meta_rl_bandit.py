"""Learns to find out which arm of a bandit pays, and to use it in later episodes.

What it shows
-------------
- Trials: `connect(config, episodes_per_trial=4)` keeps a policy's state over four episodes, in
  which the bandit stays the same. Exploration is then part of the policy: its weights don't change
  in a trial.
- `AddPreviousActionsRewards`: the policy sees what it did and what that paid.
- A metric for each episode of a trial, by a callback.

How to run it
-------------
    python -m examples.meta_rl_bandit
    python -m examples.meta_rl_bandit --num-arms 2 --episodes-per-trial 2

Results to expect
-----------------
A return is the sum of 10 pulls. With four arms it is 3.0 for random arms, as for any arm that is
always the same, and 9.0 for one who knows the best arm from the start. Training stops when the
last episode of a trial returns 8 on average: after 52,000, 56,000 and 64,000 environment steps with
seeds 0 to 2, 15 to 20 seconds on a free CPU core. The returns of a trial's episodes are then 5.9,
8.2, 8.4 and 8.3 (seed 0): the policy explores in the first and exploits in the others. The exit
code is 1 if 8 isn't reached.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import AddPreviousActionsRewards, connect
from examples.runner import apply_arguments, make_parser, run
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule


class TrialBandit(gym.Env):
    """Arms that pay 1 or 0. One of them, the same for a trial of several episodes, pays often.

    That one pays with a probability of 0.9, the others with one of 0.1. An episode is `num_pulls`
    pulls; observations say how many of them are over. A reset in the middle of an episode starts a
    new trial.

    Config:
        num_arms: Arms, and actions.
        num_pulls: Steps of an episode.
        episodes_per_trial: Episodes of a trial.
    """

    observation_space = gym.spaces.Box(0.0, 1.0, (1,), np.float32)

    def __init__(self, config: dict):
        self.num_pulls = config["num_pulls"]
        self.episodes_per_trial = config["episodes_per_trial"]
        self.num_arms = config["num_arms"]
        self.action_space = gym.spaces.Discrete(self.num_arms)
        self.num_ended = self.t = self.best = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Starts an episode, and a trial where the last one is over."""
        super().reset(seed=seed)
        if 0 < self.t < self.num_pulls:
            self.num_ended = 0
        if self.num_ended % self.episodes_per_trial == 0:
            self.best = int(self.np_random.integers(self.num_arms))
        self.t = 0
        return self._observation(), {}

    def step(self, action: int) -> tuple:
        """Pulls an arm."""
        self.t += 1
        over = self.t == self.num_pulls
        number = self.num_ended % self.episodes_per_trial + 1
        self.num_ended += over
        probability = 0.9 if action == self.best else 0.1
        reward = float(self.np_random.random() < probability)
        return self._observation(), reward, over, False, {"episode_of_trial": number}

    def _observation(self) -> np.ndarray:
        return np.array([self.t / self.num_pulls], np.float32)


def log_returns(*, episode: Any, metrics_logger: Any, **_: Any) -> None:
    """RLlib callback: the return by the episode's place in its trial."""
    number = episode.get_infos(-1)["episode_of_trial"]
    metrics_logger.log_value(metric_of(number), episode.get_return(), window=100)


def metric_of(number: int) -> str:
    """The metric that holds the return of a trial's episode."""
    return f"return_{number}"


def build_config(args: argparse.Namespace) -> PPOConfig:
    """PPO with states that last for a trial, and previous actions and rewards as inputs."""
    env_config = {
        "num_arms": args.num_arms,
        "num_pulls": args.num_pulls,
        "episodes_per_trial": args.episodes_per_trial,
    }
    # A row is an episode and the step that RLlib's Learner appends to it.
    model_config: Any = DeepLinearAttentionConfig(max_seq_len=args.num_pulls + 1)
    config = (
        PPOConfig()
        .environment(TrialBandit, env_config=env_config)
        .env_runners(env_to_module_connector=lambda *_: AddPreviousActionsRewards())
        .callbacks(on_episode_end=log_returns)
        .training(
            train_batch_size_per_learner=4000,
            minibatch_size=512,
            num_epochs=6,
            lr=1e-3,
            grad_clip=0.5,
            entropy_coeff=0.01,
            # Returns reach 9: their loss must not drown that of the policy.
            vf_loss_coeff=0.1,
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
    connect(apply_arguments(config, args), episodes_per_trial=args.episodes_per_trial)
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 if the return in a trial's last episode was not reached.
    """
    defaults = {"stop_reward": 8.0, "stop_timesteps": 200_000, "num_envs_per_env_runner": 32}
    parser = make_parser(__doc__, **defaults)
    parser.add_argument("--num-arms", type=int, default=4)
    parser.add_argument("--num-pulls", type=int, default=10, help="steps of an episode")
    parser.add_argument("--episodes-per-trial", type=int, default=4)
    args = parser.parse_args(argv)
    without_memory = args.num_pulls * (0.9 + 0.1 * (args.num_arms - 1)) / args.num_arms
    print(f"random arms, or always the same: {without_memory:.2f} an episode")
    print(f"the best arm, known from the start: {args.num_pulls * 0.9:.2f}")
    metrics = [metric_of(number) for number in range(args.episodes_per_trial, 0, -1)]
    return run(build_config(args), args, metrics)


if __name__ == "__main__":
    sys.exit(main())
