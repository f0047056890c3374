"""GRU and LSTM: torch's weights and fused kernels, with or without the residual frame."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from rlmodules.kernels import gru
from rlmodules.memories.memory import Memory, State, mask_padding
from rlmodules.memories.options import Count
from rlmodules.memories.residual import BlockStack, Mixer, StackConfig


class CellMixer(Mixer):
    """One layer of a GRU, `h (D)`, or of an LSTM, `h (D)` and `c (D)`.

    Rows run one step after the other, `O(T D^2)`: a GRU's on CPUs through our kernel, which knows
    resets, all others through torch's fused ones. There resets cut a row into parts; those of about
    the same length run side by side.

    Args:
        kind: "gru" or "lstm".
        input_dim: Features of the input.
        width: Features D of state and output.

    References:
        Cho et al. 2014, https://arxiv.org/abs/1406.1078; Hochreiter and Schmidhuber 1997.
    """

    # The kernel is one call already, which `torch.compile` leaves as it is.
    compiles = False
    cell: Any

    def __init__(self, kind: Literal["gru", "lstm"], input_dim: int, width: int):
        super().__init__()
        self.keys = ("h",) if kind == "gru" else ("h", "c")
        self.cell = (nn.GRU if kind == "gru" else nn.LSTM)(input_dim, width, batch_first=True)

    def initial_state(self) -> State:
        """Zeros."""
        return {key: torch.zeros(self.cell.hidden_size) for key in self.keys}

    def forward(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Mixes, see `Mixer.forward`."""
        if h.numel() == 0:
            return h.new_zeros(*h.shape[:2], self.cell.hidden_size), state
        dtypes = {key: value.dtype for key, value in state.items()}
        weight = self.cell.weight_ih_l0
        with torch.autocast(h.device.type, enabled=False):
            x = h.to(weight.dtype)
            states = tuple(state[key].to(weight.dtype) for key in self.keys)
            if h.shape[1] == 1:
                out, states = self._step(x, states, valid, resets)
            elif len(states) == 1 and x.device.type == "cpu":
                out = gru(x, states[0], *self.cell.all_weights[0], resets=resets)
                states = (out[:, -1] if valid is None else _last_valid(out, valid, states[0]),)
            else:
                out, states = self._row(x, states, valid, resets)
        new_state = {
            key: value.to(dtypes[key]) for key, value in zip(self.keys, states, strict=True)
        }
        return out.to(h.dtype), new_state

    def _row(self, x, states, valid, resets):
        """A call of the kernel for all parts of about one length; resets are where parts start."""
        if resets is None:
            return self._part(x, states, valid)
        B, T = resets.shape
        valid = torch.ones_like(resets) if valid is None else valid
        resets = resets & valid
        starts = resets.clone()
        starts[:, 0] = True
        part_of = starts.flatten().cumsum(0) - 1
        firsts = starts.flatten().nonzero()[:, 0]
        lengths = torch.zeros_like(firsts).index_add(0, part_of, valid.flatten().long())
        goes_on = ~resets.flatten()[firsts, None]
        states = [torch.where(goes_on, s[firsts // T], 0.0) for s in states]

        # Padded to powers of two: few calls, and never more padding than steps.
        widths = 2 ** lengths.clamp(min=1).double().log2().ceil().long()
        steps, outs, parts, lasts = [], [], [], []
        for width in widths.unique().tolist():
            own = (widths == width).nonzero()[:, 0]
            offsets = torch.arange(width, device=x.device)
            is_there = offsets < lengths[own, None]
            index = (firsts[own, None] + offsets)[is_there]
            rows = x.new_zeros(len(own), width, x.shape[-1])
            rows = rows.index_put((is_there,), x.flatten(0, 1).index_select(0, index))
            out, last = self._part(rows, [s[own] for s in states], is_there)
            steps.append(index)
            outs.append(out[is_there])
            parts.append(own)
            lasts.append(torch.stack(last))
        out = x.new_zeros(B * T, outs[0].shape[-1]).index_copy(0, torch.cat(steps), torch.cat(outs))
        last_of_row = torch.cat(parts).argsort()[part_of.view(B, T)[:, -1]]
        return out.unflatten(0, (B, T)), tuple(torch.cat(lasts, 1)[:, last_of_row])

    def _part(self, x, states, valid):
        first: Any = tuple(state[None].contiguous() for state in states)
        if valid is None:
            out, last = self.cell(x, first if len(first) > 1 else first[0])
            return out, tuple(s[0] for s in (last if len(first) > 1 else (last,)))
        if len(states) == 1:
            # A GRU's state is its output: packing would take up to four times as long.
            out, _ = self.cell(x, first[0])
            return out, (_last_valid(out, valid, states[0]),)
        lengths = valid.sum(1)
        packed = nn.utils.rnn.pack_padded_sequence(
            x, lengths.clamp(min=1).cpu(), batch_first=True, enforce_sorted=False
        )
        out, last = self.cell(packed, first)
        out, _ = nn.utils.rnn.pad_packed_sequence(out, batch_first=True, total_length=x.shape[1])
        is_there = (lengths > 0)[:, None]
        pairs = zip(last, states, strict=True)
        return out, tuple(torch.where(is_there, a[0], b) for a, b in pairs)

    def _step(self, x, states, valid, resets):
        """The same for a single step, in operations that can be exported."""
        if resets is not None:
            resets = resets if valid is None else resets & valid
            states = tuple(torch.where(resets, 0.0, s) for s in states)
        cell = self.cell
        weights = (cell.weight_ih_l0, cell.weight_hh_l0, cell.bias_ih_l0, cell.bias_hh_l0)
        if len(states) == 1:
            new = (torch.gru_cell(x[:, 0], states[0], *weights),)
        else:
            new = torch.lstm_cell(x[:, 0], states, *weights)
        if valid is not None:
            new = tuple(torch.where(valid, a, b) for a, b in zip(new, states, strict=True))
        return new[0][:, None], new


def _last_valid(out: Tensor, valid: Tensor, before: Tensor) -> Tensor:
    """The output of each row's last valid step; the state before in rows without one."""
    lengths = valid.sum(1)
    last = out[torch.arange(len(out), device=out.device), (lengths - 1).clamp(min=0)]
    return torch.where((lengths > 0)[:, None], last, before)


class Cells(Memory):
    """Cells one behind the other, nothing around them; keys are stacked over layers, `(L, D)`.

    Args:
        input_dim: Features of the input.
        config: Settings.
    """

    def __init__(self, input_dim: int, config: CellConfig):
        super().__init__()
        self.input_dim, self.output_dim = input_dim, config.d_model
        widths = [input_dim] + [config.d_model] * config.num_layers
        self.cells = BlockStack(
            CellMixer(config.memory, width, config.d_model) for width in widths[:-1]
        )

    def initial_state(self) -> State:
        """Zeros."""
        return self.cells.initial_state()

    def forward(
        self,
        x: Tensor,
        state: State,
        *,
        valid: Tensor | None = None,
        resets: Tensor | None = None,
    ) -> tuple[Tensor, State]:
        """Runs the cells, see `Memory.forward`."""
        return self.cells.run(mask_padding(x, valid), state, None, valid, resets)


@dataclass(kw_only=True)
class CellConfig(StackConfig):
    """Settings that GRU and LSTM share."""

    memory: Literal["gru", "lstm"]
    """The memory's name."""

    d_model: Count = 128
    """Width of the state and of the memory's output."""

    num_layers: Count = 1
    """Layers."""

    residual: bool = False
    """Whether each layer stands in a residual block with a feed-forward part, which
    `feedforward_dim` and `positions` are for. Otherwise there is nothing around the cells."""

    def build_mixer(self, layer: int) -> Mixer:
        """Builds the cell of a block."""
        return CellMixer(self.memory, self.d_model, self.d_model)

    def build_memory(self, input_dim: int) -> Memory:
        """Builds the cells, in the residual frame or without."""
        if self.residual:
            return super().build_memory(input_dim)
        if self.positions != "none":
            raise ValueError(
                f"`positions` is {self.positions!r}, but bare cells count their steps themselves. "
                "Set `residual=True`, or leave it out."
            )
        return Cells(input_dim, self)


@dataclass(kw_only=True)
class GRUConfig(CellConfig):
    """Settings of a GRU."""

    memory: Literal["gru"] = "gru"
    """The memory's name."""


@dataclass(kw_only=True)
class LSTMConfig(CellConfig):
    """Settings of an LSTM."""

    memory: Literal["lstm"] = "lstm"
    """The memory's name."""
