"""GTrXL: attention over a window of past steps, with gates instead of residual connections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from einops import einsum, rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from rlmodules.kernels import relative_attention
from rlmodules.memories.config import MemoryConfig
from rlmodules.memories.memory import (
    Memory,
    State,
    count_steps,
    mask_padding,
    unit_values,
    zero_steps,
)
from rlmodules.memories.options import Count, Range
from rlmodules.memories.residual import BlockStack


class GRUGate(nn.Module):
    """Merges a layer's output y into its input x, as a GRU merges an input into its state.

    Args:
        dim: Width D of both.
        bias: Added to the keep side. A positive one starts the gate close to passing x on.

    References:
        Parisotto et al. 2019, https://arxiv.org/abs/1910.06764, section 3.2.
    """

    def __init__(self, dim: int, bias: float):
        super().__init__()
        # Reset, update and candidate side by side: one product instead of three.
        self.of_output = nn.Linear(dim, 3 * dim, bias=False)
        self.of_input = nn.Linear(dim, 2 * dim, bias=False)
        self.of_reset_input = nn.Linear(dim, dim, bias=False)
        self.bias = nn.Parameter(torch.full((dim,), float(bias)))
        for layer in (self.of_output, self.of_input, self.of_reset_input):
            for weight in layer.weight.split(dim):
                nn.init.xavier_uniform_(weight)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """Merges `x` and `y`, both `(..., D)`."""
        reset_y, update_y, candidate_y = self.of_output(y).chunk(3, dim=-1)
        reset_x, update_x = self.of_input(x).chunk(2, dim=-1)
        reset = torch.sigmoid(reset_y + reset_x)
        update = torch.sigmoid(update_y + update_x - self.bias)
        candidate = torch.tanh(candidate_y + self.of_reset_input(reset * x))
        return x + update * (candidate - x)


class GTrXLUnit(nn.Module):
    """One unit: relative attention over window and chunk, then a feed-forward part, each gated.

    The state of a unit is `window (M, D)`: its last M inputs, normalised but not yet scaled, so
    that it doesn't depend on weights.

    Args:
        config: Settings of the memory.
    """

    distances: Tensor

    def __init__(self, config: GTrXLConfig):
        super().__init__()
        d_model, width = config.d_model, config.num_heads * config.head_dim
        self.num_heads = config.num_heads
        self.head_dim = config.head_dim
        self.memory_inference = config.memory_inference
        self.memory_training = config.window_in_training
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * width, bias=False)
        self.content_bias = nn.Parameter(torch.empty(config.num_heads, config.head_dim))
        self.position_bias = nn.Parameter(torch.empty(config.num_heads, config.head_dim))
        self.positions = nn.Linear(d_model, width, bias=False)
        self.out = nn.Linear(width, d_model, bias=False)
        self.attention_gate = GRUGate(d_model, config.gate_bias)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(d_model),
            nn.Linear(d_model, config.feedforward_dim, bias=False),
            nn.ReLU(),
            nn.Linear(config.feedforward_dim, d_model, bias=False),
            nn.ReLU(),
        )
        self.feedforward_gate = GRUGate(d_model, config.gate_bias)
        nn.init.xavier_uniform_(self.content_bias)
        nn.init.xavier_uniform_(self.position_bias)
        # Follows from the settings: stays out of checkpoints.
        self.register_buffer(
            "distances", _distance_table(config.memory_inference, d_model), persistent=False
        )

    def initial_state(self) -> State:
        """Zeros; none of them is ever seen."""
        return {"window": torch.zeros(self.memory_inference, self.attention_norm.weight.shape[0])}

    def forward(
        self, x: Tensor, state: State, span: Tensor, valid: Tensor | None, filled: Tensor | None
    ) -> tuple[Tensor, State]:
        """Runs the unit.

        Args:
            x: Inputs, `(B, T, D)`.
            state: `window (B, M, D)`.
            span: How many earlier steps each step may see, `(B, T)` int64.
            valid: False on right padding, `(B, T)` bool, or None.
            filled: How many slots of the new window are of the episode, `(B,)` int64. None: those
                that are not hold zeros already.

        Returns:
            Outputs `(B, T, D)` and the window after each row's last valid step.
        """
        normed, steps = self._steps(x, state)
        if x.shape[1] == 1:
            attended = self._attend_step(normed, steps, span)
        else:
            attended = self._attend_chunk(normed, steps, span)
        x = self.attention_gate(x, F.relu(self.out(attended)))
        x = self.feedforward_gate(x, self.feedforward(x))
        return x, {"window": self._last_steps(steps, valid, filled)}

    def attention_weights(
        self, x: Tensor, state: State, span: Tensor, valid: Tensor | None, filled: Tensor | None
    ) -> Tensor:
        """What heads give to the values of the steps of x, `(B, H, T, T)`; arguments as above.

        The window's steps have the rest: over both, a step's weights sum to 1.
        """
        q, k, _, distance_scores = self._chunk_inputs(*self._steps(x, state))
        scale = self.head_dim**-0.5
        weights = relative_attention(q, k, unit_values(k), distance_scores, span, scale=scale)
        return weights[..., -x.shape[1] :]

    def _steps(self, x: Tensor, state: State) -> tuple[Tensor, Tensor]:
        """Normalised inputs `(B, T, D)`, and the same behind the window's `(B, M + T, D)`."""
        window = state["window"]
        normed = F.layer_norm(x.to(window.dtype), x.shape[-1:], eps=self.attention_norm.eps)
        return normed, torch.cat([window, normed], 1)

    def _attend_chunk(self, normed: Tensor, steps: Tensor, span: Tensor) -> Tensor:
        """Attention with a key and a value for each step, `(B, T, H K)`."""
        q, k, v, distance_scores = self._chunk_inputs(normed, steps)
        out = relative_attention(q, k, v, distance_scores, span, scale=self.head_dim**-0.5)
        return rearrange(out, "B H T K -> B T (H K)")

    def _chunk_inputs(self, normed: Tensor, steps: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys and values of all steps in reach, and scores by distance."""
        weights = self.qkv.weight.split([self.qkv.out_features // 3] * 3)
        q = self._heads(F.linear(self._scaled(normed), weights[0]))
        steps = steps[:, -(self.memory_training + normed.shape[1]) :]
        kv = F.linear(self._scaled(steps), torch.cat(weights[1:]))
        k, v = (self._heads(x) for x in kv.chunk(2, dim=-1))
        return q + self.content_bias[:, None], k, v, self._distance_scores(q)

    def _attend_step(self, normed: Tensor, steps: Tensor, span: Tensor) -> Tensor:
        """The same for a single step, without the keys and values of the window.

        Queries are taken to the space of the steps instead, and the mix of steps to that of the
        values: a cost of `M D` a head instead of `M D K`. What the keys' constant part adds to all
        scores alike drops out of the softmax.
        """
        query, key, value = rearrange(self.qkv.weight, "(n H K) D -> n H K D", n=3, K=self.head_dim)
        scale, shift = self.attention_norm.weight, self.attention_norm.bias
        q = einsum(self._scaled(normed), query, "B T D, H K D -> B H T K")
        content = einsum(q + self.content_bias[:, None], key * scale, "B H T K, H K D -> B H T D")
        shared = steps.to(content.dtype)[:, None]
        mix = relative_attention(
            content, shared, shared, self._distance_scores(q), span, scale=self.head_dim**-0.5
        )
        return rearrange(
            einsum(mix * scale + shift, value, "B H T D, H K D -> B T H K"), "B T H K -> B T (H K)"
        )

    def _distance_scores(self, q: Tensor) -> Tensor:
        """Scores by distance, `(B, H, T, M + 1)`."""
        table = rearrange(self.positions(self.distances), "M (H K) -> H K M", K=self.head_dim)
        return (q + self.position_bias[:, None]) @ table

    def _scaled(self, normed: Tensor) -> Tensor:
        # In the weights' dtype: the window stays float32 in a module of half precision.
        norm = self.attention_norm
        return normed.to(norm.weight.dtype) * norm.weight + norm.bias

    def _heads(self, x: Tensor) -> Tensor:
        return rearrange(x, "B T (H K) -> B H T K", K=self.head_dim)

    def _last_steps(self, steps: Tensor, valid: Tensor | None, filled: Tensor | None) -> Tensor:
        """The window after the last valid step, zeros before the episode's first one."""
        M = self.memory_inference
        if valid is None:
            window = steps[:, -M:]
        else:
            index = valid.sum(1)[:, None] + torch.arange(M, device=steps.device)
            window = steps.gather(1, index[..., None].expand(-1, -1, steps.shape[-1]))
        if filled is None:
            return window
        ages = torch.arange(M, 0, -1, device=steps.device)
        return torch.where((ages <= filled[:, None])[..., None], window, 0.0)


class GTrXL(Memory):
    """Gated Transformer-XL: each step attends to itself and the `memory_inference` steps before.

    A chunk of T steps costs `O(T (M + C))` a head and layer with blocks of C steps (see
    `relative_attention`), a single step `O(M D)`. The state holds `L M D` floats and the step
    counter: `window (L, M, D)`, `t ()` int64. Slots of the window from before the episode are
    masked. Layers reach back M steps each, so the output depends on up to `L M` earlier steps.

    Gradients flow through the steps of one call. The incoming window is data: none flow into it.

    Args:
        input_dim: Features of the input.
        config: Settings.

    References:
        Parisotto et al. 2019, https://arxiv.org/abs/1910.06764. As RLlib's old `GTrXLNet`: ReLU
        behind attention and feed-forward part, no normalisation at the end. Differs from it: each
        step of a chunk sees exactly its last M steps, and nothing from before the episode.

    Example:
        ```python
        import torch
        from rlmodules.memories import GTrXLConfig

        memory = GTrXLConfig(max_seq_len=20, memory_inference=32).build_memory(input_dim=8)
        state = {key: x.expand(3, *x.shape) for key, x in memory.initial_state().items()}
        y, state = memory(torch.randn(3, 20, 8), state)
        assert y.shape == (3, 20, 64)
        ```
    """

    detaches_state = True

    def __init__(self, input_dim: int, config: GTrXLConfig):
        super().__init__()
        self.input_dim = input_dim
        self.output_dim = config.d_model
        self.memory_inference = config.memory_inference
        self.memory_training = config.window_in_training
        self.project = nn.Linear(input_dim, config.d_model)
        nn.init.xavier_uniform_(self.project.weight)
        nn.init.zeros_(self.project.bias)
        self.units = BlockStack(GTrXLUnit(config) for _ in range(config.num_layers))

    def initial_state(self) -> State:
        """Empty windows and the step counter at 0."""
        return self.units.initial_state() | zero_steps()

    def compilable(self) -> list[nn.Module]:
        """The units."""
        return list(self.units)

    def forward(
        self,
        x: Tensor,
        state: State,
        *,
        valid: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Runs the units, see `Memory.forward`."""
        num_steps = x.shape[1]
        counts, t = count_steps(state["t"], num_steps, valid, resets)
        span = counts.clamp(max=self.memory_inference)
        if num_steps > 1:
            steps = torch.arange(num_steps, device=x.device)
            span = torch.minimum(span, self.memory_training + steps)
        windows = {"window": state["window"].detach()}
        filled = None if resets is None else t
        x = self.project(mask_padding(x, valid))
        x, windows = self.units.run(x, windows, span, valid, filled)
        return x, {"t": t, **windows}


def _distance_table(memory: int, dim: int) -> Tensor:
    """Sines, then cosines, of the distances M to 0 at `dim / 2` frequencies, `(M + 1, dim)`."""
    frequencies = 10_000 ** (-torch.arange(0, dim, 2, dtype=torch.float64) / dim)
    angles = torch.arange(memory, -1, -1)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=-1).to(torch.get_default_dtype())


@dataclass(kw_only=True)
class GTrXLConfig(MemoryConfig):
    """Settings of GTrXL: gated units of attention over a window of past steps."""

    memory: Literal["gtrxl"] = "gtrxl"
    """The memory's name."""

    d_model: Count = 64
    """Width of the units, even."""

    num_layers: Count = 2
    """Units."""

    num_heads: Count = 4
    """Heads a unit."""

    head_dim: Count = 16
    """Width of a head's queries, keys and values."""

    feedforward_dim: Count = 128
    """Hidden width of the units' feed-forward parts."""

    memory_inference: Count = 64
    """Earlier steps that a step attends to, in each unit. The state holds as many inputs a unit."""

    memory_training: Annotated[int, Range(0)] | None = None
    """How many of these steps a training row puts before its first one. None: all of them, and
    training computes exactly what the rollout did. Fewer are faster, and a row's first steps then
    see less than they saw in the rollout."""

    gate_bias: float = 2.0
    """Above 0, the units start close to passing their input on."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.d_model % 2:
            raise ValueError(
                f"`d_model` is {self.d_model}, but must be even: distances are encoded in pairs of "
                "sine and cosine. Add 1."
            )
        if self.window_in_training > self.memory_inference:
            raise ValueError(
                f"`memory_training` is {self.memory_training}, but must be at most "
                f"`memory_inference` ({self.memory_inference}): a training row can put no more "
                "steps before itself than the rollout kept. Leave it out to use all of them."
            )

    @property
    def window_in_training(self) -> int:
        """Steps that a training row puts before its first one."""
        return self.memory_inference if self.memory_training is None else self.memory_training

    def build_memory(self, input_dim: int) -> Memory:
        """Builds the units."""
        return GTrXL(input_dim, self)
