"""Softmax attention over a sliding window, with scores that depend on the distance."""

import torch
from einops import rearrange
from torch import Tensor
from torch.nn import functional as F

# Queries C of a block. Longer sequences are cut into blocks, so that time and memory grow in
# proportion to the length.
BLOCK_SIZE = 64


def relative_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    distance_scores: Tensor,
    span: Tensor,
    *,
    scale: float,
) -> Tensor:
    """Attention of each step to itself and at most the M steps before it.

    `o_i = sum_j softmax_j(scale (q_i . k_j + p_i[distance])) v_j` over the keys j at a distance of
    0 to `span_i` from step i. A NaN in a key or value reaches all heads of the steps that see it,
    and no other step. Costs `O(T (M + C) (K + V))` time and `O(T (M + C))` memory, with C queries a
    block.

    Args:
        q: Queries, `(B, H, T, K)`.
        k: Keys, `(B, H, W + T, K)`: of W steps before the first query, at most M, and of the
            queries' steps. Axis H may be 1: heads that share them.
        v: Values, `(B, H, W + T, V)`, axis H as that of the keys.
        distance_scores: `p (B, H, T, M + 1)`, in the order of distances M, M - 1, ..., 0.
        span: How many earlier steps each query sees, `(B, T)` int64: at most M, and at most W plus
            the query's index.
        scale: Factor on all scores.

    Returns:
        Outputs `(B, H, T, V)`.

    References:
        Dai et al. 2019, https://arxiv.org/abs/1901.02860, section 3.3. Differs: every query sees
        its own window of M steps, whatever its place in the chunk.
    """
    T, M = q.shape[2], distance_scores.shape[-1] - 1
    C = BLOCK_SIZE
    if T <= C:
        return _attend(q, k, v, distance_scores, span, scale)
    num_blocks = -(-T // C)
    after = num_blocks * C - T
    padding = (0, 0, M + T - k.shape[2], after)
    k, v = (
        rearrange(F.pad(x, padding).unfold(2, M + C, C), "B H n D S -> (B n) H S D") for x in (k, v)
    )
    q, distance_scores = (
        rearrange(F.pad(x, (0, 0, 0, after)), "B H (n C) D -> (B n) H C D", C=C)
        for x in (q, distance_scores)
    )
    span = rearrange(F.pad(span, (0, after)), "B (n C) -> (B n) C", C=C)
    out = _attend(q, k, v, distance_scores, span, scale)
    return rearrange(out, "(B n) H C D -> B H (n C) D", n=num_blocks)[:, :, :T]


def _attend(
    q: Tensor, k: Tensor, v: Tensor, distance_scores: Tensor, span: Tensor, scale: float
) -> Tensor:
    """One block: every query against all keys, with a mask."""
    num_queries, num_keys = q.shape[2], k.shape[2]
    first = num_keys - num_queries
    steps = torch.arange(num_queries, device=q.device)[:, None]
    keys = torch.arange(num_keys, device=q.device) - first
    distances = steps - keys
    visible = (distances >= 0) & (distances <= span[:, None, :, None])
    # Neither -inf nor a weight of 0 keeps a NaN from a step that does not see it: keys and values
    # are made finite, and the mask has the NaN. Summed in float32: half precision overflows.
    with torch.no_grad():
        flaws = (k.sum((1, 3), dtype=torch.float32) + v.sum((1, 3), dtype=torch.float32)) * 0
    k, v = (x.nan_to_num(0.0, 0.0, 0.0) for x in (k, v))
    mask = torch.where(visible, flaws[:, None, None], -torch.inf).to(q.dtype)
    bias = _by_key(distance_scores * scale, num_keys) + mask
    # Keys that all heads share are not copied for each: heads become further queries.
    rows = "B H T D -> B (H T) D" if k.shape[1] == 1 else "B H T D -> (B H) T D"
    B, H = q.shape[:2]
    q, bias = (rearrange(x, rows) for x in (q * scale, bias))
    k, v = (rearrange(x, "B H S D -> (B H) S D") for x in (k, v))
    weights = torch.baddbmm(bias, q, k.transpose(1, 2)).softmax(-1)
    return (weights @ v).view(B, H, num_queries, v.shape[-1])


def _by_key(distance_scores: Tensor, num_keys: int) -> Tensor:
    """Scores by distance `(B, H, T, M + 1)` -> scores by key `(B, H, T, num_keys)`.

    Row i has to move i places to the right. Read in rows that are one entry shorter than they were
    written, it does.
    """
    num_queries, M = distance_scores.shape[2], distance_scores.shape[3] - 1
    width = M + num_queries
    padded = F.pad(distance_scores, (0, num_queries))
    moved = padded.flatten(2)[..., : num_queries * width].unflatten(2, (num_queries, width))
    return moved[..., width - num_keys :]
