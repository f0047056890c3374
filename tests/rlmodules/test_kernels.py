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
