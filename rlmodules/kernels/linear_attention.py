"""Causal linear attention with decay: chunk by chunk for sequences, one update for a step."""

from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlmodules.kernels.chunkwise import ChunkwiseAttention

# Steps of a chunk. Longer ones take more arithmetic and fewer states: wide heads gain from that.
NARROW_CHUNK, WIDE_CHUNK, WIDE = 32, 64, 64
# Floats of a tensor that are worked on at a time on CPUs. Larger ones come from the system afresh
# at each use instead of from the allocator, page by page: a third slower at 8,192 steps.
TILE_SIZE = 2**22


def linear_attention(
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
    chunk_size: int | None = None,
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """Causal linear attention over a sequence that continues from a state.

    `S_t = a_t S_{t-1} + k_t v_t^T`, `z_t = a_t z_{t-1} + k_t` and
    `o_t = S_t^T q_t / (z_t . q_t + eps)`, with `a_t = exp(log_decay_t)`. A NaN changes no output
    before its step.

    Costs `O(T C (K + V) + T K V)` time for chunks of C steps and keeps one `K x V` state a chunk
    for the backward pass; `T = 1` is a single rank-one update. Computes in the state's dtype, also
    under autocast: sums over thousands of steps stall in half precision.

    Args:
        q: Queries after the feature map, `(B, H, T, K)`.
        k: Keys after the feature map, `(B, H, T, K)`. Not negative if `normalize`.
        v: Values, `(B, H, T, V)`.
        state: `S (B, H, K, V)` and `z (B, H, K)` before the first step. Their dtype (float32 or
            float64) is the dtype of the computation and of the results.
        log_decay: Logarithm of the decay a head and step, `(B, H, T)`, not positive; -inf forgets
            all. None: no decay.
        valid: False on right padding, `(B, T)` bool. Padding must be finite; it changes no valid
            output and not the returned state. None: all steps are valid.
        resets: True where a new episode starts, `(B, T)` bool: the state is zero before that step.
        normalize: Whether to divide by `z_t . q_t + eps`. If not, z is returned as it is.
        eps: Added to the normaliser.
        chunk_size: Steps C per chunk. None: what is fastest, 32 for widths below 64, else 64.

    Returns:
        Outputs `(B, H, T, V)` and the state `(S, z)` after each row's last valid step.

    References:
        Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236, eq. 16-20; the decay a head
        and the chunks: Dao and Gu 2024, https://arxiv.org/abs/2405.21060, section 6.
        Differs: an initial state, resets and padding.

    Example:
        ```python
        import torch
        from rlmodules.kernels import linear_attention

        q, k = torch.rand(2, 4, 100, 16), torch.rand(2, 4, 100, 16)
        v = torch.randn(2, 4, 100, 32)
        state = torch.zeros(2, 4, 16, 32), torch.zeros(2, 4, 16)
        out, state = linear_attention(q, k, v, state)
        assert out.shape == (2, 4, 100, 32)
        ```
    """
    S, z = state[0], state[1] if normalize else None
    # Entering a context costs as much as several operators of a step.
    autocast = torch.is_autocast_enabled(q.device.type)
    with torch.autocast(q.device.type, enabled=False) if autocast else nullcontext():
        q, k, v = (x.to(S.dtype) for x in (q, k, v))
        if log_decay is not None:
            log_decay = log_decay.to(S.dtype)
        if valid is not None:
            # A padded step neither writes nor decays nor starts an episode.
            k = torch.where(valid[:, None, :, None], k, 0.0)
            if log_decay is not None:
                log_decay = torch.where(valid[:, None], log_decay, 0.0)
            if resets is not None:
                resets = resets & valid
        if q.shape[2] == 1:
            out, S, z = _step(q, k, v, S, z, log_decay, resets, eps)
        else:
            out, S, z = _chunkwise(q, k, v, S, z, log_decay, resets, eps, chunk_size)
    return out, (S, state[1] if z is None else z)


def chunk_size_of(width: int) -> int:
    """Steps of a chunk for keys of a width."""
    return WIDE_CHUNK if width >= WIDE else NARROW_CHUNK


def _step(q, k, v, S, z, log_decay, resets, eps):
    if resets is not None:
        S = torch.where(resets[:, :, None, None], 0.0, S)
    a = None if log_decay is None else log_decay.exp()
    S = torch.addcmul(S if a is None else a[..., None] * S, k.transpose(2, 3), v)
    out = q @ S
    if z is None:
        return out, S, None
    if resets is not None:
        z = torch.where(resets[:, :, None], 0.0, z)
    z = (z if a is None else a * z) + k[:, :, 0]
    return out / ((q * z[:, :, None]).sum(-1, keepdim=True) + eps), S, z


def _chunkwise(q, k, v, S, z, log_decay, resets, eps, chunk_size):
    B, H, T, K = q.shape
    N = max(1, -(-T // (chunk_size or chunk_size_of(K))))
    C = max(1, -(-T // N))  # equal chunks: the least padding
    padding = N * C - T
    if padding:
        q, k, v = (pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    q, k, v = (x.reshape(B * H, N, C, x.shape[-1]) for x in (q, k, v))
    if log_decay is not None:
        log_decay = pad(log_decay, (0, padding)).reshape(B * H, N, C)
    episode = None
    if resets is not None:
        # Which episode of the row a step belongs to; the incoming state belongs to episode 0.
        episode = pad(resets, (0, padding)).cumsum(1).view(B, N, C).repeat_interleave(H, 0)
    z = None if z is None else z.flatten(0, 1)
    tensors = (q, k, v, S.flatten(0, 1), z, log_decay, episode)
    rows = B * H
    if q.device.type == "cpu" and not torch.compiler.is_compiling():
        rows = max(1, TILE_SIZE // (N * C * K))
    if rows >= B * H:
        out, S, z = ChunkwiseAttention.apply(*tensors, eps)
    else:
        num_tiles = -(-B * H // rows)
        # `split`, not slices: the backward pass of a slice fills a tensor of the whole's size.
        tiles = zip(
            *([None] * num_tiles if x is None else x.split(rows) for x in tensors), strict=True
        )
        results = [ChunkwiseAttention.apply(*tile, eps) for tile in tiles]
        outs, last_S, last_z = zip(*results, strict=True)
        out, S, z = torch.cat(outs), torch.cat(last_S), None if z is None else torch.cat(last_z)
    out = out.view(B, H, N * C, v.shape[-1])
    if padding:
        out = out[:, :, :T]
    return out, S.unflatten(0, (B, H)), None if z is None else z.unflatten(0, (B, H))
