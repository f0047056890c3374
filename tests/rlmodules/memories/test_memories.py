import copy
import dataclasses
import pickle

import pytest
import torch

from rlmodules.contract.memory import check_memory
from rlmodules.memories import (
    DeepLinearAttentionConfig,
    FFMConfig,
    GatedDeltaConfig,
    GRUConfig,
    GTrXLConfig,
    LinearAttentionConfig,
    LRUConfig,
    LSTMConfig,
    MinGRUConfig,
    MixedConfig,
    Mixer,
    POPGymLinearAttentionConfig,
    StackConfig,
    WindowAttentionConfig,
)
from rlmodules.memories.positions import POSITIONS
from tests.contracts import D, MemoryContract, initial, inputs

SMALL = {"d_model": 8, "num_heads": 2, "head_dim": 4, "feedforward_dim": 7}
FRAME = {"d_model": 8, "feedforward_dim": 7}
GTRXL = {"d_model": 8, "num_heads": 2, "head_dim": 3, "feedforward_dim": 7}


def build(config_class, **settings):
    return config_class(max_seq_len=8, **settings).build_memory(D)


def deep(**settings):
    return build(DeepLinearAttentionConfig, **{**SMALL, **settings})


def gtrxl(**settings):
    return build(GTrXLConfig, **{**GTRXL, **settings})


def popgym(**settings):
    return build(POPGymLinearAttentionConfig, **settings)


SUM = {**SMALL, "head_dim": 3, "normalizer": "sum", "positions": "none"}

MEMORIES = {
    "linear": lambda: build(LinearAttentionConfig, **SMALL),
    "deep": deep,
    "deep-sum": lambda: deep(**SUM),
    "deep-plain": lambda: deep(**SUM, short_conv_size=0, decay=False),
    "deep-sine": lambda: deep(
        **SUM | {"positions": "sine"}, position_horizon=50, short_conv_activation="linear"
    ),
    "gtrxl": lambda: gtrxl(memory_inference=6),
    "gtrxl-one": lambda: gtrxl(num_layers=1, memory_inference=1),
    "gtrxl-long": lambda: gtrxl(memory_inference=40, gate_bias=0.0),
    "gru": lambda: build(GRUConfig, d_model=8, num_layers=2),
    "lstm": lambda: build(LSTMConfig, d_model=8),
    "gru-residual": lambda: build(GRUConfig, **FRAME, residual=True, positions="sine"),
    "lstm-residual": lambda: build(LSTMConfig, **FRAME, num_layers=2, residual=True),
    "linear-options": lambda: deep(
        feature_map="unit", write_gate=True, output_gate=True, num_layers=1
    ),
    "delta": lambda: build(GatedDeltaConfig, **SMALL),
    "delta-rotary": lambda: build(
        GatedDeltaConfig, **SMALL, positions="rotary", decay=False, output_gate=True, num_layers=1
    ),
    "min-gru": lambda: build(MinGRUConfig, **FRAME, state_dim=6),
    "lru": lambda: build(LRUConfig, **FRAME, state_dim=6),
    "ffm": lambda: build(FFMConfig, **FRAME, num_traces=3, num_rhythms=2, num_layers=1),
    "window": lambda: build(WindowAttentionConfig, **SMALL, window=6),
    "window-one": lambda: build(WindowAttentionConfig, **SMALL, window=1, num_layers=1),
    "mixed": lambda: build(
        MixedConfig, **SMALL, window=5, state_dim=6, layers=["window", "gated_delta", "min_gru"]
    ),
    "popgym": lambda: popgym(hidden_size=25),
    "popgym-deep": lambda: popgym(hidden_size=50, num_layers=3, positions="none"),
    "popgym-max": lambda: popgym(hidden_size=16, S_aggregator="max", z_aggregator="max"),
    "popgym-max-sum": lambda: popgym(hidden_size=16, S_aggregator="max"),
}


class TestContract(MemoryContract):
    @pytest.fixture(params=MEMORIES)
    def memory(self, request):
        return MEMORIES[request.param]().double()


@pytest.mark.parametrize("positions", POSITIONS)
def test_every_encoding_serves_any_step(positions):
    memory = deep(positions=positions, position_horizon=10).double()
    y, state = memory(inputs(25), initial(memory))
    assert y.isfinite().all()
    assert (state["t"] == 25).all()


def test_pickles_and_copies_compute_the_same():
    memory = deep().double()
    expected, _ = memory(inputs(9), initial(memory))
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert torch.equal(other(inputs(9), initial(other))[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_steps", [1, 5])
@pytest.mark.parametrize("name", MEMORIES)
def test_half_precision_modules_keep_their_states_in_float32(name, num_steps, dtype):
    torch.manual_seed(0)
    memory = MEMORIES[name]()
    before = initial(memory, torch.float32)
    expected, _ = memory(inputs(num_steps).float(), before)
    y, state = memory.to(dtype)(inputs(num_steps).to(dtype), before)
    y.sum().backward()
    assert {key: x.dtype for key, x in state.items()} == {k: x.dtype for k, x in before.items()}
    assert y.dtype == dtype
    assert (y - expected).abs().mean() < 0.03 * expected.abs().mean()


@pytest.mark.parametrize(("num_rows", "num_steps"), [(0, 1), (0, 5), (2, 0)])
@pytest.mark.parametrize("name", MEMORIES)
def test_nothing_to_compute(name, num_rows, num_steps):
    memory = MEMORIES[name]()
    state = {k: x.expand(num_rows, *x.shape) for k, x in memory.initial_state().items()}
    valid = torch.ones(num_rows, num_steps, dtype=torch.bool)
    y, after = memory(torch.randn(num_rows, num_steps, D), state, valid=valid, resets=~valid)
    assert y.shape == (num_rows, num_steps, memory.output_dim)
    assert all(torch.equal(after[key], x) for key, x in state.items())


def test_memories_at_the_start():
    """Time constants of 3.7 to 404 steps; a single head's is not the shortest."""
    for num_heads, steps in ((1, [404]), (2, [4, 404]), (3, [4, 34, 404])):
        (block,) = deep(num_layers=1, num_heads=num_heads).blocks
        assert (1 + block.mixer.decay.bias.exp()).round().tolist() == steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "rotary", "normalizer": "sum"}, 'Set `normalizer="rms"`'),
        (
            {"positions": "rotary", "normalizer": "rms", "head_dim": 3},
            "`head_dim` is 3, but must be even",
        ),
        ({"short_conv_size": 1}, "`short_conv_size` is 1, but must be 0"),
    ],
)
def test_options_that_do_not_go_together(options, message):
    with pytest.raises(ValueError, match=message):
        deep(**options)


def test_rotary_positions_need_something_to_turn():
    with pytest.raises(ValueError, match='`positions` is "rotary", but this memory has no queries'):
        build(SumConfig, positions="rotary")


def test_popgym_needs_a_state():
    with pytest.raises(ValueError, match="`hidden_size` is 4, which leaves no state for 4 layers"):
        popgym(hidden_size=4, num_layers=4)


def test_popgym_needs_room_for_its_positions():
    with pytest.raises(ValueError, match="`position_size` is 6, but must be at most 5"):
        popgym(position_size=6)


class SumMixer(Mixer):
    """A decayed sum: the least that a mixer can be, with a state of its own."""

    def __init__(self, width):
        super().__init__()
        self.width = width

    def initial_state(self):
        return {"h": torch.zeros(self.width)}

    def forward(self, h, state, turn, valid, resets):
        outputs, running = [], state["h"]
        for t in range(h.shape[1]):
            if resets is not None:
                starts = resets[:, t] if valid is None else resets[:, t] & valid[:, t]
                running = torch.where(starts[:, None], 0.0, running)
            updated = 0.9 * running + h[:, t]
            running = updated if valid is None else updated.where(valid[:, t, None], running)
            outputs.append(running)
        return torch.stack(outputs, 1), {"h": running}


@dataclasses.dataclass(kw_only=True)
class SumConfig(StackConfig):
    d_model: int = 8
    feedforward_dim: int = 7

    def build_mixer(self, layer):
        return SumMixer(self.d_model)


def test_a_mixer_is_a_memory():
    check_memory(build(SumConfig, positions="sine"))


def test_states_are_stacked_over_the_blocks_that_have_them():
    layers = ["linear_attention", "gru", "gated_delta", "lstm", "ffm", "lru", "min_gru", "window"]
    state = build(MixedConfig, layers=layers).initial_state()
    assert {key: len(value) for key, value in state.items()} == {
        "S": 2, "conv": 2, "h": 2, "c": 1, "traces": 1, "s": 1, "min_h": 1,
        "keys": 1, "values": 1, "age": 1,
    }  # fmt: skip


def test_states_of_one_name_are_of_one_size():
    class TwoWidths(SumConfig):
        def build_mixer(self, layer):
            return SumMixer(self.d_model + layer)

    with pytest.raises(ValueError, match="The state `h` has the shapes"):
        build(TwoWidths)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"layers": []}, r"`layers` is \[\], but a stack has at least one block"),
        ({"layers": ["gru"] * 3, "num_layers": 4}, "`num_layers` is 4, but `layers` has 3"),
        ({"layers": ["windows"]}, r"`layers` is \['windows'\], but must be a list"),
    ],
)
def test_stacks_that_there_are_not(settings, message):
    with pytest.raises(ValueError, match=message):
        build(MixedConfig, **settings)


@pytest.mark.parametrize("kind", ["gru", "lstm"])
def test_cells_equal_torch(kind):
    """All layers of torch's own class, with its weights."""
    config_class = {"gru": GRUConfig, "lstm": LSTMConfig}[kind]
    memory = build(config_class, d_model=6, num_layers=2).double()
    theirs = {"gru": torch.nn.GRU, "lstm": torch.nn.LSTM}[kind](D, 6, 2, batch_first=True).double()
    for layer, cell in enumerate(memory.cells):
        for name, weight in cell.cell.named_parameters():
            getattr(theirs, name.replace("l0", f"l{layer}")).data.copy_(weight)
    x = inputs(9)
    y, state = memory(x, initial(memory))
    expected, last = theirs(x)
    torch.testing.assert_close(y, expected)
    for key, value in zip(state, last if kind == "lstm" else [last], strict=True):
        torch.testing.assert_close(state[key], value.transpose(0, 1))


def test_bare_cells_have_no_positions():
    with pytest.raises(ValueError, match="`positions` is 'sine', but bare cells count"):
        build(GRUConfig, positions="sine")


def test_unit_features_need_no_sum():
    with pytest.raises(ValueError, match="`feature_map` is 'unit' with `normalizer` 'sum'"):
        deep(positions="none", feature_map="unit", normalizer="sum")
