"""Whether the environment that a config names is known, before EnvRunners fail to make it."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import gymnasium as gym
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.tune.registry import ENV_CREATOR, _global_registry


def registered_creator(name: Any) -> Callable[[Any], Any] | None:
    """What `register_env` was given for a name, None if nothing was.

    Private in Ray 2.60, which has no other way to ask. A test fails if Ray renames it.
    """
    if not isinstance(name, str) or not _global_registry.contains(ENV_CREATOR, name):
        return None
    return _global_registry.get(ENV_CREATOR, name)


def check_env(config: AlgorithmConfig) -> None:
    """Refuses a name that neither RLlib nor gymnasium knows.

    On remote EnvRunners RLlib 2.60 reports such a name as an `IndexError`.

    Raises:
        ValueError: if `env` is such a name.
    """
    env: Any = config.env
    if not isinstance(env, str) or registered_creator(env) is not None:
        return
    package, _, name = env.rpartition(":")
    try:
        if package:
            importlib.import_module(package)
        gym.spec(name)
    except (gym.error.UnregisteredEnv, ModuleNotFoundError) as error:
        raise ValueError(
            f"`env` is {env!r}, which is no registered environment: {error} Give gymnasium's ID, "
            "with the package that registers it in front, `package:ID`; a class; or a name for "
            "which `ray.tune.registry.register_env` was called before `connect`."
        ) from error
    except gym.error.Error:
        return  # a name without its version, which gymnasium completes
