"""What the connectors require of a module, checked where they first see it."""

from __future__ import annotations

from typing import Any

import torch
import tree
from ray.rllib.core.rl_module.rl_module import RLModule


def check_max_seq_len(model_config: Any, name: str) -> int:
    """Returns `max_seq_len` of a model config; `name` says whose.

    Raises:
        ValueError: if it is missing, no integer, or below 1.
    """
    if "max_seq_len" not in model_config:
        raise ValueError(
            "`max_seq_len` is missing: a module with memory is trained on rows of that many "
            f"timesteps. Set it in the config of `{name}`, e.g. "
            "`RLModuleSpec(model_config={'max_seq_len': 64, ...})`."
        )
    value = model_config["max_seq_len"]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"`max_seq_len` is {value!r}, but must be an integer of at least 1: the number of "
            f"timesteps of a training row of `{name}`. Common values are 20 to 256."
        )
    return value


def check_replay_lengths(max_seq_len: int, burn_in_len: int) -> None:
    """Checks the length of rows and of what is read before them.

    Raises:
        ValueError: if a row has no room for a step, or the burn-in is no number of steps.
    """
    if max_seq_len < 2:
        raise ValueError(
            f"`max_seq_len` is {max_seq_len}, but must be at least 2 to replay sequences: a row of "
            "that many observations holds one step less. Common values are 20 to 256."
        )
    if isinstance(burn_in_len, bool) or not isinstance(burn_in_len, int) or burn_in_len < 0:
        raise ValueError(
            f"`burn_in_len` is {burn_in_len!r}, but must be an integer of at least 0: the number "
            "of steps that the module reads before each row. Common values are 0 to 40."
        )


def device_of(module: RLModule) -> str:
    """Where the module lives: the device of its first parameter."""
    parameter = next(module.parameters(), None) if isinstance(module, torch.nn.Module) else None
    return "cpu" if parameter is None else str(parameter.device)


def row_length(module: RLModule) -> int | None:
    """Timesteps of a training row of this module, None if it has no memory.

    Raises:
        TypeError: if the module's initial state is no dict.
        ValueError: if `max_seq_len` is missing or wrong.
    """
    state = module.get_initial_state()
    if state is None:
        return None
    if not isinstance(state, dict):
        raise TypeError(
            f"`get_initial_state` of `{type(module).__name__}` returned a "
            f"{type(state).__name__}, but must return a dict of tensors. Wrap the state, e.g. "
            "`return {'h': state}`."
        )
    if not module.is_stateful():
        return None
    return check_max_seq_len(module.model_config, type(module).__name__)


def initial_state(module: RLModule, device: torch.device | str | None = None) -> Any:
    """The module's initial state as a tree of tensors without gradient, no batch axis."""
    return tree.map_structure(
        lambda leaf: torch.as_tensor(leaf, device=device).detach(), module.get_initial_state()
    )
