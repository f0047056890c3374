"""A model and what it costs, as plain data."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule

from rlmodules.memories.compilation import CPU_DELAY, has_toolchain
from rlmodules.modules.base import BaseMemoryRLModule, MemoryCore
from rlmodules.tools import costs, sequences

logger = logging.getLogger("rllib_memory")


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
    max_seq_len = None
    if module.is_stateful():
        if "max_seq_len" not in (module.model_config or {}):
            raise ValueError(
                f"`max_seq_len` is missing in the model config of {type(module).__name__}. Set it "
                "to the number of timesteps a training row holds, for example 64."
            )
        max_seq_len = module.model_config["max_seq_len"]
    facts: dict[str, Any] = {
        "class": f"{type(module).__module__}.{type(module).__qualname__}",
        "memory": _memory(module),
        "observation_space": _one_line(module.observation_space),
        "action_space": _one_line(module.action_space),
        "parameters": costs.parameters(module),
        "state": costs.state(module),
        "flops_per_step": _flops(module, max_seq_len),
        "compile": _compile(module, config),
    }
    if max_seq_len is not None:
        size = facts["state"]["bytes"]
        facts["stored_states"] = sequences.stored_states(config, max_seq_len, size)
        if config is not None:
            facts["rows"] = sequences.rows(config, max_seq_len, connected)
    return {**facts, "settings": _settings(module)}


def _one_line(space: Any) -> str:
    return " ".join(str(space).split())


def _flops(module: Any, max_seq_len: int | None) -> dict[str, int] | None:
    try:
        return costs.flops(module, max_seq_len)
    except Exception as error:
        # A module of the user's own may need columns that only its connectors know.
        logger.warning(
            "No arithmetic counted: a pass of %s failed: %r", type(module).__name__, error
        )
        return None


def _memory(module: Any) -> str | None:
    """The memory's name, or its class; of a module that is not ours, that it has one."""
    for part in vars(module).get("_modules", {}).values():
        if isinstance(part, MemoryCore):
            return getattr(module.memory_config, "memory", type(part.memory).__name__)
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
    """Every field of the module's config; of modules that are not ours, what differs.

    RLlib's model config has some forty fields, of which most configure networks that a module does
    not build.
    """
    ours = isinstance(module, BaseMemoryRLModule)
    config_class = type(module.memory_config) if ours else DefaultModelConfig
    defaults = _defaults(config_class)
    if ours:
        names = [field.name for field in dataclasses.fields(config_class)]
        values = {name: getattr(module.memory_config, name) for name in names}
    else:
        given = module.model_config or {}
        values = {k: v for k, v in given.items() if k not in defaults or v != defaults[k]}
    return [
        {"name": name, "value": value} | ({"default": defaults[name]} if name in defaults else {})
        for name, value in values.items()
    ]


def _defaults(config_class: Any) -> dict[str, Any]:
    """By field, where it has one."""
    # Not `is MISSING`: a class that was defined in a script is pickled with a copy of that.
    missing = type(dataclasses.MISSING)
    defaults = {}
    for field in dataclasses.fields(config_class):
        factory: Any = field.default_factory
        if not isinstance(factory, missing):
            defaults[field.name] = factory()
        elif not isinstance(field.default, missing):
            defaults[field.name] = field.default
    return defaults
