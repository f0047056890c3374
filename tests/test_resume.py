"""A resumed run is the saved one, bit for bit, and so is its next update."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect
from rlmodules import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    MemoryQRLModule,
    MemorySACRLModule,
)
from tests.envs import RandomObservations

pytestmark = pytest.mark.ray

MODULE = "default_policy"
T = 8
SCHEDULE = [[0, 1e-2], [2000, 1e-3]]
# The coefficient grows with every update.
KL = {"use_kl_loss": True, "kl_target": 1e-9, "kl_coeff": 0.3}
TRAINING = {
    PPOConfig: {"lr": SCHEDULE, "entropy_coeff": SCHEDULE, **KL},
    APPOConfig: {
        "lr": SCHEDULE,
        "entropy_coeff": SCHEDULE,
        **KL,
        "target_network_update_freq": 1,
        "circular_buffer_num_batches": 1,
        "circular_buffer_iterations_per_batch": 1,
        "train_batch_size_per_learner": 128,
    },
    IMPALAConfig: {"lr": SCHEDULE, "entropy_coeff": SCHEDULE},
    DQNConfig: {"lr": SCHEDULE, "target_network_update_freq": 100, "tau": 0.5},
    SACConfig: {"actor_lr": SCHEDULE, "critic_lr": 1e-2, "alpha_lr": 0.1},
}
MODULES = {
    DQNConfig: MemoryQRLModule,
    SACConfig: MemorySACRLModule,
}


def build(config_class):
    continuous = config_class is SACConfig
    config = (
        config_class()
        .environment(
            RandomObservations,
            env_config={"action_space": gym.spaces.Box(-2.0, 2.0, (2,), np.float32)}
            if continuous
            else {},
        )
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=2,
            rollout_fragment_length=32,
            env_to_module_connector=lambda env, spaces, device: MeanStdFilter(),
        )
        .learners(num_learners=0)
        .training(**TRAINING[config_class])
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=MODULES.get(config_class, DeepLinearAttentionRLModule),
                model_config=DeepLinearAttentionConfig(
                    max_seq_len=T,
                    fcnet_hiddens=[8],
                    d_model=8,
                    num_heads=2,
                    head_dim=4,
                    feedforward_dim=8,
                    compile=False,
                ),
            )
        )
        .debugging(seed=0, log_sys_usage=False)
    )
    return connect(config).build_algo()


def learner_of(algorithm):
    return algorithm.learner_group._learner


def update(algorithm, episodes, num_steps):
    """One update as the Learner makes it; that of APPO and IMPALA would leave it to a thread."""
    torch.manual_seed(num_steps)
    Learner.update(
        learner_of(algorithm),
        training_data=TrainingData(episodes=copy.deepcopy(episodes)),
        timesteps={
            "num_env_steps_sampled_lifetime": num_steps,
            "num_env_steps_trained_lifetime": num_steps,
        },
    )


def assert_equal(actual, expected):
    actual, expected = (dict(tree.flatten_with_path(x)) for x in (actual, expected))
    assert actual.keys() == expected.keys()
    for path, value in expected.items():
        np.testing.assert_array_equal(np.asarray(actual[path]), np.asarray(value), str(path))


def learner_state(algorithm):
    learner = learner_of(algorithm)
    state = copy.deepcopy(learner.get_state(not_components="metrics_logger"))
    # The other metrics have times in them, and are read and emptied once an iteration.
    counter = (MODULE, "num_module_steps_trained_lifetime")
    return {**state, "counter": learner.metrics.peek(counter, default=0)}


def filter_state(algorithm):
    (piece,) = algorithm.env_runner._env_to_module[MeanStdFilter]
    return copy.deepcopy(piece.get_state())


@pytest.mark.parametrize("config_class", list(TRAINING), ids=lambda c: c.__name__)
def test_a_resumed_run_is_the_saved_one(config_class, tmp_path):
    saved = build(config_class)
    restored = None
    try:
        batches = [saved.env_runner.sample(num_timesteps=128) for _ in range(3)]
        initial = learner_state(saved)
        for batch, num_steps in zip(batches, (500, 1000), strict=False):
            update(saved, batch, num_steps)
        expected = learner_state(saved)
        restored = Algorithm.from_checkpoint(saved.save_to_path(str(tmp_path)))

        assert_equal(learner_state(restored), expected)
        assert_equal(filter_state(restored), filter_state(saved))
        sampling = restored.env_runner.module.get_state()
        weights = expected["rl_module"][MODULE]
        assert_equal(sampling, {name: weights[name] for name in sampling})
        # Nothing would be shown by what is as at the beginning.
        for name, value in expected["adapted_state"].items():
            assert value != initial["adapted_state"][name], name

        for algorithm in (saved, restored):
            update(algorithm, batches[2], 1050)
        assert_equal(learner_state(restored), learner_state(saved))
        assert any(
            not np.array_equal(value, weights[name])
            for name, value in learner_state(saved)["rl_module"][MODULE].items()
        )
    finally:
        saved.stop()
        if restored is not None:
            restored.stop()
