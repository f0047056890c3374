"""Observations of any supported space -> one feature vector a step."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from ray.rllib.core.columns import Columns
from ray.rllib.core.models.base import ENCODER_OUT
from ray.rllib.core.models.catalog import Catalog
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from torch import Tensor, nn

ACTIVATIONS: dict[str, type[nn.Module] | None] = {
    "linear": None,
    "relu": nn.ReLU,
    "tanh": nn.Tanh,
    "silu": nn.SiLU,
    "swish": nn.SiLU,
    "elu": nn.ELU,
    "gelu": nn.GELU,
    "leaky_relu": nn.LeakyReLU,
    "sigmoid": nn.Sigmoid,
}

Path = tuple[str | int, ...]

# Integers of more than 16 bits count something; they are no pixels.
_LARGEST_PIXEL = 2**16 - 1


def mlp(
    input_dim: int,
    hiddens: Sequence[int],
    activation: str | None,
    *,
    output_dim: int | None = None,
    setting: str = "fcnet",
) -> nn.Sequential:
    """Linear layers with orthogonal weights, an activation after each hidden one.

    The optional output layer has no activation and starts near zero (weights N(0, 0.01), bias 0),
    so that a fresh policy is close to uniform and a fresh value close to 0.

    Args:
        input_dim: Width of the input.
        hiddens: Widths of the hidden layers, may be empty.
        activation: A key of `ACTIVATIONS`; None is "linear".
        output_dim: Width of the output layer; None builds none.
        setting: Prefix of the config keys that error messages name (`{setting}_hiddens`).

    Raises:
        ValueError: If `hiddens` or `activation` is invalid.
    """
    name = "linear" if activation is None else str(activation).lower()
    if name not in ACTIVATIONS:
        raise ValueError(
            f"`{setting}_activation` is {activation!r}, which is no known activation. "
            f"Use one of {', '.join(ACTIVATIONS)}."
        )
    if not all(isinstance(width, int) and width >= 1 for width in hiddens):
        raise ValueError(
            f"`{setting}_hiddens` is {hiddens!r}, but every layer width must be an int of at "
            "least 1. Pass a list such as [64, 64]; an empty list builds no layer."
        )
    activation_class = ACTIVATIONS[name]
    layers: list[nn.Module] = []
    for width in hiddens:
        layer = nn.Linear(input_dim, width)
        nn.init.orthogonal_(layer.weight)
        layers += [layer] if activation_class is None else [layer, activation_class()]
        input_dim = width
    if output_dim is not None:
        layer = nn.Linear(input_dim, output_dim)
        nn.init.normal_(layer.weight, std=0.01)
        nn.init.zeros_(layer.bias)
        layers.append(layer)
    return nn.Sequential(*layers)


class ObservationEncoder(nn.Module):
    """Turns observations into features of `output_dim` floats a step.

    Every leaf of the space becomes a flat vector; all of them, concatenated in the order of
    `gymnasium.spaces.flatten`, go through an MLP. Leaves are encoded as follows:

    - `Box` of rank 3: RLlib's CNN over the first two axes, channels last. `conv_filters=[]`
      flattens the box instead.
    - any other `Box`: flattened, cast to float.
    - Integers in a `Box` of rank 2 or more, pixels or the cells of a grid, are divided by the
      largest bound's absolute value, uint8 by 255, where that has at most 16 bits.
    - `Discrete`, `MultiDiscrete`: one-hot, with their `start`. A value outside the space, as it
      may stand in padding, gives zeros.
    - Integers in a `Box` of any rank: one-hot too, where the bounds allow each of them at most
      `one_hot_max_values` values.
    - `MultiBinary`: flattened, cast to float.

    Args:
        space: The observation space; `Dict` and `Tuple` may nest.
        hiddens: Widths of the MLP's layers; an empty list passes the leaves' features on.
        activation: Activation after each layer, one of `ACTIVATIONS`.
        norm: Whether a LayerNorm without learned parameters follows the MLP.
        model_config: RLlib's model config; its `conv_*` keys configure the CNN.
        one_hot_max_values: See above; 0 leaves all boxes numbers.

    Attributes:
        input_dim: Number of features before the MLP.
        output_dim: Number of features after it.

    Raises:
        ValueError: If the space or a setting is not supported.
    """

    def __init__(
        self,
        space: gym.Space,
        hiddens: Sequence[int],
        activation: str | None,
        *,
        norm: bool = False,
        model_config: Mapping[str, Any] | None = None,
        one_hot_max_values: int = 0,
    ) -> None:
        super().__init__()
        leaves = list(space_leaves(space))
        self._paths = [path for path, _ in leaves]
        encoders = [
            _leaf_encoder(path, leaf, model_config or {}, one_hot_max_values)
            for path, leaf in leaves
        ]
        self.leaves = nn.ModuleList(encoders)
        self.input_dim = sum(encoder.output_dim for encoder in encoders)
        if self.input_dim < 1:
            raise ValueError(
                f"The observation space {space} has no features to encode. "
                "Give the environment an observation of at least one number."
            )
        self.output_dim: int = hiddens[-1] if len(hiddens) else self.input_dim
        self.mlp = mlp(self.input_dim, hiddens, activation)
        if norm:
            self.mlp.append(nn.LayerNorm(self.output_dim, elementwise_affine=False))

    def forward(self, obs: Any) -> Tensor:
        """Encodes observations.

        Args:
            obs: Tensors in the structure of the space, each leaf with the same leading axes
                (usually `B, T`) before the shape of its space.

        Returns:
            Features `(..., output_dim)`.
        """
        # The parameters' dtype, so that the encoder also works after `.double()`.
        dtype = next((p.dtype for p in self.parameters()), torch.get_default_dtype())
        leaves = zip(self._paths, self.leaves, strict=True)
        features = [encode(_get(obs, path), dtype) for path, encode in leaves]
        return self.mlp(features[0] if len(features) == 1 else torch.cat(features, dim=-1))


def space_leaves(space: gym.Space, path: Path = ()) -> Iterator[tuple[Path, gym.Space]]:
    """Yields path and space of each leaf, in the order of `gymnasium.spaces.flatten`."""
    if isinstance(space, spaces.Dict):
        children: Any = space.spaces.items()
    elif isinstance(space, spaces.Tuple):
        children = enumerate(space.spaces)
    else:
        yield path, space
        return
    for key, child in children:
        yield from space_leaves(child, (*path, key))


def path_text(path: Path) -> str:
    """How messages name a leaf: ` at ['arm'][0]`, nothing for a space without leaves."""
    return " at " + "".join(f"[{key!r}]" for key in path) if path else ""


def _get(tree: Any, path: Path) -> Tensor:
    for key in path:
        tree = tree[key]
    return tree


def _leaf_encoder(
    path: Path, space: gym.Space, model_config: Mapping[str, Any], one_hot_max_values: int
) -> _Flatten | _OneHot | _Image:
    if isinstance(space, spaces.Box):
        if _num_values(space) <= one_hot_max_values:
            low, high = space.low.astype(int).reshape(-1), space.high.astype(int).reshape(-1)
            return _OneHot(high - low + 1, low, rank=len(space.shape))
        flat = len(space.shape) != 3 or model_config.get("conv_filters") == []
        if flat:
            return _Flatten(space.shape, _pixel_scale(space))
        return _Image(path, space, model_config)
    if isinstance(space, spaces.Discrete):
        return _OneHot(np.array([space.n]), np.array([space.start]), rank=0)
    if isinstance(space, spaces.MultiDiscrete):
        return _OneHot(space.nvec.reshape(-1), space.start.reshape(-1), rank=len(space.shape))
    if isinstance(space, spaces.MultiBinary):
        return _Flatten(space.shape)
    raise ValueError(
        f"The observation space{path_text(path)} is {space}, which is not supported. Supported "
        "are Box, Discrete, MultiDiscrete, MultiBinary, and Dict and Tuple of these: convert it "
        "in an observation wrapper or an env-to-module connector."
    )


def _num_values(space: spaces.Box) -> float:
    """How many values the bounds allow a number of the box at most; infinite for floats."""
    if not np.issubdtype(space.dtype, np.integer) or not space.low.size:
        return math.inf
    return float(np.subtract(space.high, space.low, dtype=float).max()) + 1


def _pixel_scale(space: spaces.Box) -> float:
    """Brings the integers of a picture or a grid to at most 1; 1.0 for everything else."""
    if len(space.shape) < 2 or not space.low.size or np.issubdtype(space.dtype, np.floating):
        return 1.0
    largest = max(abs(float(space.low.min())), abs(float(space.high.max())))
    return 1 / largest if 0 < largest <= _LARGEST_PIXEL else 1.0


class _Flatten(nn.Module):
    """Casts a leaf to float, scales it and flattens it."""

    def __init__(self, shape: tuple[int, ...], scale: float = 1.0) -> None:
        super().__init__()
        self._rank = len(shape)
        self._scale = scale
        self.output_dim = int(np.prod(shape))

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        lead = x.shape[: x.dim() - self._rank]
        x = x.reshape(*lead, self.output_dim).to(dtype)
        return x if self._scale == 1.0 else x * self._scale


class _OneHot(nn.Module):
    """One-hot vectors of integer components, side by side.

    Compares each component with the values it may take, which needs no check of the data (a check
    would make a GPU wait) and is defined for values outside the space.
    """

    values: Tensor
    index: Tensor

    def __init__(self, sizes: np.ndarray, starts: np.ndarray, rank: int) -> None:
        super().__init__()
        self._rank = rank
        self._sizes = [int(size) for size in sizes]
        self.output_dim = sum(self._sizes)
        values = np.concatenate([np.arange(n) + s for n, s in zip(sizes, starts, strict=True)])
        # Follows from the space: stays out of checkpoints.
        self.register_buffer("values", torch.as_tensor(values).long(), persistent=False)
        index = torch.arange(len(self._sizes)).repeat_interleave(torch.tensor(self._sizes))
        self.register_buffer("index", index, persistent=False)

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        lead = x.shape[: x.dim() - self._rank]
        components = x.reshape(*lead, len(self._sizes))
        if not x.is_floating_point():
            # PyTorch neither gathers nor compares unsigned integers of more than 8 bits.
            components = components.long()
        if len(self._sizes) > 1:  # a single one is compared with all values as it is
            components = components[..., self.index]
        return (components == self.values).to(dtype)


class _Image(nn.Module):
    """RLlib's CNN on images of shape (width, height, channels)."""

    def __init__(self, path: Path, space: spaces.Box, model_config: Mapping[str, Any]) -> None:
        super().__init__()
        settings = dataclasses.asdict(DefaultModelConfig())
        settings |= {key: value for key, value in model_config.items() if key.startswith("conv_")}
        first, second, third = space.shape
        # RLlib's default filters also match a size in the last two axes, and then run over the
        # first two.
        of_default_size = not settings["conv_filters"] and first != second == third
        if first < min(second, third) or of_default_size:
            raise ValueError(
                f"The observation space{path_text(path)} is {space}, whose first axis looks like "
                "channels or frames, but images are convolved over their first two axes, with "
                "channels last. Move the axis in an observation wrapper, with "
                "`np.moveaxis(image, 0, -1)`, or set `conv_filters` to [] to flatten the "
                "observation. If the first axis is a height, exchange it with the width."
            )
        try:
            config = Catalog._get_encoder_config(space, settings)
        except ValueError as error:
            raise ValueError(
                f"The observation space{path_text(path)} is {space}: RLlib has no default "
                f"convolutions for the shape {space.shape}. Set `conv_filters` to a list of "
                "[channels, kernel, stride], or to [] to flatten the observation instead."
            ) from error
        assert config.output_dims is not None  # for pyright: a CNN config always knows it
        self._scale = _pixel_scale(space)
        self.output_dim = int(config.output_dims[0])
        self.cnn = config.build(framework="torch")

    def forward(self, x: Tensor, dtype: torch.dtype) -> Tensor:
        images = x.flatten(end_dim=-4).to(dtype)
        if self._scale != 1.0:
            images = images * self._scale
        features = self.cnn({Columns.OBS: images})[ENCODER_OUT]
        return features.reshape(*x.shape[:-3], self.output_dim)
