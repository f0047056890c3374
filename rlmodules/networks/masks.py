"""Masks of the actions that are allowed at a step."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
from gymnasium import spaces
from torch import Tensor


class ActionMask:
    """Makes actions impossible that an observation does not allow.

    A step that allows no action of a component, as padding does, keeps that component's logits.

    Args:
        key: Key of the mask in the `Dict` observation: 1 for actions that are allowed, 0 for those
            that are not; for `MultiDiscrete` the components' masks side by side.
        observation_space: The module's observation space.
        action_space: The module's action space.

    Attributes:
        encoded_space: The observation space without the mask: what the encoder reads.

    Raises:
        ValueError: If the action space has no logits to mask, or there is no such mask in the
            observation space.
    """

    def __init__(self, key: str, observation_space: gym.Space, action_space: gym.Space) -> None:
        self.key = key
        self._sizes = _num_actions(action_space)
        if not isinstance(observation_space, spaces.Dict) or key not in observation_space.spaces:
            raise ValueError(
                f"`action_mask` is {key!r}, but the observation space {observation_space} is no "
                f"Dict with that key. Let the environment return Dict({key}=MultiBinary("
                f"{sum(self._sizes)}), observations=...), or name the key that holds the mask."
            )
        mask = observation_space[key]
        shape = (sum(self._sizes),)
        if mask.shape != shape or not _holds_flags(mask):
            raise ValueError(
                f"`action_mask` is {key!r}, but the observation space has {mask} there. The mask "
                f"of {action_space} is MultiBinary or a Box from 0 to 1, of shape {shape}: a 1 or "
                "0 for each action."
            )
        others = {name: space for name, space in observation_space.items() if name != key}
        if not others:
            raise ValueError(
                f"`action_mask` is {key!r}, but the observation space {observation_space} holds "
                "nothing else. Add what the policy observes, e.g. under 'observations'."
            )
        self.encoded_space = spaces.Dict(others)

    def apply(self, logits: Tensor, obs: Any) -> Tensor:
        """Masks logits, or values of actions, `(..., n)` by the mask in `obs`."""
        allowed = obs[self.key].bool().split(self._sizes, dim=-1)
        allowed = torch.cat([part | ~part.any(-1, keepdim=True) for part in allowed], dim=-1)
        # Half of the lowest number: what distributions subtract from it must not overflow.
        return logits.where(allowed, torch.finfo(logits.dtype).min / 2)


def _holds_flags(space: gym.Space) -> bool:
    if isinstance(space, spaces.Box):
        return bool((space.low >= 0).all() and (space.high <= 1).all())
    return isinstance(space, spaces.MultiBinary)


def _num_actions(action_space: gym.Space) -> list[int]:
    if isinstance(action_space, spaces.Discrete):
        return [int(action_space.n)]
    if isinstance(action_space, spaces.MultiDiscrete):
        return [int(n) for n in action_space.nvec]
    raise ValueError(
        f"`action_mask` is set, but the action space is {action_space}. Only Discrete and "
        "MultiDiscrete actions can be masked: use one of them, or leave the setting out."
    )
