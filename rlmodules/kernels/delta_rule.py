"""The gated delta rule: chunk by chunk for sequences, one update for a step."""

import torch
from torch import Tensor
from torch.nn.functional import pad

from rlmodules.kernels.chunkwise_delta import ChunkwiseDelta

# Steps of a chunk. The solve in it grows with its square, so narrow heads gain from shorter ones.
NARROW_CHUNK, WIDE_CHUNK, WIDE = 16, 32, 64


def delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    S: Tensor,
    *,
    log_decay: Tensor | None = None,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
    chunk_size: int | None = None,
) -> tuple[Tensor, Tensor]:
    """Gated delta rule over a sequence that continues from a state.

    `S' = a_t S_{t-1}`, `S_t = S' + beta_t k_t (v_t - S'^T k_t)^T` and `o_t = S_t^T q_t`, with
    `a_t = exp(log_decay_t)`: a step overwrites what its key held, by the share beta.

    Costs `O(T C (C + K + V) + T K V)` time for chunks of C steps and keeps one `K x V` state a
    chunk for the backward pass; `T = 1` is a single rank-one update. Computes in the state's dtype,
    also under autocast.

    Args:
        q: Queries, `(B, H, T, K)`.
        k: Keys, `(B, H, T, K)`, normally of length 1: beyond a squared length of `2 / beta` the
            state grows with each step.
        v: Values, `(B, H, T, V)`.
        beta: What share of a key's value is replaced, `(B, H, T)`, from 0 to 2.
        S: State before the first step, `(B, H, K, V)`. Its dtype (float32 or float64) is the dtype
            of the computation and of the results.
        log_decay: Logarithm of the decay a head and step, `(B, H, T)`, not positive; -inf forgets
            all. None: no decay, the delta rule of fast weight programmers.
        valid: False on right padding, `(B, T)` bool. Padding changes no valid output and not the
            returned state, whatever it holds. None: all steps are valid.
        resets: True where a new episode starts, `(B, T)` bool: the state is zero before that step.
        chunk_size: Steps C per chunk. None: what is fastest, 16 for widths below 64, else 32.

    Returns:
        Outputs `(B, H, T, V)` and the state after each row's last valid step.

    References:
        Yang et al. 2024, https://arxiv.org/abs/2412.06464, eq. 10, and its chunks, section 3.3;
        without decay: Schlag et al. 2021, https://arxiv.org/abs/2102.11174, eq. 24, and
        https://arxiv.org/abs/2406.06484, section 3.
        Differs: an initial state, resets and padding.

    Example:
        ```python
        import torch
        from rlmodules.kernels import delta_rule

        q, k = torch.randn(2, 4, 100, 16), torch.randn(2, 4, 100, 16)
        k = torch.nn.functional.normalize(k, dim=-1)
        v, beta = torch.randn(2, 4, 100, 32), torch.rand(2, 4, 100)
        out, S = delta_rule(q, k, v, beta, torch.zeros(2, 4, 16, 32))
        assert out.shape == (2, 4, 100, 32)
        ```
    """
    with torch.autocast(q.device.type, enabled=False):
        q, k, v, beta = (x.to(S.dtype) for x in (q, k, v, beta))
        if log_decay is not None:
            log_decay = log_decay.to(S.dtype)
        if valid is not None:
            # A padded step neither writes nor decays nor starts an episode.
            q, k, v = (torch.where(valid[:, None, :, None], x, 0.0) for x in (q, k, v))
            beta = torch.where(valid[:, None], beta, 0.0)
            if log_decay is not None:
                log_decay = torch.where(valid[:, None], log_decay, 0.0)
            if resets is not None:
                resets = resets & valid
        if q.shape[2] == 1:
            return _step(q, k, v, beta, S, log_decay, resets)
        return _chunkwise(q, k, v, beta, S, log_decay, resets, chunk_size)


def _step(q, k, v, beta, S, log_decay, resets):
    if resets is not None:
        S = torch.where(resets[:, :, None, None], 0.0, S)
    if log_decay is not None:
        S = log_decay.exp()[..., None] * S
    S = S + k.mT @ (beta[..., None] * (v - k @ S))
    return q @ S, S


def _chunkwise(q, k, v, beta, S, log_decay, resets, chunk_size):
    B, H, T, K = q.shape
    if chunk_size is None:
        chunk_size = WIDE_CHUNK if K >= WIDE else NARROW_CHUNK
    N = max(1, -(-T // chunk_size))
    C = max(1, -(-T // N))  # equal chunks: the least padding
    padding = N * C - T
    if padding:
        q, k, v = (pad(x, (0, 0, 0, padding)) for x in (q, k, v))
    q, k, v = (x.reshape(B * H, N, C, x.shape[-1]) for x in (q, k, v))
    beta = pad(beta, (0, padding)).reshape(B * H, N, C)
    if log_decay is not None:
        log_decay = pad(log_decay, (0, padding)).reshape(B * H, N, C)
    episode = None
    if resets is not None:
        # Which episode of the row a step belongs to; the incoming state belongs to episode 0.
        episode = pad(resets, (0, padding)).cumsum(1).view(B, N, C).repeat_interleave(H, 0)
    out, S = ChunkwiseDelta.apply(q, k, v, beta, S.flatten(0, 1), log_decay, episode)
    return out.view(B, H, N * C, v.shape[-1])[:, :, :T], S.unflatten(0, (B, H))
