"""Environments of several agents that return lists where their spaces have tuples or arrays."""

import gymnasium as gym
import numpy as np
import pytest
import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env import MultiAgentEnv

from connectors import BuildTrainBatch, MemoryMultiAgentEnvRunner, connect
from connectors.agents import agents_by_module, batch_key
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule

S = gym.spaces
BOX = S.Box(-1.0, 1.0, (2,), np.float32)
SPACES = {
    "group": S.Tuple([BOX, S.Dict(x=S.Tuple([S.Discrete(3), S.MultiBinary(2)]))]),
    "flat": BOX,
}


class Lists(MultiAgentEnv):
    """Observations made of lists, as RLlib's `with_agent_groups` and plain Python return them."""

    def __init__(self, config=None):
        super().__init__()
        self.lists = (config or {})["lists"]
        self.possible_agents = self.agents = list(SPACES)
        self.observation_spaces = SPACES
        self.action_spaces = dict.fromkeys(SPACES, S.Tuple([S.Discrete(2), BOX]))
        for space in SPACES.values():
            space.seed(0)

    def reset(self, *, seed=None, options=None):
        self.t = 0
        return self.observe(), {}

    def step(self, actions):
        assert all(self.action_spaces[agent].contains(action) for agent, action in actions.items())
        self.t += 1
        over = self.t == 7
        return self.observe(), dict.fromkeys(SPACES, 1.0), {"__all__": over}, {"__all__": False}, {}

    def observe(self):
        seen = {agent: space.sample() for agent, space in SPACES.items()}
        if not self.lists:
            return seen
        (box, parts), flat = seen["group"], tuple(seen["flat"].tolist())
        return {"group": [box.tolist(), {"x": [*parts["x"]]}], "flat": flat}


def sample(lists):
    """The observations of each agent, in rows."""
    config = (
        PPOConfig()
        .environment(Lists, env_config={"lists": lists})
        .env_runners(num_env_runners=0)
        .training(train_batch_size_per_learner=32, minibatch_size=16)
        .multi_agent(
            policies=set(SPACES), policy_mapping_fn=lambda agent_id, episode, **kwargs: agent_id
        )
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=DeepLinearAttentionRLModule,
                model_config=DeepLinearAttentionConfig(
                    max_seq_len=4, d_model=8, num_heads=1, head_dim=4, compile=False
                ),
            )
        )
        .debugging(seed=0, log_sys_usage=False)
    )
    runner = MemoryMultiAgentEnvRunner(config=connect(config))
    episodes = runner.sample(num_timesteps=20)
    batch = BuildTrainBatch()(rl_module=runner.module, batch={}, episodes=episodes, shared_data={})
    runner.stop()
    agents = {id_: agents[0] for id_, agents in agents_by_module(episodes).items()}
    return {id_: batch[Columns.OBS][batch_key(agent)][0] for id_, agent in agents.items()}


@pytest.mark.ray
def test_lists_are_what_their_spaces_say():
    lists, arrays = sample(True), sample(False)
    assert isinstance(lists["group"], tuple)
    tree.map_structure(np.testing.assert_array_equal, lists, arrays)
    assert [leaf.shape[2:] for leaf in tree.flatten(lists["group"])] == [(2,), (), (2,)]
