"""A model and what it costs, as plain data."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.rl_module import RLModule

from rlmodules.base import BaseMemoryRLModule
from rlmodules.compilation import CPU_DELAY, has_toolchain
from rlmodules.core import MemoryCore
from rlmodules.tools import costs, sequences


def describe(
    config: AlgorithmConfig | None, modules: Mapping[str, RLModule], *, connected: bool = False
) -> dict[str, Any]:
    """Everything about modules that can be known before training.

    Args:
        config: The algorithm's config; None for a module alone.
        modules: By module ID, as on a Learner.
        connected: Whether `connect` was called on the config.

    Returns:
        Dicts, lists, strings and numbers: `algorithm` (None without config) and `modules` by ID.
    """
    return {
        "algorithm": None
        if config is None
        else sequences.algorithm_settings(config, connected=connected),
        "modules": {
            module_id: describe_module(module, config, connected=connected)
            for module_id, module in modules.items()
        },
    }


def describe_module(
    module: Any, config: AlgorithmConfig | None, *, connected: bool
) -> dict[str, Any]:
    """One module of `describe`."""
    facts: dict[str, Any] = {
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "memory": _memory(module),
        "observation_space": str(module.observation_space),
        "action_space": str(module.action_space),
        "parameters": costs.parameters(module),
        "state": costs.state(module),
    }
    max_seq_len = module.model_config["max_seq_len"] if module.is_stateful() else None
    if max_seq_len is not None:
        rows: dict[str, Any] = {"max_seq_len": max_seq_len, "rows_per_batch": None}
        if config is not None:
            rows = facts["rows"] = sequences.rows(config, max_seq_len, connected)
        facts["stored_states"] = sequences.stored_states(config, rows, facts["state"]["bytes"])
    facts["flops_per_step"] = costs.flops(module, max_seq_len)
    facts["compile"] = _compile(module, config)
    facts["settings"] = _settings(module)
    return facts


def _memory(module: Any) -> str | None:
    """The class of the memory; of a module that is not ours, that it has one."""
    for child in module.children():
        if isinstance(child, MemoryCore):
            return type(child.memory).__name__
    return "its own" if module.is_stateful() else None


def _compile(module: Any, config: AlgorithmConfig | None) -> dict[str, Any] | None:
    """The mode, and when training on this machine would compile."""
    if not isinstance(module, BaseMemoryRLModule):
        return None
    mode = module.memory_config.compile
    device = "cuda" if config is not None and config.num_gpus_per_learner else "cpu"
    if mode != "auto":
        return {"mode": mode, "when": "at the first update" if mode else "never"}
    if not has_toolchain(device):
        return {"mode": mode, "when": "never: no compiler on this machine"}
    if device == "cpu":
        return {"mode": mode, "when": f"after {CPU_DELAY:.0f} s of training"}
    return {"mode": mode, "when": "at the first update"}


def _settings(module: Any) -> list[dict[str, Any]]:
    """Every field of the module's config. Modules that are not ours: their model config."""
    if not isinstance(module, BaseMemoryRLModule):
        return [{"name": name, "value": value} for name, value in module.model_config.items()]
    settings = []
    for field in dataclasses.fields(module.memory_config):
        value = getattr(module.memory_config, field.name)
        setting = {"name": field.name, "value": value}
        if field.default_factory is not dataclasses.MISSING:
            setting["default"] = field.default_factory()
        elif field.default is not dataclasses.MISSING:
            setting["default"] = field.default
        settings.append(setting)
    return settings
