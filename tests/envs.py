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


class RememberFirst(gym.Env):
    """The first observation names the action that the last step rewards.

    Observations are a cue, one-hot, at the first step and zeros after it; their last number is 1
    at the last step. Only the last action counts: 1 if it is the cue's, else -1.

    Config:
        num_cues: Cues, and actions. Defaults to 2.
        length: Steps of an episode. Defaults to 8.
    """

    def __init__(self, config=None):
        super().__init__()
        config = dict(config or {})
        self.num_cues = config.get("num_cues", 2)
        self.length = config.get("length", 8)
        self.observation_space = gym.spaces.Box(0.0, 1.0, (self.num_cues + 1,), np.float32)
        self.action_space = gym.spaces.Discrete(self.num_cues)
        self.cue = self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue = int(self.np_random.integers(self.num_cues))
        self.t = 0
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        over = self.t == self.length
        reward = (1.0 if action == self.cue else -1.0) if over else 0.0
        return self._observation(), reward, over, False, {}

    def _observation(self):
        observation = np.zeros(self.num_cues + 1, np.float32)
        observation[self.cue] = self.t == 0
        observation[-1] = self.t == self.length - 1
        return observation


class RememberCue(gym.Env):
    """A cue of -1 or 1 at the first step is the right action at the last one.

    Observations are the cue, 0 after the first step, and whether this is the last step. The only
    reward is the last one, minus the distance of the action from the cue: -1 on average for
    whatever a policy without memory does, up to 0 with one.

    Config:
        length: Steps of an episode. Defaults to 8.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    action_space = gym.spaces.Box(-1.0, 1.0, (1,), np.float32)

    def __init__(self, config=None):
        super().__init__()
        self.length = dict(config or {}).get("length", 8)
        self.cue = 0.0
        self.t = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.cue = float(self.np_random.choice([-1.0, 1.0]))
        self.t = 0
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        over = self.t == self.length
        reward = -abs(float(action[0]) - self.cue) if over else 0.0
        return self._observation(), reward, over, False, {}

    def _observation(self):
        cue = self.cue if self.t == 0 else 0.0
        return np.array([cue, self.t == self.length - 1], dtype=np.float32)
