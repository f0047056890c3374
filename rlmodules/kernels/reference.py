"""The recurrences as slow, obvious loops: what every fast kernel is tested against.

One step of the loop is one line of the paper. Run them in float64; they work in any dtype and
carry gradients, the initial state's included.
"""

import itertools

import torch
from torch import Tensor

NEUTRAL_MAX = -1e20
"""What a maximum starts from: below every finite activation, and finite itself."""


def linear_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: tuple[Tensor, Tensor],
    *,
    log_decay: Tensor | None = None,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
    normalize: bool = True,
    eps: float = 1e-5,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Linear attention, one step after the other.

    `O(T K V)` time and, for the backward pass, memory. Arguments, results and source as in
    [`linear_attention`][rlmodules.kernels.linear_attention].
    """
    S, z = state
    outputs = []
    for t in range(q.shape[2]):
        a = torch.ones_like(q[:, :, t, 0]) if log_decay is None else log_decay[:, :, t].exp()
        (S,) = _reset((S,), (torch.zeros_like(S),), resets, valid, t)
        new_S = a[..., None, None] * S + k[:, :, t, :, None] * v[:, :, t, None, :]
        (S,) = _keep_on_padding((S,), (new_S,), valid, t)
        out = torch.einsum("bhk,bhkv->bhv", q[:, :, t], S)
        if normalize:
            (z,) = _reset((z,), (torch.zeros_like(z),), resets, valid, t)
            (z,) = _keep_on_padding((z,), (a[..., None] * z + k[:, :, t],), valid, t)
            out = out / (torch.einsum("bhk,bhk->bh", q[:, :, t], z)[..., None] + eps)
        outputs.append(out)
    return torch.stack(outputs, 2), (S, z)


def delta_rule_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    S: Tensor,
    *,
    log_decay: Tensor | None = None,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The gated delta rule, one step after the other.

    Arguments, results and source as in [`delta_rule`][rlmodules.kernels.delta_rule].
    """
    outputs = []
    for t in range(q.shape[2]):
        (S,) = _reset((S,), (torch.zeros_like(S),), resets, valid, t)
        a = torch.ones_like(beta[:, :, t]) if log_decay is None else log_decay[:, :, t].exp()
        decayed = a[..., None, None] * S
        error = v[:, :, t] - torch.einsum("bhkv,bhk->bhv", decayed, k[:, :, t])
        write = beta[:, :, t, None] * error
        new_S = decayed + k[:, :, t, :, None] * write[:, :, None, :]
        (S,) = _keep_on_padding((S,), (new_S,), valid, t)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], S))
    return torch.stack(outputs, 2), S


def scan_reference(
    a: Tensor,
    b: Tensor,
    h0: Tensor,
    *,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """A linear recurrence, one step after the other; complex tensors work, too.

    Arguments, results and source as in [`scan`][rlmodules.kernels.scan].
    """
    a = a.expand_as(b)
    h = h0
    outputs = []
    for t in range(b.shape[1]):
        (h,) = _reset((h,), (torch.zeros_like(h),), resets, valid, t)
        (h,) = _keep_on_padding((h,), (a[:, t] * h + b[:, t],), valid, t)
        outputs.append(h)
    return torch.stack(outputs, 1), h


def max_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over a running maximum of `k v^T`, one step after the other.

    Arguments, results and source as in [`max_attention`][rlmodules.kernels.max_attention].
    """
    S = state
    outputs = []
    for t in range(q.shape[2]):
        (S,) = _reset((S,), (torch.full_like(S, NEUTRAL_MAX),), resets, valid, t)
        new_S = torch.maximum(S, k[:, :, t, :, None] * v[:, :, t, None, :])
        (S,) = _keep_on_padding((S,), (new_S,), valid, t)
        outputs.append(torch.einsum("bhk,bhkv->bhv", q[:, :, t], S))
    return torch.stack(outputs, 2), S


def gru_reference(
    x: Tensor,
    h0: Tensor,
    weight_ih: Tensor,
    weight_hh: Tensor,
    bias_ih: Tensor,
    bias_hh: Tensor,
    *,
    resets: Tensor | None = None,
) -> Tensor:
    """A layer of a GRU, one step after the other.

    Arguments, results and source as in [`gru`][rlmodules.kernels.gru].
    """
    h, outputs = h0, []
    for t in range(x.shape[1]):
        (h,) = _reset((h,), (torch.zeros_like(h),), resets, None, t)
        given = (x[:, t] @ weight_ih.T + bias_ih).chunk(3, 1)
        hidden = (h @ weight_hh.T + bias_hh).chunk(3, 1)
        r, z = (torch.sigmoid(given[i] + hidden[i]) for i in range(2))
        h = (1 - z) * torch.tanh(given[2] + r * hidden[2]) + z * h
        outputs.append(h)
    return torch.stack(outputs, 1)


def short_convolution_reference(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution, one step after the other.

    Arguments, results and source as in
    [`short_convolution`][rlmodules.kernels.short_convolution].
    """
    outputs = []
    for t in range(x.shape[1]):
        (state,) = _reset((state,), (torch.zeros_like(state),), resets, valid, t)
        window = torch.cat([state, x[:, t : t + 1]], 1)
        outputs.append(torch.einsum("bwd,wd->bd", window, weight))
        (state,) = _keep_on_padding((state,), (window[:, 1:],), valid, t)
    return torch.stack(outputs, 1), state


def relative_attention_reference(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance_scores: Tensor,
    span: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Sliding-window attention, one query and one key after the other.

    Arguments, results and source as in
    [`relative_attention`][rlmodules.kernels.relative_attention].
    """
    B, H, T, _ = q.shape
    k, v = k.expand(-1, H, -1, -1), v.expand(-1, H, -1, -1)
    M, W = distance_scores.shape[-1] - 1, k.shape[2] - T
    out = q.new_zeros(B, H, T, v.shape[-1])
    for b, h, i in itertools.product(range(B), range(H), range(T)):
        visible = range(int(span[b, i]) + 1)
        scores = [
            scale * (q[b, h, i] @ k[b, h, W + i - d] + distance_scores[b, h, i, M - d])
            for d in visible
        ]
        weights = torch.stack(scores).softmax(0)
        out[b, h, i] = sum(weights[d] * v[b, h, W + i - d] for d in visible)
    return out


def _reset(states, initial, resets, valid, t):
    """The initial state in the rows where a new episode starts at step `t`."""
    if resets is None:
        return states
    return _select(resets[:, t] if valid is None else resets[:, t] & valid[:, t], initial, states)


def _keep_on_padding(states, updated, valid, t):
    """The updated state in the rows where step `t` is a real one."""
    return updated if valid is None else _select(valid[:, t], updated, states)


def _select(condition, if_true, if_false):
    return tuple(
        torch.where(condition.view(-1, *[1] * (a.dim() - 1)), a, b)
        for a, b in zip(if_true, if_false, strict=True)
    )
