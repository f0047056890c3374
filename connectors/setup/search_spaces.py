"""Settings that Tune draws for each trial: what `connect` leaves to it, and what it can't."""

from __future__ import annotations

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig

from rlmodules.memories.options import is_search_space

# What `connect` reads and rewrites, so that it has to know the value. Everything else is read, or
# checked again, when a trial builds its algorithm.
_MUST_BE_KNOWN = (
    "_rl_module_spec",
    "_model_config",
    "policies",
    "_env_to_module_connector",
    "_module_to_env_connector",
    "_learner_connector",
    "add_default_connectors_to_learner_pipeline",
    "env_runner_cls",
    "callbacks_on_algorithm_init",
    "callbacks_on_checkpoint_loaded",
    "replay_buffer_config",
    "output",
    "offline_data_class",
    "prelearner_class",
    "offline_eval_runner_class",
    "offline_evaluation_type",
    "materialize_data",
    "materialize_mapped_data",
    "torch_ddp_kwargs",
)


def is_searched(config: AlgorithmConfig, *settings: str) -> bool:
    """Whether one of these settings is a search space, so that each trial checks its own value."""
    return any(is_search_space(getattr(config, setting, None)) for setting in settings)


def has_search_spaces(config: AlgorithmConfig) -> bool:
    """Whether this is no config that an algorithm is built from, but one to draw them from."""
    model_config = config._model_config if isinstance(config._model_config, dict) else {}
    return any(map(is_search_space, [*vars(config).values(), *model_config.values()]))


def check_search_spaces(config: AlgorithmConfig) -> None:
    """Refuses search spaces where `connect` needs a value.

    Raises:
        ValueError: if there is one.
    """
    for name in _MUST_BE_KNOWN:
        value = vars(config).get(name)
        setting = name.removeprefix("_")
        if setting == "replay_buffer_config" and not is_search_space(value):
            setting, value = f"{setting}['type']", (value or {}).get("type")
        if is_search_space(value):
            raise ValueError(
                f"`connect` found a search space in `{setting}`, {value!r}, but needs a value to "
                "plug into. Search over modules after it, "
                "`config.rl_module(rl_module_spec=tune.grid_search([RLModuleSpec(...), ...]))`; "
                "for another setting run one `Tuner` a value."
            )
