"""`MemoryRLModule`: RLlib's contract, spaces, weights, target networks, value passes."""

import copy
import dataclasses
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from gymnasium import spaces
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.target_network_api import TARGET_NETWORK_ACTION_DIST_INPUTS
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from connectors.rows import values
from rlmodules import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    LinearAttentionConfig,
    LinearAttentionRLModule,
    MemoryRLModule,
)

B, T = 3, 6
BOX = spaces.Box(-1.0, 1.0, (4,), np.float32)
DISCRETE = spaces.Discrete(3)
HEADS = {"max_seq_len": 8, "fcnet_hiddens": [8], "compile": False}
POPGYM = {"module_class": MemoryRLModule, "memory": "popgym_linear_attention", "hidden_size": 25}
SMALL = {
    "max_seq_len": T,
    "fcnet_hiddens": [8],
    "d_model": 8,
    "num_heads": 2,
    "head_dim": 4,
    "feedforward_dim": 8,
    "compile": False,
}

OBSERVATION_SPACES = {
    "box": BOX,
    "box of one number": spaces.Box(-1.0, 1.0, (), np.float32),
    "box of rank 2": spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "box of integers": spaces.Box(-5, 5, (3,), np.int16),
    "image": spaces.Box(0, 255, (10, 10, 3), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete from 2": spaces.Discrete(5, start=2),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "multi-binary": spaces.MultiBinary(3),
    "dict": spaces.Dict({"b": BOX, "a": spaces.Discrete(2)}),
    "tuple": spaces.Tuple((spaces.MultiBinary(2), spaces.Box(0, 255, (10, 10, 1), np.uint8))),
    "nested": spaces.Dict(
        {"x": spaces.Tuple((BOX, spaces.Dict({"y": spaces.Discrete(3)}))), "z": BOX}
    ),
}
ACTION_SPACES = {
    "discrete": DISCRETE,
    "box": spaces.Box(-1.0, 1.0, (2,), np.float32),
    "multi-discrete": spaces.MultiDiscrete([2, 3]),
    "dict": spaces.Dict({"a": DISCRETE, "b": spaces.Box(-1.0, 1.0, (2,), np.float32)}),
    "tuple": spaces.Tuple((DISCRETE, spaces.Dict({"a": spaces.MultiDiscrete([2, 2])}))),
}


def build(
    observation_space=BOX,
    action_space=DISCRETE,
    *,
    inference_only=False,
    module_class=DeepLinearAttentionRLModule,
    **settings,
):
    torch.manual_seed(0)
    if module_class.config_class is None:
        settings = {"memory": "deep_linear_attention", **settings}
    # The widths are those of attention.
    small = HEADS if settings.get("memory") == "popgym_linear_attention" else SMALL
    return RLModuleSpec(
        module_class=module_class,
        observation_space=observation_space,
        action_space=action_space,
        inference_only=inference_only,
        model_config={**small, **settings},
    ).build()


def batch_of(module, num_steps=T, num_rows=B, seq_lens=None):
    """A train batch of random observations from random states."""
    module.observation_space.seed(0)
    samples = [module.observation_space.sample() for _ in range(num_rows * num_steps)]
    obs = tree.map_structure(
        lambda *x: np.stack(x).reshape(num_rows, num_steps, *np.shape(x[0])), *samples
    )
    generator = torch.Generator().manual_seed(1)
    state = tree.map_structure(
        lambda x: (
            torch.rand(num_rows, *x.shape, generator=generator)
            if x.is_floating_point()
            else x.expand(num_rows, *x.shape) + 7
        ),
        module.get_initial_state(),
    )
    batch = {Columns.OBS: convert_to_torch_tensor(obs), Columns.STATE_IN: state}
    if seq_lens is not None:
        batch[Columns.SEQ_LENS] = torch.tensor(seq_lens)
    return batch


def assert_trees_equal(actual, expected):
    tree.map_structure(torch.testing.assert_close, actual, expected)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"positions": "sine"},
        {"vf_share_layers": False},
        {**POPGYM, "positions": "none", "num_layers": 3},
    ],
    ids=str,
)
def test_states(settings):
    module = build(**settings)
    assert module.is_stateful()
    state = module.get_initial_state()
    assert isinstance(state, dict)
    for leaf in tree.flatten(state):
        assert isinstance(leaf, torch.Tensor)
        assert leaf.dtype in (torch.float32, torch.int64)
    if settings.get("vf_share_layers") is False:
        assert state.keys() == {"actor", "critic"}
    batch = batch_of(module, 1)
    state_out = module.forward_inference(batch)[Columns.STATE_OUT]
    tree.assert_same_structure(state, state_out)
    for before, after in zip(tree.flatten(state), tree.flatten(state_out), strict=True):
        assert after.shape == (B, *before.shape)
        assert after.dtype == before.dtype


@pytest.mark.parametrize("module_class", [LinearAttentionRLModule, DeepLinearAttentionRLModule])
def test_outputs(module_class):
    module = build(module_class=module_class)
    assert module.get_initial_state()["S"].shape[0] == (
        1 if module_class is LinearAttentionRLModule else 2
    )
    batch = batch_of(module)
    inference = module.forward_inference(batch)
    exploration = module.forward_exploration(batch)
    train = module.forward_train(batch)
    for out in (inference, exploration):
        assert out.keys() == {Columns.ACTION_DIST_INPUTS, Columns.STATE_OUT}
        assert not any(leaf.requires_grad for leaf in tree.flatten(out))
    assert train.keys() == {Columns.ACTION_DIST_INPUTS, Columns.EMBEDDINGS}
    logits = train[Columns.ACTION_DIST_INPUTS]
    assert logits.shape == (B, T, 3)
    assert logits.requires_grad
    assert_trees_equal(inference, exploration)
    assert_trees_equal(inference[Columns.ACTION_DIST_INPUTS], logits.detach())

    # A rollout, step by step, from the same states.
    state, steps = batch[Columns.STATE_IN], []
    for t in range(T):
        step = {Columns.OBS: batch[Columns.OBS][:, t : t + 1], Columns.STATE_IN: state}
        out = module.forward_exploration(step)
        state = out[Columns.STATE_OUT]
        steps.append(out[Columns.ACTION_DIST_INPUTS])
    torch.testing.assert_close(torch.cat(steps, 1), logits.detach(), rtol=0, atol=1e-5)
    assert_trees_equal(state, inference[Columns.STATE_OUT])


@pytest.mark.parametrize("vf_share_layers", [True, False])
def test_values(vf_share_layers):
    module = build(vf_share_layers=vf_share_layers, fcnet_norm=True)
    batch = batch_of(module, num_rows=7, seq_lens=[6, 1, 2, 3, 6, 5, 4])
    module.train()
    embeddings = module.forward_train(batch)[Columns.EMBEDDINGS]
    expected = module.compute_values(batch, embeddings=embeddings)
    assert expected.shape == (7, T)
    assert expected.requires_grad

    modes = []
    module.value_head.register_forward_hook(
        lambda *_: modes.append((module.training, torch.is_grad_enabled()))
    )
    values = module.compute_values(batch)
    assert not values.requires_grad
    assert modes == [(False, False)]
    assert module.training
    torch.testing.assert_close(values, expected.detach())

    module.eval()
    module.compute_values(batch)
    assert not module.training


def test_a_failing_value_pass_restores_the_mode():
    module = build()
    with pytest.raises(KeyError):
        module.compute_values({Columns.OBS: torch.zeros(1, 1, 4)})
    assert module.training


def test_row_blocks_of_nested_observations(monkeypatch):
    module = build(OBSERVATION_SPACES["nested"], vf_share_layers=False)
    batch = batch_of(module, num_rows=5, seq_lens=[1, 2, 3, 4, 5])
    expected = module.compute_values(batch)
    monkeypatch.setattr(values, "VALUE_STEPS", 1)
    torch.testing.assert_close(values.values_of_batch(module, batch), expected)


def test_two_memories():
    module = build(vf_share_layers=False)
    batch = batch_of(module)
    module.value_head.net[0].weight.data.normal_()
    module.forward_train(batch)[Columns.ACTION_DIST_INPUTS].sum().backward()
    with_gradient = {n.split(".")[0] for n, p in module.named_parameters() if p.grad is not None}
    assert with_gradient == {"core", "policy_head"}
    module.zero_grad()
    out = module.forward_train(batch)
    module.compute_values(batch, embeddings=out[Columns.EMBEDDINGS]).sum().backward()
    with_gradient = {n.split(".")[0] for n, p in module.named_parameters() if p.grad is not None}
    assert with_gradient == {"critic_core", "value_head"}


@pytest.mark.parametrize("vf_share_layers", [True, False])
def test_inference_only(vf_share_layers):
    """An EnvRunner's module, and the weights that a Learner sends it."""
    learner = build(vf_share_layers=vf_share_layers)
    runner = build(vf_share_layers=vf_share_layers, inference_only=True)
    assert not hasattr(runner, "value_head")
    assert hasattr(runner, "critic_core") is not vf_share_layers
    with torch.no_grad():
        for parameter in learner.parameters():
            parameter.add_(0.1)
    batch = batch_of(learner, 1)
    expected = learner.forward_inference(batch)
    for state in (learner.get_state(inference_only=True), learner.get_state()):
        other = copy.deepcopy(runner)
        other.set_state(state)
        assert_trees_equal(other.forward_inference(batch), expected)
    learner.make_target_networks()
    runner.set_state(learner.get_state())
    # With a `MultiRLModuleSpec` the EnvRunners' modules are complete, and get such states, too.
    whole = build(vf_share_layers=vf_share_layers)
    own = copy.deepcopy(whole.state_dict())
    whole.set_state(runner.get_state())
    assert_trees_equal(whole.forward_inference(batch), expected)
    for key, value in whole.state_dict().items():
        assert key in runner.state_dict() or torch.equal(value, own[key])
    some = {**runner.get_state(), "value_head.net.0.bias": np.zeros(1, np.float32)}
    with pytest.raises(ValueError, match=r"missing \['value_head.net.0.weight'\]"):
        whole.set_state(some)


def test_set_state_is_all_or_nothing():
    module = build()
    before = copy.deepcopy(module.state_dict())
    good = {key: value + 1 for key, value in module.get_state().items()}
    missing = {k: v for k, v in good.items() if k != "policy_head.net.0.bias"}
    unexpected = {**good, "core.extra": np.zeros(2)}
    mis_shaped = {**good, "value_head.net.0.weight": np.zeros((2, 8))}
    for state, message in (
        (missing, r"missing \['policy_head.net.0.bias'\]"),
        (unexpected, r"unexpected \['core.extra'\]"),
        (mis_shaped, r"mis-shaped \['value_head.net.0.weight \(2, 8\) instead of \(1, 8\)'\]"),
    ):
        with pytest.raises(ValueError, match=message):
            module.set_state(state)
        assert_trees_equal(dict(module.state_dict()), dict(before))
    module.set_state(good)
    for key, value in module.state_dict().items():
        torch.testing.assert_close(value, before[key] + 1)


def test_inference_only_modules_ignore_training_weights_only():
    runner = build(inference_only=True)
    state = build().get_state()
    with pytest.raises(ValueError, match=r"unexpected \['value_header.x'\]"):
        runner.set_state({**state, "value_header.x": np.zeros(1)})


class BrokenConfig(DeepLinearAttentionConfig):
    def build_memory(self, input_dim):
        return self.no_such_setting


class BrokenRLModule(DeepLinearAttentionRLModule):
    config_class = BrokenConfig


def test_attribute_errors_of_setup_surface():
    with pytest.raises(RuntimeError, match=r"BrokenRLModule failed: .*no_such_setting"):
        build(module_class=BrokenRLModule)


def check_space(module):
    """A step, and a sequence with padding."""
    out = module.forward_exploration(batch_of(module, 1))
    dist = module.get_exploration_action_dist_cls().from_logits(out[Columns.ACTION_DIST_INPUTS])
    actions = dist.sample()
    assert dist.logp(actions).shape == (B, 1)

    batch = batch_of(module, seq_lens=[T, 1, 3])
    out = module.forward_train(batch)
    dist = module.get_train_action_dist_cls().from_logits(out[Columns.ACTION_DIST_INPUTS])
    logp = dist.logp(dist.sample())
    assert logp.shape == dist.entropy().shape == (B, T)
    values = module.compute_values(batch, embeddings=out[Columns.EMBEDDINGS])
    (logp.sum() + values.sum()).backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("name", OBSERVATION_SPACES)
def test_observation_spaces(name):
    check_space(build(OBSERVATION_SPACES[name]))


@pytest.mark.parametrize(
    ("name", "free_log_std"),
    [*((name, False) for name in ACTION_SPACES), ("box", True), ("dict", True)],
)
def test_action_spaces(name, free_log_std):
    check_space(build(action_space=ACTION_SPACES[name], free_log_std=free_log_std))


@pytest.mark.parametrize("settings", [{}, {**POPGYM, "S_aggregator": "max"}], ids=str)
def test_padding_is_inert(settings):
    """NaN in the padding, as RLlib never puts there, but other connectors may."""
    module = build(vf_share_layers=False, positions="sine", **settings)
    clean = batch_of(module, seq_lens=[T, 1, 3])
    valid = torch.arange(T) < clean[Columns.SEQ_LENS][:, None]
    # RLlib 2.60 may deliver lengths as float32.
    dirty = {**clean, Columns.SEQ_LENS: clean[Columns.SEQ_LENS].float()}
    dirty[Columns.OBS] = torch.where(valid[..., None], clean[Columns.OBS], torch.nan)
    results = []
    for batch in (clean, dirty):
        module.zero_grad()
        out = module.forward_train(batch)
        values = module.compute_values(batch, embeddings=out[Columns.EMBEDDINGS])
        (out[Columns.ACTION_DIST_INPUTS][valid].square().sum() + values[valid].sum()).backward()
        gradients = [p.grad for p in module.parameters()]
        assert all(g.isfinite().all() for g in gradients)
        state = module.forward_inference(batch)[Columns.STATE_OUT]
        results.append((values[valid].detach(), gradients, state))
    assert_trees_equal(*results)


@pytest.mark.parametrize("vf_share_layers", [True, False])
def test_target_networks(vf_share_layers):
    module = build(vf_share_layers=vf_share_layers)
    own_keys = set(module.state_dict())
    module.make_target_networks()
    batch = batch_of(module, seq_lens=[T, 1, 3])
    expected = module.forward_train(batch)[Columns.ACTION_DIST_INPUTS].detach()
    target = module.forward_target(batch)
    torch.testing.assert_close(target[TARGET_NETWORK_ACTION_DIST_INPUTS], expected)
    assert not target[TARGET_NETWORK_ACTION_DIST_INPUTS].requires_grad

    new_keys = set(module.state_dict()) - own_keys
    assert new_keys
    assert all(key.startswith(("target_core.", "target_policy_head.")) for key in new_keys)
    inference_state = module.get_state(inference_only=True)
    assert not any(key.startswith(("target_", "value_head")) for key in inference_state)
    assert all(key in own_keys for key in inference_state)

    with torch.no_grad():
        for parameter in [*module.core.parameters(), *module.policy_head.parameters()]:
            parameter.add_(0.1)
    torch.testing.assert_close(
        module.forward_target(batch)[TARGET_NETWORK_ACTION_DIST_INPUTS], expected
    )
    for network, target_network in module.get_target_network_pairs():
        target_network.load_state_dict(network.state_dict())
    torch.testing.assert_close(
        module.forward_target(batch)[TARGET_NETWORK_ACTION_DIST_INPUTS],
        module.forward_train(batch)[Columns.ACTION_DIST_INPUTS].detach(),
    )


def check_autocast(device):
    module = build(positions="sine").to(device)
    batch = tree.map_structure(lambda x: x.to(device), batch_of(module, seq_lens=[T, 1, 3]))
    expected = module.forward_train(batch)[Columns.ACTION_DIST_INPUTS].detach()
    with torch.autocast(device, torch.bfloat16):
        out = module.forward_train(batch)
        values = module.compute_values(batch, embeddings=out[Columns.EMBEDDINGS])
        state = module.forward_inference(batch)[Columns.STATE_OUT]
        blocked = module.compute_values(batch)
    (out[Columns.ACTION_DIST_INPUTS].float().square().sum() + values.float().sum()).backward()
    assert all(p.grad.isfinite().all() for p in module.parameters())
    assert all(x.dtype in (torch.float32, torch.int64) for x in state.values())
    assert (out[Columns.ACTION_DIST_INPUTS] - expected).abs().max() < 0.05
    assert (blocked - values).abs().max() < 0.05


def test_autocast():
    check_autocast("cpu")


@pytest.mark.gpu
def test_autocast_on_a_gpu():
    check_autocast("cuda")


@pytest.mark.gpu
def test_a_gpu_computes_the_same():
    module = build()
    batch = batch_of(module, seq_lens=[T, 1, 3])
    expected = module.forward_train(batch)[Columns.ACTION_DIST_INPUTS]
    moved = {k: tree.map_structure(lambda x: x.cuda(), v) for k, v in batch.items()}
    moved[Columns.SEQ_LENS] = batch[Columns.SEQ_LENS].float()  # RLlib may leave it on the CPU
    out = copy.deepcopy(module).cuda().forward_train(moved)[Columns.ACTION_DIST_INPUTS]
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-4, atol=1e-4)


def test_copies_and_pickles():
    module = build(OBSERVATION_SPACES["nested"])
    batch = batch_of(module)
    expected = module.forward_inference(batch)
    for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_trees_equal(other.forward_inference(batch), expected)


@pytest.mark.parametrize("vf_share_layers", [True, False])
def test_checkpoint(tmp_path, vf_share_layers):
    module = build(vf_share_layers=vf_share_layers)
    batch = batch_of(module)
    module.save_to_path(tmp_path)
    restored = DeepLinearAttentionRLModule.from_checkpoint(tmp_path)
    assert restored.memory_config == module.memory_config
    assert_trees_equal(restored.forward_inference(batch), module.forward_inference(batch))
    torch.testing.assert_close(restored.compute_values(batch), module.compute_values(batch))


@pytest.mark.parametrize("config_class", [LinearAttentionConfig, DeepLinearAttentionConfig])
def test_dataclass_and_dict_build_the_same(config_class):
    module_class = (
        LinearAttentionRLModule
        if config_class is LinearAttentionConfig
        else DeepLinearAttentionRLModule
    )
    config = config_class(**SMALL)
    modules = []
    for model_config in (config, dataclasses.asdict(config)):
        torch.manual_seed(0)
        spec = RLModuleSpec(
            module_class=module_class,
            observation_space=BOX,
            action_space=DISCRETE,
            model_config=model_config,
        )
        modules.append(spec.build())
    assert_trees_equal(dict(modules[0].state_dict()), dict(modules[1].state_dict()))
    assert modules[0].memory_config == modules[1].memory_config == config


def test_unsupported_space():
    with pytest.raises(ValueError, match="observation space"):
        build(gym.spaces.Text(5))
    with pytest.raises(ValueError, match="action space"):
        build(action_space=gym.spaces.MultiBinary(2))


def test_eval_reaches_all_parts_and_walks_once(monkeypatch):
    module = MemoryRLModule(
        observation_space=BOX,
        action_space=DISCRETE,
        model_config={**SMALL, "memory": "linear_attention"},
    )
    assert module.train().eval() is module
    assert not any(part.training for part in module.modules())
    walks = []
    monkeypatch.setattr(module, "train", lambda mode=True: walks.append(mode))
    module.eval()
    assert not walks
