"""Short causal depthwise convolution that continues from its last inputs."""

import torch
from torch import Tensor


def short_convolution(
    x: Tensor,
    weight: Tensor,
    state: Tensor,
    *,
    valid: Tensor | None = None,
    resets: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Causal depthwise convolution of width W over time.

    `y_t = sum_w weight_w x_{t - W + 1 + w}`, written as W shifted products: for widths of about
    four that is several times faster on CPUs than a depthwise `conv1d`. `O(T W D)`.

    Args:
        x: Inputs, `(B, T, D)`.
        weight: `(W, D)`, the current step's weight last.
        state: The W - 1 inputs before the first step, `(B, W - 1, D)`, the latest last. Zeros
            before an episode's first step.
        valid: False on right padding, `(B, T)` bool. None: all steps are valid.
        resets: True where a new episode starts, `(B, T)` bool: nothing before is seen from there.

    Returns:
        Outputs `(B, T, D)` and the W - 1 inputs up to each row's last valid step, in the state's
        dtype.

    References:
        The short convolution of H3 and Mamba: https://arxiv.org/abs/2212.14052, section 3.
    """
    W = weight.shape[0]
    T = x.shape[1]
    inputs = torch.cat([state, x.to(state.dtype)], 1)
    if T == 1 and valid is None and resets is None:
        return (inputs * weight).sum(1, keepdim=True), inputs[:, 1:]
    episode = None
    if resets is not None:
        resets = resets if valid is None else resets & valid
        episode = torch.nn.functional.pad(resets.long().cumsum(1), (W - 1, 0))
    out = inputs[:, W - 1 :] * weight[-1]
    for w in range(W - 1):
        shifted = inputs[:, w : w + T]
        if episode is not None:
            same = episode[:, w : w + T] == episode[:, W - 1 :]
            shifted = torch.where(same[..., None], shifted, 0.0)
        out = out + shifted * weight[w]
    if valid is None:
        last = inputs[:, T:]
        episode_last = None if episode is None else (episode[:, T:], episode[:, -1:])
    else:
        length = valid.sum(1, keepdim=True)
        index = length + torch.arange(W - 1, device=x.device)
        last = inputs.gather(1, index[..., None].expand(-1, -1, inputs.shape[2]))
        episode_last = None
        if episode is not None:
            episode_last = (episode.gather(1, index), episode.gather(1, length + W - 2))
    if episode_last is not None:
        last = torch.where((episode_last[0] == episode_last[1])[..., None], last, 0.0)
    return out, last
