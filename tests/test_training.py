"""Each algorithm learns, in real runs, a task that only a policy with memory can.

DQN, SAC, BC and MARWIL have theirs beside the tests of their Learners.
"""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.envs import RememberFirst, RememberFirstAgents

pytestmark = [pytest.mark.ray, pytest.mark.slow]

# Without memory the mean return is 0 with two cues.
GOAL = 0.9
MAX_STEPS = 250_000
NUM_ENVS = 16
FRAGMENT = 32

PPO = {"lr": 1e-3, "minibatch_size": 128, "num_epochs": 6, "use_kl_loss": False}


@dataclass
class Case:
    config: Any
    training: dict = field(default_factory=dict)
    env: Any = RememberFirst
    env_config: dict = field(default_factory=dict)
    num_learners: int = 0


CASES = {
    "PPO": Case(PPOConfig, PPO),
    "PPO, two Learners": Case(PPOConfig, {**PPO, "minibatch_size": 64}, num_learners=2),
    "PPO, agents together": Case(PPOConfig, PPO, RememberFirstAgents),
    "PPO, agents in turns": Case(PPOConfig, PPO, RememberFirstAgents, {"turns": True}),
    "APPO": Case(APPOConfig),
    "APPO, agents together": Case(APPOConfig, {}, RememberFirstAgents),
    "IMPALA": Case(IMPALAConfig),
}


def build(case):
    spec = RLModuleSpec(
        module_class=DeepLinearAttentionRLModule,
        model_config=DeepLinearAttentionConfig(max_seq_len=8, compile=False),
    )
    batch_size = NUM_ENVS * FRAGMENT // max(1, case.num_learners)
    config = (
        case.config()
        .environment(case.env, env_config=case.env_config)
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=NUM_ENVS,
            rollout_fragment_length=FRAGMENT,
        )
        .learners(num_learners=case.num_learners)
        .training(
            train_batch_size_per_learner=batch_size,
            **{"lr": 2e-3, "entropy_coeff": 0.01, **case.training},
        )
        .rl_module(rl_module_spec=spec)
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=1000)
        .debugging(seed=1, log_sys_usage=False)
    )
    if case.env is RememberFirstAgents:
        config.multi_agent(
            policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *_, **__: f"p{agent[1:]}"
        )
    return connect(config).build_algo()


def returns(episodes):
    """Of each agent, over all episodes that have ended."""
    agents = [
        agent
        for episode in episodes
        for agent in getattr(episode, "agent_episodes", {0: episode}).values()
    ]
    return [agent.get_return() for agent in agents]


@pytest.mark.parametrize("name", CASES)
def test_learns_to_remember(name):
    """Until the sampled and the most likely actions both reach the goal."""
    algorithm = build(CASES[name])
    num_agents = 2 if CASES[name].env is RememberFirstAgents else 1
    steps, sampled, greedy = 0, -1.0, -1.0
    try:
        while steps < MAX_STEPS and greedy < GOAL:
            result = algorithm.train()
            steps = result["num_env_steps_sampled_lifetime"]
            sampled = result["env_runners"].get("episode_return_mean", -1.0) / num_agents
            if sampled >= GOAL:
                episodes = algorithm.env_runner.sample(num_episodes=64, explore=False)
                greedy = np.mean(returns(episodes))
    finally:
        algorithm.stop()
    assert sampled >= GOAL
    assert greedy >= GOAL
