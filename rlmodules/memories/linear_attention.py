"""Linear attention as a memory: pre-norm residual blocks around a recurrent matrix state."""

from typing import Literal

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn import functional as F

from rlmodules.kernels import linear_attention, short_convolution
from rlmodules.memories.memory import Memory, State, count_steps, mask_padding, unit_values
from rlmodules.memories.stack import run_blocks, stack_initial_states
from rlmodules.positions import POSITIONS, PositionalEncoding, rotate, rotation

ShortConvActivation = Literal["silu", "linear"]
Normalizer = Literal["sum", "rms"]
Positions = Literal[
    "none", "rotary", "learned", "fixed", "sine", "scaled_sine", "simple_scaled", "perceptron",
    "base2", "time2vec",
]  # fmt: skip


class LinearAttentionBlock(nn.Module):
    """One residual block: linear attention, then a feed-forward part, each behind a LayerNorm.

    The state of a block is `S (H, K, K)`, with the sum normaliser `z (H, K)` and with a
    convolution its last inputs `conv (W - 1, 3 H K)`.

    Args:
        d_model: Width D of input and output.
        num_heads: Heads H.
        head_dim: Width K of queries, keys and values a head; a head's state has K x K floats.
        feedforward_dim: Hidden width of the feed-forward part.
        short_conv_size: Width W of the short causal convolution over queries, keys and values.
            0: none.
        short_conv_activation: What follows the convolution. "linear" starts it at the identity.
        decay: Whether a head forgets, at a rate that it computes from its input. At the start the
            heads' rates are spread from short to long memories.
        normalizer: "sum" divides by the decayed sum of the keys' products with the query, as the
            paper does; "rms" leaves the sum out and normalises each head's output.
    """

    def __init__(
        self,
        d_model: int,
        num_heads: int,
        head_dim: int,
        feedforward_dim: int,
        *,
        short_conv_size: int = 4,
        short_conv_activation: ShortConvActivation = "silu",
        decay: bool = True,
        normalizer: Normalizer = "rms",
    ):
        super().__init__()
        self.num_heads = num_heads
        self.head_dim = head_dim
        self.short_conv_size = short_conv_size
        self.short_conv_activation = short_conv_activation
        self.normalizer = normalizer
        width = num_heads * head_dim
        self.attention_norm = nn.LayerNorm(d_model)
        self.qkv = nn.Linear(d_model, 3 * width, bias=False)
        self.conv = None
        if short_conv_size:
            weight = torch.randn(short_conv_size, 3 * width) / short_conv_size**0.5
            if short_conv_activation == "linear":
                weight = torch.zeros(short_conv_size, 3 * width)
                weight[-1] = 1.0
            self.conv = nn.Parameter(weight)
        self.decay = None
        if decay:
            self.decay = nn.Linear(d_model, num_heads)
            nn.init.zeros_(self.decay.weight)
            # sigmoid(1) .. sigmoid(6): time constants from about 3 to 400 steps.
            with torch.no_grad():
                self.decay.bias.copy_(torch.linspace(1.0, 6.0, num_heads))
        self.head_norm = nn.RMSNorm(head_dim) if normalizer == "rms" else None
        self.out = nn.Linear(width, d_model, bias=False)
        self.feedforward = nn.Sequential(
            nn.LayerNorm(d_model),
            nn.Linear(d_model, feedforward_dim),
            nn.GELU(),
            nn.Linear(feedforward_dim, d_model),
        )

    def initial_state(self) -> State:
        """Zeros: nothing has been written yet."""
        H, K = self.num_heads, self.head_dim
        state = {"S": torch.zeros(H, K, K)}
        if self.normalizer == "sum":
            state["z"] = torch.zeros(H, K)
        if self.short_conv_size:
            state["conv"] = torch.zeros(self.short_conv_size - 1, 3 * H * K)
        return state

    def forward(
        self,
        x: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Runs the block as `Memory.forward`; `turn (B, T, K)` rotates queries and keys."""
        qk, v, log_decay, new_state = self._project(x, state, turn, valid, resets)
        out, (new_state["S"], z) = self._attend(qk, v, log_decay, state["S"], state, valid, resets)
        if self.normalizer == "sum":
            new_state["z"] = z
        if self.head_norm is not None:
            out = self.head_norm(out)
        x = x + self.out(rearrange(out, "B H T V -> B T (H V)").to(x.dtype))
        return x + self.feedforward(x), new_state

    def attention_weights(
        self,
        x: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> Tensor:
        """What heads give to the values of steps, `(B, H, T, T)`; arguments as in `forward`.

        These weights times the values are the heads' outputs, before their norm.
        """
        qk, _, log_decay, _ = self._project(x, state, turn, valid, resets)
        values = unit_values(qk[1])
        S = values.new_zeros(*qk.shape[1:3], self.head_dim, x.shape[1])
        return self._attend(qk, values, log_decay, S, state, valid, resets)[0]

    def _project(
        self,
        x: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor | None, State]:
        """What the attention takes: queries with keys, values, decay; and the convolution's state.

        Queries and keys are one tensor `(2, B, H, T, K)`, values `(B, H, T, V)`.
        """
        h = self.attention_norm(x)
        qkv = self.qkv(h)
        new_state = {}
        if self.conv is not None:
            qkv, new_state["conv"] = short_convolution(
                qkv, self.conv, state["conv"], valid=valid, resets=resets
            )
            if self.short_conv_activation == "silu":
                qkv = F.silu(qkv)
        # One copy here; what follows is several times slower on permuted strides.
        qkv = rearrange(qkv, "B T (n H K) -> n B H T K", n=3, H=self.num_heads).contiguous()
        qk = F.elu(qkv[:2]) + 1
        if turn is not None:
            qk = rotate(qk, turn)
        log_decay = None
        if self.decay is not None:
            log_decay = F.logsigmoid(self.decay(h).to(state["S"].dtype)).transpose(1, 2)
        return qk, qkv[2], log_decay, new_state

    def _attend(
        self,
        qk: Tensor,
        v: Tensor,
        log_decay: Tensor | None,
        S: Tensor,
        state: State,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Outputs `(B, H, T, V)` and the new S and z, from an S of `(B, H, K, V)`."""
        normalize = self.normalizer == "sum"
        z = state["z"] if normalize else torch.zeros_like(S[..., 0])
        return linear_attention(
            qk[0],
            qk[1],
            v,
            (S, z),
            log_decay=log_decay,
            valid=valid,
            resets=resets,
            normalize=normalize,
        )


class DeepLinearAttention(Memory):
    """A stack of linear-attention blocks.

    `O(T)` in the sequence length and, at a step, independent of the episode's length. The state
    holds `L H K K` floats, with the sum normaliser another `L H K`, with a convolution another
    `3 L H K (W - 1)`, and a step counter where the positions need one. Keys: `S (L, H, K, K)`,
    `z (L, H, K)`, `conv (L, W - 1, 3 H K)`, `t ()` int64.

    Args:
        input_dim: Features of the input.
        d_model: Width of the blocks and of the output.
        num_layers: Blocks L.
        num_heads: Heads H a block.
        head_dim: Width K a head.
        feedforward_dim: Hidden width of the feed-forward parts.
        positions: "none", "rotary" (relative, on queries and keys), or one of POPGym's encodings,
            mixed into the input.
        position_horizon: Steps that the encodings are laid out for, POPGym's `max_seq_len`.
        short_conv_size: See `LinearAttentionBlock` for this and what follows.
        short_conv_activation: "silu" or "linear".
        decay: Whether heads forget.
        normalizer: "sum" or "rms".

    Raises:
        ValueError: If an option is out of its range, or rotary positions meet the sum normaliser.

    References:
        Katharopoulos et al. 2020, https://arxiv.org/abs/2006.16236; the deep variant: POPGym,
        https://arxiv.org/abs/2303.01859. Differs: heads, residual pre-norm blocks, convolution,
        decay.

    Example:
        ```python
        import torch
        from rlmodules.memories import DeepLinearAttention

        memory = DeepLinearAttention(input_dim=8, d_model=64, num_layers=2)
        state = {key: x.expand(3, *x.shape) for key, x in memory.initial_state().items()}
        y, state = memory(torch.randn(3, 20, 8), state)
        assert y.shape == (3, 20, 64)
        ```
    """

    def __init__(
        self,
        input_dim: int,
        d_model: int = 64,
        num_layers: int = 2,
        num_heads: int = 4,
        head_dim: int = 16,
        feedforward_dim: int = 128,
        *,
        positions: Positions = "rotary",
        position_horizon: int = 1024,
        short_conv_size: int = 4,
        short_conv_activation: ShortConvActivation = "silu",
        decay: bool = True,
        normalizer: Normalizer = "rms",
    ):
        super().__init__()
        _check(positions, short_conv_size, normalizer, head_dim)
        self.input_dim = input_dim
        self.output_dim = d_model
        self.project = nn.Linear(input_dim, d_model)
        self.positions = None
        if positions in POSITIONS:
            self.positions = PositionalEncoding(positions, d_model, position_horizon)
        self.counts_steps = positions != "none"
        self.head_dim = head_dim
        self.blocks = nn.ModuleList(
            LinearAttentionBlock(
                d_model,
                num_heads,
                head_dim,
                feedforward_dim,
                short_conv_size=short_conv_size,
                short_conv_activation=short_conv_activation,
                decay=decay,
                normalizer=normalizer,
            )
            for _ in range(num_layers)
        )
        self.norm = nn.LayerNorm(d_model)

    def initial_state(self) -> State:
        """Zeros of every block, stacked over the layers, and the step counter at 0."""
        return stack_initial_states(self.blocks, self.counts_steps)

    def compilable(self) -> list[nn.Module]:
        """The blocks."""
        return list(self.blocks)

    def forward(
        self,
        x: Tensor,
        state: State,
        *,
        valid: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Runs the stack, see `Memory.forward`."""
        x = self.project(mask_padding(x, valid))
        turn, new_state = None, {}
        if self.counts_steps:
            t, new_state["t"] = count_steps(state["t"], x.shape[1], valid, resets)
            if self.positions is not None:
                x = self.positions(x, t)
            else:
                dtype = torch.promote_types(x.dtype, torch.float32)
                turn = rotation(t, self.head_dim, dtype=dtype)
        x, block_states = run_blocks(self.blocks, x, state, turn, valid, resets)
        return self.norm(x), new_state | block_states


class LinearAttention(DeepLinearAttention):
    """A single linear-attention block, see [`DeepLinearAttention`][rlmodules.memories]."""

    def __init__(self, input_dim: int, d_model: int = 64, **options):
        super().__init__(input_dim, d_model, num_layers=1, **options)


def _check(positions, short_conv_size, normalizer, head_dim):
    if positions == "rotary" and normalizer != "rms":
        raise ValueError(
            f'`positions` = "rotary" with `normalizer` = "{normalizer}": rotated products may be '
            'negative and cannot normalise a sum. Set `normalizer="rms"` or other positions.'
        )
    if positions not in ("none", "rotary", *POSITIONS):
        raise ValueError(
            f'`positions` = "{positions}" is none of: none, rotary, {", ".join(POSITIONS)}.'
        )
    if positions == "rotary" and head_dim % 2:
        raise ValueError(
            f"`head_dim` = {head_dim} must be even with rotary positions, which turn pairs of "
            "features. Make it even or set other positions."
        )
    if short_conv_size < 0 or short_conv_size == 1:
        raise ValueError(
            f"`short_conv_size` = {short_conv_size} must be 0 (no convolution) or at least 2: a "
            "convolution of width 1 sees no earlier step."
        )
