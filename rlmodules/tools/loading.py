"""Finds what a command is given: objects by import path or in files, modules of a config."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner


def load_object(text: str) -> Any:
    """What `package.module:name` or `path.py:name` stands for.

    Raises:
        ValueError: If there is no such file, module or name.
    """
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise ValueError(
            f"`{text}` is neither a checkpoint's folder nor the place of an object. Give a folder, "
            "`package.module:name` or `path.py:name`."
        )
    module = _load_file(Path(place)) if place.endswith(".py") else _import(place)
    if not hasattr(module, name):
        raise ValueError(f"`{place}` has no `{name}`. Name a variable, function or class in it.")
    return getattr(module, name)


def load_config(text: str) -> AlgorithmConfig:
    """The config that `package.module:name` or `path.py:name` is, or returns when called.

    Raises:
        ValueError: If it is none, or cannot be found.
    """
    found = load_object(text)
    config = found if isinstance(found, AlgorithmConfig) or not callable(found) else found()
    if not isinstance(config, AlgorithmConfig):
        raise ValueError(
            f"`{text}` is or returns a {type(config).__name__}, but must be an AlgorithmConfig or "
            "a function without arguments that returns one."
        )
    return config


def build_modules(config: AlgorithmConfig) -> dict[str, RLModule]:
    """Builds the modules of a config as a Learner would, by module ID.

    Makes an environment, whose spaces, changed by the config's connectors, are those of the
    modules.
    """
    spaces = None
    if config.env is not None:
        local = config.copy(copy_frozen=False)
        local.env_runners(num_env_runners=0, num_envs_per_env_runner=1)
        default = MultiAgentEnvRunner if config.is_multi_agent else SingleAgentEnvRunner
        runner = (config.env_runner_cls or default)(config=local)
        spaces = runner.get_spaces()
        runner.stop()
    spec = config.get_multi_rl_module_spec(spaces=spaces, inference_only=False)
    modules: Any = spec.build()
    return {module_id: modules[module_id] for module_id in sorted(modules.keys())}


def _import(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not (name + ".").startswith(error.name + "."):
            raise  # something that the module itself imports
        raise ValueError(
            f"There is no module `{name}`. Install it, or run from the folder that it is in."
        ) from error


def _load_file(path: Path) -> Any:
    if not path.is_file():
        raise ValueError(f"There is no file `{path}`. Give a path from here, or a whole one.")
    # As `python path.py` does: files beside it can be imported.
    sys.path.insert(0, str(path.parent.absolute()))
    # Under its path, which no other module has for a name.
    spec: Any = importlib.util.spec_from_file_location(str(path), path)
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
