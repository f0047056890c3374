"""Linear attention over chunks: the forward pass and its gradient, written out.

By hand because autograd would keep, copy and zero more than the arithmetic itself costs. Axes: G
independent sequences (rows times heads), N chunks of C steps, widths K and V.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class Factors(NamedTuple):
    """What decay and resets multiply with; None where that is 1."""

    inside: Tensor | None
    """`(G, N, C, C)`: from step j to step i of a chunk, 0 above the diagonal."""
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

    Arguments of `apply`: q, k `(G, N, C, K)`, v `(G, N, C, V)`, S `(G, K, V)`, z `(G, K)`,
    log_decay `(G, N, C)` or None, episode `(G, N, C)` int64 or None, normalize, eps. Returns
    outputs `(G, N, C, V)` and the final S and z.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        S: Tensor,
        z: Tensor,
        log_decay: Tensor | None,
        episode: Tensor | None,
        normalize: bool,
        eps: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        factors = _factors(log_decay, episode, q)
        A = _mask_(q @ k.mT, factors.inside)
        read, write = _scale(q, factors.read), _scale(k, factors.write)
        # What each chunk adds to the state becomes the state before it.
        states, S = _scan_(write.mT @ v, S, factors.carry)
        sums, z = _scan_(write.sum(2), z, factors.carry)
        out = _add_product_(A @ v, read, states)
        norm = None
        if normalize:
            norm = A.sum(-1, keepdim=True) + read @ sums.unsqueeze(-1)
            norm += eps
            out /= norm
        ctx.save_for_backward(q, k, v, A, states, sums, S, z, out, norm, episode, *factors)
        ctx.has_decay = log_decay is not None
        return out, S, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_S: Tensor, d_z: Tensor) -> tuple:  # noqa: D102
        # Autocast may be on where the gradients are computed.
        with torch.autocast(d_out.device.type, enabled=False):
            return _gradients(ctx, d_out, d_S, d_z)


def _gradients(ctx: Any, d_out: Tensor, d_S: Tensor, d_z: Tensor) -> tuple:
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
    d_A = _mask_(d_A, factors.inside)

    # Backward in time: what all later chunks want of the state after each chunk.
    d_states, d_first = _scan_(read.mT @ d_out, d_S, factors.carry, reverse=True)
    d_read = d_out @ states.mT
    d_write = v @ d_states.mT
    if d_norm is None:
        d_sums, d_first_sum = _scan_(torch.zeros_like(sums), d_z, factors.carry, reverse=True)
    else:
        d_sums = (read.mT @ d_norm).squeeze(-1)
        d_sums, d_first_sum = _scan_(d_sums, d_z, factors.carry, reverse=True)
        d_read.addcmul_(d_norm, sums.unsqueeze(2))
    d_write += d_sums.unsqueeze(2)
    d_q = _add_product_(_scale(d_read, factors.read), d_A, k)
    d_k = _add_product_(_scale(d_write, factors.write), d_A.mT, q)
    d_v = _add_product_(A.mT @ d_out, write, d_states)
    d_log_decay = None
    if ctx.has_decay:
        final = (d_S * S).sum((1, 2)) + (d_z * z).sum(1)
        d_log_decay = _decay_gradient(q, d_q, k, d_k, final, episode)
    return d_q, d_k, d_v, d_first, d_first_sum, d_log_decay, None, None, None


def _factors(log_decay: Tensor | None, episode: Tensor | None, q: Tensor) -> Factors:
    if log_decay is None and episode is None:
        return Factors(None, None, None, None)
    mask = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool, device=q.device).tril()
    reads = writes = carries = torch.ones_like(mask[0, 0])
    if episode is not None:
        before = torch.cat([torch.zeros_like(episode[:, :1, -1]), episode[:, :-1, -1]], 1)
        mask = mask & (episode[..., :, None] == episode[..., None, :])
        reads = episode == before[..., None]
        writes = episode == episode[..., -1:]
        carries = before == episode[..., -1]
    if log_decay is None:
        factors = (mask, reads[..., None], writes[..., None], carries[..., None])
        return Factors(*(x.to(q.dtype) for x in factors))
    G = log_decay.cumsum(-1)
    # Masked before the exponential: above the diagonal it would overflow.
    inside = (G[..., :, None] - G[..., None, :]).masked_fill_(~mask, -torch.inf).exp_()
    read, write, carry = G.exp(), (G[..., -1:] - G).exp(), G[..., -1].exp()
    if episode is not None:
        read, write, carry = read * reads, write * writes, carry * carries
    return Factors(inside, read[..., None], write[..., None], carry[..., None])


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


def _mask_(A: Tensor, inside: Tensor | None) -> Tensor:
    return A.tril_() if inside is None else A.mul_(inside)


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


def _add_product_(out: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """`out += a @ b`, in one pass."""
    return out.flatten(0, 1).baddbmm_(a.flatten(0, 1), b.flatten(0, 1)).view_as(out)
