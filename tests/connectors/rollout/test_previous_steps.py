"""Previous actions and rewards: right at each step, at resets and at cuts, in all action spaces."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium.spaces.utils import flatten
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from connectors import AddPreviousActionsRewards, connect
from rlmodules import LinearAttentionConfig, LinearAttentionRLModule
from tests.connectors.helpers import BOX, DISCRETE
from tests.envs import SampledObservations

pytestmark = pytest.mark.ray

ACTIONS = {
    "discrete": gym.spaces.Discrete(3),
    "multi-discrete": gym.spaces.MultiDiscrete([2, 3]),
    "box": gym.spaces.Box(-2.0, 2.0, (2,), np.float32),
    "dict": gym.spaces.Dict(
        move=gym.spaces.Discrete(3), arm=gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    ),
    "tuple": gym.spaces.Tuple(
        (gym.spaces.Discrete(2), gym.spaces.Tuple((gym.spaces.MultiDiscrete([2, 2]),)))
    ),
}


def make_runner(action_space, observation_space=BOX, *, num_envs=3):
    config = (
        PPOConfig()
        .environment(
            SampledObservations,
            env_config={"observation_space": observation_space, "action_space": action_space},
        )
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=num_envs,
            env_to_module_connector=lambda env, spaces, device: AddPreviousActionsRewards(),
        )
        .rl_module(
            rl_module_spec=RLModuleSpec(
                LinearAttentionRLModule, model_config=LinearAttentionConfig(max_seq_len=4)
            )
        )
        .debugging(seed=0, log_sys_usage=False)
    )
    return SingleAgentEnvRunner(config=connect(config))


@pytest.mark.parametrize("kind", ACTIONS)
def test_every_step_of_episodes_that_are_cut_anywhere(kind):
    space = ACTIONS[kind]
    runner = make_runner(space)
    width = gym.spaces.utils.flatdim(space)
    # The last step of each episode's earlier part.
    last = {}
    num_continued = 0
    for num_timesteps in (40, 25, 3, 1, 60):
        for episode in runner.sample(num_timesteps=num_timesteps):
            observations = episode.get_observations()
            assert observations["previous_action"].shape == (len(episode) + 1, width)
            assert observations["previous_action"].dtype == np.float32
            assert observations["previous_reward"].shape == (len(episode) + 1, 1)
            actions = [flatten(space, episode.get_actions(t)) for t in range(len(episode))]
            rewards = [*episode.get_rewards()]
            before = (np.zeros(width), 0.0)
            if episode.t_started:
                before = last[episode.id_]
                num_continued += 1
            np.testing.assert_allclose(
                observations["previous_action"], np.stack([before[0], *actions]), rtol=1e-6
            )
            np.testing.assert_allclose(
                observations["previous_reward"][:, 0], [before[1], *rewards], rtol=1e-6
            )
            assert runner.module.observation_space.contains(episode.get_observations(-1))
            last[episode.id_] = (actions[-1], rewards[-1]) if actions else before
    assert num_continued > 3


def test_the_learner_sees_what_the_runner_saw():
    runner = make_runner(ACTIONS["dict"])
    runner.sample(num_timesteps=20)
    episodes = runner.sample(num_timesteps=30)
    expected = [episode.get_observations() for episode in episodes]
    pipeline = runner.config.build_learner_connector(BOX, ACTIONS["dict"])
    pipeline.prepend(AddOneTsToEpisodesAndTruncate())
    batch = pipeline(
        rl_module=runner.module.as_multi_rl_module(), batch={}, episodes=episodes, shared_data={}
    )["default_policy"]
    valid = torch.arange(4) < batch[Columns.SEQ_LENS][:, None]
    for key in ("observations", "previous_action", "previous_reward"):
        steps = batch[Columns.OBS][key][valid]
        np.testing.assert_array_equal(steps, np.concatenate([part[key] for part in expected]))


def test_dict_observations_get_two_keys_more():
    space = gym.spaces.Dict(a=BOX, action_mask=gym.spaces.MultiBinary(2))
    runner = make_runner(DISCRETE, space, num_envs=1)
    keys = {"a", "action_mask", "previous_action", "previous_reward"}
    assert runner.module.observation_space.keys() == keys
    assert runner.sample(num_timesteps=5)[0].get_observations(-1).keys() == keys


def test_keys_that_are_taken():
    space = gym.spaces.Dict(previous_reward=BOX)
    with pytest.raises(ValueError, match=r"adds \['previous_reward'\] to observations"):
        AddPreviousActionsRewards(space, DISCRETE)


def test_agents_with_spaces_of_their_own():
    """Agent `b` acts every second step; its reward is what it got since its last action."""
    spaces = gym.spaces.Dict(a=BOX, b=gym.spaces.Dict(x=BOX))
    actions = gym.spaces.Dict(a=DISCRETE, b=ACTIONS["box"])
    piece = AddPreviousActionsRewards(spaces, actions, multi_agent=True)
    assert piece.observation_space["a"].keys() == {
        "observations",
        "previous_action",
        "previous_reward",
    }
    assert piece.observation_space["b"]["previous_action"].shape == (2,)

    def observe(*agents):
        return {agent: spaces[agent].sample() for agent in agents}

    def act(**actions):
        episode.add_env_step(observe(*observing), actions, dict.fromkeys(("a", "b"), 0.5), infos={})
        piece(rl_module=None, batch={}, episodes=[episode], shared_data={})

    def latest(agent):
        return episode.agent_episodes[agent].get_observations(-1)

    episode = MultiAgentEpisode(observation_space=dict(spaces), action_space=dict(actions))
    episode.add_env_reset(observations=observe("a", "b"), infos={})
    piece(rl_module=None, batch={}, episodes=[episode], shared_data={})
    assert latest("a")["previous_action"].tolist() == [0, 0]
    assert latest("b").keys() == {"x", "previous_action", "previous_reward"}
    observing = ["a"]
    act(a=1, b=np.float32([0.25, -1]))
    assert latest("a")["previous_action"].tolist() == [0, 1]
    assert latest("b")["previous_action"].tolist() == [0, 0]
    episode = episode.cut(len_lookback_buffer=1)
    observing = ["a", "b"]
    act(a=0)
    assert latest("a")["previous_action"].tolist() == [1, 0]
    assert latest("b")["previous_action"].tolist() == [0.25, -1]
    assert latest("b")["previous_reward"].tolist() == [1.0]
