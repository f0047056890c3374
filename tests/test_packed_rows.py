"""Packed rows train as padded ones do: the same losses and gradients, through RLlib's Learners."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

from connectors import SequenceReplayBuffer, connect
from rlmodules import (
    DeepLinearAttentionConfig,
    GRUConfig,
    GTrXLConfig,
    LSTMConfig,
    MemoryRLModule,
    MinGRUConfig,
    MixedConfig,
)
from rlmodules.memories import LinearAttentionConfig
from rlmodules.memories.linear_attention import LinearAttentionMixer
from rlmodules.modules.batches import RESETS
from tests.connectors.helpers import BOX, DISCRETE, make_episodes, with_snapshots
from tests.test_multi_agent import ppo

pytestmark = pytest.mark.ray

T = 8
ID = "default_policy"
# Whole episodes and parts of them; rows that begin in mid-episode; one with a bootstrap step only.
CHUNKS = [
    (3, 0, "terminated"),
    (12, 0, "truncated"),
    (2, 0, "truncated"),
    (8, 0, "cut"),
    (1, 0, "terminated"),
    (4, 5, "cut"),
    (3, 9, "terminated"),
    (2, 0, "cut"),
    (6, 0, "terminated"),
    (9, 2, "truncated"),
]
WHOLE = [(n, 0, "terminated" if n % 2 else "truncated") for n in (3, 12, 2, 4, 1, 21, 5)]
# Rows of four slots, with the bootstrap step: two that follow one another become a row.
EQUAL_CHUNKS = [(3, 9, "cut"), (3, 0, "terminated"), (3, 5, "terminated"), (3, 0, "truncated")] * 4
MEMORIES = {
    "deep": (DeepLinearAttentionConfig, {"d_model": 8, "num_heads": 2, "head_dim": 4}),
    "gtrxl": (GTrXLConfig, {"d_model": 8, "num_heads": 2, "head_dim": 4, "memory_inference": 5}),
    "gru": (GRUConfig, {"d_model": 8}),
    "lstm": (LSTMConfig, {"d_model": 8}),
    "min_gru": (MinGRUConfig, {"d_model": 8}),
    "mixed": (MixedConfig, {"d_model": 8, "positions": "sine"}),
}


def model(memory="deep", **settings):
    config_class, sizes = MEMORIES[memory]
    return config_class(max_seq_len=T, fcnet_hiddens=[8], compile=False, **{**sizes, **settings})


class Watched:
    """A Learner with fixed weights that keeps the gradients and losses of all minibatches."""

    def __init__(self, config, pack_rows):
        connect(config, pack_rows=pack_rows)
        action_space = config.action_space or DISCRETE
        spaces = dict.fromkeys([*config.policies, "__env_single__"], (BOX, action_space))
        torch.manual_seed(0)
        self.learner = config.learner_class(
            config=config, module_spec=config.get_multi_rl_module_spec(spaces=spaces)
        )
        self.learner.build()
        self.losses, self.gradients, self.batches = [], [], []
        compute_gradients = self.learner.compute_gradients

        def watch(losses, **kwargs):
            gradients = compute_gradients(losses, **kwargs)
            self.losses.append({id_: loss.item() for id_, loss in losses.items()})
            copies = [None if g is None else g.clone() for g in gradients.values()]
            self.gradients.append(copies)
            return gradients

        self.learner.compute_gradients = watch

    def batch(self, episodes):
        return self.learner._learner_connector(
            rl_module=self.learner.module,
            batch={},
            episodes=copy.deepcopy(episodes),
            shared_data={},
            metrics=self.learner.metrics,
        )

    def update(self, episodes, **settings):
        training_data = TrainingData(episodes=copy.deepcopy(episodes))
        return self.learner.update(training_data=training_data, timesteps={}, **settings)


def assert_same_gradients(packed, padded):
    assert len(packed.losses) == len(padded.losses) > 0
    for mine, theirs in zip(packed.losses, padded.losses, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    largest = 0.0
    for mine, theirs in zip(packed.gradients, padded.gradients, strict=True):
        for a, b in zip(mine, theirs, strict=True):
            assert (a is None) == (b is None)
            if a is not None:
                torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)
                largest = max(largest, b.abs().max().item())
    assert largest > 1e-3


def both(make_config):
    return [Watched(make_config(), pack_rows) for pack_rows in (True, False)]


def on_policy(config_class, model_config, **training):
    spec = RLModuleSpec(module_class=MemoryRLModule, model_config=model_config)
    config = config_class().environment(observation_space=BOX, action_space=DISCRETE)
    return (
        config.rl_module(rl_module_spec=spec)
        .training(lr=0.0, **training)
        .learners(num_learners=0)
        .debugging(seed=0)
    )


@pytest.mark.parametrize("vf_share_layers", [True, False])
@pytest.mark.parametrize("memory", MEMORIES)
def test_ppo(memory, vf_share_layers):
    packed, padded = both(
        lambda: on_policy(
            PPOConfig, model(memory, vf_share_layers=vf_share_layers), entropy_coeff=0.01
        )
    )
    module = padded.learner.module[ID]
    episodes = with_snapshots(module, make_episodes(module, CHUNKS), T)
    assert RESETS in packed.batch(episodes)[ID]
    mine, theirs = (side.update(episodes)[ID] for side in (packed, padded))
    assert_same_gradients(packed, padded)
    for name in ("vf_explained_var", "mean_kl_loss", "entropy"):
        assert float(mine[name].peek()) == pytest.approx(
            float(theirs[name].peek()), rel=1e-4, abs=1e-6
        ), name


def test_ppo_in_several_minibatches():
    """Of the same steps each, as many as before, and several times."""
    packed, padded = both(lambda: on_policy(PPOConfig, model()))
    module = padded.learner.module[ID]
    episodes = with_snapshots(module, make_episodes(module, EQUAL_CHUNKS), T)
    numbers = [len(side.batch(episodes)[ID][Columns.SEQ_LENS]) for side in (packed, padded)]
    assert numbers == [8, 16]
    for side in (packed, padded):
        side.update(episodes, minibatch_size=16, num_epochs=2)
    assert len(packed.losses) == 8
    assert_same_gradients(packed, padded)


@pytest.mark.parametrize("config_class", [BCConfig, MARWILConfig])
def test_recorded_episodes(config_class):
    """Without states, each from its first step on."""
    recorded = {"input_": ["nowhere"], "input_read_episodes": True}
    packed, padded = both(
        lambda: on_policy(config_class, model()).offline_data(
            **recorded, dataset_num_iters_per_learner=1
        )
    )
    episodes = make_episodes(padded.learner.module[ID], WHOLE)
    for episode in episodes:
        del episode.extra_model_outputs[Columns.STATE_OUT]
    assert RESETS in packed.batch(episodes)[ID]
    for side in (packed, padded):
        side.update(episodes)
    assert_same_gradients(packed, padded)


def loss_and_gradients(side, episodes):
    batch = side.batch(episodes)[ID]
    module = side.learner.module[ID]
    torch.manual_seed(1)
    for parameter in module.parameters():
        # Targets differ from the networks.
        parameter.data += 0.3 * torch.randn_like(parameter)
    loss = side.learner.compute_loss_for_module(
        module_id=ID, config=side.learner.config, batch=batch, fwd_out=module.forward_train(batch)
    )
    loss.backward()
    side.losses.append({ID: loss.item()})
    side.gradients.append([parameter.grad for parameter in module.parameters()])
    return batch


@pytest.mark.parametrize("config_class", [APPOConfig, IMPALAConfig])
def test_vtrace(config_class):
    """Each episode bootstraps from its own last observation."""
    packed, padded = both(lambda: on_policy(config_class, model()))
    module = padded.learner.module[ID]
    episodes = with_snapshots(module, make_episodes(module, CHUNKS), T)
    try:
        batches = [loss_and_gradients(side, episodes) for side in (packed, padded)]
    finally:
        for side in (packed, padded):
            side.learner.shutdown()
    assert RESETS in batches[0]
    assert len(batches[0][RESETS]) < len(batches[1][Columns.SEQ_LENS])
    assert_same_gradients(packed, padded)


def off_policy(config_class, action_space, model_config, **training):
    config = config_class().environment(observation_space=BOX, action_space=action_space)
    # `connect` knows the module class.
    return config.rl_module(model_config=model_config).training(**training)


def check_replay(make_config, action_space):
    packed, padded = both(make_config)
    module = padded.learner.module[ID]
    episodes = make_episodes(module, WHOLE, action_space=action_space)
    buffer = SequenceReplayBuffer(1000, batch_length_T=T, seed=0)
    buffer.add(with_snapshots(module, episodes, T))
    slices = buffer.sample(60)
    batches = [loss_and_gradients(side, slices) for side in (packed, padded)]
    assert RESETS in batches[0]
    assert len(batches[0][RESETS]) < len(batches[1][Columns.SEQ_LENS])
    assert_same_gradients(packed, padded)


def test_several_agents():
    """Each module's rows for themselves; RLlib's LSTM and other people's modules are padded."""
    packed, padded = both(lambda: ppo(schedule="lives"))
    runner = MultiAgentEnvRunner(config=packed.learner.config)
    episodes = runner.sample(num_timesteps=60) + runner.sample(num_timesteps=60)
    batches = packed.batch(episodes)
    assert {id_ for id_, batch in batches.items() if RESETS in batch} == {"ours"}
    for side in (packed, padded):
        side.update(episodes)
    assert_same_gradients(packed, padded)


@pytest.mark.parametrize("n_step", [1, 3])
def test_dqn(n_step):
    check_replay(lambda: off_policy(DQNConfig, DISCRETE, model(), n_step=n_step), DISCRETE)


@pytest.mark.parametrize("vf_share_layers", [True, False])
def test_sac(vf_share_layers, monkeypatch):
    """With actions that are drawn half a standard deviation off."""
    normal = torch.distributions.Normal
    monkeypatch.setattr(normal, "rsample", lambda dist, shape=(): dist.loc + dist.scale / 2)
    monkeypatch.setattr(normal, "sample", lambda dist, shape=(): dist.rsample().detach())
    space = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
    model_config = model(vf_share_layers=vf_share_layers)
    check_replay(lambda: off_policy(SACConfig, space, model_config), space)


class Forgetful(LinearAttentionMixer):
    """Forgets to reset."""

    def forward(self, h, state, turn, valid, resets):
        return super().forward(h, state, turn, valid, None)


class ForgetfulConfig(LinearAttentionConfig):
    def build_mixer(self, layer):
        return Forgetful(self)


class ForgetfulRLModule(MemoryRLModule):
    config_class = ForgetfulConfig


@pytest.mark.parametrize("pack_rows", [True, False])
def test_a_memory_that_is_not_reset_is_refused(pack_rows):
    spec = RLModuleSpec(module_class=ForgetfulRLModule, model_config=ForgetfulConfig(max_seq_len=T))
    config = PPOConfig().environment(observation_space=BOX, action_space=DISCRETE)
    config.rl_module(rl_module_spec=spec)
    if not pack_rows:
        Watched(config, pack_rows)
        return
    with pytest.raises(ValueError, match=r"`pack_rows` is True, .* breaks promise 4"):
        Watched(config, pack_rows)
