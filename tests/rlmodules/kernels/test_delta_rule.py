"""The delta rule against its loop: outputs, state and every gradient; masks, NaN, like keys."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import normalize

from rlmodules.kernels import delta_rule, delta_rule_reference
from tests.contracts import assert_equal

B, H, K, V = 3, 2, 5, 6
LENGTHS = (1, 2, 7, 64, 65, 150)


def tensors(num_steps, decay=False, cosine=0.0, dtype=torch.float64, num_rows=B):
    """q, k, v, beta, S and, with decay, the log decays; two keys have this cosine on average."""
    generator = torch.Generator().manual_seed(num_steps)

    def rand(*shape):
        return torch.randn(num_rows, H, *shape, generator=generator, dtype=torch.float64)

    q = normalize(rand(num_steps, K), dim=-1)
    mixed = cosine**0.5 * normalize(rand(1, K), dim=-1)
    k = normalize(mixed + (1 - cosine) ** 0.5 * normalize(rand(num_steps, K), dim=-1), dim=-1)
    inputs = [q, k, rand(num_steps, V), 2 * rand(num_steps).sigmoid(), rand(K, V)]
    if decay:
        inputs.append(-rand(num_steps).abs())
    return [x.to(dtype).requires_grad_() for x in inputs]


def masks_of(num_steps, masked=True, with_resets=True):
    lengths = torch.tensor([num_steps, num_steps // 2, 0])[:, None]
    generator = torch.Generator().manual_seed(num_steps)
    resets = torch.rand(B, num_steps, generator=generator) < 0.1
    return {
        "valid": torch.arange(num_steps) < lengths if masked else None,
        "resets": resets if with_resets else None,
    }


def run(function, inputs, **options):
    log_decay = inputs[5] if len(inputs) > 5 else None
    return function(*inputs[:5], log_decay=log_decay, **options)


def results(function, inputs, **options):
    """Valid outputs, the state, and the gradients of a random function of both."""
    out, S = run(function, inputs, **options)
    if options.get("valid") is not None:
        out = torch.where(options["valid"][:, None, :, None], out, 0.0)
    generator = torch.Generator().manual_seed(0)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=torch.float64).to(x.dtype)).sum()
        for x in (out, S)
    )
    return out, S, *torch.autograd.grad(loss, inputs)


def assert_equals_the_loop(inputs, **masks):
    assert_equal(
        results(delta_rule, inputs, **masks), results(delta_rule_reference, inputs, **masks)
    )


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("with_resets", [False, True])
@pytest.mark.parametrize("decay", [False, True])
def test_equals_the_loop(num_steps, masked, with_resets, decay):
    assert_equals_the_loop(tensors(num_steps, decay), **masks_of(num_steps, masked, with_resets))


@pytest.mark.parametrize("least", [-300.0, -1e30, -math.inf])
@pytest.mark.parametrize("num_steps", [1, 90])
def test_forgetting_at_once(least, num_steps):
    """Such a step leaves nothing and changes nothing between the steps behind it."""
    inputs = tensors(num_steps, decay=True)
    with torch.no_grad():
        inputs[5][:, :, ::7] = least
    assert_equals_the_loop(inputs, **masks_of(num_steps))
    floats = [x.detach().float().requires_grad_() for x in inputs]
    actual = [x.double() for x in results(delta_rule, floats)]
    assert_equal(actual, results(delta_rule_reference, inputs), tolerance=1e-5)


@settings(max_examples=10)
@given(
    num_steps=st.integers(2, 100),
    resets=st.lists(st.tuples(st.integers(0, B - 1), st.integers(0, 99)), max_size=5),
    lengths=st.lists(st.integers(0, 100), min_size=B, max_size=B),
    cut=st.integers(1, 99),
)
def test_any_masks_and_cuts(num_steps, resets, lengths, cut):
    valid = torch.arange(num_steps) < torch.tensor(lengths)[:, None]
    starts = torch.zeros(B, num_steps, dtype=torch.bool)
    for row, step in resets:
        starts[row, min(step, num_steps - 1)] = True
    inputs = tensors(num_steps, decay=True)
    assert_equals_the_loop(inputs, valid=valid, resets=starts)
    S = inputs[4]
    for part in (slice(0, min(cut, num_steps - 1)), slice(min(cut, num_steps - 1), None)):
        steps = [x[:, :, part] for x in (*inputs[:4], inputs[5])]
        pieces = [*steps[:4], S, steps[4]]
        _, S = run(delta_rule, pieces, valid=valid[:, part], resets=starts[:, part])
    assert_equal(S, run(delta_rule, inputs, valid=valid, resets=starts)[1])


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 200])
def test_chunk_size_does_not_matter(chunk_size):
    inputs, masks = tensors(50, decay=True), masks_of(50)
    actual = results(delta_rule, inputs, chunk_size=chunk_size, **masks)
    assert_equal(actual, results(delta_rule, inputs, **masks))


@pytest.mark.parametrize("cosine", [0.0, 0.9, 0.999, 1.0])
def test_float32_with_keys_that_are_alike(cosine):
    inputs = tensors(1024, cosine=cosine)
    floats = [x.detach().float().requires_grad_() for x in inputs]
    actual = [x.double() for x in results(delta_rule, floats)]
    assert_equal(actual, results(delta_rule_reference, inputs), tolerance=1e-5)


@pytest.mark.parametrize("decay", [False, True])
def test_gradcheck(decay):
    """The hand-written backward pass against finite differences, not only against autograd."""
    inputs, masks = tensors(7, decay), masks_of(7)
    assert torch.autograd.gradcheck(
        lambda *inputs: run(delta_rule, inputs, chunk_size=3, **masks), inputs, fast_mode=True
    )


@pytest.mark.parametrize("num_steps", [1, 70])
def test_nan_in_padding_is_inert(num_steps):
    inputs, masks = tensors(num_steps, decay=True), masks_of(num_steps)
    expected = results(delta_rule, inputs, **masks)
    broken = [x.detach().clone() for x in inputs]
    for i in (0, 1, 2, 3, 5):
        broken[i].transpose(1, 2)[~masks["valid"]] = math.nan
    assert_equal(results(delta_rule, [x.requires_grad_() for x in broken], **masks), expected)


@pytest.mark.parametrize("step", [0, 20, 40])
@pytest.mark.parametrize("which", [0, 1, 2, 3, 5])
def test_nan_does_not_travel_back(which, step):
    inputs = [x.detach() for x in tensors(70, decay=True)]
    expected, _ = run(delta_rule, inputs)
    inputs[which][:, :, step] = math.nan
    out, _ = run(delta_rule, inputs)
    assert_equal(out[:, :, :step], expected[:, :, :step])
    assert out[:, :, step].isnan().all()


def test_overwrites():
    """What a key held is replaced, not added to."""
    key = torch.tensor([0.6, 0.8]).expand(1, 1, 2, 2)
    value = torch.tensor([[1.0], [5.0]])[None, None]
    out, _ = delta_rule(key, key, value, torch.ones(1, 1, 2), torch.zeros(1, 1, 2, 1))
    assert_equal(out, value, tolerance=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_computes_in_the_dtype_of_the_state(dtype):
    inputs = [x.detach().to(dtype) for x in tensors(70, decay=True)]
    inputs[4] = inputs[4].float()
    with torch.autocast("cpu", torch.bfloat16):
        out, S = run(delta_rule, inputs)
    assert out.dtype == S.dtype == torch.float32
    assert_equal(out, run(delta_rule, [x.float() for x in inputs])[0], tolerance=1e-6)


def test_memory_is_linear_in_time():
    """No tensor kept for the backward pass is larger than the inputs or the chunks' states."""
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.untyped_storage().nbytes() // 8) or x, lambda x: x
    ):
        run(delta_rule, tensors(512), chunk_size=16)
    assert max(sizes) <= B * H * 512 * 16


@pytest.mark.filterwarnings("ignore")  # the compiler's own
def test_traces_whole_for_any_number_of_rows():
    torch.compiler.reset()
    compiled = torch.compile(delta_rule, fullgraph=True, backend="aot_eager", dynamic=False)
    graphs = set()
    for num_rows in (3, 4, 2):
        inputs = tensors(40, decay=True, num_rows=num_rows)
        for x in inputs:
            torch._dynamo.maybe_mark_dynamic(x, 0)
        assert_equal(results(compiled, inputs), results(delta_rule, inputs))
        graphs.add(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert len(graphs) == 1
    torch.compiler.reset()
