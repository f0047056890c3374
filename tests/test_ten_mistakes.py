"""What newcomers get wrong, each an error before training that says how to put it right."""

import re
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.algorithms.cql import CQLConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.registry import register_env

from connectors import MemoryMetrics, MemoryPolicy, connect
from rlmodules import GRUConfig, MemoryQRLModule, MemoryRLModule
from rlmodules.modules.checkpoints import load_module
from tests.envs import RandomObservations

pytestmark = pytest.mark.ray

SMALL: dict[str, Any] = {"max_seq_len": 8, "d_model": 8, "fcnet_hiddens": [8]}
SPACES = {
    "observation_space": gym.spaces.Box(-1.0, 1.0, (3,), np.float32),
    "action_space": gym.spaces.Discrete(2),
}


def ppo(env: Any = RandomObservations, **model_config: Any) -> Any:
    model: Any = GRUConfig(**{**SMALL, **model_config})
    return PPOConfig().environment(env).env_runners(num_env_runners=0).rl_module(model_config=model)


def module(**changed):
    config = {**SMALL, "memory": "gru"} | changed.pop("model_config", {})
    return MemoryRLModule(**{**SPACES, **changed}, model_config=config)


# Each does it wrong; the error names the setting, its value, the rule and the remedy.


def wrong_observation_space(tmp_path):
    module(observation_space=gym.spaces.Dict({"name": gym.spaces.Text(5)}))


def wrong_action_space(tmp_path):
    module(action_space=gym.spaces.Box(-1.0, 1.0, (2, 2), np.float32))


def no_connect(tmp_path):
    """PPO does without. DQN's own pipeline gives next observations in rows of their own."""
    model: Any = GRUConfig(**SMALL)
    spec = RLModuleSpec(module_class=MemoryQRLModule, model_config=model)
    algorithm = (
        DQNConfig()
        .environment(RandomObservations)
        .env_runners(num_env_runners=0)
        .rl_module(rl_module_spec=spec, model_config={"max_seq_len": 8})
        .training(
            num_steps_sampled_before_learning_starts=10,
            replay_buffer_config={"type": "EpisodeReplayBuffer"},
        )
        .build_algo()
    )
    try:
        for _ in range(20):
            algorithm.train()
    finally:
        algorithm.stop()


def metrics_without_connect(tmp_path):
    ppo().callbacks(MemoryMetrics).build_algo()


def changed_after_connect(tmp_path):
    connect(ppo()).learners(learner_connector=lambda *_: []).build_algo()


def wrong_type(tmp_path):
    ppo(max_seq_len="8")


def misspelt_key(tmp_path):
    ppo(d_modle=16)


def misspelt_key_of_a_dict(tmp_path):
    connect(ppo().rl_module(model_config={**SMALL, "memory": "gru", "d_modle": 16}))


def num_learners(value):
    return lambda tmp_path: connect(ppo().learners(num_learners=value))


def wrong_path(tmp_path):
    MemoryPolicy.from_checkpoint(tmp_path / "runs")


def other_width(tmp_path):
    path = module().save_to_path(tmp_path / "saved")
    module(model_config={"d_model": 16}).restore_from_path(path)


def misspelt_env(tmp_path):
    connect(ppo(env="CartPol-v1"))


def unknown_package(tmp_path):
    connect(ppo(env="no_such_package:CartPole-v1"))


def unsupported_algorithm(tmp_path):
    connect(CQLConfig().environment(RandomObservations))


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        (wrong_observation_space, ["at ['name'] is Text", "not supported", "observation wrapper"]),
        (
            wrong_action_space,
            ["is Box(-1.0, 1.0, (2, 2)", "Use a Box of shape (4,)", "action wrapper"],
        ),
        (no_connect, ["`NEXT_OBS`", "cannot be learned", "Call `connect(config)` after"]),
        (metrics_without_connect, ["`callbacks`", "`MemoryMetrics`", "Call `connect(config)`"]),
        (changed_after_connect, ["`learner_connector`", "must be", "Call `connect(config)` after"]),
        (wrong_type, ["`max_seq_len` is '8'", "must be an integer of at least 1"]),
        (misspelt_key, ["`d_modle` is no setting of GRUConfig", "Did you mean `d_model`?"]),
        (misspelt_key_of_a_dict, ["`d_modle` is no setting of GRU", "Did you mean `d_model`?"]),
        *(
            (num_learners(value), [f"`num_learners` is {value!r}", "at least 0", "config.learners"])
            for value in (-1, 1.5, "2", True)
        ),
        (wrong_path, ["`path` is '", "runs', where there is no checkpoint", "Give the folder"]),
        (other_width, ["`d_model` is 8 in the checkpoint and 16 here", "Build the module with"]),
        (misspelt_env, ["`env` is 'CartPol-v1'", "Did you mean: `CartPole`", "register_env`"]),
        (unknown_package, ["`env` is 'no_such_package:", "No module named", "`package:ID`"]),
        (unsupported_algorithm, ["`connect` got a `CQLConfig`", "count padding", "Use SAC"]),
    ],
)
def test_the_error_says_what_to_do(tmp_path, mistake, said):
    with pytest.raises(ValueError, match=re.escape(said[0])) as caught:
        mistake(tmp_path)
    for part in said:
        assert part in str(caught.value)


@pytest.mark.parametrize("env", ["CartPole-v1", "CartPole", "named_here", RandomObservations])
def test_environments_that_are_known(env):
    register_env("named_here", RandomObservations)
    connect(ppo(env=env))


def test_a_right_checkpoint_loads(tmp_path):
    module().save_to_path(tmp_path / "saved")
    loaded: Any = load_module(tmp_path / "saved")
    assert loaded.memory_config.d_model == 8
