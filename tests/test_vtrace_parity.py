"""APPO and IMPALA see what the EnvRunner saw, in real runs of all their parts.

As in `test_parity.py`: the Learner's log-probabilities equal the recorded `ACTION_LOGP` on every
valid step. The learning rate is 0, so that this holds however late a batch is trained on.
"""

import time

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.appo import APPO, APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import MemoryAPPOTorchLearner, MemoryIMPALATorchLearner, connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.envs import RandomObservations

pytestmark = pytest.mark.ray

T = 8
NUM_ENVS = 3


class Recording:
    """Logs how far each batch's log-probabilities are from those of the rollout."""

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        module = self.module[module_id].unwrapped()

        def error(outputs):
            dist_class = module.get_train_action_dist_cls()
            dist = dist_class.from_logits(outputs[Columns.ACTION_DIST_INPUTS].detach())
            difference = dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
            return difference[batch[Columns.LOSS_MASK]].abs().max().item()

        zeros = tree.map_structure(torch.zeros_like, batch[Columns.STATE_IN])
        with torch.no_grad():
            stateless = module.forward_train({**batch, Columns.STATE_IN: zeros})
        for name, value, reduce in (
            ("error", error(fwd_out), "max"),
            ("error_without_state", error(stateless), "max"),
            ("num_updates", 1, "sum"),
            ("num_rows", len(batch[Columns.SEQ_LENS]), "sum"),
            ("num_real_steps", int(batch[Columns.LOSS_MASK].sum()), "sum"),
            ("num_slots", batch[Columns.LOSS_MASK].shape[1], "max"),
        ):
            self.metrics.log_value((module_id, name), value, reduce=reduce)
        return super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )


class RecordingAPPO(Recording, MemoryAPPOTorchLearner):
    pass


class RecordingIMPALA(Recording, MemoryIMPALATorchLearner):
    pass


def deep(**settings):
    small = {
        "fcnet_hiddens": [8],
        "d_model": 8,
        "num_heads": 2,
        "head_dim": 4,
        "feedforward_dim": 8,
        "compile": False,
    }
    return DeepLinearAttentionConfig(max_seq_len=T, **{**small, **settings})


LSTM = DefaultModelConfig(use_lstm=True, max_seq_len=T, lstm_cell_size=8, fcnet_hiddens=[8])


def build(
    algorithm,
    *,
    fragment,
    model_config=None,
    env_config=None,
    learners=None,
    env_runners=None,
    **training,
):
    spec = RLModuleSpec(
        # None: the algorithm's own module.
        module_class=None if model_config is LSTM else DeepLinearAttentionRLModule,
        model_config=model_config or deep(),
    )
    config, learner_class = {
        "APPO": (APPOConfig(), RecordingAPPO),
        "IMPALA": (IMPALAConfig(), RecordingIMPALA),
    }[algorithm]
    config = (
        config.environment(RandomObservations, env_config=env_config or {})
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=NUM_ENVS,
            rollout_fragment_length=fragment,
        )
        .learners(num_learners=0, learner_class=learner_class)
        .training(train_batch_size_per_learner=NUM_ENVS * fragment, lr=0.0)
        .rl_module(rl_module_spec=spec)
        .reporting(min_time_s_per_iteration=0.1)
        .debugging(seed=0, log_sys_usage=False)
    )
    config.env_runners(**(env_runners or {})).learners(**(learners or {})).training(**training)
    return connect(config).build_algo()


def train(algo, iterations, *, tolerance=1e-5):
    """Results of the module's updates, one dict an iteration that had any."""
    results = []
    try:
        deadline = time.monotonic() + 120
        while len(results) < iterations:
            assert time.monotonic() < deadline, "the Learner does not train"
            # With EnvRunners or Learners elsewhere, an iteration may end before an update does.
            result = algo.train().get("learners", {}).get("default_policy", {})
            if result.get("num_updates", 0) > 0:
                results.append(result)
    finally:
        algo.stop()
    assert max(result["error"] for result in results) < tolerance
    # The test sees a wrong state.
    assert max(result["error_without_state"] for result in results) > 1e-4
    assert all(result["num_slots"] == T + 1 for result in results)
    return results


@pytest.mark.parametrize("algorithm", ["APPO", "IMPALA"])
@pytest.mark.parametrize(
    "fragment",
    [
        pytest.param(19, id="fragments end inside rows"),
        pytest.param(16, id="rows divide fragments"),
    ],
)
def test_rows_and_fragments(algorithm, fragment):
    results = train(build(algorithm, fragment=fragment), 4)
    for result in results:
        assert result["num_real_steps"] / result["num_updates"] >= NUM_ENVS * fragment


@pytest.mark.parametrize(
    "model_config",
    [pytest.param(deep(vf_share_layers=False), id="two memories"), pytest.param(LSTM, id="lstm")],
)
def test_modules_with_continuous_actions_and_truncated_episodes(model_config):
    env_config = {"action_space": gym.spaces.Box(-0.1, 0.1, (2,), np.float32), "truncate": True}
    train(build("APPO", fragment=19, model_config=model_config, env_config=env_config), 3)


@pytest.mark.gpu
def test_shuffled_minibatches_on_a_gpu():
    algo = build(
        "APPO",
        fragment=16,
        learners={"num_gpus_per_learner": 1},
        num_epochs=2,
        minibatch_size=32,
        shuffle_batch_per_epoch=True,
    )
    train(algo, 2, tolerance=1e-4)


@pytest.mark.slow
def test_shuffled_minibatches_from_an_aggregator_actor():
    """RLlib forgets that such rows may be shuffled, and the module there is never trained."""
    algo = build(
        "APPO",
        fragment=16,
        learners={"num_learners": 1, "num_aggregator_actors_per_learner": 1},
        num_epochs=2,
        minibatch_size=32,
        shuffle_batch_per_epoch=True,
    )
    results = train(algo, 2)
    # Two epochs of two minibatches or more.
    assert results[-1]["num_updates"] >= 4
    assert results[-1]["num_rows"] / results[-1]["num_updates"] < 6


def test_checkpoints_hold_the_target_networks(tmp_path):
    algo = build("APPO", fragment=16, lr=1e-3, circular_buffer_iterations_per_batch=1)
    for _ in range(3):
        algo.train()
    saved = algo.save_to_path(tmp_path)
    expected = algo.learner_group._learner.module["default_policy"].get_state()
    algo.stop()
    restored = APPO.from_checkpoint(saved)
    try:
        learner = restored.learner_group._learner.module["default_policy"]
        runner = restored.env_runner.module
        state = learner.get_state()
        assert state.keys() == expected.keys()
        assert all(np.array_equal(state[key], expected[key]) for key in expected)
        # The target is behind; EnvRunners do without it.
        targets = {name for name in state if name.startswith("target_")}
        assert any(
            not np.array_equal(state[name], state[name.removeprefix("target_")]) for name in targets
        )
        assert runner.get_state().keys() == {
            name for name in state if not name.startswith(("target_", "value_head."))
        }
        assert all(np.array_equal(value, state[name]) for name, value in runner.get_state().items())
        restored.train()
    finally:
        restored.stop()


@pytest.mark.slow
def test_two_learners_stay_equal():
    algo = build(
        "IMPALA",
        fragment=16,
        learners={"num_learners": 2, "learner_class": MemoryIMPALATorchLearner},
        lr=1e-3,
        num_epochs=2,
    )

    def in_learners(function):
        return [result.get() for result in algo.learner_group.foreach_learner(function)]

    def weights():
        return in_learners(lambda x: x.module["default_policy"].unwrapped().get_state())

    try:
        before = weights()[0]
        steps, rebuilt = 0, []
        while steps < 400:
            learners = algo.train().get("learners", {})
            steps = learners.get("__all_modules__", {}).get("num_env_steps_trained_lifetime", 0)
            # NaN in an iteration in which nothing was trained.
            counts = learners.get("default_policy", {}).get("memory", {})
            rebuilt.append(counts.get("num_rebuilt_rows", 0))
        # The threads have trained on all they were sent.
        deadline = time.monotonic() + 60
        while True:
            first, second = weights()
            if all(np.array_equal(first[key], second[key]) for key in first):
                break
            assert time.monotonic() < deadline
            time.sleep(0.2)
    finally:
        algo.stop()
    assert np.nansum(rebuilt) == 0
    assert any(not np.array_equal(first[key], before[key]) for key in first)
