"""The fast kernels against their reference loops: outputs, final states and every gradient."""

import itertools

import pytest
import torch

from rlmodules.kernels import (
    linear_attention,
    linear_attention_reference,
    max_attention,
    max_attention_reference,
    relative_attention,
    relative_attention_reference,
    short_convolution,
    short_convolution_reference,
)
from tests.contracts import assert_equal

B, H, K, V = 3, 2, 5, 6
LENGTHS = (1, 2, 7, 63, 64, 65, 150)
BOTH = list(itertools.product((False, True), repeat=2))


def tensors(num_steps, masked, with_resets):
    torch.manual_seed(num_steps)
    valid = resets = None
    if masked:
        valid = torch.arange(num_steps) < torch.tensor([num_steps, num_steps // 2, 0])[:, None]
    if with_resets:
        resets = torch.rand(B, num_steps) < 0.1
    q = torch.rand(B, H, num_steps, K, dtype=torch.float64, requires_grad=True)
    k = torch.rand(B, H, num_steps, K, dtype=torch.float64, requires_grad=True)
    v = torch.randn(B, H, num_steps, V, dtype=torch.float64, requires_grad=True)
    S = torch.randn(B, H, K, V, dtype=torch.float64, requires_grad=True)
    z = torch.rand(B, H, K, dtype=torch.float64, requires_grad=True)
    return (q, k, v, S, z), {"valid": valid, "resets": resets}


def results(outputs, state, valid, inputs):
    """Valid outputs, state, and the gradients of a random function of both."""
    if valid is not None:
        mask = valid[:, None, :, None] if outputs.dim() == 4 else valid[..., None]
        outputs = torch.where(mask, outputs, 0.0)
    generator = torch.Generator().manual_seed(0)
    loss = sum(
        (x * torch.randn(x.shape, generator=generator, dtype=x.dtype)).sum()
        for x in (outputs, *state)
    )
    gradients = torch.autograd.grad(loss, inputs, allow_unused=True)
    return outputs, *state, *(g for g in gradients if g is not None)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize(("masked", "with_resets"), BOTH)
@pytest.mark.parametrize(("decay", "normalize"), BOTH)
def test_linear_attention(num_steps, masked, with_resets, decay, normalize):
    (q, k, v, S, z), masks = tensors(num_steps, masked, with_resets)
    inputs = [q, k, v, S, z]
    log_decay = None
    if decay:
        log_decay = -torch.rand(B, H, num_steps, dtype=torch.float64)
        log_decay[:, 0] *= 300  # a head that forgets at once must not overflow
        inputs.append(log_decay.requires_grad_())
    actual, expected = (
        results(
            *function(q, k, v, (S, z), log_decay=log_decay, normalize=normalize, **masks),
            masks["valid"],
            inputs,
        )
        for function in (linear_attention, linear_attention_reference)
    )
    assert_equal(actual, expected)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)])
@pytest.mark.parametrize("num_steps", [1, 7, 65])
@pytest.mark.parametrize(("masked", "with_resets"), BOTH)
@pytest.mark.parametrize("normalize", [False, True])
def test_decay_that_leaves_nothing(num_steps, masked, with_resets, normalize, dtype, tolerance):
    """Steps that forget all, among steps that forget almost nothing."""
    inputs, masks = tensors(num_steps, masked, with_resets)
    sizes = torch.tensor([0.0, -0.01, -0.01, -30.0, -1e4, -1e30, -torch.inf], dtype=torch.float64)
    log_decay = sizes[torch.randint(len(sizes), (B, H, num_steps))].requires_grad_()
    inputs = [*inputs, log_decay]
    rounded = [x.detach().to(dtype).requires_grad_() for x in inputs]
    exact = [x.detach().double().requires_grad_() for x in rounded]
    both = []
    for function, inputs in ((linear_attention, rounded), (linear_attention_reference, exact)):
        q, k, v, S, z, log_decay = inputs
        out, state = function(q, k, v, (S, z), log_decay=log_decay, normalize=normalize, **masks)
        out, *state = (x.double() for x in (out, *state))
        both.append([x.double() for x in results(out, state, masks["valid"], inputs)])
    assert_equal(*both, tolerance)


def test_z_is_left_alone_without_normaliser():
    (q, k, v, S, z), masks = tensors(50, True, True)
    for num_steps in (1, 50):
        parts = (x[:, :, :num_steps] for x in (q, k, v))
        shorter = {key: x[:, :num_steps] for key, x in masks.items()}
        _, (_, after) = linear_attention(*parts, (S, z), normalize=False, **shorter)
        assert after is z


@pytest.mark.parametrize("chunk_size", [1, 3, 16, 200])
def test_chunk_size_does_not_matter(chunk_size):
    (q, k, v, S, z), masks = tensors(50, True, True)
    actual = linear_attention(q, k, v, (S, z), chunk_size=chunk_size, **masks)
    assert_equal(actual, linear_attention(q, k, v, (S, z), **masks))


def test_tiles_do_not_matter(monkeypatch):
    (q, k, v, S, z), masks = tensors(50, False, True)
    inputs = [q, k, v, S, z]
    expected = results(*linear_attention(q, k, v, (S, z), **masks), None, inputs)
    monkeypatch.setitem(linear_attention.__globals__, "TILE_SIZE", 1)
    assert_equal(results(*linear_attention(q, k, v, (S, z), **masks), None, inputs), expected)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize(("masked", "with_resets"), BOTH)
def test_max_attention(num_steps, masked, with_resets):
    (q, k, v, S, _), masks = tensors(num_steps, masked, with_resets)
    actual, expected = (
        results(out, (state,), masks["valid"], [q, k, v, S])
        for out, state in (
            function(q, k, v, S, **masks) for function in (max_attention, max_attention_reference)
        )
    )
    assert_equal(actual, expected)


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(
    ("window", "before", "num_steps"),
    [
        pytest.param(5, 5, 1, id="step"),
        pytest.param(5, 5, 9, id="one block"),
        pytest.param(5, 2, 9, id="fewer keys than the window"),
        pytest.param(5, 0, 9, id="no keys before"),
        pytest.param(5, 5, 64, id="within a block"),
        pytest.param(5, 5, 65, id="two blocks"),
        pytest.param(30, 30, 70, id="long window, ragged blocks"),
        pytest.param(12, 7, 128, id="fewer keys, full blocks"),
    ],
)
def test_relative_attention(window, before, num_steps, shared):
    torch.manual_seed(num_steps)

    def rand(*shape):
        return torch.randn(2, H, *shape, dtype=torch.float64, requires_grad=True)

    q, scores = rand(num_steps, K), rand(num_steps, window + 1)
    k, v = rand(before + num_steps, K), rand(before + num_steps, V)
    if shared:
        k, v = (x[:, :1].detach().requires_grad_() for x in (k, v))
    # From nothing to all of the window, as at the start of an episode.
    most = (before + torch.arange(num_steps)).clamp(max=window)
    span = torch.stack([most, torch.minimum(most, torch.randint(0, window + 1, (num_steps,)))])
    actual, expected = (
        results(function(q, k, v, scores, span, scale=0.7), (), None, [q, k, v, scores])
        for function in (relative_attention, relative_attention_reference)
    )
    assert_equal(actual, expected)


@pytest.mark.parametrize("num_steps", LENGTHS)
@pytest.mark.parametrize(("masked", "with_resets"), BOTH)
@pytest.mark.parametrize("width", [2, 4])
def test_short_convolution(num_steps, masked, with_resets, width):
    _, masks = tensors(num_steps, masked, with_resets)
    x = torch.randn(B, num_steps, V, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(width, V, dtype=torch.float64, requires_grad=True)
    state = torch.randn(B, width - 1, V, dtype=torch.float64, requires_grad=True)
    actual, expected = (
        results(out, (last,), masks["valid"], [x, weight, state])
        for out, last in (
            function(x, weight, state, **masks)
            for function in (short_convolution, short_convolution_reference)
        )
    )
    assert_equal(actual, expected)


def assert_causal(function, reference, tensors, name, step, value):
    """What is not finite changes no output before its step, and later ones as in the loop."""
    flawed = tensors[name].detach().clone()
    flawed.select(-1 if name == "log_decay" else -2, step)[:] = value
    flawed = {**tensors, name: flawed}
    actual, expected, loop = function(**flawed), function(**tensors), reference(**flawed)
    time = torch.arange(actual.shape[-2]) < 40
    assert torch.equal(actual[..., time, :], expected[..., time, :])
    assert not loop[..., 40, :].isfinite().any()
    assert torch.equal(actual.isfinite(), loop.isfinite())


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("name", ["q", "k", "v"])
@pytest.mark.parametrize(("with_decay", "normalize"), BOTH)
@pytest.mark.parametrize("with_resets", [False, True])
def test_nan_is_causal_in_linear_attention(name, value, with_decay, normalize, with_resets):
    (q, k, v, S, z), _ = tensors(100, False, False)
    options = {"state": (S, z), "normalize": normalize}
    if with_decay:
        options["log_decay"] = -torch.rand(B, H, 100, dtype=S.dtype)
    if with_resets:
        # Before the NaN: the loop also keeps it from what follows a later reset.
        options["resets"] = (torch.arange(100) % 17 == 5).expand(B, 100) & (torch.arange(100) < 40)
    assert_causal(
        lambda **x: linear_attention(**x, **options)[0],
        lambda **x: linear_attention_reference(**x, **options)[0],
        {"q": q, "k": k, "v": v},
        name,
        40,
        value,
    )


def test_nan_is_causal_in_decays():
    (q, k, v, S, z), _ = tensors(100, False, False)
    inputs = {"q": q, "k": k, "v": v, "log_decay": -torch.rand(B, H, 100, dtype=S.dtype)}
    assert_causal(
        lambda **x: linear_attention(**x, state=(S, z))[0],
        lambda **x: linear_attention_reference(**x, state=(S, z))[0],
        inputs,
        "log_decay",
        40,
        torch.nan,
    )


@pytest.mark.parametrize(
    ("name", "value"), [("q", torch.nan), ("k", torch.nan), ("v", torch.nan), ("v", torch.inf)]
)
@pytest.mark.parametrize("before", [0, 5])
def test_nan_is_causal_in_relative_attention(name, value, before):
    torch.manual_seed(0)
    shapes = {"q": (100, K), "k": (before + 100, K), "v": (before + 100, V)}
    inputs = {x: torch.randn(2, H, *shape, dtype=torch.float64) for x, shape in shapes.items()}
    scores = torch.randn(2, H, 100, 6, dtype=torch.float64)
    # Of one row the window slides over the flaw; the other one's steps see themselves only.
    span = torch.stack([(before + torch.arange(100)).clamp(max=5), torch.zeros(100).long()])
    assert_causal(
        lambda **x: relative_attention(**x, distance_scores=scores, span=span, scale=0.7),
        lambda **x: relative_attention_reference(**x, distance_scores=scores, span=span, scale=0.7),
        inputs,
        name,
        40 if name == "q" else before + 40,
        value,
    )


@pytest.mark.parametrize("name", ["q", "k", "v"])
def test_nan_is_causal_in_max_attention(name):
    (q, k, v, S, _), _ = tensors(100, False, False)
    assert_causal(
        lambda **x: max_attention(**x, state=S)[0],
        lambda **x: max_attention_reference(**x, state=S)[0],
        {"q": q, "k": k, "v": v},
        name,
        40,
        torch.nan,
    )


def test_nan_is_causal_in_short_convolution():
    x, weight = torch.randn(B, 100, V, dtype=torch.float64), torch.randn(4, V, dtype=torch.float64)
    state = torch.randn(B, 3, V, dtype=torch.float64)
    assert_causal(
        lambda x: short_convolution(x, weight, state)[0],
        lambda x: short_convolution_reference(x, weight, state)[0],
        {"x": x},
        "x",
        40,
        torch.nan,
    )


@pytest.mark.parametrize(("num_rows", "num_steps"), [(0, 1), (0, 70), (0, 0), (2, 0)])
def test_nothing_to_compute(num_rows, num_steps):
    """No rows or no steps: empty outputs, the states as they were."""
    q, k = torch.rand(2, num_rows, H, num_steps, K)
    v, x = torch.rand(num_rows, H, num_steps, V), torch.rand(num_rows, num_steps, V)
    S, z = torch.rand(num_rows, H, K, V), torch.rand(num_rows, H, K)
    conv = torch.rand(num_rows, 3, V)
    flags = torch.ones(num_rows, num_steps, dtype=torch.bool)
    masks = {"valid": flags, "resets": ~flags}
    window = torch.rand(num_rows, H, 5 + num_steps, K)
    scores, span = torch.rand(num_rows, H, num_steps, 6), torch.zeros(num_rows, num_steps).long()
    outputs, state = linear_attention(q, k, v, (S, z), log_decay=-q[..., 0], **masks)
    outputs_max, state_max = max_attention(q, k, v, S, **masks)
    outputs_conv, state_conv = short_convolution(x, torch.rand(4, V), conv, **masks)
    assert outputs.shape == outputs_max.shape == v.shape
    assert outputs_conv.shape == x.shape
    assert relative_attention(q, window, window, scores, span, scale=1.0).shape == q.shape
    assert_equal([*state, state_max, state_conv], [S, z, S, conv])


def test_gradcheck():
    """The hand-written backward pass against finite differences, not only against autograd."""
    torch.manual_seed(0)
    shape = (2, 1, 7)
    q = torch.rand(*shape, 2, dtype=torch.float64, requires_grad=True)
    k = torch.rand(*shape, 2, dtype=torch.float64, requires_grad=True)
    v = torch.randn(*shape, 3, dtype=torch.float64, requires_grad=True)
    S = torch.randn(2, 1, 2, 3, dtype=torch.float64, requires_grad=True)
    z = torch.rand(2, 1, 2, dtype=torch.float64, requires_grad=True)
    log_decay = (-torch.rand(shape, dtype=torch.float64)).requires_grad_()
    resets = torch.rand(2, 7) < 0.2

    def run(q, k, v, S, z, log_decay):
        out, state = linear_attention(
            q, k, v, (S, z), log_decay=log_decay, resets=resets, chunk_size=3
        )
        return out, *state

    assert torch.autograd.gradcheck(run, (q, k, v, S, z, log_decay))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs_accumulate_in_float32(dtype):
    """2,000 ones sum to 2,000; in bfloat16 they stall at 256."""
    ones = torch.ones(1, 1, 2000, 1, dtype=dtype)
    state = torch.zeros(1, 1, 1, 1), torch.zeros(1, 1, 1)
    with torch.autocast("cpu", torch.bfloat16):
        _, (S, z) = linear_attention(ones, ones, ones, state)
    assert S.item() == z.item() == 2000


def test_memory_is_linear_in_time():
    """No tensor kept for the backward pass is larger than the inputs or the chunks' states."""
    (q, k, v, S, z), _ = tensors(512, False, False)
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: sizes.append(x.numel()) or x, lambda x: x
    ):
        linear_attention(q, k, v, (S, z), chunk_size=16)
    assert max(sizes) <= B * H * 512 * 16


@pytest.mark.gpu
@pytest.mark.parametrize("decay", [False, True])
@pytest.mark.parametrize("with_resets", [False, True])
def test_linear_attention_on_gpu(decay, with_resets):
    (q, k, v, S, z), masks = tensors(150, True, with_resets)
    log_decay = -torch.rand(B, H, 150, dtype=torch.float64) if decay else None
    inputs = [q, k, v, S, z]
    expected = results(
        *linear_attention_reference(q, k, v, (S, z), log_decay=log_decay, **masks),
        masks["valid"],
        inputs,
    )
    on_gpu = [x.detach().cuda().requires_grad_() for x in inputs]
    masks = {key: None if x is None else x.cuda() for key, x in masks.items()}
    out, state = linear_attention(
        *on_gpu[:3],
        tuple(on_gpu[3:]),
        log_decay=None if log_decay is None else log_decay.cuda(),
        **masks,
    )
    actual = results(
        out.cpu(),
        [x.cpu() for x in state],
        None if masks["valid"] is None else masks["valid"].cpu(),
        on_gpu,
    )
    assert_equal([x.cpu() for x in actual], list(expected))
