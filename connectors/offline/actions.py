"""Recorded actions in the units in which a policy samples them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import tree
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space


def script_action_struct(config: AlgorithmConfig, action_space: Any) -> Any:
    """What the actions of a script have to be normalised to.

    Returns:
        The structure of the action space. None if all actions are to stay as they are:
        `actions_in_input_normalized` says that they are normalised, or policies sample in the units
        of the environment, without `normalize_actions`.
    """
    if config.actions_in_input_normalized or not config.normalize_actions:
        return None
    return get_base_struct_from_space(action_space)


def is_sampled(state: dict[str, Any]) -> bool:
    """Whether a policy sampled the actions of a recorded episode.

    EnvRunners record such actions before they are unsquashed, and the distribution with them. What
    comes without is an environment's own: of a script, or at random.

    Args:
        state: What `SingleAgentEpisode.get_state` returned.
    """
    outputs = state["extra_model_outputs"] or {}
    return Columns.ACTION_LOGP in outputs or Columns.ACTION_DIST_INPUTS in outputs


def normalize_actions(episode: SingleAgentEpisode, struct: Any) -> None:
    """Brings actions from the bounds of their spaces to [-1, 1], where RLlib unsquashes them.

    Args:
        episode: An episode that is in numpy form.
        struct: Of its action space.
    """
    data = episode.actions.data
    episode.actions.data = tree.map_structure_up_to(struct, _normalize, struct, data)


def _normalize(space: Any, actions: Any) -> Any:
    is_float = isinstance(space, gym.spaces.Box) and np.issubdtype(space.dtype, np.floating)
    if not is_float or not space.is_bounded():
        return actions
    low, high = space.low.astype(np.float64), space.high.astype(np.float64)
    width = np.where(high > low, high - low, 1.0)
    return ((actions - low) * 2.0 / width - 1.0).astype(np.float32)
