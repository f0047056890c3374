"""What a config says about its modules, checked and completed before training starts."""

from __future__ import annotations

import dataclasses
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec

from connectors.validation import check_max_seq_len
from rlmodules.memories import MemoryConfig
from rlmodules.memories.config import check_names
from rlmodules.memories.options import is_search_space
from rlmodules.modules.base import BaseMemoryRLModule
from rlmodules.modules.checkpoint_version import VERSION_KEY


def complete_module_specs(config: AlgorithmConfig, ours: type[BaseMemoryRLModule]) -> None:
    """Gives memories without a module class that of the algorithm, and plain dicts their config.

    Args:
        config: It is changed in place.
        ours: The module class for its algorithm, which takes any memory.

    Raises:
        ValueError: if algorithm, module class and model config do not go together, or if a setting
            is unknown.
    """
    spec: Any = config.rl_module_spec
    default: Any = config.get_default_rl_module_spec()
    changed = {}
    for module_id, module_spec in _specs_by_id(config, spec).items():
        # RLlib puts its own class where none is given.
        no_class = module_spec.module_class in (None, default.module_class)
        if no_class and _is_of_memory(config, module_spec):
            module_spec.module_class = ours
            changed[module_id] = module_spec
        module_class: Any = module_spec.module_class
        if not issubclass(module_class, BaseMemoryRLModule):
            continue
        if not issubclass(module_class, ours):
            raise ValueError(
                f"`module_class` is `{module_class.__name__}`, which has no heads for a "
                f"`{type(config).__name__}`. Use `{ours.__name__}` or a class derived from it; or "
                "leave it out: the memory's config alone gets the right one."
            )
        if _complete_model_config(config, module_spec):
            changed[module_id] = module_spec
    if not changed:
        return
    if not isinstance(spec, RLModuleSpec):
        spec.rl_module_specs.update(changed)
    config.rl_module(rl_module_spec=spec)


def row_lengths(config: AlgorithmConfig) -> dict[str, int]:
    """`max_seq_len` of each module that has memory, by module ID.

    Raises:
        ValueError: if it is missing or wrong.
    """
    lengths = {}
    for module_id, spec in _specs_by_id(config, config.rl_module_spec).items():
        model_config = {**config.model_config, **_as_dict(spec.model_config)}
        if _may_be_stateful(spec, model_config):
            lengths[module_id] = check_max_seq_len(model_config, module_id)
    return lengths


def module_classes(config: AlgorithmConfig) -> dict[str, Any]:
    """The class of each module, by module ID."""
    specs = _specs_by_id(config, config.rl_module_spec)
    return {module_id: spec.module_class for module_id, spec in specs.items()}


def _specs_by_id(config: AlgorithmConfig, spec: Any) -> dict[str, RLModuleSpec]:
    if isinstance(spec, RLModuleSpec):
        # One spec for all: RLlib builds a module for each policy from it.
        return dict.fromkeys(config.policies, spec)
    specs = spec.rl_module_specs
    if not config.is_multi_agent and DEFAULT_MODULE_ID not in specs:
        names = ", ".join(f"`{module_id}`" for module_id in specs)
        raise ValueError(
            f"`MultiRLModuleSpec` has the modules {names}, but the config has a single agent. Name "
            "the policies in `config.multi_agent(policies=..., policy_mapping_fn=...)`, or give a "
            "single `RLModuleSpec`."
        )
    defaults: Any = {id_: config.get_default_rl_module_spec() for id_ in config.policies}
    return {**defaults, **specs}


def _is_of_memory(config: AlgorithmConfig, spec: RLModuleSpec) -> bool:
    """Whether the model config is one of a memory; the config's counts where the spec has none."""
    own, shared = spec.model_config, config._model_config
    if isinstance(own, (MemoryConfig, DefaultModelConfig)):
        return isinstance(own, MemoryConfig)
    return isinstance(shared, MemoryConfig) or "memory" in {**_as_dict(shared), **(own or {})}


def _complete_model_config(config: AlgorithmConfig, spec: RLModuleSpec) -> bool:
    """Reads a model config as the module will; puts a plain dict's dataclass in its place.

    Returns:
        Whether it was a dict.
    """
    module_class: Any = spec.module_class
    own, shared = spec.model_config, config._model_config
    for given in (own, shared):
        if isinstance(given, DefaultModelConfig):
            raise ValueError(
                "`model_config` is RLlib's `DefaultModelConfig`, which describes no memory for "
                f"`{module_class.__name__}`. Give it a memory's, such as "
                "`GTrXLConfig(max_seq_len=64)`; RLlib's LSTM needs no module class."
            )
    wanted = module_class.config_class
    for given in (own, shared):
        if isinstance(given, MemoryConfig) and wanted and not isinstance(given, wanted):
            raise ValueError(
                f"`model_config` is a `{type(given).__name__}`, but `{module_class.__name__}` "
                f"takes a `{wanted.__name__}`. Use that, or a module class that takes any memory "
                "of this package, such as `MemoryRLModule`."
            )
    both = isinstance(own, MemoryConfig) and isinstance(shared, MemoryConfig)
    if both and type(own) is not type(shared):
        raise ValueError(
            f"`model_config` is a `{type(shared).__name__}` in `config.rl_module` and a "
            f"`{type(own).__name__}` in an `RLModuleSpec`, but RLlib merges the two. Give each "
            "`RLModuleSpec` its own, and leave that of `config.rl_module` out."
        )
    # Only what the user set: the keys that algorithms add have other defaults. A module that was
    # loaded has the version of its checkpoint besides.
    settings = {**_as_dict(shared), **_as_dict(own)}
    settings.pop(VERSION_KEY, None)
    spaces = {k: v for k, v in _as_dict(shared).items() if is_search_space(v) and settings[k] is v}
    if spaces:
        config.rl_module(model_config=_complete_search(settings, spaces, module_class))
        return False
    model_config = module_class.read_config(settings)
    if dataclasses.is_dataclass(own):
        return False
    spec.model_config = model_config
    return True


def _complete_search(
    settings: dict[str, Any], spaces: dict[str, Any], module_class: Any
) -> dict[str, Any]:
    """A model config that Tune draws from, with the memory's defaults, not the algorithm's.

    Raises:
        ValueError: if a setting that `connect` has to know is a search space, or one is wrong.
    """
    for name in {"memory", "max_seq_len"} & spaces.keys():
        raise ValueError(
            f"`{name}` is a search space, {spaces[name]!r}, but `connect` needs a value: rows and "
            "module classes depend on it. Search over whole specs after it: "
            "`config.rl_module(rl_module_spec=tune.grid_search([RLModuleSpec(...), ...]))`."
        )
    known = {name: value for name, value in settings.items() if name not in spaces}
    model_config = module_class.read_config(known)
    check_names(spaces, type(model_config))
    return {**dataclasses.asdict(model_config), **spaces}


def _as_dict(model_config: Any) -> dict[str, Any]:
    if model_config is None or isinstance(model_config, dict):
        return model_config or {}
    return dataclasses.asdict(model_config)


def _may_be_stateful(spec: RLModuleSpec, model_config: dict[str, Any]) -> bool:
    """False where the module certainly has no memory, and needs no `max_seq_len`."""
    module_class = spec.module_class
    if module_class is None or module_class.get_initial_state is RLModule.get_initial_state:
        return False
    # RLlib's own modules, and what is derived from them, have the state of an LSTM that most don't
    # use. Its examples have states of their own.
    if module_class.get_initial_state.__module__.startswith("ray.rllib.algorithms."):
        return bool(model_config.get("use_lstm"))
    return True
