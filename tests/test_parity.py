"""The Learner sees what the EnvRunner saw: in real PPO runs, on both connector paths.

The first log-probabilities of an update, before any weight has changed, equal the recorded
`ACTION_LOGP` on every valid step. That needs the right observations, states, masks, rows and
weights all at once.
"""

import functools

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.evaluation.postprocessing import Postprocessing

from connectors import MemoryPPOTorchLearner, connect
from rlmodules import (
    DeepLinearAttentionConfig,
    GTrXLConfig,
    LinearAttentionConfig,
    MemoryRLModule,
    POPGymLinearAttentionConfig,
)
from rlmodules.memories import compilation
from tests.envs import RandomObservations

pytestmark = pytest.mark.ray

NUM_ENVS = 3
SMALL = {
    "fcnet_hiddens": [8],
    "d_model": 8,
    "num_heads": 2,
    "head_dim": 4,
    "feedforward_dim": 8,
    "compile": False,
}


class RecordingLearner(MemoryPPOTorchLearner):
    """Keeps each train batch and how far its log-probabilities are from those of the rollout."""

    def build(self):
        super().build()
        self.batches, self.errors, self.errors_without_state = [], [], []

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        module = self.module[module_id].unwrapped()

        def error(outputs):
            dist_class = module.get_train_action_dist_cls()
            dist = dist_class.from_logits(outputs[Columns.ACTION_DIST_INPUTS].detach())
            difference = dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
            return difference[batch[Columns.LOSS_MASK]].abs().max().item()

        self.batches.append(dict(batch))
        self.errors.append(error(fwd_out))
        zeros = tree.map_structure(torch.zeros_like, batch[Columns.STATE_IN])
        with torch.no_grad():
            outputs = module.forward_train({**batch, Columns.STATE_IN: zeros})
        self.errors_without_state.append(error(outputs))
        return super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )


def build(
    model_config, *, fragment, connected, env_config=None, num_gpus_per_learner=0, pack_rows=True
):
    config = (
        PPOConfig()
        .environment(RandomObservations, env_config=env_config or {})
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=NUM_ENVS,
            rollout_fragment_length=fragment,
        )
        .learners(
            num_learners=0,
            num_gpus_per_learner=num_gpus_per_learner,
            learner_class=RecordingLearner,
        )
        # One update an iteration, with all rows at once.
        .training(
            train_batch_size_per_learner=NUM_ENVS * fragment,
            minibatch_size=None,
            num_epochs=1,
            lr=0.01,
        )
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=MemoryRLModule,
                model_config=model_config,
            )
        )
        .debugging(seed=0, log_sys_usage=False)
    )
    return (connect(config, pack_rows=pack_rows) if connected else config).build_algo()


def check_parity(model_config, *, tolerance=1e-5, **settings):
    algorithm = build(model_config, **settings)
    try:
        learner = algorithm.learner_group._learner
        for _ in range(3):
            algorithm.train()
    finally:
        algorithm.stop()
    T = model_config.max_seq_len
    num_valid = [int(batch[Columns.LOSS_MASK].sum()) for batch in learner.batches]
    assert len(learner.errors) == 3
    assert max(learner.errors) <= tolerance
    # The test sees a wrong state; every sampled step is trained on.
    assert min(learner.errors_without_state[1:]) > 1e-4
    assert all(n >= NUM_ENVS * settings["fragment"] for n in num_valid)
    assert all(batch[Columns.LOSS_MASK].shape[1] == T for batch in learner.batches)
    return learner


def deep(max_seq_len=8, **settings):
    return DeepLinearAttentionConfig(max_seq_len=max_seq_len, **{**SMALL, **settings})


def single(max_seq_len=8, **settings):
    return LinearAttentionConfig(max_seq_len=max_seq_len, **{**SMALL, **settings})


def gtrxl(max_seq_len=8, **settings):
    return GTrXLConfig(max_seq_len=max_seq_len, **{**SMALL, **settings})


def popgym(preset=POPGymLinearAttentionConfig, **settings):
    small = {"fcnet_hiddens": [16], "head_fcnet_hiddens": [8], "hidden_size": 25}
    return preset(max_seq_len=8, **{**small, **settings})


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "rllib"])
@pytest.mark.parametrize(
    ("max_seq_len", "fragment"),
    [
        pytest.param(8, 19, id="fragments end inside rows"),
        pytest.param(8, 24, id="rows divide fragments"),
        pytest.param(64, 19, id="rows are longer than episodes"),
    ],
)
def test_rows_and_fragments(max_seq_len, fragment, connected):
    """Episodes have 3 to 40 steps: shorter and longer than a row, cut by fragments."""
    check_parity(deep(max_seq_len), fragment=fragment, connected=connected)


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "rllib"])
@pytest.mark.parametrize(
    "model_config",
    [
        pytest.param(deep(vf_share_layers=False), id="two memories"),
        pytest.param(
            popgym(POPGymLinearAttentionConfig.deep, num_layers=2, hidden_size=64), id="popgym deep"
        ),
        pytest.param(gtrxl(memory_inference=3), id="gtrxl, memory < rows"),
        pytest.param(gtrxl(memory_inference=8), id="gtrxl, memory = rows"),
        pytest.param(gtrxl(memory_inference=50), id="gtrxl, memory > rows"),
    ],
)
def test_modules_on_both_paths(model_config, connected):
    check_parity(model_config, fragment=19, connected=connected)


@pytest.mark.parametrize(
    "model_config",
    [
        pytest.param(single(), id="one block"),
        pytest.param(gtrxl(memory_inference=5, vf_share_layers=False), id="gtrxl, two memories"),
        pytest.param(gtrxl(40, memory_inference=3), id="gtrxl, rows of several blocks"),
        pytest.param(popgym(), id="popgym"),
        pytest.param(popgym(S_aggregator="max"), id="popgym max"),
        pytest.param(deep(positions="sine"), id="sine"),
        pytest.param(deep(positions="none", normalizer="sum"), id="sum"),
    ],
)
def test_modules(model_config):
    check_parity(model_config, fragment=19, connected=True)


def test_continuous_actions_and_truncated_episodes():
    env_config = {"action_space": gym.spaces.Box(-0.1, 0.1, (2,), np.float32), "truncate": True}
    check_parity(deep(), fragment=19, connected=True, env_config=env_config)


@pytest.mark.slow
# PyTorch's compiler raises warnings of its own.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("connected", [True, False], ids=["connected", "rllib"])
def test_compiled(connected, monkeypatch):
    width = SMALL["d_model"]
    if not connected:
        # Without code generation, to save time; at a width that nothing else compiles.
        width = 20
        monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    learner = check_parity(deep(compile=True, d_model=width), fragment=19, connected=connected)
    blocks = learner.module["default_policy"].core.memory.blocks
    assert all(compilation.is_compiled(block) for block in blocks)


@pytest.mark.gpu
def test_learner_on_a_gpu():
    learner = check_parity(
        deep(), fragment=19, connected=True, num_gpus_per_learner=1, tolerance=1e-4
    )
    assert next(learner.module["default_policy"].parameters()).is_cuda


@pytest.mark.parametrize("vf_share_layers", [True, False])
def test_both_paths_train_the_same(vf_share_layers):
    """The same rows on the same seeds, and the same weights after each update."""
    batches, weights = [], []
    for connected in (True, False):
        algorithm = build(
            deep(vf_share_layers=vf_share_layers, positions="sine"),
            fragment=19,
            connected=connected,
            # RLlib knows padded rows only.
            pack_rows=False,
        )
        try:
            learner = algorithm.learner_group._learner
            states = []
            for _ in range(2):
                algorithm.train()
                states.append(learner.module["default_policy"].get_state())
            batches.append(learner.batches)
            weights.append(states)
        finally:
            algorithm.stop()
    for ours, theirs in zip(*batches, strict=True):
        assert ours.keys() == theirs.keys()
        assert Postprocessing.ADVANTAGES in ours
        for column, expected in theirs.items():
            tree.map_structure(
                functools.partial(torch.testing.assert_close, rtol=1e-5, atol=1e-5),
                ours[column],
                expected,
            )
    for ours, theirs in zip(*weights, strict=True):
        for key, expected in theirs.items():
            np.testing.assert_allclose(ours[key], expected, rtol=0, atol=1e-5, err_msg=key)
