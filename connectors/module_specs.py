"""What a config says about its modules, checked before training starts."""

from __future__ import annotations

import dataclasses
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec

from connectors.validation import check_max_seq_len


def validated_row_lengths(config: AlgorithmConfig) -> dict[str, int]:
    """Checks the model configs of all modules; puts a checked plain dict's dataclass in its place.

    Returns:
        `max_seq_len` of each module that has memory, by module ID.

    Raises:
        ValueError: if it is missing or wrong, or if a setting is unknown.
    """
    spec: Any = config.rl_module_spec
    row_lengths = {}
    for module_id, module_spec in _specs_by_id(config, spec).items():
        if _validate_model_config(config, module_spec):
            config.rl_module(rl_module_spec=spec)
        model_config = {**config.model_config, **_as_dict(module_spec.model_config)}
        if _may_be_stateful(module_spec, model_config):
            row_lengths[module_id] = check_max_seq_len(model_config, module_id)
    return row_lengths


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
    default: Any = config.get_default_rl_module_spec()
    return {**dict.fromkeys(config.policies, default), **specs}


def _validate_model_config(config: AlgorithmConfig, spec: RLModuleSpec) -> bool:
    """Checks a plain dict against the module's config class, and replaces it; False if it isn't."""
    config_class = getattr(spec.module_class, "config_class", None)
    if config_class is None or dataclasses.is_dataclass(spec.model_config):
        return False
    # Only what the user set: the keys that algorithms add have other defaults.
    shared = _as_dict(config._model_config)
    spec.model_config = config_class.from_dict({**shared, **_as_dict(spec.model_config)})
    return True


def _as_dict(model_config: Any) -> dict[str, Any]:
    if model_config is None or isinstance(model_config, dict):
        return model_config or {}
    return dataclasses.asdict(model_config)


def _may_be_stateful(spec: RLModuleSpec, model_config: dict[str, Any]) -> bool:
    """False where the module certainly has no memory, and needs no `max_seq_len`."""
    module_class = spec.module_class
    if module_class is None or module_class.get_initial_state is RLModule.get_initial_state:
        return False
    # RLlib's own modules define the state of an LSTM that most of them don't have.
    if module_class.__module__.startswith("ray.rllib."):
        return bool(model_config.get("use_lstm"))
    return True
