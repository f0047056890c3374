"""PPO with memory in PettingZoo environments, parallel and AEC.

What it shows
-------------
- A PettingZoo `ParallelEnv` in RLlib's `ParallelPettingZooEnv`, an `AECEnv` in its `PettingZooEnv`.
- `connect` on both: a memory for each agent, also where agents take turns, and where one leaves
  early.

A scout is shown a word at its first step and has to say it four steps later; then it leaves. What
it says is shown to a runner for a single step, who has to say the word at the end. Each gets 0.5
for the right word and -0.5 for a wrong one. Without memory both can only guess, one of four words.

How to run it
-------------
    python -m examples.pettingzoo_relay
    python -m examples.pettingzoo_relay --api aec
    python -m examples.pettingzoo_relay --run-dir relay
    python -m examples.serve_policy --run-dir relay

The last two serve what was learnt: `examples/serve_policy.py`.

Results to expect
-----------------
The return is the sum of both: 1 for two who remember, -0.5 for any two who don't. It reaches 0.9
after 45,056, 36,864 and 40,960 steps of the environment with seeds 0 to 2. Where agents take turns,
each step is one agent's, and it takes 49,152, 53,248 and 73,728: one to two minutes of a CPU core.
The exit code is 1 if 0.9 isn't reached.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gymnasium as gym
import numpy as np
from pettingzoo import AECEnv, ParallelEnv
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.wrappers.pettingzoo_env import ParallelPettingZooEnv, PettingZooEnv
from ray.tune.registry import register_env

from connectors import connect, starting_point
from examples.run_dir import RunDir
from examples.runner import apply_arguments, local_ray, make_parser, train_until
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule

AGENTS = ["scout_0", "runner_0"]


class Relay:
    """The rules of the game, in which each agent counts its own steps.

    Agents see a word, one-hot, or nothing, and in the last number whether they have to say one.

    Config:
        num_words: Words, and actions. Defaults to 4.
        length: Steps of the runner; the scout leaves in the middle. Defaults to 8.
    """

    def __init__(self, config: dict[str, Any]):
        self.num_words = config.get("num_words", 4)
        length = config.get("length", 8)
        self.asked_at = {"scout_0": length // 2, "runner_0": length - 1}
        self.observation_space = gym.spaces.Box(0.0, 1.0, (self.num_words + 1,), np.float32)
        self.action_space = gym.spaces.Discrete(self.num_words)
        self.rng = np.random.default_rng()

    def start(self, seed: int | None) -> None:
        """Draws a word."""
        if seed is not None:
            self.rng = np.random.default_rng(seed)
        self.word = int(self.rng.integers(self.num_words))
        self.steps = dict.fromkeys(AGENTS, 0)
        # The step at which an agent sees which word.
        self.shown = {"scout_0": (0, self.word)}

    def see(self, agent: str) -> np.ndarray:
        """What an agent observes."""
        seen = np.zeros(self.num_words + 1, np.float32)
        step, word = self.shown.get(agent, (None, 0))
        seen[word] = self.steps[agent] == step
        seen[-1] = self.steps[agent] == self.asked_at[agent]
        return seen

    def act(self, actions: dict[str, int]) -> dict[str, float]:
        """The rewards of agents that act at once."""
        asked = [agent for agent in actions if self.steps[agent] == self.asked_at[agent]]
        for agent in actions:
            self.steps[agent] += 1
        if "scout_0" in asked:
            self.shown["runner_0"] = (self.steps["runner_0"], int(actions["scout_0"]))
        right = {agent: actions[agent] == self.word for agent in asked}
        return {a: (0.5 if right[a] else -0.5) if a in asked else 0.0 for a in actions}

    def has_left(self, agent: str) -> bool:
        """Whether an agent has said its word."""
        return self.steps[agent] > self.asked_at[agent]


class ParallelRelay(ParallelEnv):
    """The relay for agents that act at once.

    Config:
        num_words, length: Those of `Relay`.
    """

    def __init__(self, config: dict[str, Any]):
        self.metadata = {"name": "parallel_relay_v0", "render_modes": []}
        self.game = Relay(config)
        self.possible_agents = list(AGENTS)

    def observation_space(self, agent: str) -> gym.Space:
        """The same for both."""
        return self.game.observation_space

    def action_space(self, agent: str) -> gym.Space:
        """The same for both."""
        return self.game.action_space

    def reset(self, seed: int | None = None, options: dict | None = None) -> tuple:
        """Starts a game."""
        self.game.start(seed)
        self.agents = list(AGENTS)
        return {a: self.game.see(a) for a in AGENTS}, {a: {} for a in AGENTS}

    def step(self, actions: dict[str, int]) -> tuple:
        """All that are still there act."""
        acting, rewards = self.agents, self.game.act(actions)
        ended = {agent: self.game.has_left(agent) for agent in acting}
        self.agents = [agent for agent in acting if not ended[agent]]
        observations = {agent: self.game.see(agent) for agent in acting}
        return observations, rewards, ended, dict.fromkeys(acting, False), {a: {} for a in acting}


class TurnRelay(AECEnv):
    """The relay for agents that take turns: the runner acts when it has heard the scout.

    Config:
        num_words, length: Those of `Relay`.
    """

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.metadata = {"name": "turn_relay_v0", "render_modes": []}
        self.game = Relay(config)
        self.possible_agents = list(AGENTS)

    def observation_space(self, agent: str) -> gym.Space:
        """The same for both."""
        return self.game.observation_space

    def action_space(self, agent: str) -> gym.Space:
        """The same for both."""
        return self.game.action_space

    def observe(self, agent: str) -> np.ndarray:
        """What an agent sees."""
        return self.game.see(agent)

    def reset(self, seed: int | None = None, options: dict | None = None) -> None:
        """Starts a game."""
        self.game.start(seed)
        self.agents = list(AGENTS)
        self.agent_selection = "scout_0"
        self.rewards = dict.fromkeys(AGENTS, 0.0)
        self._cumulative_rewards = dict.fromkeys(AGENTS, 0.0)
        self.terminations = dict.fromkeys(AGENTS, False)
        self.truncations = dict.fromkeys(AGENTS, False)
        self.infos = {agent: {} for agent in AGENTS}

    def step(self, action: Any) -> None:
        """The selected agent acts; one that has left is removed by the action None."""
        agent = self.agent_selection
        if self.terminations[agent]:
            self._was_dead_step(action)
            return
        self._cumulative_rewards[agent] = 0.0
        self._clear_rewards()
        self.rewards |= self.game.act({agent: action})
        self.terminations[agent] = self.game.has_left(agent)
        self.agent_selection = self.agents[(self.agents.index(agent) + 1) % len(self.agents)]
        self._accumulate_rewards()
        self._deads_step_first()


APIS = {
    "parallel": lambda config: ParallelPettingZooEnv(ParallelRelay(config)),
    "aec": lambda config: PettingZooEnv(TurnRelay(config)),
}


def policy_of(agent_id: Any, *_: Any, **__: Any) -> str:
    """RLlib's policy mapping: each agent has its own."""
    return agent_id


def build_config(args: argparse.Namespace) -> AlgorithmConfig:
    """PPO, with a module for each agent."""
    # On EnvRunners an environment is made by its name.
    env = f"{args.api}_relay"
    register_env(env, APIS[args.api])
    model_config: Any = DeepLinearAttentionConfig(max_seq_len=16)
    config = (
        starting_point(PPOConfig())
        .environment(env)
        .multi_agent(policies=set(AGENTS), policy_mapping_fn=policy_of)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=DeepLinearAttentionRLModule, model_config=model_config
            )
        )
    )
    return connect(apply_arguments(config, args))


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 if the return was not reached.
    """
    parser = make_parser(__doc__, stop_timesteps=200_000)
    parser.add_argument("--api", choices=APIS, default="parallel", help="of PettingZoo")
    parser.add_argument("--run-dir", type=Path, help="new folder for a checkpoint at the end")
    args = parser.parse_args(argv)
    config = build_config(args)
    with local_ray(args):
        training = train_until(config, args)
        if args.run_dir is not None:
            run = RunDir(args.run_dir)
            run.create({"env": "relay", "api": args.api})
            run.save(training.algo, {"iteration": training.algo.iteration})
        training.algo.stop()
    return 0 if training.reached else 1


if __name__ == "__main__":
    sys.exit(main())
