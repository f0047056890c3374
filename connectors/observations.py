"""Observations from outside, checked and cast as gymnasium's vector environments would."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import numpy as np


def conform(observation: Any, space: gym.Space, name: str = "observation") -> Any:
    """The observation with the structure, shapes and dtypes of a space.

    Args:
        observation: What the environment returned.
        space: The environment's observation space.
        name: Names the (part of the) observation in messages.

    Returns:
        The same values, arrays cast to the space's dtype.

    Raises:
        ValueError: if structure, shape or kind of dtype differ, or a discrete value is unknown.
    """
    if isinstance(space, gym.spaces.Dict):
        keys = list(space.spaces)
        if not isinstance(observation, Mapping) or observation.keys() != set(keys):
            given = (
                sorted(map(str, observation))
                if isinstance(observation, Mapping)
                else type(observation).__name__
            )
            raise ValueError(
                f"`{name}` is {given}, but must be a dict with the keys {keys}, as in the "
                "environment that the agent was trained in."
            )
        return {key: conform(observation[key], space[key], f"{name}[{key!r}]") for key in keys}
    if isinstance(space, gym.spaces.Tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(space.spaces):
            raise ValueError(
                f"`{name}` is a {type(observation).__name__}, but must be a tuple of "
                f"{len(space.spaces)} parts, as in the environment that the agent was trained in."
            )
        return tuple(
            conform(part, child, f"{name}[{i}]")
            for i, (part, child) in enumerate(zip(observation, space.spaces, strict=True))
        )
    if space.shape is None or space.dtype is None:
        _check_contained(observation, space, name)
        return observation
    return _conform_array(observation, space, name)


def _conform_array(observation: Any, space: Any, name: str) -> Any:
    try:
        array = np.asarray(observation)
    except ValueError:
        array = np.asarray(None)  # nested lists of unequal lengths
    if array.shape != space.shape:
        raise ValueError(
            f"`{name}` has shape {array.shape}, but must have {space.shape}: one observation of "
            "the environment, without batch or time axis, and before any connector."
        )
    if not np.can_cast(array.dtype, space.dtype, casting="same_kind"):
        raise ValueError(
            f"`{name}` has dtype {array.dtype}, but must be of the kind of {space.dtype}. Convert "
            "it as the environment did in training."
        )
    array = array.astype(space.dtype)
    if not isinstance(space, gym.spaces.Box):
        _check_contained(array[()], space, name)
    # A zero-dimensional array becomes a scalar, as in a vector environment.
    return array[()]


def _check_contained(observation: Any, space: gym.Space, name: str) -> None:
    if not space.contains(observation):
        raise ValueError(
            f"`{name}` is {observation!r}, which is not in the space {space} that the agent was "
            "trained with."
        )
