"""POPGym's `"max"` aggregator: attention over a running maximum, in bounded memory."""

from typing import Any

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rlmodules.kernels.reference import NEUTRAL_MAX

CHUNK_SIZE = 16


def max_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    *,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """Causal attention whose state is a running maximum.

    `S_t = max(S_{t-1}, k_t v_t^T)` element by element and `o_t = S_t^T q_t`.

    Costs `O(T K V log C)` time. Keeps one `K x V` state per chunk of C steps and recomputes the
    states inside a chunk in the backward pass, one chunk at a time. Computes in the state's dtype.

    Args:
        q: Queries after the feature map, `(B, H, T, K)`.
        k: Keys after the feature map, `(B, H, T, K)`.
        v: Values, `(B, H, T, V)`.
        state: `S (B, H, K, V)` before the first step, float32 or float64; -1e20 where nothing has
            been seen yet.
        valid: False on right padding, `(B, T)` bool. None: all steps are valid.
        resets: True where a new episode starts, `(B, T)` bool.
        chunk_size: Steps C per chunk.

    Returns:
        Outputs `(B, H, T, V)` and the state after each row's last valid step.

    References:
        POPGym 1.0.7, `MaxAggregation`. Differs: does not start from 0, which hides every negative
        entry; an initial state, resets and padding; bounded memory.
    """
    S = state
    T = q.shape[2]
    with torch.autocast(q.device.type, enabled=False):
        q, k, v = (x.to(S.dtype) for x in (q, k, v))
        if T == 0:
            return q @ S, S
        if valid is None:
            valid = torch.ones(q.shape[0], T, dtype=torch.bool, device=q.device)
        episode = torch.zeros_like(valid, dtype=torch.long)
        if resets is not None:
            episode = (resets & valid).long().cumsum(1)
        before = torch.zeros_like(episode[:, :1])
        outputs = []
        for start in range(0, T, chunk_size):
            chunk = slice(start, start + chunk_size)
            arguments: tuple[Any, ...] = (
                *(x[:, :, chunk] for x in (q, k, v)),
                S,
                valid[:, chunk],
                episode[:, chunk],
                before,
            )
            if chunk_size < T and torch.is_grad_enabled():
                out, S = checkpoint(_chunk, *arguments, use_reentrant=False)
            else:
                out, S = _chunk(*arguments)
            before = episode[:, chunk][:, -1:]
            outputs.append(out)
    return torch.cat(outputs, 2), S


def _chunk(q, k, v, S, valid, episode, before):
    """One chunk; `before (B, 1)` is the episode that the incoming state belongs to."""
    running = k[..., :, None] * v[..., None, :]
    running = torch.where(valid[:, None, :, None, None], running, NEUTRAL_MAX)
    # A scan by doubling: after the pass with shift d each step holds the maximum of its last 2d
    # steps. The two windows never overlap, so a maximum has one source and one gradient.
    C = q.shape[2]
    shift = 1
    while shift < C:
        same = episode[:, shift:] == episode[:, :-shift]
        earlier = torch.where(same[:, None, :, None, None], running[:, :, :-shift], NEUTRAL_MAX)
        running = torch.cat(
            [running[:, :, :shift], torch.maximum(running[:, :, shift:], earlier)], 2
        )
        shift *= 2
    same = (episode == before)[:, None, :, None, None]
    running = torch.maximum(running, torch.where(same, S[:, :, None], NEUTRAL_MAX))
    return (q[..., None, :] @ running).squeeze(-2), running[:, :, -1]
