"""A layer of a GRU over whole sequences, which starts anew wherever an episode does."""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


def gru(
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor,
    bias_hh: Tensor,
    *,
    resets: Tensor | None = None,
) -> Tensor:
    """One layer of a GRU with the weights of `torch.nn.GRU`, gradient written by hand.

    `r, z = sigmoid(W_i x_t + b_i + W_h h_{t-1} + b_h)`, `n = tanh(W_i x_t + b_i + r (W_h h_{t-1} +
    b_h))`, `h_t = (1 - z) n + z h_{t-1}`, each with its rows of weights and biases. `O(T D^2)`
    time, `4 T D` numbers kept for the backward pass. A step takes six operations forward and four
    back; what depends on no other step, weight gradients included, is done for all steps at once.
    On CPUs `torch.nn.GRU` leaves every step to autograd and is slower; on GPUs cuDNN's kernel is
    faster.

    Args:
        x: Inputs, `(B, T, I)`. Padding may hold anything finite: it changes no earlier step.
        h0: State before the first step, `(B, D)`.
        weight_ih: `(3 D, I)`: rows for r, z and n.
        weight_hh: `(3 D, D)`.
        bias_ih: `(3 D,)`.
        bias_hh: `(3 D,)`.
        resets: True where a new episode starts, `(B, T)` bool: the state is zero before that step.

    Returns:
        The states after each step, `(B, T, D)`.

    References:
        Cho et al. 2014, https://arxiv.org/abs/1406.1078.
        Differs: as in torch, r is applied behind the product with `W_h`, and z keeps the old state.

    Example:
        ```python
        import torch
        from rlmodules.kernels import gru

        layer, x = torch.nn.GRU(8, 16, batch_first=True), torch.randn(2, 100, 8)
        h = gru(x, torch.zeros(2, 16), *layer.all_weights[0])
        torch.testing.assert_close(h, layer(x)[0])
        ```
    """
    return _GRU.apply(x, h0, weight_ih, weight_hh, bias_ih, bias_hh, resets)


# Products with a gate's derivative in one operation each.
_SIGMOID_BACKWARD = torch.ops.aten.sigmoid_backward
_TANH_BACKWARD = torch.ops.aten.tanh_backward


class _GRU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x, h0, weight_ih, weight_hh, bias_ih, bias_hh, resets) -> Tensor:
        h, rz, n = _states(x, h0, weight_ih, weight_hh, bias_ih, bias_hh, resets)
        ctx.save_for_backward(x, h0, weight_ih, weight_hh, bias_hh, resets, h, rz, n)
        return h.transpose(0, 1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: Tensor) -> tuple:
        return *_gradients(*ctx.saved_tensors, d_h.transpose(0, 1)), None


# To the compiler each is one operation: traced, there would be thousands.
@torch.library.custom_op("rlmodules::gru", mutates_args=())
def _states(
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor,
    bias_hh: Tensor,
    resets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """States `(T, B, D)`, gates r and z `(T, B, 2 D)`, and n `(T, B, D)`."""
    (B, T, _), D = x.shape, h0.shape[1]
    sizes = [2 * D, D]
    inputs = torch.addmm(bias_ih, _by_time(x), weight_ih.t()).view(T, B, 3 * D).split(sizes, 2)
    h, rz, n = (x.new_empty(T, B, size) for size in (D, 2 * D, D))
    hidden = x.new_empty(B, 3 * D)
    hidden_rz, hidden_n = hidden.split(sizes, 1)
    r, z = rz.split(D, 2)
    weight, last = weight_hh.t(), h0
    # Views of all steps at once: made one by one they take as long as what is done with them.
    steps = zip(h, rz, r, z, n, *inputs, _starts(resets, T), strict=True)
    for h_t, rz_t, r_t, z_t, n_t, given_rz, given_n, start in steps:
        if start is not None:
            last = last.masked_fill(start, 0.0)
        torch.addmm(bias_hh, last, weight, out=hidden)
        torch.add(given_rz, hidden_rz, out=rz_t).sigmoid_()
        torch.addcmul(given_n, r_t, hidden_n, out=n_t).tanh_()
        last = torch.lerp(n_t, last, z_t, out=h_t)
    return h, rz, n


@torch.library.custom_op("rlmodules::gru_backward", mutates_args=())
def _gradients(
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_hh: Tensor,
    resets: Tensor | None,
    h: Tensor,
    rz: Tensor,
    n: Tensor,
    d_h: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of x, h0, both weights and both biases; d_h `(T, B, D)` is that of the states."""
    T, B, D = h.shape
    before = torch.cat([h0[None], h[:-1]])
    if resets is not None:
        before.masked_fill_(resets.t()[..., None], 0.0)
    before = before.view(T * B, D)
    hidden_n = torch.addmm(bias_hh[2 * D :], before, weight_hh[2 * D :].t()).view(T, B, D)
    r, z = rz.split(D, 2)
    # What a state's gradient is multiplied with for the gradients in front of sigmoids and tanh.
    factors = h.new_empty(T, B, 3, D)
    f_r, f_z, f_n = factors.unbind(2)
    d_n = _TANH_BACKWARD(1 - z, n)
    torch.mul(d_n, _SIGMOID_BACKWARD(hidden_n, r), out=f_r)
    _SIGMOID_BACKWARD.grad_input(before.view(T, B, D) - n, z, grad_input=f_z)
    torch.mul(d_n, r, out=f_n)
    d_hidden, d_states, d = torch.empty_like(factors), torch.empty_like(h), torch.zeros_like(h0)
    flat = d_hidden.view(T, B, 3 * D)
    steps = zip(d_states, d_states[:, :, None], d_h, z, factors, d_hidden, flat, strict=True)
    for (d_t, d_column, d_h_t, z_t, f_t, d_gates, d_flat), start in zip(
        reversed(list(steps)), reversed(_starts(resets, T)), strict=True
    ):
        torch.add(d, d_h_t, out=d_t)
        torch.mul(d_column, f_t, out=d_gates)
        d = torch.addmm(d_t * z_t, d_flat, weight_hh)
        if start is not None:
            d.masked_fill_(start, 0.0)
    d_hidden = flat.view(T * B, 3 * D)
    # n's part of the input is not multiplied with r.
    d_inputs = torch.cat([flat[..., : 2 * D], d_states * d_n], 2).view(T * B, 3 * D)
    return (
        (d_inputs @ weight_ih).view(T, B, -1).transpose(0, 1),
        d,
        d_inputs.t() @ _by_time(x),
        d_hidden.t() @ before,
        d_inputs.sum(0),
        d_hidden.sum(0),
    )


def _by_time(x: Tensor) -> Tensor:
    """All steps' inputs one below the other, first those of step 0: `(T B, I)`."""
    return x.transpose(0, 1).flatten(0, 1)


def _starts(resets: Tensor | None, T: int) -> list[Tensor | None]:
    """The rows in which an episode starts, `(B, 1)` bool a step; None where there are none."""
    if resets is None:
        return [None] * T
    by_time = resets.t()[..., None]
    return [
        rows if any_row else None
        for rows, any_row in zip(by_time, resets.any(0).tolist(), strict=True)
    ]


@_states.register_fake
def _(x, h0, weight_ih, weight_hh, bias_ih, bias_hh, resets):
    (B, T, _), D = x.shape, h0.shape[1]
    return tuple(x.new_empty(T, B, size) for size in (D, 2 * D, D))


@_gradients.register_fake
def _(x, h0, weight_ih, weight_hh, bias_hh, resets, h, rz, n, d_h):
    shapes = (x, h0, weight_ih, weight_hh, bias_hh, bias_hh)
    return tuple(torch.empty_like(y) for y in shapes)
