"""Observations and actions in JSON."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np

from connectors.observations import conform


def observation_from_json(value: Any, space: gym.Space) -> Any:
    """An observation of a space, from what a JSON document says.

    Arrays are nested lists, discrete values integers, `Dict` spaces objects, `Tuple` spaces lists.

    Args:
        value: What `json.loads` returned.
        space: The environment's observation space.

    Raises:
        ValueError: if it does not fit the space, or holds numbers that are not finite or do not
            fit the dtype.
    """
    return conform(_with_dtypes(value, space, "observation"), space)


def action_to_json(action: Any) -> str:
    """An action of the environment as JSON, in the same form as observations."""
    return json.dumps({"action": action}, default=lambda leaf: leaf.tolist(), allow_nan=False)


def _with_dtypes(value: Any, space: gym.Space, name: str) -> Any:
    """Casts numbers as far as the structure fits; `conform` says where it does not."""
    if isinstance(space, gym.spaces.Dict) and isinstance(value, dict):
        # Keys of JSON are strings, those of a space need not be.
        children = {str(key): (key, child) for key, child in space.spaces.items()}
        parts = {}
        for text, part in value.items():
            key, child = children.get(text, (text, None))
            parts[key] = part if child is None else _with_dtypes(part, child, f"{name}[{key!r}]")
        return parts
    if isinstance(space, gym.spaces.Tuple) and isinstance(value, list):
        children = [*space.spaces, *[None] * (len(value) - len(space.spaces))]
        return [
            part if child is None else _with_dtypes(part, child, f"{name}[{i}]")
            for i, (part, child) in enumerate(zip(value, children, strict=False))
        ]
    return value if space.dtype is None else _with_dtype(value, space.dtype, name)


def _with_dtype(value: Any, dtype: np.dtype, name: str) -> Any:
    try:
        array = np.asarray(value)
    except ValueError:
        return value  # nested lists of unequal lengths
    if array.dtype.kind not in "biuf":
        return value
    with np.errstate(over="ignore", invalid="ignore"):
        cast = array.astype(dtype)
    if not np.isfinite(cast).all():
        raise ValueError(
            f"`{name}` holds numbers that are not finite in {dtype}. One of them would stay in the "
            "memory until the end of the episode."
        )
    if array.dtype.kind == "f":
        return array
    # JSON's integers have no width. `conform` judges by dtype and would refuse or wrap them.
    if not np.array_equal(cast, array):
        raise ValueError(
            f"`{name}` holds integers beyond those of {dtype}, the dtype that the agent was "
            "trained with."
        )
    return cast
