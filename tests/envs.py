"""Environments that tests train on."""

import gymnasium as gym
import numpy as np
from ray.rllib.env.multi_agent_env import MultiAgentEnv


class RandomObservations(gym.Env):
    """Random numbers in episodes of 3 to 40 steps; the reward depends on the action.

    Config:
        action_space: Defaults to `Discrete(2)`.
        truncate: Whether episodes end truncated instead of terminated.
        lengths: Numbers of steps to draw from, in place of 3 to 40.
    """

    observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)

    def __init__(self, config=None):
        super().__init__()
        config = dict(config or {})
        self.action_space = config.get("action_space", gym.spaces.Discrete(2))
        self.truncate = config.get("truncate", False)
        self.lengths = config.get("lengths", range(3, 41))
        self.steps_left = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps_left = self.lengths[int(self.np_random.integers(len(self.lengths)))]
        return self._observation(), {}

    def step(self, action):
        self.steps_left -= 1
        over = self.steps_left == 0
        reward = float(np.mean(action))
        return self._observation(), reward, over and not self.truncate, over and self.truncate, {}

    def _observation(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


class RandomAgents(MultiAgentEnv):
    """Several agents that see random numbers, in episodes of 3 to 40 steps.

    Config:
        schedule: When which agent acts. "together"; "turns", one after the other; "rates", agent
            k every k + 1 steps; "lives", each agent appears and dies at random times, terminated
            or truncated.
        num_agents: Named "a0", "a1" and so on.
        truncate: Whether episodes end truncated instead of terminated.
        lengths: Numbers of steps of an episode to draw from, in place of 3 to 40.
        action_spaces: By agent; `Discrete(2)` for all others.
        fails_at: Step of the environment's life at which it raises, once.
    """

    def __init__(self, config=None):
        super().__init__()
        config = dict(config or {})
        self.schedule = config.get("schedule", "together")
        self.truncate = config.get("truncate", False)
        self.fails_at = config.get("fails_at")
        self.lengths = config.get("lengths", range(3, 41))
        self.possible_agents = [f"a{k}" for k in range(config.get("num_agents", 3))]
        spaces = config.get("action_spaces", {})
        self.observation_spaces = {
            agent: gym.spaces.Box(-1.0, 1.0, (3,), np.float32) for agent in self.possible_agents
        }
        self.action_spaces = {
            agent: spaces.get(agent, gym.spaces.Discrete(2)) for agent in self.possible_agents
        }
        self.rng = np.random.default_rng(config.get("seed", 0))
        self.num_steps = 0

    def reset(self, *, seed=None, options=None):
        self.t = 0
        self.length = self.lengths[int(self.rng.integers(len(self.lengths)))]
        self.births = dict.fromkeys(self.possible_agents, 0)
        self.deaths = dict.fromkeys(self.possible_agents, self.length)
        if self.schedule == "lives":
            for agent in self.possible_agents[1:]:
                self.births[agent] = int(self.rng.integers(0, self.length))
                self.deaths[agent] = self.births[agent] + int(self.rng.integers(1, 12))
        self.agents = [agent for agent in self.possible_agents if self.births[agent] == 0]
        return {agent: self._see() for agent in self.agents if self._sees(agent)}, {}

    def step(self, actions):
        self.t += 1
        self.num_steps += 1
        if self.num_steps == self.fails_at:
            raise RuntimeError("the environment broke")
        over = self.t == self.length
        dead = [agent for agent in self.agents if over or self.deaths[agent] <= self.t]
        terminated = dict.fromkeys(dead, not self.truncate)
        truncated = dict.fromkeys(dead, self.truncate)
        if not over:
            terminated |= dict.fromkeys(dead, self.t % 2 == 0)
            truncated |= dict.fromkeys(dead, self.t % 2 == 1)
            self.agents = [agent for agent in self.agents if agent not in dead]
            self.agents += [agent for agent, birth in self.births.items() if birth == self.t]
        seeing = dict.fromkeys([*dead, *filter(self._sees, self.agents)])
        return (
            {agent: self._see() for agent in seeing},
            {agent: float(np.mean(actions.get(agent, 0.0))) for agent in (*actions, *seeing)},
            terminated | {"__all__": over and not self.truncate},
            truncated | {"__all__": over and self.truncate},
            {},
        )

    def _sees(self, agent):
        number = self.possible_agents.index(agent)
        if self.schedule == "turns":
            return self.t % len(self.possible_agents) == number
        if self.schedule == "rates":
            return self.t % (number + 1) == 0
        return True

    def _see(self):
        return self.rng.uniform(-1, 1, 3).astype(np.float32)


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


class RememberFirstAgents(MultiAgentEnv):
    """Two agents, each of which plays a `RememberFirst` of its own.

    Config:
        turns: Whether they act one after the other instead of together.
        game: Another class in place of `RememberFirst`.
        num_cues, length: Those of the game; the length is in an agent's own steps.
    """

    def __init__(self, config=None):
        super().__init__()
        config = dict(config or {})
        self.turns = config.pop("turns", False)
        self.possible_agents = ["a0", "a1"]
        game = config.pop("game", RememberFirst)
        self.games = {agent: game(config) for agent in self.possible_agents}
        self.observation_spaces = {a: game.observation_space for a, game in self.games.items()}
        self.action_spaces = {a: game.action_space for a, game in self.games.items()}

    def reset(self, *, seed=None, options=None):
        self.agents = list(self.possible_agents)
        seeds = {a: seed if seed is None else 2 * seed + k for k, a in enumerate(self.agents)}
        self.seen = {a: game.reset(seed=seeds[a])[0] for a, game in self.games.items()}
        return self._show(self.agents[:1] if self.turns else self.agents), {}

    def step(self, actions):
        results = {agent: self.games[agent].step(action) for agent, action in actions.items()}
        self.seen |= {agent: result[0] for agent, result in results.items()}
        ended = {agent: result[2] for agent, result in results.items()}
        self.agents = [agent for agent in self.agents if not ended.get(agent)]
        acting = [agent for agent in self.agents if not self.turns or agent not in actions]
        return (
            self._show([agent for agent in self.possible_agents if ended.get(agent)] + acting),
            {agent: result[1] for agent, result in results.items()},
            ended | {"__all__": not self.agents},
            {"__all__": False},
            {},
        )

    def _show(self, agents):
        return {agent: self.seen[agent] for agent in agents}


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
