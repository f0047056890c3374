"""Memories by name: the config class that a model config asks for."""

import difflib
from collections.abc import Mapping
from typing import Any

from rlmodules.memories import (
    DeepLinearAttentionConfig,
    FFMConfig,
    GatedDeltaConfig,
    GRUConfig,
    GTrXLConfig,
    LinearAttentionConfig,
    LRUConfig,
    LSTMConfig,
    MemoryConfig,
    MinGRUConfig,
    MixedConfig,
    POPGymLinearAttentionConfig,
    WindowAttentionConfig,
)

CONFIGS: dict[str, type[MemoryConfig]] = {
    config_class.memory: config_class
    for config_class in (
        LinearAttentionConfig,
        DeepLinearAttentionConfig,
        GTrXLConfig,
        GRUConfig,
        LSTMConfig,
        GatedDeltaConfig,
        MinGRUConfig,
        LRUConfig,
        FFMConfig,
        WindowAttentionConfig,
        MixedConfig,
        POPGymLinearAttentionConfig,
    )
}
"""All memories of this package. A new one is a line here, and a file in `memories`."""


def config_class_of(model_config: Mapping[str, Any]) -> type[MemoryConfig]:
    """The config class whose `memory` a model config names.

    Raises:
        ValueError: If it names none, or one that doesn't exist.
    """
    names = ", ".join(map(repr, CONFIGS))
    if "memory" not in model_config:
        raise ValueError(
            "`memory` is missing in the model config: the name of the memory to build, one of "
            f"{names}. Configs of this package, such as `GTrXLConfig`, have it. A config of your "
            "own needs a module class that names it: `config_class = MyConfig`."
        )
    name = model_config["memory"]
    if name not in CONFIGS:
        close = difflib.get_close_matches(str(name).lower(), CONFIGS, n=1)
        hint = f"Did you mean {close[0]!r}?" if close else f"Use one of {names}."
        raise ValueError(f"`memory` is {name!r}, which is the name of no memory. {hint}")
    return CONFIGS[name]
