"""Attention over a window of past steps, as a mixer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn

from rlmodules.kernels import relative_attention
from rlmodules.memories.memory import State, count_steps, unit_values
from rlmodules.memories.options import Count
from rlmodules.memories.residual import Mixer, StackConfig


class WindowAttentionMixer(Mixer):
    """Each step attends to itself and at most the M steps of its episode before it.

    The state has the keys and values of the last M steps, `keys (M, H K)` and `values (M, H K)`,
    and how many steps the episode has, `age ()` int64. A row of T steps costs `O(T (M + C))` a
    head, a step `O(M)`. What a head gives to a distance is learned, and added to its scores.

    Args:
        config: Its settings.

    References:
        Vaswani et al. 2017, https://arxiv.org/abs/1706.03762; scores by distance: Raffel et al.
        2020, https://arxiv.org/abs/1910.10683, section 2.1. Differs: a window for each step, one
        score a distance.
    """

    def __init__(self, config: WindowAttentionConfig):
        super().__init__()
        self.head_dim = config.head_dim
        self.window = config.window
        self.width = config.num_heads * config.head_dim
        self.qkv = nn.Linear(config.d_model, 3 * self.width, bias=False)
        # In the order of distances M, M - 1, ..., 0.
        self.distance_scores = nn.Parameter(torch.zeros(config.num_heads, config.window + 1))
        self.out = nn.Linear(self.width, config.d_model, bias=False)

    def initial_state(self) -> State:
        """Zeros; none of them is ever seen."""
        return {
            "keys": torch.zeros(self.window, self.width),
            "values": torch.zeros(self.window, self.width),
            "age": torch.zeros((), dtype=torch.int64),
        }

    def forward(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Mixes, see `Mixer.forward`."""
        q, keys, values, span, age = self._project(h, state, valid, resets)
        out = self._attend(q, self._heads(keys), self._heads(values), span)
        out = self.out(rearrange(out, "B H T K -> B T (H K)").to(h.dtype))
        new_state = {"keys": self._last(keys, valid, age), "values": self._last(values, valid, age)}
        return out, {**new_state, "age": age}

    def attention_weights(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> Tensor:
        """What heads give to the values of the steps of h, `(B, H, T, T)`; arguments as above.

        The window's steps have the rest: over both, a step's weights sum to 1.
        """
        q, keys, _, span, _ = self._project(h, state, valid, resets)
        k = self._heads(keys)
        return self._attend(q, k, unit_values(k), span)[..., -h.shape[1] :]

    def _project(
        self, h: Tensor, state: State, valid: Tensor | None, resets: Tensor | None
    ) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
        """Queries; keys and values `(B, M + T, H K)`; what each step sees; the new age."""
        q, k, v = self.qkv(h).to(state["keys"].dtype).chunk(3, dim=-1)
        keys, values = (torch.cat([state[n], x], 1) for n, x in (("keys", k), ("values", v)))
        counts, age = count_steps(state["age"], h.shape[1], valid, resets)
        return self._heads(q), keys, values, counts.clamp(max=self.window), age

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, span: Tensor) -> Tensor:
        B, _, T, _ = q.shape
        scores = self.distance_scores[:, None].to(q.dtype).expand(B, -1, T, -1)
        return relative_attention(q, k, v, scores, span, scale=self.head_dim**-0.5)

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "B T (H K) -> B H T K", K=self.head_dim)

    def _last(self, steps: Tensor, valid: Tensor | None, age: Tensor) -> Tensor:
        """The last M of the steps up to each row's last valid one, zeros before its episode."""
        M = self.window
        if valid is None:
            last = steps[:, -M:]
        else:
            index = valid.sum(1)[:, None] + torch.arange(M, device=steps.device)
            last = steps.gather(1, index[..., None].expand(-1, -1, steps.shape[-1]))
        ages = torch.arange(M, 0, -1, device=steps.device)
        return torch.where((ages <= age[:, None])[..., None], last, 0.0)


@dataclass(kw_only=True)
class WindowAttentionConfig(StackConfig):
    """Settings of a stack of attention over a window."""

    memory: Literal["window"] = "window"
    """The memory's name."""

    num_heads: Count = 4
    """Heads a block."""

    head_dim: Count = 16
    """Width of a head's queries, keys and values."""

    window: Count = 64
    """Earlier steps M that a step attends to. The state holds keys and values of as many."""

    def build_mixer(self, layer: int) -> Mixer:
        """Builds the mixer of a block."""
        return WindowAttentionMixer(self)
