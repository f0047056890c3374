"""The gated delta rule over chunks: the forward pass and its gradient, written out.

Axes: G independent sequences (rows times heads), N chunks of C steps, widths K and V.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.linalg import solve_triangular

from rlmodules.kernels.chunkwise import add_product_, move_nan_


class Decays(NamedTuple):
    """What decay and resets multiply with; None where that is 1."""

    inside: Tensor | None
    """`(G, N, C, C)`: from step j to step i of a chunk, 0 above the diagonal."""
    read: Tensor | None
    """`(G, N, C, 1)`: from the state before the chunk to step i."""
    write: Tensor | None
    """`(G, N, C, 1)`: from step j to the state after the chunk."""
    carry: Tensor | None
    """`(G, N, 1, 1)`: from the state before the chunk to the one after it."""


class ChunkwiseDelta(torch.autograd.Function):
    """Outputs and states of the gated delta rule, chunk by chunk.

    What step i writes depends on what the steps before it wrote: with `L_ij = beta_i k_i . k_j`
    below the diagonal, decayed, the writes of a chunk are `U = (1 + L)^-1 (beta v - beta k S)`.
    One triangular solve for all chunks at once gives both parts of U; it stays exact for keys that
    are alike, where an inverse by repeated products does not. Then the states, two products a
    chunk. Keeps q, k, v, four `C x C` products a chunk, U, W and one state a chunk.

    Arguments of `apply`: q, k `(G, N, C, K)`, v `(G, N, C, V)`, beta `(G, N, C)`, S `(G, K, V)`,
    log_decay `(G, N, C)` or None, episode `(G, N, C)` int64 or None. Returns outputs
    `(G, N, C, V)` and the final S.
    """

    @staticmethod
    def forward(  # noqa: D102
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        beta: Tensor,
        S: Tensor,
        log_decay: Tensor | None,
        episode: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        decays = _decays(log_decay, episode, q)
        beta = beta.unsqueeze(-1)
        erase = beta * k
        # The solve reads no diagonal and nothing above it.
        L = _decay_(erase @ k.mT, decays)
        values = torch.cat([beta * v, _scale(erase, decays.read)], -1)
        U, W = _solve(L, values).split([v.shape[-1], k.shape[-1]], -1)
        write = _scale(k, decays.write)
        U, states, S = _write(U, W, write, decays.carry, S)
        A = q @ k.mT
        written = move_nan_(U, A)
        A = _decay_(A, decays).tril_()
        out = add_product_(A @ written, _scale(q, decays.read), states)
        ctx.save_for_backward(q, k, v, beta, A, L, U, W, states, S, episode, *decays)
        ctx.has_decay = log_decay is not None
        return out, S

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor, d_S: Tensor) -> tuple:  # noqa: D102
        # Autocast may be on where the gradients are computed.
        with torch.autocast(d_out.device.type, enabled=False):
            return _gradients(ctx, d_out, d_S)


def _gradients(ctx: Any, d_out: Tensor, d_S: Tensor) -> tuple:
    q, k, v, beta, A, L, U, W, states, S, episode, *decays = ctx.saved_tensors
    decays = Decays(*decays)
    read, write = _scale(q, decays.read), _scale(k, decays.write)

    # Backward in time: what the outputs and all later chunks want of each chunk's writes.
    d_U, d_states, d_first = _unwrite(A.mT @ d_out, read.mT @ d_out, W, write, decays.carry, d_S)
    # Of the right-hand side of the solve, `beta v - beta k S`; L gets the product of the two.
    d_rhs = _solve(L.mT, d_U, upper=True)
    d_L = _decay_(d_rhs @ U.mT, decays).neg_().tril_(-1)
    d_A = _decay_(d_out @ U.mT, decays).tril_()

    # A key has two roles: what is looked up and erased, and what is written to.
    d_erase = _scale(d_rhs @ states.mT, decays.read).neg_()
    d_erase = add_product_(d_erase, d_L, k)
    d_write = _scale(U @ d_states.mT, decays.write)
    d_write = add_product_(add_product_(d_write, d_L.mT, beta * k), d_A.mT, q)
    d_q = add_product_(_scale(d_out @ states.mT, decays.read), d_A, k)
    erased = (d_erase * k).sum(-1)
    d_beta = (d_rhs * v).sum(-1) + erased
    d_log_decay = None
    if ctx.has_decay:
        # A step reads with the sum of log decays up to it and was written with minus that sum.
        d_sum = (q * d_q).sum(-1) + beta.squeeze(-1) * erased - (k * d_write).sum(-1)
        d_sum[:, -1, -1] += (d_S * S).sum((1, 2))
        d_log_decay = _sum_later(d_sum, episode)
    return d_q, d_write.addcmul(beta, d_erase), beta * d_rhs, d_beta, d_first, d_log_decay, None


def _write(
    U: Tensor, W: Tensor, write: Tensor, carry: Tensor | None, S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """What each chunk writes, `U - W S`, the states before each chunk, and the last state."""
    writes, states = [], []
    for n in range(U.shape[1]):
        states.append(S)
        writes.append(torch.baddbmm(U[:, n], W[:, n], S, alpha=-1))
        S = torch.baddbmm(_scale(S, carry, n), write[:, n].mT, writes[-1])
    return torch.stack(writes, 1), torch.stack(states, 1), S


def _unwrite(
    d_U: Tensor, d_read: Tensor, W: Tensor, write: Tensor, carry: Tensor | None, d_S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `_write`: of the writes, of the states after each chunk, of the first state.

    `d_U` is what a chunk's outputs want of its writes, `d_read` what they want of the state before.
    """
    d_writes, after = [], []
    for n in reversed(range(d_U.shape[1])):
        after.append(d_S)
        d_writes.append(torch.baddbmm(d_U[:, n], write[:, n], d_S))
        d_S = torch.baddbmm(_scale(d_S, carry, n), W[:, n].mT, d_writes[-1], alpha=-1)
        d_S += d_read[:, n]
    return torch.stack(d_writes[::-1], 1), torch.stack(after[::-1], 1), d_S


def _solve(L: Tensor, x: Tensor, *, upper: bool = False) -> Tensor:
    """`(1 + L)^-1 x` for a triangular L, of which diagonal and other half are not read.

    Transposed, as the library lays matrices out the other way: it need not copy them.
    """
    return solve_triangular(L.mT, x.mT, upper=not upper, left=False, unitriangular=True).mT


def _decays(log_decay: Tensor | None, episode: Tensor | None, q: Tensor) -> Decays:
    if log_decay is None and episode is None:
        return Decays(None, None, None, None)
    C = q.shape[2]
    mask = torch.ones(C, C, dtype=torch.bool, device=q.device).tril()
    read = carry = torch.ones_like(q[:, :, :, :1])
    inside = mask.to(q.dtype)
    if log_decay is not None:
        # Each sum by itself: differences of sums from the chunk's start lose their digits behind a
        # step that forgets much, and all of them behind one that forgets everything.
        steps = log_decay[..., None].expand(*log_decay.shape, C)
        inside = torch.where(mask.tril(-1), steps, 0.0).cumsum(-2).exp_() * inside
        read = log_decay.cumsum(-1).exp().unsqueeze(-1)
    write, carry = inside[..., -1, :, None], read[:, :, -1:]
    if episode is not None:
        before = torch.cat([torch.zeros_like(episode[:, :1, -1]), episode[:, :-1, -1]], 1)
        inside = inside * (episode[..., :, None] == episode[..., None, :])
        read = read * (episode == before[..., None]).unsqueeze(-1)
        write, carry = inside[..., -1, :, None], read[:, :, -1:]
    return Decays(inside, read, write, carry)


def _sum_later(x: Tensor, episode: Tensor | None) -> Tensor:
    """The sum of x `(G, N, C)` from each step to the last of its episode."""
    later = x.flatten(1).flip(1).cumsum(1).flip(1)
    if episode is not None:
        episode = episode.flatten(1)
        # The part of the sum that belongs to later episodes starts where the next one does.
        last = torch.searchsorted(episode, episode, right=True)
        later = later - torch.cat([later, torch.zeros_like(later[:, :1])], 1).gather(1, last)
    return later.view(x.shape)


def _decay_(A: Tensor, decays: Decays) -> Tensor:
    return A if decays.inside is None else A.mul_(decays.inside)


def _scale(x: Tensor, factor: Tensor | None, n: int | None = None) -> Tensor:
    if factor is None:
        return x
    return x * (factor if n is None else factor[:, n])
