"""The GRU against its loop and torch's: states and every gradient, over masks, NaN and dtypes."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodules.kernels import gru, gru_reference
from tests.contracts import assert_equal

B, INPUTS, D = 3, 4, 5


def layer(dtype=torch.float64):
    torch.manual_seed(0)
    return torch.nn.GRU(INPUTS, D, batch_first=True).to(dtype)


def tensors(num_steps, dtype=torch.float64):
    """Inputs, the state before them, and the weights and biases of a layer."""
    generator = torch.Generator().manual_seed(num_steps)
    x = torch.randn(B, num_steps, INPUTS, generator=generator, dtype=dtype)
    h0 = torch.randn(B, D, generator=generator, dtype=dtype)
    weights = [w.detach() for w in layer(dtype).all_weights[0]]
    return [x.requires_grad_() for x in (x, h0, *weights)]


def results(function, inputs, resets=None):
    """States, and the gradients of a random function of them."""
    h = function(*inputs, resets=resets)
    generator = torch.Generator().manual_seed(0)
    factor = torch.randn(h.shape, generator=generator, dtype=torch.float64).to(h.dtype)
    return h, *torch.autograd.grad((h * factor).sum(), inputs)


def some_resets(num_steps):
    return torch.rand(B, num_steps, generator=torch.Generator().manual_seed(1)) < 0.1


@pytest.mark.parametrize("num_steps", [1, 2, 7, 130])
@pytest.mark.parametrize("with_resets", [False, True])
def test_equals_the_loop(with_resets, num_steps):
    inputs = tensors(num_steps)
    resets = some_resets(num_steps) if with_resets else None
    assert_equal(results(gru, inputs, resets), results(gru_reference, inputs, resets))


@settings(max_examples=20)
@given(
    num_steps=st.integers(1, 50),
    resets=st.lists(st.tuples(st.integers(0, B - 1), st.integers(0, 49)), max_size=20),
)
def test_any_resets(num_steps, resets):
    mask = torch.zeros(B, num_steps, dtype=torch.bool)
    for row, step in resets:
        mask[row, min(step, num_steps - 1)] = True
    inputs = tensors(num_steps)
    assert_equal(results(gru, inputs, mask), results(gru_reference, inputs, mask))


def test_equals_torch():
    torch_layer, (x, h0, *_) = layer(), tensors(70)
    expected, _ = torch_layer(x, h0[None])
    actual = gru(x, h0, *torch_layer.all_weights[0])
    assert_equal([actual], [expected])
    parameters = [x, h0, *torch_layer.parameters()]
    assert_equal(
        torch.autograd.grad(actual.square().sum(), parameters),
        torch.autograd.grad(expected.square().sum(), parameters),
    )


def test_gradcheck():
    inputs, resets = tensors(9), some_resets(9)
    assert resets.any()
    assert torch.autograd.gradcheck(lambda *inputs: gru(*inputs, resets=resets), inputs)


def test_float32():
    inputs, resets = tensors(1024, torch.float32), some_resets(1024)
    exact = results(gru_reference, [x.detach().double().requires_grad_() for x in inputs], resets)
    actual = [x.double() for x in results(gru, inputs, resets)]
    assert_equal(actual, exact, tolerance=1e-5)


def test_nan_stays_in_its_episode():
    inputs, resets = tensors(40), torch.zeros(B, 40, dtype=torch.bool)
    resets[:, [10, 30]] = True
    expected, d_x, *_ = results(gru, inputs, resets)
    x = inputs[0].detach().clone()
    x[:, 20] = math.nan
    h, d_broken, *_ = results(gru, [x.requires_grad_(), *inputs[1:]], resets)
    others = [*range(10), *range(30, 40)]
    assert torch.equal(h[:, :20], expected[:, :20])
    assert torch.equal(h[:, others], expected[:, others])
    assert torch.equal(d_broken[:, others], d_x[:, others])


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_traces_whole():
    torch.compiler.reset()
    compiled = torch.compile(gru, fullgraph=True, backend="aot_eager", dynamic=False)
    inputs, resets = tensors(70), some_resets(70)
    assert_equal(results(compiled, inputs, resets), results(gru, inputs, resets))
    torch.compiler.reset()
