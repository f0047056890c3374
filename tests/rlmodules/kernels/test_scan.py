"""The scan against its reference: states and every gradient, real and complex, masks and NaN.

All of it twice: for the loop in C++, and for the blocks that run where there is no compiler.
"""

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlmodules.kernels import complex_scan, scan, scan_loop, scan_reference
from tests.contracts import assert_equal

B, D = 3, 5
LENGTHS = (1, 2, 7, 64, 65, 520)
BOTH = list(itertools.product((False, True), repeat=2))


@pytest.fixture(scope="module", params=["loop", "blocks"], autouse=True)
def implementation(request):
    """Runs all tests with each."""
    if request.param == "loop" and scan_loop.library() is None:
        pytest.skip("this machine has no C++ compiler")
    with pytest.MonkeyPatch.context() as patch:
        if request.param == "blocks":
            patch.setattr(scan_loop, "can_run", lambda _: False)
        yield request.param


def complex_reference(a, b, h0, **masks):
    h, last = scan_reference(*(torch.view_as_complex(x) for x in (a, b, h0)), **masks)
    return torch.view_as_real(h), torch.view_as_real(last)


SCANS = {
    "real": (scan, scan_reference, ()),
    "complex": (complex_scan, complex_reference, (2,)),
}


def tensors(num_steps, pair, constant, dtype=torch.float64):
    """Factors, what is added, and the state; factors are at most 1 in size."""
    generator = torch.Generator().manual_seed(num_steps)
    a = torch.rand(*(() if constant else (B, num_steps)), D, generator=generator, dtype=dtype)
    if pair:
        angle = 6 * torch.rand(a.shape, generator=generator, dtype=dtype)
        a = torch.stack([a * angle.cos(), a * angle.sin()], -1)
    b = torch.randn(B, num_steps, D, *pair, generator=generator, dtype=dtype)
    h0 = torch.randn(B, D, *pair, generator=generator, dtype=dtype)
    return [x.requires_grad_() for x in (a, b, h0)]


def masks_of(num_steps, masked=True, with_resets=True):
    lengths = torch.tensor([num_steps, num_steps // 2, 0])[:, None]
    generator = torch.Generator().manual_seed(num_steps)
    resets = torch.rand(B, num_steps, generator=generator) < 0.1
    return {
        "valid": torch.arange(num_steps) < lengths if masked else None,
        "resets": resets if with_resets else None,
    }


def results(function, inputs, masks):
    """Valid states, last state, and the gradients of a random function of both."""
    h, last = function(*inputs, **masks)
    if masks.get("valid") is not None:
        h = torch.where(masks["valid"].view(*h.shape[:2], *[1] * (h.dim() - 2)), h, 0.0)
    generator = torch.Generator().manual_seed(0)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum()
        for x in (h, last)
    )
    return h, last, *torch.autograd.grad(loss, inputs)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize(("masked", "with_resets"), BOTH)
@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("name", SCANS)
def test_equals_the_loop(name, constant, masked, with_resets, num_steps):
    fast, slow, pair = SCANS[name]
    inputs = tensors(num_steps, pair, constant)
    masks = masks_of(num_steps, masked, with_resets)
    assert_equal(results(fast, inputs, masks), results(slow, inputs, masks))


@settings(max_examples=20)
@given(
    num_steps=st.integers(2, 200),
    resets=st.lists(st.tuples(st.integers(0, B - 1), st.integers(0, 199)), max_size=5),
    lengths=st.lists(st.integers(0, 200), min_size=B, max_size=B),
)
def test_any_masks(num_steps, resets, lengths):
    masks = {
        "valid": torch.arange(num_steps) < torch.tensor(lengths)[:, None],
        "resets": torch.zeros(B, num_steps, dtype=torch.bool),
    }
    for row, step in resets:
        masks["resets"][row, min(step, num_steps - 1)] = True
    inputs = tensors(num_steps, (), False)
    assert_equal(results(scan, inputs, masks), results(scan_reference, inputs, masks))


@pytest.mark.parametrize("operation_size", [1, B * D * 8, B * D * 16])
def test_blocks_do_not_matter(operation_size, implementation, monkeypatch):
    if implementation != "blocks":
        pytest.skip("the loop has none")
    inputs, masks = tensors(300, (), False), masks_of(300)
    expected = results(scan, inputs, masks)
    monkeypatch.setitem(scan.__globals__, "OPERATION_SIZE", operation_size)
    assert_equal(results(scan, inputs, masks), expected)


@pytest.mark.parametrize("num_steps", [7, 66])
@pytest.mark.parametrize("name", SCANS)
def test_gradcheck(name, num_steps):
    fast, _, pair = SCANS[name]
    inputs = tensors(num_steps, pair, False)
    masks = masks_of(num_steps)
    assert torch.autograd.gradcheck(lambda *inputs: fast(*inputs, **masks), inputs, fast_mode=True)


@pytest.mark.parametrize("constant", [False, True])
@pytest.mark.parametrize("name", SCANS)
def test_float32(name, constant):
    fast, slow, pair = SCANS[name]
    inputs = tensors(1024, pair, constant, torch.float32)
    exact = results(slow, [x.detach().double().requires_grad_() for x in inputs], {})
    actual = [x.double() for x in results(fast, inputs, {})]
    assert_equal(actual, exact, tolerance=1e-5)


@pytest.mark.parametrize("num_steps", [1, 100])
@pytest.mark.parametrize("name", SCANS)
def test_nan_in_padding_is_inert(name, num_steps):
    fast, _, pair = SCANS[name]
    inputs, masks = tensors(num_steps, pair, False), masks_of(num_steps)
    expected = results(fast, inputs, masks)
    padding = ~masks["valid"]
    broken = []
    for x in inputs[:2]:
        x = x.detach().clone()
        x[padding] = math.nan
        broken.append(x.requires_grad_())
    assert_equal(results(fast, [*broken, inputs[2]], masks), expected)


@pytest.mark.parametrize("step", [0, 37, 99])
@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", SCANS)
def test_nan_does_not_travel_back(name, which, step):
    fast, _, pair = SCANS[name]
    inputs = [x.detach() for x in tensors(100, pair, False)]
    expected, _ = fast(*inputs)
    inputs[which][:, step] = math.nan
    h, _ = fast(*inputs)
    assert torch.equal(h[:, :step], expected[:, :step])
    assert h[:, step:].isnan().all()


def test_computes_in_the_dtype_of_the_state():
    ones = torch.ones(1, 2000, 1, dtype=torch.bfloat16)
    with torch.autocast("cpu", torch.bfloat16):
        _, last = scan(ones, ones, torch.zeros(1, 1))
    assert last.item() == 2000


@pytest.mark.filterwarnings("ignore")  # the compiler's own
@pytest.mark.parametrize("name", SCANS)
def test_traces_whole_for_any_number_of_rows(name):
    fast, _, pair = SCANS[name]
    torch.compiler.reset()
    compiled = torch.compile(fast, fullgraph=True, backend="aot_eager", dynamic=False)
    graphs = []
    for num_rows in (3, 4, 2):
        shapes = (num_rows, 70, D), (num_rows, 70, D), (num_rows, D)
        inputs = [(torch.rand(*shape, *pair) / 2).requires_grad_() for shape in shapes]
        for x in inputs:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        assert_equal(results(compiled, inputs, {}), results(fast, inputs, {}))
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(set(graphs)) == 1
    torch.compiler.reset()


@pytest.mark.parametrize("name", SCANS)
def test_inputs_that_lie_strangely_in_memory(name):
    fast, slow, pair = SCANS[name]
    # Transposed, expanded, and one number of several.
    a = torch.rand(D, 70, B, *pair, dtype=torch.float64).div(2).transpose(0, 2)
    b = torch.randn(B, 1, D, 2, *pair, dtype=torch.float64)[:, :, :, 0].expand(-1, 70, -1, *pair)
    h0 = torch.randn(D, B, *pair, dtype=torch.float64).transpose(0, 1)
    for factors in (a, a[:, :1, :1].expand(a.shape)):
        inputs = [x.detach().requires_grad_() for x in (factors, b, h0)]
        assert_equal(results(fast, inputs, {}), results(slow, inputs, {}))


def test_views_that_are_negated_when_read():
    pairs = torch.randn(3, B, 70, D, dtype=torch.complex128) / 3
    a, b, h0 = (x.conj().imag for x in (pairs[0], pairs[1], pairs[2, :, 0]))
    assert a.is_neg()
    assert_equal(scan(a, b, h0), scan_reference(a, b, h0))


class TestWithoutACompiler:
    @pytest.fixture(autouse=True)
    def forgotten(self):
        scan_loop.library.cache_clear()
        yield
        scan_loop.library.cache_clear()

    def runs_all_the_same(self):
        assert scan_loop.library() is None
        inputs = tensors(100, (), False)
        assert_equal(results(scan, inputs, {}), results(scan_reference, inputs, {}))

    def test_none_is_there(self, monkeypatch):
        monkeypatch.delenv("CXX", raising=False)
        monkeypatch.setenv("PATH", "")
        self.runs_all_the_same()

    def test_it_fails(self, monkeypatch):
        monkeypatch.setenv("CXX", "false")
        self.runs_all_the_same()

    def test_it_makes_no_library(self, monkeypatch):
        monkeypatch.setenv("CXX", "true")
        self.runs_all_the_same()
