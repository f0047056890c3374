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


class SampledObservations(gym.Env):
    """Observations drawn from any space, in episodes of 1 to 20 steps, with rewards unlike 0.

    Config:
        observation_space: The space.
        action_space: Defaults to `Discrete(3)`.
        action_mask: Adds random masks of `Discrete` or `MultiDiscrete` actions, under
            `"action_mask"`, and raises on an action that is not allowed.
    """

    def __init__(self, config=None):
        super().__init__()
        config = dict(config or {})
        self.action_space = config.get("action_space", gym.spaces.Discrete(3))
        self.observation_space = observations = config["observation_space"]
        observations.seed(0)
        self.masked = bool(config.get("action_mask"))
        self.mask = None
        if self.masked:
            nvec = getattr(self.action_space, "nvec", None)
            self.sizes = [int(self.action_space.n)] if nvec is None else nvec.tolist()
            masks = gym.spaces.MultiBinary(sum(self.sizes))
            self.observation_space = gym.spaces.Dict(observations=observations, action_mask=masks)
        self._observations = observations
        self.task = 0

    def set_task(self, task):
        """Adds the task's number to all rewards."""
        self.task = task

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps_left = int(self.np_random.integers(1, 21))
        return self._observation(), {}

    def step(self, action):
        self.steps_left -= 1
        if self.masked:
            parts = np.split(self.mask, np.cumsum(self.sizes)[:-1])
            for part, component in zip(parts, np.atleast_1d(action), strict=True):
                if not part[component]:
                    raise ValueError(f"action {action} is not allowed by {self.mask}")
        reward = float(self.np_random.uniform(0.5, 1.5)) + self.task
        over = self.steps_left == 0
        return self._observation(), reward, over, False, {}

    def _observation(self):
        observation = self._observations.sample()
        if not self.masked:
            return observation
        self.mask = np.concatenate([self._allowed(size) for size in self.sizes])
        return {"observations": observation, "action_mask": self.mask}

    def _allowed(self, size):
        mask = self.np_random.integers(0, 2, size).astype(np.int8)
        mask[self.np_random.integers(size)] = 1
        return mask


class Recall(gym.Env):
    """Shows one of two cues in the first of 8 steps; the last action should name it."""

    observation_space = gym.spaces.Box(0.0, 1.0, (3,), np.float32)
    action_space = gym.spaces.Discrete(2)

    def __init__(self, config=None):
        super().__init__()

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.cue = int(self.np_random.integers(2))
        return np.eye(3, dtype=np.float32)[self.cue], {}

    def step(self, action):
        self.t += 1
        over = self.t == 8
        reward = float(over and action == self.cue)
        return np.float32([0, 0, 1]), reward, over, False, {}
