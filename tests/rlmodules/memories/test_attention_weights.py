"""The weights that memories say they use are those that their kernels use."""

import pytest
import torch

from rlmodules.memories import MixedConfig
from rlmodules.memories import gated_delta as delta_memory
from rlmodules.memories import gtrxl as gtrxl_memory
from rlmodules.memories import linear_attention as linear_memory
from rlmodules.memories import popgym as popgym_memory
from rlmodules.memories import window as window_memory
from rlmodules.memories.compilation import compile_blocks
from rlmodules.memories.memory import Memory, NoWeightsError
from tests.contracts import B, D, assert_equal, initial, inputs
from tests.rlmodules.memories.test_memories import MEMORIES, SMALL, build, deep, gtrxl, popgym

LINEAR = ["linear", *(name for name in MEMORIES if name.split("-")[0] == "deep"), "popgym"]
LINEAR += ["popgym-deep"]
OTHERS = ["delta", "delta-rotary", "window", "window-one"]
SUPPORTED = {
    name: build
    for name, build in MEMORIES.items()
    if name in LINEAR + OTHERS or name.split("-")[0] == "gtrxl"
}
SUPPORTED["mixed"] = lambda: build(MixedConfig, **SMALL, window=5)
T = 90


@pytest.fixture(params=SUPPORTED)
def memory(request):
    return SUPPORTED[request.param]().double()


@pytest.fixture
def calls(monkeypatch):
    """Arguments and outputs of the attention kernels that a memory calls."""
    recorded = []

    def record(module, name):
        kernel = getattr(module, name)

        def call(q, k, v, *args, **options):
            out = kernel(q, k, v, *args, **options)
            recorded.append((q, k, v, options, out if torch.is_tensor(out) else out[0]))
            return out

        monkeypatch.setattr(module, name, call)

    record(linear_memory, "linear_attention")
    record(popgym_memory, "linear_attention")
    record(delta_memory, "delta_rule")
    record(gtrxl_memory, "relative_attention")
    record(window_memory, "relative_attention")
    return recorded


@pytest.mark.parametrize("num_steps", [1, T])
def test_weights_times_values_are_the_kernels_outputs(memory, calls, num_steps):
    x, state = inputs(num_steps), initial(memory)
    weights = memory.attention_weights(x, state)
    calls.clear()
    memory(torch.cat([x, x[:, :1]], 1), state)  # a single step of GTrXL has no values
    layers = [call for call in calls if call[2].shape[-1] > 1]
    assert weights.shape == (B, len(layers), layers[0][2].shape[1], num_steps, num_steps)
    for layer, (_, _, v, _, out) in enumerate(layers):
        values = v[:, :, -num_steps - 1 : -1]
        assert_equal(weights[:, layer] @ values, out[:, :, :num_steps])


def test_a_write_gate_is_part_of_the_weights(calls):
    memory = MEMORIES["linear-options"]().double()
    x, state = inputs(T), initial(memory)
    weights = memory.attention_weights(x, state)
    calls.clear()
    memory(x, state)
    (block,), ((_, _, _, _, out),) = memory.blocks, calls
    of_block = {key: leaf[:, 0] for key, leaf in state.items() if key != "t"}
    _, values, _ = block.mixer.project(block.norm(memory.project(x)), of_block, None, None)
    assert_equal(weights[:, 0] @ values, out)


@pytest.mark.parametrize("name", LINEAR)
def test_linear_attention_follows_the_formula(name, calls):
    memory = SUPPORTED[name]().double()
    weights = memory.attention_weights(inputs(T), initial(memory))
    blocks = [call for call in calls if call[2].shape[-1] == T]
    for layer, (q, k, _, options, _) in enumerate(blocks):
        log_decay = options.get("log_decay")
        if log_decay is None:
            log_decay = torch.zeros_like(q[..., 0])
        sums = log_decay.cumsum(-1)
        expected = (q @ k.mT * (sums[..., :, None] - sums[..., None, :]).exp()).tril()
        if options.get("normalize", True):
            expected = expected / (expected.sum(-1, keepdim=True) + 1e-5)
        assert_equal(weights[:, layer], expected)


def test_popgym_with_a_maximum_of_keys_follows_the_formula():
    memory = popgym(hidden_size=16, positions="none", z_aggregator="max").double()
    x = inputs(T)
    block = memory.blocks[0]
    h = block.norm(memory.preprocess(x))
    q, k = (torch.nn.functional.elu(layer(h)) + 1 for layer in (block.query, block.key))
    normaliser = (q * k.cummax(1).values).sum(-1, keepdim=True) + 1e-5
    weights = memory.attention_weights(x, initial(memory))
    assert_equal(weights[:, 0, 0], (q @ k.mT).tril() / normaliser)


@pytest.mark.parametrize("window", [1, 6, 40])
def test_gtrxl_shares_one_among_the_steps_in_its_window(window):
    memory = gtrxl(memory_inference=window).double()
    weights = memory.attention_weights(inputs(T), initial(memory))
    assert_equal(weights.sum(-1), torch.ones_like(weights[..., 0]))
    ages = torch.arange(T)[:, None] - torch.arange(T)
    inside = (ages >= 0) & (ages <= window)
    assert (weights[..., ~inside] == 0).all()
    assert (weights[..., inside] > 0).all()


def test_a_state_of_earlier_steps_takes_a_part(memory):
    """Of what a longer sequence gives, the columns of the steps that are asked for."""
    x = torch.cat([inputs(11), inputs(T)], 1)
    whole = memory.attention_weights(x, initial(memory))
    with torch.no_grad():
        _, busy = memory(inputs(11), initial(memory))
    part = memory.attention_weights(inputs(T), busy)
    assert_equal(part, whole[..., 11:, 11:])


def test_nothing_of_the_memory_changes(memory):
    x, state = inputs(7), initial(memory)
    before, _ = memory(x, state)
    weights = memory.attention_weights(x, state)
    assert not weights.requires_grad
    assert (weights.triu(1) == 0).all()
    assert not any(module._forward_pre_hooks for module in memory.modules())
    assert torch.equal(memory(x, state)[0], before)


@pytest.mark.parametrize("name", ["popgym-max", "popgym-max-sum"])
def test_a_maximum_has_no_weights(name):
    memory = MEMORIES[name]().double()
    with pytest.raises(ValueError, match='`S_aggregator` is "max", which has no attention weights'):
        memory.attention_weights(inputs(7), initial(memory))


@pytest.mark.parametrize("name", ["gru", "gru-residual", "min-gru", "lru", "ffm", "mixed"])
def test_these_have_no_weights(name):
    """Of a mixed stack all layers have to have them, or it would seem to have fewer."""
    memory = MEMORIES[name]().double()
    with pytest.raises(NoWeightsError, match="Mixer` has no attention weights: its output is no"):
        memory.attention_weights(inputs(7), initial(memory))


def test_other_memories_have_no_weights():
    class Mean(Memory):
        def initial_state(self):
            return {"h": torch.zeros(D)}

        def forward(self, x, state, *, valid=None, resets=None):
            return x.cumsum(1), state

    memory = Mean()
    with pytest.raises(ValueError, match="`Mean` has no attention weights"):
        memory.attention_weights(inputs(7), initial(memory))


def test_a_memory_around_a_memory():
    class Around(Memory):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def initial_state(self):
            return self.inner.initial_state()

        def forward(self, x, state, *, valid=None, resets=None):
            return self.inner(2 * x, state, valid=valid, resets=resets)

    memory = MEMORIES["gtrxl"]().double()
    weights = Around(memory).attention_weights(inputs(7), initial(memory))
    assert_equal(weights, memory.attention_weights(2 * inputs(7), initial(memory)))


def test_compiled_blocks_have_the_same_weights():
    memory = deep().double()
    expected = memory.attention_weights(inputs(7), initial(memory))
    assert compile_blocks(memory.compilable(), True, torch.device("cpu"))
    assert torch.equal(memory.attention_weights(inputs(7), initial(memory)), expected)
