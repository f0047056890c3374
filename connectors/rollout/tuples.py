"""Observations of several agents in the structure that their spaces say."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import tree
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space


class TuplesFromLists(gym.Wrapper):
    """Gives observations of several agents the structure of their spaces.

    RLlib's `with_agent_groups` returns lists for `Tuple` spaces, which RLlib's connectors take for
    arrays; a list or a tuple of a `Box` they take for a structure. For a single agent, gymnasium's
    vector environments see to both.

    Args:
        env: The environment.
        spaces: Its agents' observation spaces.
    """

    def __init__(self, env: gym.Env, spaces: dict[Any, gym.Space]):
        super().__init__(env)
        self._structs = {
            agent: get_base_struct_from_space(space) for agent, space in spaces.items()
        }

    def reset(self, **kwargs: Any) -> tuple[Any, Any]:
        """Resets the environment."""
        observations, infos = self.env.reset(**kwargs)
        return self._restore(observations), infos

    def step(self, action: Any) -> tuple[Any, Any, Any, Any, Any]:
        """Takes a step."""
        observations, reward, terminated, truncated, infos = self.env.step(action)
        return self._restore(observations), reward, terminated, truncated, infos

    def _restore(self, observations: dict[Any, Any]) -> dict[Any, Any]:
        return {
            agent_id: restore_structure(observation, self._structs.get(agent_id))
            for agent_id, observation in observations.items()
        }


def restore_structure(item: Any, struct: Any) -> Any:
    """The item with tuples and arrays where it has lists.

    Args:
        item: An element of the space, with lists in it.
        struct: What RLlib's `get_base_struct_from_space` makes of the space; None leaves all as is.
    """
    if tree.is_nested(struct):
        return tree.map_structure_up_to(struct, _restore_leaf, struct, item)
    return _restore_leaf(struct, item)


def _restore_leaf(space: gym.Space | None, item: Any) -> Any:
    if space is None or not isinstance(item, (list, tuple)):
        return item
    return np.asarray(item, space.dtype)
