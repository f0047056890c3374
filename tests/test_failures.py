"""A Learner that dies takes the run with it; Tune brings it back from its last checkpoint."""

import functools
import os
import signal

import pytest
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.envs import RandomObservations


def kill_learner_once(*, algorithm, result, flag, **kwargs):
    if algorithm.iteration == 2 and not flag.exists():
        flag.touch()
        algorithm.learner_group.foreach_learner(lambda _: os.kill(os.getpid(), signal.SIGKILL))


# Tune warns about its own defaults, and about the Learner that died.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.ray
@pytest.mark.slow
def test_a_killed_learner_resumes_from_the_checkpoint(tmp_path):
    flag = tmp_path / "killed"
    settings = DeepLinearAttentionConfig(max_seq_len=8, d_model=16, compile=False)
    config = (
        PPOConfig()
        .environment(RandomObservations)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=3)
        .learners(num_learners=1)
        .training(train_batch_size_per_learner=60, minibatch_size=32, num_epochs=1)
        .rl_module(rl_module_spec=RLModuleSpec(DeepLinearAttentionRLModule, model_config=settings))
        .callbacks(on_train_result=functools.partial(kill_learner_once, flag=flag))
    )
    (result,) = tune.Tuner(
        "PPO",
        param_space=connect(config),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            stop={"training_iteration": 4},
            failure_config=tune.FailureConfig(max_failures=1),
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            verbose=0,
        ),
    ).fit()
    assert flag.exists()
    assert result.error is None
    assert result.metrics["training_iteration"] == 4
    # It went on from the first iteration's checkpoint, with the steps counted until then.
    assert result.metrics["iterations_since_restore"] == 3
    assert result.metrics["num_env_steps_sampled_lifetime"] >= 4 * 60
