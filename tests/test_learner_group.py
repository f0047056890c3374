"""Several Learners: exact states, equal weights, the gradients of one Learner."""

import copy

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from connectors import MemoryPPOTorchLearner, connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.envs import RandomObservations

pytestmark = pytest.mark.ray


def spec(max_seq_len=8, **settings):
    model_config = DeepLinearAttentionConfig(
        max_seq_len=max_seq_len, d_model=16, **{"compile": False, **settings}
    )
    return RLModuleSpec(module_class=DeepLinearAttentionRLModule, model_config=model_config)


def ppo(num_learners, module_spec=None, env_config=None, **training):
    return (
        PPOConfig()
        .environment(RandomObservations, env_config=env_config or {})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=3)
        .learners(num_learners=num_learners)
        .training(
            **{
                "train_batch_size_per_learner": 60,
                "minibatch_size": 32,
                "num_epochs": 2,
                "lr": 1e-3,
                **training,
            }
        )
        .rl_module(rl_module_spec=module_spec or spec())
        .debugging(seed=0, log_sys_usage=False)
    )


def of_all_learners(algorithm, function):
    return [result.get() for result in algorithm.learner_group.foreach_learner(function)]


def weights(learner):
    return {name: module.unwrapped().get_state() for name, module in learner.module.items()}


def gradients(learner):
    module = learner.module[DEFAULT_MODULE_ID].unwrapped()
    return {name: p.grad.numpy() for name, p in module.named_parameters() if p.grad is not None}


def assert_equal_everywhere(algorithm):
    first, second = of_all_learners(algorithm, weights)
    assert first.keys() == second.keys()
    for name, state in first.items():
        assert all(np.array_equal(state[key], second[name][key]) for key in state)


@pytest.mark.slow
def test_two_learners_rebuild_states_and_stay_equal():
    algorithm = connect(ppo(2)).build_algo()
    rebuilt = stale = 0
    for _ in range(4):
        counts = algorithm.train()["learners"][DEFAULT_MODULE_ID]["memory"]
        rebuilt += counts["num_rebuilt_rows"]
        stale += counts["num_stale_rows"]
    assert_equal_everywhere(algorithm)
    algorithm.stop()
    assert rebuilt > 0
    assert stale == 0


def test_two_learners_compute_the_gradients_of_one():
    """On the same steps, where both have equally many. Slices and their states included.

    Each of the two packs its own rows, those of the one are padded.
    """
    one, two = (ppo(n, env_config={"lengths": [2, 3, 21, 40]}) for n in (0, 2))
    one = connect(one, pack_rows=False).build_algo()
    two = connect(two).build_algo()
    state = one.learner_group.get_state()
    two.learner_group.set_state(state)
    one.env_runner.set_state({"rl_module": one.get_weights(), "weights_seq_no": 1})
    episodes = [e for e in one.env_runner.sample(num_timesteps=200) if len(e) > 1][:9]
    if sum(map(len, episodes)) % 2:
        episodes[-1] = episodes[-1][: len(episodes[-1]) - 1]
    slices = list(ShardEpisodesIterator(list(episodes), 2, len_lookback_buffer=8))
    assert len({sum(map(len, part)) for part in slices}) == 1
    pieces = [piece for part in slices for piece in part]
    assert len(pieces) > len(episodes)

    # A local Learner's connectors write into the episodes they get.
    one.learner_group.update(episodes=copy.deepcopy(pieces))
    (expected,) = of_all_learners(one, gradients)
    two.learner_group.update(episodes=episodes)
    for actual in of_all_learners(two, gradients):
        assert actual.keys() == expected.keys()
        for name, gradient in expected.items():
            np.testing.assert_allclose(actual[name], gradient, rtol=0, atol=1e-6, err_msg=name)
    assert max(abs(gradient).max() for gradient in expected.values()) > 1e-3
    one.stop()
    two.stop()


@pytest.mark.slow
def test_compiled_cores_on_two_learners():
    """The same weights as without compilation, equal on both."""
    results = []
    for compiled in (False, True):
        algorithm = connect(ppo(2, spec(compile=compiled))).build_algo()
        for _ in range(2):
            algorithm.train()
        assert_equal_everywhere(algorithm)
        (num_compiled, _) = of_all_learners(algorithm, count_compiled)
        assert num_compiled == (2 if compiled else 0)
        results.append(of_all_learners(algorithm, weights)[0][DEFAULT_MODULE_ID])
        algorithm.stop()
    eager, compiled = results
    for name, expected in eager.items():
        np.testing.assert_allclose(compiled[name], expected, rtol=0, atol=1e-4, err_msg=name)


def count_compiled(learner):
    from rlmodules.memories import compilation

    blocks = learner.module[DEFAULT_MODULE_ID].unwrapped().core.memory.blocks
    return sum(compilation.is_compiled(block) for block in blocks)


class AutocastLearner(MemoryPPOTorchLearner):
    """Computes in bfloat16 where torch's autocast allows it. RLlib has no setting for that."""

    def update(self, **kwargs):
        with torch.autocast(torch.device(self.device).type, torch.bfloat16):
            return super().update(**kwargs)


@pytest.mark.parametrize("learner_class", [MemoryPPOTorchLearner, AutocastLearner])
@pytest.mark.parametrize(
    "num_gpus",
    [
        pytest.param(0, marks=pytest.mark.slow),
        pytest.param(
            1,
            marks=[
                pytest.mark.gpu,
                pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
            ],
        ),
    ],
)
def test_two_learners_in_half_precision_and_on_gpus(learner_class, num_gpus):
    """gloo on CPUs, nccl on GPUs: weights stay equal and finite."""
    config = ppo(2).learners(num_gpus_per_learner=num_gpus, learner_class=learner_class)
    algorithm = connect(config).build_algo()
    before = of_all_learners(algorithm, weights)[0][DEFAULT_MODULE_ID]
    for _ in range(2):
        result = algorithm.train()["learners"]
    assert_equal_everywhere(algorithm)
    after = of_all_learners(algorithm, weights)[0][DEFAULT_MODULE_ID]
    algorithm.stop()
    assert result["__all_modules__"]["memory"]["num_nonfinite_gradients"] == 0
    assert all(np.isfinite(value).all() for value in after.values())
    assert any(not np.array_equal(before[key], after[key]) for key in after)
