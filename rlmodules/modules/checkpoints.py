"""Modules of a checkpoint, an Algorithm's or a module's own, without building the Algorithm."""

import pickle
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import (
    COMPONENT_LEARNER,
    COMPONENT_LEARNER_GROUP,
    COMPONENT_RL_MODULE,
    DEFAULT_MODULE_ID,
)
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.checkpoints import Checkpointable

MODULES = Path(COMPONENT_LEARNER_GROUP, COMPONENT_LEARNER, COMPONENT_RL_MODULE)
"""Where an Algorithm's checkpoint has the folders of its modules."""


def find_checkpoint(path: Any) -> tuple[Path, AlgorithmConfig | None]:
    """Looks what kind of checkpoint there is.

    Args:
        path: A folder, seen from here or as a whole; `~` is the home.

    Returns:
        The absolute path, the only kind that RLlib reads; and the config of an Algorithm's
        checkpoint, None of a module's.

    Raises:
        ValueError: If there is neither at `path`.
    """
    path = Path(path).expanduser().absolute()
    info = path / Checkpointable.CLASS_AND_CTOR_ARGS_FILE_NAME
    saved: dict[str, Any] = pickle.loads(info.read_bytes()) if info.is_file() else {"class": None}
    kind = saved["class"]
    if isinstance(kind, type) and issubclass(kind, Algorithm):
        (state,), _ = saved["ctor_args_and_kwargs"]
        # A copy, so that the builders of its connectors read this config.
        return path, AlgorithmConfig.from_state(state).copy(copy_frozen=False)
    if (
        not isinstance(kind, type)
        or not issubclass(kind, RLModule)
        or issubclass(kind, MultiRLModule)
    ):
        raise ValueError(
            f"`path` is {str(path)!r}, where there is no checkpoint of an Algorithm or of a single "
            "RLModule. Give the folder that `algo.save_to_path()` returned, or a module's in it, "
            f"{MODULES / DEFAULT_MODULE_ID}."
        )
    return path, None


def load_modules(path: Any) -> tuple[AlgorithmConfig | None, dict[str, RLModule]]:
    """Reads all modules of an Algorithm's checkpoint, or a module's own.

    Args:
        path: As for `find_checkpoint`.

    Returns:
        The Algorithm's config, None if there is only a module; and the modules by ID.

    Raises:
        ValueError: If there is neither at `path`.
    """
    path, config = find_checkpoint(path)
    folders = [path] if config is None else sorted((path / MODULES).iterdir())
    modules: dict[str, Any] = {
        folder.name: RLModule.from_checkpoint(folder) for folder in folders if folder.is_dir()
    }
    return config, modules


def load_module(path: Any) -> RLModule:
    """Reads a module's own checkpoint, or the only module of an Algorithm's.

    Args:
        path: As for `find_checkpoint`.

    Raises:
        ValueError: If there is neither at `path`, or the Algorithm has several modules.
    """
    _, modules = load_modules(path)
    if len(modules) > 1:
        raise ValueError(
            f"`path` is {str(path)!r}, a checkpoint with the modules {sorted(modules)}, but one is "
            f"needed. Give the folder of one, {MODULES / '<module ID>'} in it."
        )
    (module,) = modules.values()
    return module
