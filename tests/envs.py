"""Environments that tests train on."""

import gymnasium as gym
import numpy as np


class RandomObservations(gym.Env):
    """Random numbers in episodes of 3 to 40 steps; the reward depends on the action.

    Config:
        action_space: Defaults to `Discrete(2)`.
        truncate: Whether episodes end truncated instead of terminated.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)

    def __init__(self, config=None):
        super().__init__()
        config = dict(config or {})
        self.action_space = config.get("action_space", gym.spaces.Discrete(2))
        self.truncate = config.get("truncate", False)
        self.steps_left = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps_left = int(self.np_random.integers(3, 41))
        return self._observation(), {}

    def step(self, action):
        self.steps_left -= 1
        over = self.steps_left == 0
        reward = float(np.mean(action))
        return self._observation(), reward, over and not self.truncate, over and self.truncate, {}

    def _observation(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)
