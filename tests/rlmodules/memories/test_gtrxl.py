"""GTrXL: against a loop over single steps, its settings, and RLlib's old class."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.models.catalog import MODEL_DEFAULTS, ModelCatalog
from ray.rllib.models.torch.attention_net import GTrXLNet
from torch.nn import functional as F

from rlmodules import GTrXLConfig, GTrXLRLModule, load_legacy_weights
from tests.contracts import B, D, assert_equal, initial, inputs

SMALL = {"d_model": 8, "num_heads": 2, "head_dim": 3, "feedforward_dim": 7}


def build_memory(**settings):
    return GTrXLConfig(max_seq_len=8, **{**SMALL, **settings}).build_memory(D)


OBS_SPACE = gym.spaces.Box(-1.0, 1.0, (5,), np.float32)
ACTION_SPACE = gym.spaces.Discrete(3)


def gate(weights, x, y):
    """Parisotto et al. 2019, section 3.2."""
    reset_y, update_y, candidate_y = weights.of_output.weight.chunk(3)
    reset_x, update_x = weights.of_input.weight.chunk(2)
    r = torch.sigmoid(reset_y @ y + reset_x @ x)
    z = torch.sigmoid(update_y @ y + update_x @ x - weights.bias)
    h = torch.tanh(candidate_y @ y + weights.of_reset_input.weight @ (r * x))
    return (1 - z) * x + z * h


def unit_step(unit, past, x):
    """One step of one unit: `past` are its inputs at the earlier steps it may see."""
    H, K = unit.num_heads, unit.head_dim
    query, key, value = unit.qkv.weight.view(3, H, K, -1)
    positions = unit.positions.weight.view(H, K, -1)
    normed = [unit.attention_norm(step) for step in (*past, x)]
    heads = []
    for h in range(H):
        q = query[h] @ normed[-1]
        scores = []
        for j, step in enumerate(normed):
            distance = len(past) - j
            width = len(x)
            angles = [distance / 10_000 ** (i / width) for i in range(0, width, 2)]
            encoding = torch.tensor(
                [math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=x.dtype
            )
            content = (q + unit.content_bias[h]) @ (key[h] @ step)
            position = (q + unit.position_bias[h]) @ (positions[h] @ encoding)
            scores.append((content + position) / math.sqrt(K))
        weights = torch.stack(scores).softmax(0)
        heads.append(sum(w * (value[h] @ step) for w, step in zip(weights, normed, strict=True)))
    y = F.relu(unit.out.weight @ torch.cat(heads))
    x = gate(unit.attention_gate, x, y)
    return gate(unit.feedforward_gate, x, unit.feedforward(x))


def reference(memory, episode):
    """The paper, one step after the other: outputs `(T, D)` of one episode from its first step."""
    past = [[] for _ in memory.units]
    outputs = []
    for x in episode:
        x = memory.project(x)
        for seen, unit in zip(past, memory.units, strict=True):
            before, x = x, unit_step(unit, seen[-memory.memory_inference :], x)
            seen.append(before)
        outputs.append(x)
    return torch.stack(outputs)


@pytest.mark.parametrize("memory_inference", [1, 4, 40])
def test_equals_the_loop(memory_inference):
    torch.set_default_dtype(torch.float64)  # the sines too
    try:
        memory = build_memory(memory_inference=memory_inference)
    finally:
        torch.set_default_dtype(torch.float32)
    for unit in memory.units:
        torch.nn.init.normal_(unit.attention_norm.weight)
        torch.nn.init.normal_(unit.attention_norm.bias)
    x = inputs(37)
    results = []
    for run in (
        lambda x: memory(x, initial(memory))[0],
        lambda x: torch.stack([reference(memory, episode) for episode in x]),
    ):
        leaf = x.clone().requires_grad_()
        y = run(leaf)
        loss = (y * torch.linspace(0, 1, y.numel(), dtype=y.dtype).view(y.shape)).sum()
        results.append((y, *torch.autograd.grad(loss, (leaf, *memory.parameters()))))
    assert_equal(*results)


def test_fewer_steps_before_the_chunk():
    """`memory_training` says how many stored steps a chunk's first step sees."""
    torch.manual_seed(1)
    full = build_memory(num_layers=1, memory_inference=8).double()
    short = build_memory(num_layers=1, memory_inference=8, memory_training=3).double()
    short.load_state_dict(full.state_dict())
    x = inputs(30)
    _, state = full(x[:, :10], initial(full))
    y_full, after_full = full(x[:, 10:], state)
    y_short, after_short = short(x[:, 10:], state)
    assert_equal(after_short, after_full)
    # Step i of the chunk sees min(8, 3 + i) steps: all that the other one sees from step 5 on.
    assert_equal(y_short[:, 5:], y_full[:, 5:])
    assert ((y_short - y_full)[:, :5].abs().amax(-1) > 1e-6).all()
    # In the rollout it has no effect.
    assert_equal(short(x[:, 10:11], state), full(x[:, 10:11], state))
    # The chunk's first step sees what it would see of a window with only three steps.
    three = {"window": torch.where(torch.arange(8)[:, None] >= 5, state["window"], torch.nan)}
    y, _ = full(x[:, 10:], {"window": three["window"].nan_to_num(), "t": torch.full((B,), 3)})
    assert_equal(y_short[:, 0], y[:, 0])


def test_no_gradient_of_the_window():
    memory = build_memory(memory_inference=4).double()
    x = inputs(6).requires_grad_()
    _, state = memory(x[:, :3], initial(memory))
    y, _ = memory(x[:, 3:], state)
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert (grad[:, :3] == 0).all()
    assert (grad[:, 3:] != 0).any(-1).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_low_precision(dtype):
    """Masked slots stay masked, and nothing overflows, episode starts and padding included."""
    memory = build_memory(memory_inference=8)
    x, valid = inputs(20).float(), torch.arange(20) < torch.tensor([20, 7, 1])[:, None]
    expected, _ = memory(x, initial(memory, torch.float32), valid=valid)
    with torch.autocast("cpu", dtype):
        y, state = memory(x, initial(memory, torch.float32), valid=valid)
        y.float().square().sum().backward()
        step, _ = memory(x[:, :1], initial(memory, torch.float32))
    assert all(p.grad.isfinite().all() for p in memory.parameters())
    assert state["window"].dtype == torch.float32
    assert (y - expected)[valid].abs().max() < 0.05
    assert (step - expected[:, :1]).abs().max() < 0.05


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"d_model": 7}, "`d_model` is 7, but must be even"),
        ({"memory_inference": 0}, "`memory_inference` is 0, but must be an integer of at least 1"),
        ({"memory_training": 9, "memory_inference": 8}, r"at most `memory_inference` \(8\)"),
        (
            {"memory_training": -1},
            "`memory_training` is -1, but must be an integer of at least 0",
        ),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        build_memory(**options)


# RLlib's old class.

LEGACY = {"d_model": 16, "num_heads": 2, "head_dim": 6, "feedforward_dim": 12, "num_layers": 2}


def build(**settings):
    spec = RLModuleSpec(
        module_class=GTrXLRLModule,
        observation_space=OBS_SPACE,
        action_space=ACTION_SPACE,
        model_config=GTrXLConfig(**{"max_seq_len": 8, **LEGACY, "compile": False, **settings}),
    )
    return spec.build()


def legacy_net(memory, num_outputs=None):
    return GTrXLNet(
        OBS_SPACE, ACTION_SPACE, num_outputs, {"max_seq_len": 8}, "old",
        num_transformer_units=LEGACY["num_layers"], attention_dim=LEGACY["d_model"],
        num_heads=LEGACY["num_heads"], head_dim=LEGACY["head_dim"],
        position_wise_mlp_dim=LEGACY["feedforward_dim"],
        memory_inference=memory, memory_training=memory,
    )  # fmt: skip


def legacy_wrapper(memory):
    config = {
        **MODEL_DEFAULTS,
        "use_attention": True,
        "fcnet_hiddens": [9, 7],
        "max_seq_len": 8,
        "attention_num_transformer_units": LEGACY["num_layers"],
        "attention_dim": LEGACY["d_model"],
        "attention_num_heads": LEGACY["num_heads"],
        "attention_head_dim": LEGACY["head_dim"],
        "attention_position_wise_mlp_dim": LEGACY["feedforward_dim"],
        "attention_memory_inference": memory,
    }
    return ModelCatalog.get_model_v2(OBS_SPACE, ACTION_SPACE, 3, config, framework="torch")


# RLlib warns that its old stack is old.
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("bare", [True, False], ids=["GTrXLNet", "use_attention"])
@pytest.mark.parametrize("num_steps", [1, 8])
def test_equals_the_old_class_on_the_first_step_with_a_full_memory(bare, num_steps):
    memory = 6
    old = legacy_net(memory, num_outputs=3) if bare else legacy_wrapper(memory)
    for parameter in old.parameters():  # also those that start at 0 or 1
        torch.nn.init.normal_(parameter, std=0.3)
    module = build(
        memory_inference=memory,
        fcnet_hiddens=[] if bare else [9, 7],
        fcnet_activation="linear" if bare else "tanh",
    )
    load_legacy_weights(module, old.state_dict())

    obs = torch.randn(B, num_steps, 5)
    windows = [torch.randn(B, memory, LEGACY["d_model"]) for _ in range(LEGACY["num_layers"])]
    seq_lens = torch.full((B,), num_steps)
    with torch.no_grad():
        logits, _ = old(
            {"obs": obs.flatten(0, 1), "obs_flat": obs.flatten(0, 1)}, windows, seq_lens
        )
        values = old.value_function()
        normed = [F.layer_norm(window, window.shape[-1:]) for window in windows]
        batch = {
            Columns.OBS: obs,
            Columns.STATE_IN: {"window": torch.stack(normed, 1), "t": torch.full((B,), 50)},
        }
        out = module.forward_train(batch)[Columns.ACTION_DIST_INPUTS]
        our_values = module.compute_values(batch)
    if bare:
        out = F.relu(out)
    logits, values = logits.view(B, num_steps, 3), values.view(B, num_steps)
    torch.testing.assert_close(out[:, 0], logits[:, 0], rtol=0, atol=2e-5)
    torch.testing.assert_close(our_values[:, 0], values[:, 0], rtol=0, atol=2e-5)
    if num_steps > 1:
        # The old class sees more in a chunk than in a rollout.
        assert (our_values - values)[:, 1:].abs().max() > 1e-3


@pytest.mark.filterwarnings("ignore")
def test_legacy_weights_load_all_or_none():
    module = build(fcnet_hiddens=[])
    before = {name: value.clone() for name, value in module.state_dict().items()}
    weights = legacy_net(6, num_outputs=3).state_dict()
    missing = {k: v for k, v in weights.items() if "linear_layer._model.0.bias" not in k}
    bad = [
        (missing, r"hold no 'linear_layer\._model\.0\.bias'"),
        ({**weights, "extra": torch.zeros(1)}, r"hold \['extra'\]"),
        ({**weights, "logits._model.0.bias": torch.zeros(7)}, r"policy_head\.net\.0\.bias \(7,\)"),
        (legacy_wrapper(6).state_dict(), "_hidden_layers"),
    ]
    for state, message in bad:
        with pytest.raises(ValueError, match=message):
            load_legacy_weights(module, state)
        assert_equal(dict(module.state_dict()), before)
    numpy_weights = {name: value.numpy() for name, value in weights.items()}
    load_legacy_weights(module, numpy_weights)
    assert not torch.equal(
        module.state_dict()["value_head.net.0.weight"], before["value_head.net.0.weight"]
    )
