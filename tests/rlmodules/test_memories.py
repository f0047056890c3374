import copy
import pickle

import pytest
import torch

from rlmodules.memories import DeepLinearAttention, GTrXL, LinearAttention, POPGymLinearAttention
from rlmodules.positions import POSITIONS
from tests.contracts import D, MemoryContract, initial, inputs

SMALL = {"d_model": 8, "num_heads": 2, "head_dim": 4, "feedforward_dim": 7}
GTRXL = {"d_model": 8, "num_heads": 2, "head_dim": 3, "feedforward_dim": 7}
SUM = {**SMALL, "head_dim": 3, "normalizer": "sum", "positions": "none"}

MEMORIES = {
    "linear": lambda: LinearAttention(D, **SMALL),
    "deep": lambda: DeepLinearAttention(D, **SMALL),
    "deep-sum": lambda: DeepLinearAttention(D, **SUM),
    "deep-plain": lambda: DeepLinearAttention(D, **SUM, short_conv_size=0, decay=False),
    "deep-sine": lambda: DeepLinearAttention(
        D, **SUM | {"positions": "sine"}, position_horizon=50, short_conv_activation="linear"
    ),
    "gtrxl": lambda: GTrXL(D, **GTRXL, memory_inference=6),
    "gtrxl-one": lambda: GTrXL(D, **GTRXL, num_layers=1, memory_inference=1),
    "gtrxl-long": lambda: GTrXL(D, **GTRXL, memory_inference=40, gate_bias=0.0),
    "popgym": lambda: POPGymLinearAttention(D, 25),
    "popgym-deep": lambda: POPGymLinearAttention(D, 50, 3, positions="none"),
    "popgym-max": lambda: POPGymLinearAttention(D, 16, S_aggregator="max", z_aggregator="max"),
    "popgym-max-sum": lambda: POPGymLinearAttention(D, 16, S_aggregator="max"),
}


class TestContract(MemoryContract):
    @pytest.fixture(params=MEMORIES)
    def memory(self, request):
        return MEMORIES[request.param]().double()


@pytest.mark.parametrize("positions", POSITIONS)
def test_every_encoding_serves_any_step(positions):
    memory = DeepLinearAttention(D, **SMALL, positions=positions, position_horizon=10).double()
    y, state = memory(inputs(25), initial(memory))
    assert y.isfinite().all()
    assert (state["t"] == 25).all()


def test_pickles_and_copies_compute_the_same():
    memory = DeepLinearAttention(D, **SMALL).double()
    expected, _ = memory(inputs(9), initial(memory))
    for other in (copy.deepcopy(memory), pickle.loads(pickle.dumps(memory))):
        assert torch.equal(other(inputs(9), initial(other))[0], expected)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"positions": "rotary", "normalizer": "sum"}, 'Set `normalizer="rms"`'),
        (
            {"positions": "rotary", "normalizer": "rms", "head_dim": 3},
            "`head_dim` = 3 must be even",
        ),
        ({"positions": "sinus"}, "is none of: none, rotary"),
        ({"short_conv_size": 1}, "`short_conv_size` = 1 must be 0"),
    ],
)
def test_bad_options(options, message):
    with pytest.raises(ValueError, match=message):
        DeepLinearAttention(D, **SMALL | options)


def test_popgym_needs_a_state():
    with pytest.raises(ValueError, match="`hidden_size` = 4 leaves no state for 4 layers"):
        POPGymLinearAttention(D, 4, num_layers=4)


def test_popgym_knows_no_rotation():
    with pytest.raises(ValueError, match=r"build the config with `\.popgym"):
        POPGymLinearAttention(D, 25, positions="rotary")
