"""Elementwise linear recurrences over time, real and complex.

On CPUs a loop in C++, where there is a compiler; else many blocks of steps at once.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from rlmodules.kernels import scan_loop

BLOCK_SIZE = 8
# Numbers an operation works on, at most, in each thread of a CPU. More lie too far apart for the
# caches; fewer, and torch leaves all of them to one thread.
OPERATION_SIZE = 2**15


def scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor,
    *,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Linear recurrence of each channel over a sequence that continues from a state.

    `h_t = a_t h_{t-1} + b_t`. `O(T D)` time and memory. On a CPU with a C++ compiler it is one loop
    (`$CXX` names the compiler; half a second when first used). Else all blocks of eight steps run
    at once, then the states between them, by the same function, then all blocks again from the
    right state. The backward pass is the same backward in time. Computes in the state's dtype, also
    under autocast.

    Args:
        a: Factors, `(B, T, D)` or what broadcasts to it: `(D,)` is the same for all steps. At most
            1 in size, or long sequences overflow.
        b: What is added, `(B, T, D)`.
        h0: State before the first step, `(B, D)`. Its dtype (float32 or float64) is the dtype of
            the computation and of the results.
        valid: False on right padding, `(B, T)` bool. Padding changes no valid output and not the
            returned state, whatever it holds. None: all steps are valid.
        resets: True where a new episode starts, `(B, T)` bool: the state is zero before that step.

    Returns:
        States after each step `(B, T, D)`, and the one after each row's last valid step `(B, D)`.

    References:
        Blelloch 1990, "Prefix sums and their applications"; as the form of a recurrent layer:
        Martin and Cundy 2018, https://arxiv.org/abs/1709.04057.
        Differs: blocks instead of a tree, an initial state, resets and padding.

    Example:
        ```python
        import torch
        from rlmodules.kernels import scan

        z, x = torch.rand(2, 100, 16), torch.randn(2, 100, 16)
        h, last = scan(1 - z, z * x, torch.zeros(2, 16))
        assert h.shape == (2, 100, 16)
        assert torch.equal(h[:, -1], last)
        ```
    """
    with torch.autocast(b.device.type, enabled=False):
        a, b = a.to(h0.dtype), b.to(h0.dtype)
        if b.shape[1] == 1:
            h = _step(a, b, h0, torch.mul, valid, resets)
            return h.unsqueeze(1), h
        if b.numel() == 0:
            return b, h0
        return _Scan.apply(*_masked(a, b, valid, resets), h0)


def complex_scan(
    a: Tensor,
    b: Tensor,
    h0: Tensor,
    *,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The same recurrence for complex numbers, given as pairs of reals.

    The last axis of all but the masks has two entries, the real and the imaginary part.

    Args:
        a: Factors, `(B, T, D, 2)` or what broadcasts to it: `(D, 2)` is the same for all steps.
        b: What is added, `(B, T, D, 2)`.
        h0: State before the first step, `(B, D, 2)`.
        valid: As in `scan`.
        resets: As in `scan`.

    Returns:
        States after each step `(B, T, D, 2)`, and the one after each row's last valid step
        `(B, D, 2)`.

    References:
        A constant diagonal: Orvieto et al. 2023, https://arxiv.org/abs/2303.06349, section 3.2.

    Example:
        ```python
        import torch
        from rlmodules.kernels import complex_scan

        angle = torch.rand(16)
        a = 0.9 * torch.stack([angle.cos(), angle.sin()], -1)
        h, last = complex_scan(a, torch.randn(2, 100, 16, 2), torch.zeros(2, 16, 2))
        assert h.shape == (2, 100, 16, 2)
        ```
    """
    with torch.autocast(b.device.type, enabled=False):
        a, b = a.to(h0.dtype), b.to(h0.dtype)
        if b.shape[1] == 1:
            h = _step(a, b, h0, _product, valid, resets)
            return h.unsqueeze(1), h
        if b.numel() == 0:
            return b, h0
        a, b, h0 = (torch.view_as_complex(x.contiguous()) for x in (a, b, h0))
        h, last = _Scan.apply(*_masked(a, b, valid, resets), h0)
        return torch.view_as_real(h), torch.view_as_real(last)


def _product(x: Tensor, y: Tensor) -> Tensor:
    # By hand: complex tensors cannot be exported.
    (a, b), (c, d) = x.unbind(-1), y.unbind(-1)
    return torch.stack([a * c - b * d, a * d + b * c], -1)


def _step(a, b, h0, multiply, valid, resets):
    a, b = a.expand_as(b)[:, 0], b[:, 0]
    ones = (1,) * (h0.dim() - 1)
    h = h0
    if valid is not None:
        valid = valid.view(-1, *ones)
        a, b = (torch.where(valid, x, 0.0) for x in (a, b))
    if resets is not None:
        h = torch.where(resets.view(-1, *ones), 0.0, h)
    h = multiply(a, h) + b
    return h if valid is None else torch.where(valid, h, h0)


def _masked(a, b, valid, resets):
    """The recurrence that forgets at a reset and stands still on padding."""
    if resets is not None:
        a = torch.where(resets[..., None], 0.0, a)
    if valid is not None:
        a = torch.where(valid[..., None], a, 1.0)
        b = torch.where(valid[..., None], b, 0.0)
    return a.expand_as(b), b


class _Scan(torch.autograd.Function):
    """The recurrence for a, b `(B, T, D)` and h0 `(B, D)`, all real or all complex."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
        h, last = _states(a, b, h0)
        ctx.save_for_backward(a, h, h0)
        return h, last

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: Tensor, d_last: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return _gradients(*ctx.saved_tensors, d_h, d_last)


# To the compiler each is one operation. Traced, they would be hundreds, which takes it minutes and
# makes nothing faster; and it knows no complex numbers.
@torch.library.custom_op("rlmodules::scan", mutates_args=())
def _states(a: Tensor, b: Tensor, h0: Tensor) -> tuple[Tensor, Tensor]:
    h = b.new_empty(b.shape)
    return h, _recur_(h, a, b, h0).clone()


@torch.library.custom_op("rlmodules::scan_backward", mutates_args=())
def _gradients(
    a: Tensor, h: Tensor, h0: Tensor, d_h: Tensor, d_last: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of a, b and h0: b's follow the recurrence with conjugate factors back in time."""
    d_a, d_b = torch.empty_like(h), torch.empty_like(h)
    torch.add(d_h[:, -1], d_last, out=d_b[:, -1])
    a = a.conj()
    first = _recur_(d_b[:, :-1], a[:, 1:], d_h[:, :-1], d_b[:, -1], reverse=True)
    torch.mul(d_b[:, 1:], h[:, :-1].conj(), out=d_a[:, 1:])
    torch.mul(d_b[:, 0], h0.conj(), out=d_a[:, 0])
    return d_a, d_b, a[:, 0] * first


@_states.register_fake
def _(a, b, h0):
    return b.new_empty(b.shape), h0.new_empty(h0.shape)


@_gradients.register_fake
def _(a, h, h0, d_h, d_last):
    return torch.empty_like(h), torch.empty_like(h), h0.new_empty(h0.shape)


def _recur_(out: Tensor, a: Tensor, b: Tensor, h: Tensor, *, reverse: bool = False) -> Tensor:
    """Writes the states that follow h into `out (B, T, D)`; returns the last one computed.

    With `reverse` time runs from the last step to the first.
    """
    if scan_loop.can_run(out):
        return scan_loop.recur_(out, a, b, h, reverse=reverse)
    return _recur_in_blocks_(out, a, b, h, reverse=reverse)


def _recur_in_blocks_(out, a, b, h, *, reverse):
    B, T, D = b.shape
    N = T // BLOCK_SIZE
    if b.device.type == "cpu":
        N = min(N, OPERATION_SIZE * torch.get_num_threads() // max(1, B * D))
    if N < BLOCK_SIZE:
        return _loop_(out, a, b, h, 1, reverse)
    C = T // N
    N = T // C
    # What does not fill a block comes last.
    in_blocks, rest = slice(None, N * C), slice(N * C, None)
    if reverse:
        in_blocks, rest = slice(T - N * C, None), slice(None, T - N * C)
    out_blocks, a_blocks, b_blocks = (x[:, in_blocks].unflatten(1, (N, C)) for x in (out, a, b))
    products, sums = _alone(a_blocks, b_blocks, reverse)
    after = torch.empty_like(sums)
    _recur_in_blocks_(after, products, sums, h, reverse=reverse)
    before = (after[:, 1:], h[:, None]) if reverse else (h[:, None], after[:, :-1])
    h = _loop_(out_blocks, a_blocks, b_blocks, torch.cat(before, 1), 2, reverse)
    h = h[:, 0 if reverse else -1]
    return _loop_(out[:, rest], a[:, rest], b[:, rest], h, 1, reverse)


def _alone(a, b, reverse):
    """Of each block `(B, N, C, D)` the product of all factors, and its last state from zero."""
    a, b = (x.unbind(2)[:: -1 if reverse else 1] for x in (a, b))
    product, h = a[0].clone(), b[0].clone()
    for a_t, b_t in zip(a[1:], b[1:], strict=True):
        torch.addcmul(b_t, a_t, h, out=h)
        # Here, and not for all blocks at once: a_t is in the caches.
        product *= a_t
    return product, h


def _loop_(out, a, b, h, dim, reverse):
    """As `_recur_`, step by step along an axis."""
    order = slice(None, None, -1 if reverse else 1)
    steps = (x.unbind(dim)[order] for x in (out, a, b))
    for out_t, a_t, b_t in zip(*steps, strict=True):
        h = torch.addcmul(b_t, a_t, h, out=out_t)
    return h
