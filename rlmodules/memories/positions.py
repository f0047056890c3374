"""Positional encodings: what step of its episode an input belongs to.

`PositionalEncoding` mixes one of POPGym's eight encodings into features; `rotate` turns queries
and keys so that their inner products know the distance between their steps.

Both take steps counted since the episode began, and serve any of them: the count goes on past
`max_seq_len`. Angles are computed in float64, where a step of 1e6 still has ten exact digits.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class PositionalEncoding(nn.Module):
    """Mixes an encoding of the step into features: `x (1 - s) + s encoding(t)`.

    | name | encoding of step p, width d, L = `max_seq_len` | for p >= L |
    |---|---|---|
    | `learned` | trained table | entry L - 1 |
    | `fixed` | frozen table of N(0, 1) | entry L - 1 |
    | `sine` | sin and cos of p L^(-2i/d) | goes on |
    | `scaled_sine` | `sine` times a trained scale, 75 % of it 0 at first | goes on |
    | `simple_scaled` | p/L in the last four features, 0 in the others | as for L - 1 |
    | `perceptron` | sin(w p), w trained | goes on |
    | `base2` | the lowest d bits of p | goes on |
    | `time2vec` | w p + b, all but the first in a sine, trained | first: as for L - 1 |

    Args:
        name: One of `POSITIONS`.
        dim: Width of the features.
        max_seq_len: L above.
        mode: "add" adds the encoding to the first `size` features, "cat" puts it beside them.
        size: Width of the encoding; None is `dim`.
        learn_scale: Whether s is trained, in [0, 1] and 0.5 at first; otherwise x + encoding(t).

    Attributes:
        output_dim: `dim` with "add", `dim + size` with "cat".

    Raises:
        ValueError: If the encoding is added and wider than the features.

    References:
        popgym 1.0.7, `popgym/baselines/models/embeddings.py`: equal for p < L, weight for weight.
        Differs: any step, odd widths, `base2` narrower than 17 features, and "cat", which
        overwrites features there.
    """

    def __init__(
        self,
        name: str,
        dim: int,
        max_seq_len: int,
        *,
        mode: Literal["add", "cat"] = "add",
        size: int | None = None,
        learn_scale: bool = True,
    ) -> None:
        super().__init__()
        size = dim if size is None else size
        if mode == "add" and size > dim:
            raise ValueError(
                f"`position_size` is {size}, but must be at most {dim} where the encoding is "
                f'added to {dim} features. Lower it or set `position_mode="cat"`.'
            )
        self.output_dim = dim if mode == "add" else dim + size
        self._mode = mode
        self._rest = dim - size
        self.encoding = _ENCODINGS[name](max_seq_len, size)
        self.scale = nn.Parameter(torch.tensor([0.5])) if learn_scale else None

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        """Adds positions.

        Args:
            x: Features `(B, T, dim)`.
            t: Steps since the episode began `(B, T)`, int64.

        Returns:
            Features `(B, T, output_dim)` in the dtype of `x`.
        """
        encoding = self.encoding(t).to(x.dtype)
        if self.scale is not None:
            # The value is clamped, the gradient is not: a scale at a bound can leave it again.
            scale = self.scale + (self.scale.clamp(0, 1) - self.scale).detach()
            scale = scale.to(x.dtype)
            x, encoding = x * (1 - scale), encoding * scale
        if self._mode == "cat":
            return torch.cat([x, encoding], dim=-1)
        return x + F.pad(encoding, (0, self._rest))


def rotation(
    t: Tensor, width: int, base: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> Tensor:
    """The angles of rotary positions, for `rotate`. All layers of a model can share them.

    Args:
        t: Steps since the episode began `(B, T)`, int64.
        width: Features K of what will be rotated, even.
        base: The slowest pair of features turns once in about 2 pi base steps.
        dtype: Of the result.

    Returns:
        Of the angles `t base^(-2i/K)` the cosines twice, then the negative sines and the sines:
        `(B, T, 2 K)`, what each half of the features is multiplied with.
    """
    angles = _angles(t, _frequencies(width, base, t.device), dtype)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos, -sin, sin], dim=-1)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions: turns each pair of features by an angle proportional to the step.

    Feature i is paired with feature i + K/2. The inner product of a rotated query and a rotated key
    depends on their steps' difference only.

    Args:
        x: Queries or keys `(..., B, H, T, K)`.
        rotation: What `rotation` returns for their steps, `(B, T, 2 K)`.

    Returns:
        Rotated `x`, same shape and dtype.

    References:
        Su et al. 2021, https://arxiv.org/abs/2104.09864, section 3.4.2.
        Differs: pairs halves of the features instead of neighbours.
    """
    cos, sin = rotation.unsqueeze(-3).chunk(2, dim=-1)
    # Whole vectors: halves would take twice as many operators, each on strides.
    other_half = x.roll(x.shape[-1] // 2, dims=-1)
    return torch.addcmul(x * cos, other_half, sin).to(x.dtype)


def _frequencies(width: int, base: float, device: torch.device) -> Tensor:
    """`base^(-2i/width)` for every pair i, float64; an odd width has half a pair at its end."""
    exponents = torch.arange(0, width, 2, dtype=torch.float64, device=device)
    return torch.exp(exponents * (-math.log(base) / width))


def _angles(
    t: Tensor, frequencies: Tensor, dtype: torch.dtype, offset: Tensor | None = None
) -> Tensor:
    """`t * frequencies + offset` modulo a full turn, `(*t.shape, len(frequencies))`."""
    angles = t.unsqueeze(-1) * frequencies.double()
    if offset is not None:
        angles = angles + offset
    return torch.remainder(angles, 2 * math.pi).to(dtype)


class _Table(nn.Module):
    def __init__(self, max_seq_len: int, size: int, trainable: bool) -> None:
        super().__init__()
        table = torch.randn(max_seq_len, size)
        if trainable:
            self.table = nn.Parameter(table)
        else:
            self.register_buffer("table", table)

    def forward(self, t: Tensor) -> Tensor:
        return F.embedding(t.clamp(0, self.table.shape[0] - 1), self.table)


class _Learned(_Table):
    def __init__(self, max_seq_len: int, size: int) -> None:
        super().__init__(max_seq_len, size, trainable=True)


class _Fixed(_Table):
    def __init__(self, max_seq_len: int, size: int) -> None:
        super().__init__(max_seq_len, size, trainable=False)


class _Sine(nn.Module):
    def __init__(self, max_seq_len: int, size: int) -> None:
        super().__init__()
        self._base = float(max_seq_len)
        self._size = size

    def forward(self, t: Tensor) -> Tensor:
        frequencies = _frequencies(self._size, self._base, t.device)
        angles = _angles(t, frequencies, torch.get_default_dtype())
        # sin and cos alternate; an odd width ends on a sin.
        return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2)[..., : self._size]


class _ScaledSine(_Sine):
    def __init__(self, max_seq_len: int, size: int) -> None:
        super().__init__(max_seq_len, size)
        weight = torch.rand(size)
        weight[torch.randperm(size)[: round(0.75 * size)]] = 0
        self.weight = nn.Parameter(weight)

    def forward(self, t: Tensor) -> Tensor:
        return super().forward(t) * self.weight


class _SimpleScaled(nn.Module):
    def __init__(self, max_seq_len: int, size: int) -> None:
        super().__init__()
        self._max_seq_len = max_seq_len
        self._width = min(4, size)
        self._rest = size - self._width

    def forward(self, t: Tensor) -> Tensor:
        step = t.clamp(0, self._max_seq_len - 1).unsqueeze(-1) / self._max_seq_len
        return F.pad(step.expand(*t.shape, self._width), (self._rest, 0))


class _Perceptron(nn.Module):
    def __init__(self, max_seq_len: int, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size).uniform_(-1, 1))

    def forward(self, t: Tensor) -> Tensor:
        return _angles(t, self.weight, self.weight.dtype).sin()


class _Base2(nn.Module):
    def __init__(self, max_seq_len: int, size: int) -> None:
        super().__init__()
        self._size = size

    def forward(self, t: Tensor) -> Tensor:
        # A step is a non-negative int64: bit 63 is never set, and no shift may go beyond it.
        bits = torch.arange(self._size, device=t.device).clamp(max=63)
        # Not `>>`: PyTorch's exporter to ONNX does not know it.
        shifted = torch.bitwise_right_shift(t.unsqueeze(-1), bits)
        return (shifted & 1).to(torch.get_default_dtype())


class _Time2Vec(nn.Module):
    def __init__(self, max_seq_len: int, size: int) -> None:
        super().__init__()
        self._last = max_seq_len - 1
        self.weight = nn.Parameter(torch.empty(size).uniform_(-1, 1))
        self.bias = nn.Parameter(torch.empty(size).uniform_(-1, 1))

    def forward(self, t: Tensor) -> Tensor:
        linear = t.clamp(0, self._last).unsqueeze(-1) * self.weight[:1] + self.bias[:1]
        periodic = _angles(t, self.weight[1:], self.weight.dtype, self.bias[1:]).sin()
        return torch.cat([linear, periodic], dim=-1)


_ENCODINGS: dict[str, type[nn.Module]] = {
    "learned": _Learned,
    "fixed": _Fixed,
    "sine": _Sine,
    "scaled_sine": _ScaledSine,
    "simple_scaled": _SimpleScaled,
    "perceptron": _Perceptron,
    "base2": _Base2,
    "time2vec": _Time2Vec,
}
POSITIONS: tuple[str, ...] = tuple(_ENCODINGS)
