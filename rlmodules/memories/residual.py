"""The frame that all stacked memories share: residual blocks around mixers, and positions.

A memory of this kind is its mixer: what mixes over time, with a state.
"""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from rlmodules.memories.config import MemoryConfig
from rlmodules.memories.memory import (
    Memory,
    NoWeightsError,
    State,
    count_steps,
    mask_padding,
    zero_steps,
)
from rlmodules.memories.options import Count
from rlmodules.memories.positions import POSITIONS, PositionalEncoding, rotation

Positions = Literal[
    "none", "rotary", "learned", "fixed", "sine", "scaled_sine", "simple_scaled", "perceptron",
    "base2", "time2vec",
]  # fmt: skip


class Mixer(nn.Module, abc.ABC):
    """What mixes over time in a residual block; keeps the promises of `Memory`.

    Attributes:
        rotated_dim: Width of the features that rotary positions turn; 0 where there are none.
        compiles: Whether `torch.compile` pays for blocks with this mixer.
    """

    rotated_dim: int = 0
    compiles: bool = True

    @abc.abstractmethod
    def initial_state(self) -> State:
        """The state before an episode's first step, without a batch axis. Cheap to call."""

    @abc.abstractmethod
    def forward(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Mixes a batch of sequences.

        Args:
            h: Normalised inputs, `(B, T, D)`; finite in the padding.
            state: Each row's state before its first step.
            turn: What `rotation` returns for the steps, `(B, T, 2 rotated_dim)`; None without
                rotary positions.
            valid: False on right padding, `(B, T)` bool, or None.
            resets: True where a new episode starts, `(B, T)` bool, or None.

        Returns:
            What is added to the block's input, `(B, T, D)`, and the new state.
        """

    def attention_weights(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> Tensor:
        """What heads give to the values of steps, `(B, H, T, T)`; arguments as in `forward`.

        Raises:
            NoWeightsError: Unless a subclass has them.
        """
        raise NoWeightsError(
            f"`{type(self).__name__}` has no attention weights: its output is no weighted sum of "
            "values. Use `gradient_map` of the memory, which all have."
        )


class ResidualBlock(nn.Module):
    """A mixer, then a feed-forward part, each behind a LayerNorm and added to its input.

    Args:
        mixer: What mixes over time.
        d_model: Width D of input and output.
        feedforward_dim: Hidden width of the feed-forward part.
    """

    def __init__(self, mixer: Mixer, d_model: int, feedforward_dim: int):
        super().__init__()
        self.norm = nn.LayerNorm(d_model)
        self.mixer = mixer
        self.feedforward = nn.Sequential(
            nn.LayerNorm(d_model),
            nn.Linear(d_model, feedforward_dim),
            nn.GELU(),
            nn.Linear(feedforward_dim, d_model),
        )

    def initial_state(self) -> State:
        """That of the mixer."""
        return self.mixer.initial_state()

    def forward(
        self,
        x: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Runs the block; arguments as in `Mixer.forward`."""
        mixed, state = self.mixer(self.norm(x), state, turn, valid, resets)
        x = x + mixed
        return x + self.feedforward(x), state


class BlockStack(nn.ModuleList):
    """Blocks that run one behind the other; their states lie in one tensor a key.

    A key is stacked over the blocks that have it, so that a state has few tensors.

    Args:
        blocks: Have an `initial_state()`, and map `(x, state, *args)` to an output and a state.
    """

    def __init__(self, blocks: Iterable[nn.Module]):
        super().__init__(blocks)
        states: list[State] = [block.initial_state() for block in self]  # pyright: ignore
        self._keys_of_blocks = [list(state) for state in states]
        self._keys = list(dict.fromkeys(key for state in states for key in state))
        for key in self._keys:
            shapes = {tuple(state[key].shape) for state in states if key in state}
            if len(shapes) > 1:
                raise ValueError(
                    f"The state `{key}` has the shapes {sorted(shapes)} in different blocks, but "
                    "states of one name are stacked. Give them equal sizes, or different names."
                )

    def initial_state(self) -> State:
        """The blocks' initial states, leaves `(L, ...)`."""
        states: list[State] = [block.initial_state() for block in self]  # pyright: ignore
        return {key: torch.stack([s[key] for s in states if key in s]) for key in self._keys}

    def run(self, x: Tensor, state: State, *args: Tensor | None) -> tuple[Tensor, State]:
        """Runs the blocks.

        Args:
            x: Inputs of the first block, `(B, T, D)`.
            state: Leaves `(B, L, ...)`; other keys than the blocks' are left out.
            args: What all blocks share.

        Returns:
            Outputs of the last block and the new states, stacked like `state`.
        """
        layers = {key: iter(state[key].unbind(1)) for key in self._keys}
        new_layers: dict[str, list[Tensor]] = {key: [] for key in self._keys}
        for block, keys in zip(self, self._keys_of_blocks, strict=True):
            x, new_state = block(x, {key: next(layers[key]) for key in keys}, *args)
            for key in keys:
                new_layers[key].append(new_state[key])
        return x, {key: torch.stack(values, 1) for key, values in new_layers.items()}


class ResidualStack(Memory):
    """Residual blocks, one behind the other, with positions in front and a LayerNorm behind.

    The state has the mixers' keys, stacked over the blocks that have them, `(L, ...)`, and where
    positions need one a step counter `t ()` int64.

    Args:
        input_dim: Features of the input.
        config: Widths and positions.
        mixers: One a block.

    Raises:
        ValueError: If rotary positions meet mixers that have nothing to turn, or an odd width.
    """

    def __init__(self, input_dim: int, config: StackConfig, mixers: Sequence[Mixer]):
        super().__init__()
        self.input_dim = input_dim
        self.output_dim = config.d_model
        self.project = nn.Linear(input_dim, config.d_model)
        self.counts_steps = config.positions != "none"
        self.positions = None
        if config.positions in POSITIONS:
            self.positions = PositionalEncoding(
                config.positions, config.d_model, config.position_horizon
            )
        self.rotated_dim = 0
        if config.positions == "rotary":
            self.rotated_dim = _rotated_dim(mixers)
        self.blocks = BlockStack(
            ResidualBlock(mixer, config.d_model, config.feedforward_dim) for mixer in mixers
        )
        self.norm = nn.LayerNorm(config.d_model)

    def initial_state(self) -> State:
        """The blocks' initial states and the step counter at 0."""
        return self.blocks.initial_state() | (zero_steps() if self.counts_steps else {})

    def compilable(self) -> list[nn.Module]:
        """The blocks whose mixers gain from it."""
        return [block for block in self.blocks if block.mixer.compiles]  # pyright: ignore

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
                turn = rotation(t, self.rotated_dim, dtype=dtype)
        x, block_states = self.blocks.run(x, state, turn, valid, resets)
        return self.norm(x), new_state | block_states


@dataclass(kw_only=True)
class StackConfig(MemoryConfig):
    """Settings that all stacks of residual blocks share. Subclasses say what the mixers are.

    Example:
        ```python
        from dataclasses import dataclass

        from rlmodules.memories import LinearAttentionConfig
        from rlmodules.memories.linear_attention import LinearAttentionMixer


        @dataclass(kw_only=True)
        class MyConfig(LinearAttentionConfig):
            def build_mixer(self, layer):
                return LinearAttentionMixer(self)
        ```
    """

    d_model: Count = 64
    """Width of the blocks and of the memory's output."""

    num_layers: Count = 2
    """Blocks."""

    feedforward_dim: Count = 128
    """Hidden width of the blocks' feed-forward parts."""

    positions: Positions = "none"
    """How the memory knows what time it is: "none", "rotary" (relative, on queries and keys), or
    one of POPGym's encodings, which are added to the input."""

    position_horizon: Count = 1024
    """Steps that POPGym's encodings are laid out for, best the longest episode's. They work beyond,
    but some no longer tell late steps apart."""

    @abc.abstractmethod
    def build_mixer(self, layer: int) -> Mixer:
        """Builds the mixer of a block; `layer` counts from 0."""

    def build_memory(self, input_dim: int) -> Memory:
        """Builds the stack."""
        return ResidualStack(
            input_dim, self, [self.build_mixer(layer) for layer in range(self.num_layers)]
        )


def _rotated_dim(mixers: Sequence[Mixer]) -> int:
    """The width that rotary positions turn, the same in all mixers that have one."""
    width = max(mixer.rotated_dim for mixer in mixers)
    if not width:
        raise ValueError(
            '`positions` is "rotary", but this memory has no queries and keys to turn. Set '
            '"none" or one of POPGym\'s encodings.'
        )
    if width % 2:
        raise ValueError(
            f"`head_dim` is {width}, but must be even with rotary positions, which turn pairs of "
            "features. Make it even or set other positions."
        )
    return width
