"""The `popgym` presets against the installed popgym 1.0.7, weight for weight, in float64."""

import gymnasium as gym
import numpy as np
import pytest
import torch
from popgym.baselines.models.linear_attention import LinearAttentionBlock
from popgym.baselines.ray_models.ray_linear_attention import DeepLinearAttention, LinearAttention
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch import nn

from rlmodules import MemoryRLModule, POPGymLinearAttentionConfig
from rlmodules.memories.popgym import POPGymBlock
from rlmodules.memories.positions import POSITIONS

OBS_SPACE = gym.spaces.Box(-1.0, 1.0, (5,), np.float32)
ACTION_SPACE = gym.spaces.Discrete(4)
B, T, HORIZON = 3, 20, 64
WIDTH = 128  # of the paper's networks

# Ours follows POPGym's names after the block; the rest is renamed here.
RENAMED = {
    "core.encoder.mlp.0": "feature_map.0",
    "core.memory.preprocess.0": "pre.0",
    "core.memory.blocks": "core",
    "core.memory.unmap": "unmap",
    "core.memory.positions.scale": "embedding_strength",
    "core.memory.positions.encoding.table": "embedding.weight",
    "policy_head.net.0": "actor.0.0",
    "policy_head.net.2": "actor.0.2",
    "policy_head.net.4": "actor.1",
    "value_head.net.0": "critic.0.0",
    "value_head.net.2": "critic.0.2",
    "value_head.net.4": "critic.1",
}
RENAMED_ENCODINGS = {
    "scaled_sine": {"weight": "embedding.a"},
    "perceptron": {"weight": "embedding.lin.weight"},
    "time2vec": {"weight": "embedding.net.weight", "bias": "embedding.net.bias"},
}
# POPGym computes these encodings in float32.
FLOAT32_ENCODINGS = {"sine", "scaled_sine", "simple_scaled", "perceptron", "time2vec"}

CASES = {
    **{name: {"positions": name} for name in POSITIONS},
    "none": {"positions": "none"},
    "fixed scale": {"positions": "learned", "scale_positions": False},
    "narrow positions": {"positions": "learned", "position_size": 6},
    "deep": {"num_layers": 4},
    "deep with positions": {"num_layers": 2, "positions": "fixed"},
    "max S": {"positions": "none", "S_aggregator": "max"},
    "max z": {"positions": "none", "z_aggregator": "max"},
    "deep max": {"num_layers": 3, "S_aggregator": "max", "z_aggregator": "max"},
}


def popgym_model(settings):
    settings = dict(settings)
    num_layers = settings.pop("num_layers", None)
    positions = settings.pop("positions", "none" if num_layers else "sine")
    model_class = DeepLinearAttention if num_layers else LinearAttention

    def head():
        return nn.Sequential(
            nn.Linear(256, WIDTH), nn.LeakyReLU(), nn.Linear(WIDTH, WIDTH), nn.LeakyReLU()
        )

    config = {
        "preprocessor_input_size": WIDTH,
        "preprocessor": nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LeakyReLU()),
        "preprocessor_output_size": WIDTH,
        "actor": head(),
        "critic": head(),
        "postprocessor_output_size": WIDTH,
        "embedding": None if positions == "none" else positions,
        "embedding_size": settings.get("position_size"),
        "scale_embedding": settings.get("scale_positions", True),
        "S_aggregator": settings.get("S_aggregator", "sum"),
        "Z_aggregator": settings.get("z_aggregator", "sum"),
    }
    if num_layers:
        config["num_layers"] = num_layers
    model = model_class(
        OBS_SPACE,
        ACTION_SPACE,
        4,
        {"max_seq_len": HORIZON, "custom_model_config": config},
        "popgym",
    ).double()
    # POPGym casts steps to float32, which its own float64 weights would not take.
    for name in ("lin", "net"):  # perceptron, time2vec
        if hasattr(model.embedding, name):
            net = getattr(model.embedding, name)
            net.forward = lambda x, net=net: nn.functional.linear(x.double(), net.weight, net.bias)
    return model


def our_module(settings):
    deep = "num_layers" in settings
    preset = POPGymLinearAttentionConfig.deep if deep else POPGymLinearAttentionConfig
    config = preset(max_seq_len=16, position_horizon=HORIZON, **settings)
    return RLModuleSpec(
        module_class=MemoryRLModule,
        observation_space=OBS_SPACE,
        action_space=ACTION_SPACE,
        model_config=config,
    ).build()


def popgym_name(name, module):
    """POPGym's name of one of our parameters."""
    encoding = "core.memory.positions.encoding."
    if name.startswith(encoding) and not name.endswith("table"):
        renamed = RENAMED_ENCODINGS[module.memory_config.positions]
        return renamed[name.removeprefix(encoding)]
    for ours, theirs in RENAMED.items():
        if name == ours or name.startswith(f"{ours}."):
            name = theirs + name.removeprefix(ours)
            if module.memory_config.num_layers > 1:
                return name
            # POPGym's first model has one block, not a list of them.
            return name.replace("core.0.", "core.", 1)
    raise AssertionError(f"no counterpart of {name}")


def pair(settings):
    """POPGym's model and ours with its weights, both in float64."""
    model, module = popgym_model(settings), our_module(settings).double()
    weights = model.state_dict()
    copied = {
        name: weights[popgym_name(name, module)].reshape(own.shape)
        for name, own in module.state_dict().items()
    }
    module.load_state_dict(copied)
    return model, module


def run_popgym(model, obs, state):
    """Logits, values and state, as (list of S and z a layer, step count)."""
    seq_lens = torch.full((B,), obs.shape[1])
    logits, state = model({"obs": obs.flatten(0, 1)}, list(state), seq_lens)
    values = model.value_function().view(B, -1)
    return logits.view(B, obs.shape[1], -1), values, state


def popgym_initial(model):
    return [
        x.double().expand(B, *x.shape) if x.is_floating_point() else x.expand(B, *x.shape)
        for x in model.get_initial_state()
    ]


def as_our_state(state, module):
    """POPGym's list of states as ours; its maxima start from 0, and so do ours here."""
    layers, t = state[:-1], state[-1]
    ours = {"S": torch.stack(layers[::2], 1), "z": torch.stack(layers[1::2], 1)}
    if module.memory_config.positions != "none":
        ours["t"] = t[:, 0].long()
    return ours


def run_ours(module, obs, state):
    out = module.forward_train({Columns.OBS: obs, Columns.STATE_IN: state})
    final = module._forward({Columns.OBS: obs, Columns.STATE_IN: state})[Columns.STATE_OUT]
    values = module.compute_values({}, embeddings=out[Columns.EMBEDDINGS])
    return out[Columns.ACTION_DIST_INPUTS], values, final


@pytest.mark.parametrize("start", ["initial", "busy"])
@pytest.mark.parametrize("case", CASES)
def test_models_are_equal(case, start):
    settings = CASES[case]
    model, module = pair(settings)
    tolerance = 1e-5 if settings.get("positions", "sine") in FLOAT32_ENCODINGS else 1e-10
    tolerance = 1e-10 if "num_layers" in settings else tolerance

    state = popgym_initial(model)
    if start == "busy":
        with torch.no_grad():
            _, _, state = run_popgym(model, torch.randn(B, 13, 5, dtype=torch.float64), state)
    obs = torch.randn(B, T, 5, dtype=torch.float64)
    their_logits, their_values, their_state = run_popgym(model, obs, state)
    our_logits, our_values, our_state = run_ours(module, obs, as_our_state(state, module))

    def close(ours, theirs):
        scale = max(1.0, theirs.abs().max().item())
        torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance * scale)

    close(our_logits, their_logits)
    close(our_values, their_values)
    expected = as_our_state(their_state, module)
    assert our_state.keys() == expected.keys()
    for key in expected:
        close(our_state[key].double(), expected[key].double())

    logit_weights = torch.randn_like(their_logits)
    value_weights = torch.randn_like(their_values)
    ((their_logits * logit_weights).sum() + (their_values * value_weights).sum()).backward()
    ((our_logits * logit_weights).sum() + (our_values * value_weights).sum()).backward()
    theirs = dict(model.named_parameters())
    seen = set()
    for name, parameter in module.named_parameters():
        counterpart = theirs[popgym_name(name, module)]
        seen.add(popgym_name(name, module))
        assert parameter.grad is not None, name
        close(parameter.grad, counterpart.grad.reshape(parameter.shape))
    without_gradient = {name for name, p in theirs.items() if p.grad is None}
    assert theirs.keys() - seen <= without_gradient


@pytest.mark.parametrize("settings", [{}, {"num_layers": 4}], ids=["LinearAttention", "deep"])
def test_parameters_start_alike(settings):
    """The spread of each weight at the start, where there are enough of them to tell."""
    model, module = popgym_model(settings), our_module(settings)
    theirs = model.state_dict()
    for name, ours in module.state_dict().items():
        if ours.numel() >= 100:
            std = theirs[popgym_name(name, module)].std()
            assert ours.std() == pytest.approx(std.item(), rel=0.3), name


@pytest.mark.parametrize("S_aggregator", ["sum", "max"])
@pytest.mark.parametrize("z_aggregator", ["sum", "max"])
def test_blocks_are_equal(S_aggregator, z_aggregator):
    theirs = LinearAttentionBlock(7, 4, S_aggregator, z_aggregator).double()
    ours = POPGymBlock(7, 4, S_aggregator, z_aggregator).double()
    ours.load_state_dict(theirs.state_dict())
    S = torch.rand(B, 1, 4, 4, dtype=torch.float64).requires_grad_()
    z = torch.rand(B, 1, 4, dtype=torch.float64).requires_grad_()
    x = torch.randn(B, 70, 7, dtype=torch.float64).requires_grad_()

    expected, (their_S, their_z) = theirs(x, [S, z])
    y, state = ours(x, {"S": S, "z": z}, None, None, None)
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(state["S"][:, 0], their_S[:, -1])
    torch.testing.assert_close(state["z"][:, 0], their_z[:, -1])

    inputs = (x, S, z)
    their_loss = expected.square().sum() + their_S[:, -1].square().sum() + their_z[:, -1].sum()
    our_loss = y.square().sum() + state["S"].square().sum() + state["z"].sum()
    torch.testing.assert_close(
        torch.autograd.grad(our_loss, (*inputs, *ours.parameters())),
        torch.autograd.grad(their_loss, (*inputs, *theirs.parameters())),
    )


def test_maxima_of_negative_products_are_kept():
    """What the presets fix: POPGym's maximum starts from 0 and hides negative products."""
    block = POPGymBlock(2, 2, "max", "sum")
    with torch.no_grad():
        block.value.weight.copy_(torch.tensor([[1.0, 0.0], [1.0, 0.0]]))
    state = {key: value[None] for key, value in block.initial_state().items()}
    x = torch.tensor([[[-1.0, 1.0]]])
    _, after = block(x, state, None, None, None)
    assert (after["S"] < 0).all()
    assert (after["S"] > -10).all()
