"""Linear attention over chunks: the forward pass and its gradient, written out.

By hand because autograd would keep, copy and zero more than the arithmetic itself costs. Axes: G
independent sequences (rows times heads), N chunks of C steps, widths K and V.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

# A log decay that leaves nothing: exp(-750) is 0 even in float64, and sums of it stay exact.
NOTHING_LEFT = -750.0


class Factors(NamedTuple):
    """What decay and resets multiply with; None where that is 1."""

    inside: Tensor | None
    """`(G, N, C, C)`: from step j to step i of a chunk."""
    hidden: Tensor | None
    """`(G, N, C, C)` bool: whether the steps j and i of a chunk are of different episodes."""
    read: Tensor | None
    """`(G, N, C, 1)`: from the state before the chunk to step i."""
    write: Tensor | None
    """`(G, N, C, 1)`: from step j to the state after the chunk."""
    carry: Tensor | None
    """`(G, N, 1)`: from the state before the chunk to the one after it."""


class ChunkwiseAttention(torch.autograd.Function):
    """Numerators, normalisers and states of linear attention, chunk by chunk.

    Inside a chunk the masked product `(q k^T) v`; between chunks the carried state. Four products
    forward and eight backward, `O(T C (K + V) + T K V)`; keeps `q`, `k`, `v`, the masked products
    and one state a chunk.

    Arguments of `apply`: q, k `(G, N, C, K)`, v `(G, N, C, V)`, S `(G, K, V)`, z `(G, K)` or None,
    log_decay `(G, N, C)` or None, episode `(G, N, C)` int64 or None, eps. Returns outputs
    `(G, N, C, V)`, divided by the normaliser if there is a z, and the final S and z.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        S: Tensor,
        z: Tensor | None,
        log_decay: Tensor | None,
        episode: Tensor | None,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        factors = _factors(log_decay, episode, q)
        A = q @ k.mT
        values = move_nan_(v, A)
        A = _mask_(A, factors)
        read, write = _scale(q, factors.read), _scale(k, factors.write)
        # What each chunk adds to the state becomes the state before it.
        states, S = _scan_(write.mT @ v, S, factors.carry)
        out = add_product_(A @ values, read, states)
        sums = norm = None
        if z is not None:
            sums, z = _scan_(write.sum(2), z, factors.carry)
            norm = A.sum(-1, keepdim=True) + read @ sums.unsqueeze(-1)
            norm += eps
            out /= norm
        ctx.save_for_backward(q, k, v, A, states, sums, S, z, out, norm, episode, *factors)
        ctx.has_decay = log_decay is not None
        return out, S, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_S: Tensor, d_z: Tensor | None) -> tuple:  # noqa: D102
        # Autocast may be on where the gradients are computed.
        with torch.autocast(d_out.device.type, enabled=False):
            return _gradients(ctx, d_out, d_S, d_z)


def _gradients(ctx: Any, d_out: Tensor, d_S: Tensor, d_z: Tensor | None) -> tuple:
    q, k, v, A, states, sums, S, z, out, norm, episode, *factors = ctx.saved_tensors
    factors = Factors(*factors)
    read, write = _scale(q, factors.read), _scale(k, factors.write)

    d_norm = None
    if norm is not None:
        d_out = d_out / norm
        d_norm = -(d_out * out).sum(-1, keepdim=True)
    d_A = d_out @ v.mT
    if d_norm is not None:
        d_A += d_norm
    d_A = _mask_(d_A, factors)

    # Backward in time: what all later chunks want of the state after each chunk.
    d_states, d_first = _scan_(read.mT @ d_out, d_S, factors.carry, reverse=True)
    d_read = d_out @ states.mT
    d_write = v @ d_states.mT
    d_first_sum = None
    if d_norm is not None and d_z is not None:
        d_sums = (read.mT @ d_norm).squeeze(-1)
        d_sums, d_first_sum = _scan_(d_sums, d_z, factors.carry, reverse=True)
        d_read.addcmul_(d_norm, sums.unsqueeze(2))
        d_write += d_sums.unsqueeze(2)
    d_q = add_product_(_scale(d_read, factors.read), d_A, k)
    d_k = add_product_(_scale(d_write, factors.write), d_A.mT, q)
    d_v = add_product_(A.mT @ d_out, write, d_states)
    d_log_decay = None
    if ctx.has_decay:
        final = (d_S * S).sum((1, 2))
        if d_z is not None:
            final += (d_z * z).sum(1)
        d_log_decay = _decay_gradient(q, d_q, k, d_k, final, episode)
    return d_q, d_k, d_v, d_first, d_first_sum, d_log_decay, None, None


def _factors(log_decay: Tensor | None, episode: Tensor | None, q: Tensor) -> Factors:
    inside = hidden = read = write = carry = None
    if episode is not None:
        before = torch.cat([torch.zeros_like(episode[:, :1, -1]), episode[:, :-1, -1]], 1)
        hidden = episode[..., :, None] != episode[..., None, :]
        read, write, carry = (
            same.to(q.dtype)
            for same in (
                episode == before[..., None],
                episode == episode[..., -1:],
                before == episode[..., -1],
            )
        )
    if log_decay is not None:
        # In float64: behind a step that forgets much, differences of sums would lose their digits.
        G = log_decay.double().clamp(min=NOTHING_LEFT).cumsum(-1)
        # Infinite far above the diagonal, where `_mask_` puts zeros.
        inside = (G[..., :, None] - G[..., None, :]).to(q.dtype).exp_()
        decays = G.exp().to(q.dtype), inside[..., -1, :], G[..., -1].exp().to(q.dtype)
        read, write, carry = (
            decay if same is None else decay * same
            for decay, same in zip(decays, (read, write, carry), strict=True)
        )
    factors = (None if x is None else x.unsqueeze(-1) for x in (read, write, carry))
    return Factors(inside, hidden, *factors)


def _decay_gradient(q, d_q, k, d_k, final, episode):
    """Gradient of the log decays `(G, N, C)` from those of q and k.

    Step i reads step j with `exp(L_i - L_j)`, L the sum of log decays, so that the gradient of L_i
    is `q_i . d_q_i - k_i . d_k_i`. A log decay is part of every later L of its episode.
    """
    d_L = ((q * d_q).sum(-1) - (k * d_k).sum(-1)).flatten(1)
    d_L[:, -1] += final
    later = d_L.flip(1).cumsum(1).flip(1)
    if episode is not None:
        episode = episode.flatten(1)
        # The part of the sum that belongs to later episodes starts where the next one does.
        last = torch.searchsorted(episode, episode, right=True)
        later = later - torch.cat([later, torch.zeros_like(later[:, :1])], 1).gather(1, last)
    return later.view(q.shape[:3])


def move_nan_(v: Tensor, A: Tensor) -> Tensor:
    """Makes the weights `A (..., C, C)` of steps NaN whose values are not finite.

    A weight of 0 would not keep a NaN in v from the steps before it.

    Returns:
        The values, `(..., C, V)`, all finite.
    """
    marks = v.sum(-1) * 0
    # Two passes over large tensors, left out where looking interrupts nothing.
    can_look = v.device.type == "cpu" and not torch.compiler.is_compiling()
    if can_look and not marks.any():
        return v
    A += marks.unsqueeze(-2)
    return v.nan_to_num(0.0, 0.0, 0.0)


def _mask_(A: Tensor, factors: Factors) -> Tensor:
    if factors.inside is not None:
        A *= factors.inside
    if factors.hidden is not None:
        A.masked_fill_(factors.hidden, 0.0)
    # Not left to factors of 0: a NaN would stay.
    return A.tril_()


def _scale(x: Tensor, factor: Tensor | None) -> Tensor:
    return x if factor is None else x * factor


def _scan_(
    x: Tensor, first: Tensor, carry: Tensor | None, *, reverse: bool = False
) -> tuple[Tensor, Tensor]:
    """Replaces `x (G, N, ...)` by the carried sum of the entries before, from `first (G, ...)`.

    Returns:
        x, overwritten, and the carried sum of all entries.
    """
    running = first.clone()
    for n in reversed(range(x.shape[1])) if reverse else range(x.shape[1]):
        carried = running
        if carry is not None:
            carried = running * carry[:, n].view(-1, *[1] * (running.dim() - 1))
        following = carried + x[:, n]
        x[:, n] = running
        running = following
    return x, running


def add_product_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`out += a @ b`, in one pass."""
    return out.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1)).view_as(out)
