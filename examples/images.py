"""PPO on images: a colour that flashes up once has to be named at the end.

What it shows
-------------
- Image observations with memory: a CNN of RLlib's in front of it (`conv_filters`), uint8 images as
  the environment gives them.
- Beside the image a number, in a `Dict` observation: each part has an encoder of its own.

The first image shows a square of one of four colours at a random place, the following ones noise.
At the last step, which the number announces, the colour has to be named. Without memory the mean
return is -0.5.

How to run it
-------------
    python -m examples.images
    python -m examples.images --num-gpus-per-learner 1

Results to expect
-----------------
A mean return of 0.9 after 43,008, 74,752 and 41,984 steps with seeds 0 to 2, a minute on a free CPU
core.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import gymnasium as gym
import numpy as np
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect
from examples.runner import apply_arguments, make_parser, run
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule

COLOURS = np.array([[255, 0, 0], [0, 255, 0], [0, 0, 255], [255, 255, 0]], np.uint8)
SIZE, SQUARE, LENGTH = 32, 12, 8


class FlashedColour(gym.Env):
    """Images of 32 x 32 pixels; the first one shows the colour that the last action has to name."""

    observation_space = gym.spaces.Dict(
        image=gym.spaces.Box(0, 255, (SIZE, SIZE, 3), np.uint8), answer_now=gym.spaces.Discrete(2)
    )
    action_space = gym.spaces.Discrete(len(COLOURS))

    def __init__(self, config: dict[str, Any] | None = None):
        super().__init__()
        self.colour = self.t = 0

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Shows the colour."""
        super().reset(seed=seed)
        self.colour = int(self.np_random.integers(len(COLOURS)))
        self.t = 0
        observation = self._observation()
        y, x = self.np_random.integers(SIZE - SQUARE, size=2)
        observation["image"][y : y + SQUARE, x : x + SQUARE] = COLOURS[self.colour]
        return observation, {}

    def step(self, action: Any) -> tuple:
        """Shows noise; the last action earns 1 if it is the colour, else -1."""
        self.t += 1
        over = self.t == LENGTH
        reward = (1.0 if action == self.colour else -1.0) if over else 0.0
        return self._observation(), reward, over, False, {}

    def _observation(self) -> dict[str, Any]:
        noise = self.np_random.integers(0, 64, (SIZE, SIZE, 3)).astype(np.uint8)
        return {"image": noise, "answer_now": int(self.t == LENGTH - 1)}


def build_config(args: argparse.Namespace) -> AlgorithmConfig:
    """The config."""
    model_config: Any = DeepLinearAttentionConfig(
        max_seq_len=LENGTH + 1,  # an episode, and the step that RLlib appends to bootstrap from
        conv_filters=[[8, 4, 4], [16, 4, 4]],
        d_model=32,
        num_heads=2,
        feedforward_dim=64,
    )
    config = (
        PPOConfig()
        .environment(FlashedColour)
        .env_runners(rollout_fragment_length=8 * LENGTH)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=DeepLinearAttentionRLModule, model_config=model_config
            )
        )
        .training(
            train_batch_size_per_learner=8 * LENGTH * 16,
            minibatch_size=256,
            num_epochs=6,
            lr=1e-3,
            entropy_coeff=0.01,
            grad_clip=0.5,
            use_kl_loss=False,
        )
    )
    return connect(apply_arguments(config, args))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 if the return was not reached.
    """
    args = make_parser(__doc__, stop_timesteps=200_000).parse_args(argv)
    return run(build_config(args), args)


if __name__ == "__main__":
    sys.exit(main())
