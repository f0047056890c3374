"""Two Learners: episodes are cut to share them out, and train from exact states all the same."""

import numpy as np
import pytest
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.envs import RandomObservations


@pytest.mark.ray
def test_two_learners_rebuild_states_and_stay_equal():
    spec = RLModuleSpec(
        module_class=DeepLinearAttentionRLModule,
        model_config=DeepLinearAttentionConfig(max_seq_len=8, d_model=16, compile=False),
    )
    return (
        PPOConfig()
        .environment(RandomObservations)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=3)
        .learners(num_learners=2)
        .training(train_batch_size_per_learner=60, minibatch_size=32, num_epochs=2, lr=1e-3)
        .rl_module(rl_module_spec=spec)
        .debugging(seed=0)
    )
    algo = connect(config).build_algo()
    rebuilt = stale = 0
    for _ in range(4):
        learner = algo.train()["learners"][DEFAULT_MODULE_ID]
        rebuilt += learner["num_rows_with_rebuilt_state"]
        stale += learner["num_rows_with_stale_state"]
    states = [
        result.get()
        for result in algo.learner_group.foreach_learner(
            lambda learner: learner.module[DEFAULT_MODULE_ID].unwrapped().get_state()
        )
    ]
    algo.stop()
    assert rebuilt > 0
    assert stale == 0
    first, second = states
    assert all(np.array_equal(first[key], second[key]) for key in first)
