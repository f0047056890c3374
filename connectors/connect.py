"""Plugs the connectors into an algorithm's config."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable
from functools import partial
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo.default_ppo_rl_module import DefaultPPORLModule
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.module_to_env import (
    ListifyDataForVectorEnv,
    NormalizeAndClipActions,
    UnBatchToIndividualItems,
)
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec

from connectors.algorithms import learner_class, support_for
from connectors.env_to_module import BuildModuleBatch
from connectors.learner import BuildTrainBatch
from connectors.module_to_env import FormatActions, SampleActions
from connectors.recording import record_without_states
from connectors.validation import check_max_seq_len


def connect(config: AlgorithmConfig) -> AlgorithmConfig:
    """Plugs the sequence connectors into a config, around connectors it already has.

    Call it after all other settings. Calling it twice changes nothing.

    Your own connectors run before ours. To run one behind ours, return our piece with it from
    your builder, in the order you want, and `connect` leaves that order alone:

    ```python
    from ray.rllib.algorithms.ppo import PPOConfig
    from ray.rllib.connectors.connector_v2 import ConnectorV2

    from connectors import BuildModuleBatch


    class CountRows(ConnectorV2):
        rows = 0

        def __call__(self, *, batch, **kwargs):
            self.rows += len(batch["obs"])
            return batch


    config = PPOConfig().env_runners(
        env_to_module_connector=lambda env, spaces, device: [BuildModuleBatch(), CountRows()]
    )
    ```

    Args:
        config: A PPO config with a single-agent module. It is changed in place.

    Returns:
        The same config.

    Raises:
        ValueError: if the algorithm, its Learner class or a multi-agent setup is not supported,
            if `max_seq_len` is missing or wrong, or if `minibatch_size` is below it.
    """
    support = support_for(config)
    learner = learner_class(config, support)
    spec = _single_agent_spec(config)
    _check_pipelines(config)
    model_config = _validated_model_config(config, spec)
    row_lengths = {}
    if _may_be_stateful(spec, model_config):
        row_lengths[DEFAULT_MODULE_ID] = check_max_seq_len(model_config)
    support.prepare(config, row_lengths)
    record_without_states(config)

    user = _user_builders(config)
    config.env_runners(
        env_to_module_connector=_wrap(_build_env_to_module, user["env_to_module"]),
        add_default_connectors_to_env_to_module_pipeline=False,
        module_to_env_connector=_wrap(
            _build_module_to_env,
            user["module_to_env"],
            normalize_actions=config.normalize_actions,
            clip_actions=config.clip_actions,
        ),
        add_default_connectors_to_module_to_env_pipeline=False,
    )
    config.learners(
        learner_connector=_wrap(_build_learner, user["learner"]),
        learner_class=learner,
    )
    return config


def _user_builders(config: AlgorithmConfig) -> dict[str, Callable | None]:
    """The connector builders that the user set.

    Private attributes of Ray 2.60: a config has setters for its builders, but no getters, and
    without the old builder the user's own connectors would be lost. A test fails if Ray renames
    them.
    """
    return {
        "env_to_module": config._env_to_module_connector,
        "module_to_env": config._module_to_env_connector,
        "learner": config._learner_connector,
    }


def _wrap(build: Callable, user: Callable | None, **kwargs: Any) -> Callable:
    """A picklable builder that calls the user's; a builder of ours is not wrapped again."""
    if isinstance(user, partial) and user.func is build:
        user = user.args[0]
    return partial(build, user, **kwargs)


def _build_env_to_module(
    user: Callable | None, env: Any = None, spaces: Any = None, device: Any = None
) -> list[ConnectorV2]:
    pieces = _user_pieces(user, "env_to_module_connector", env, spaces, device)
    if not _contains(pieces, BuildModuleBatch):
        pieces.append(BuildModuleBatch(device=device))
    return pieces


def _build_module_to_env(
    user: Callable | None,
    env: Any = None,
    spaces: Any = None,
    *,
    normalize_actions: bool,
    clip_actions: bool,
) -> list[ConnectorV2]:
    pieces = _user_pieces(user, "module_to_env_connector", env, spaces)
    flags: dict[str, Any] = {
        "normalize_actions": normalize_actions,
        "clip_actions": clip_actions,
    }
    if _contains(pieces, SampleActions):
        return pieces
    if not pieces:
        return [SampleActions(), FormatActions(**flags)]
    # RLlib's own pieces around the user's, which expect single items.
    return [
        SampleActions(),
        UnBatchToIndividualItems(),
        *pieces,
        NormalizeAndClipActions(**flags),
        ListifyDataForVectorEnv(),
    ]


def _build_learner(
    user: Callable | None, observation_space: Any, action_space: Any
) -> list[ConnectorV2]:
    pieces = _user_pieces(user, "learner_connector", observation_space, action_space)
    if not _contains(pieces, BuildTrainBatch):
        pieces.append(BuildTrainBatch())
    return pieces


def _user_pieces(builder: Callable | None, setting: str, *args: Any) -> list[ConnectorV2]:
    if builder is None:
        return []
    try:
        inspect.signature(builder).bind(*args)
    except TypeError:
        # The signature of earlier Ray versions, which RLlib still accepts.
        args = args[:1]
    except ValueError:
        pass
    pieces = builder(*args)
    if isinstance(pieces, ConnectorV2):
        return [pieces]
    if isinstance(pieces, (list, tuple)):
        return list(pieces)
    raise ValueError(
        f"The builder given as `{setting}` returned a {type(pieces).__name__}, but must return a "
        "`ConnectorV2` or a list of them."
    )


def _contains(pieces: list[ConnectorV2], kind: type[ConnectorV2]) -> bool:
    return any(
        isinstance(piece, kind)
        or (isinstance(piece, ConnectorPipelineV2) and _contains(piece.connectors, kind))
        for piece in pieces
    )


def _single_agent_spec(config: AlgorithmConfig) -> RLModuleSpec:
    spec: Any = config.rl_module_spec
    if config.is_multi_agent or isinstance(spec, MultiRLModuleSpec):
        raise ValueError(
            "`connect` got a multi-agent config, but supports a single agent with one "
            "`RLModuleSpec` only. Leave `connect` out: modules with memory also run on RLlib's "
            "default connectors."
        )
    return spec


def _check_pipelines(config: AlgorithmConfig) -> None:
    if not config.add_default_connectors_to_learner_pipeline:
        raise ValueError(
            "`add_default_connectors_to_learner_pipeline` is False, but must be True: our learner "
            "connector works in front of RLlib's default pieces. Leave the setting alone."
        )


def _validated_model_config(config: AlgorithmConfig, spec: RLModuleSpec) -> dict[str, Any]:
    """Checks a plain dict against the module's config class; returns what the module will get."""
    config_class = getattr(spec.module_class, "config_class", None)
    if config_class is not None and not dataclasses.is_dataclass(spec.model_config):
        # Only what the user set: the keys that algorithms add have other defaults.
        shared = _as_dict(config._model_config)
        spec.model_config = config_class.from_dict({**shared, **_as_dict(spec.model_config)})
        config.rl_module(rl_module_spec=spec)
    return {**config.model_config, **_as_dict(spec.model_config)}


def _as_dict(model_config: Any) -> dict[str, Any]:
    if model_config is None or isinstance(model_config, dict):
        return model_config or {}
    return dataclasses.asdict(model_config)


def _may_be_stateful(spec: RLModuleSpec, model_config: dict[str, Any]) -> bool:
    """False where the module certainly has no memory, and needs no `max_seq_len`."""
    module_class = spec.module_class
    if module_class is None or module_class.get_initial_state is RLModule.get_initial_state:
        return False
    if issubclass(module_class, DefaultPPORLModule):
        return bool(model_config.get("use_lstm"))
    return True
