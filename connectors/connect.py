"""Plugs the connectors into an algorithm's config."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import partial
from typing import Any, TypeVar

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.module_to_env import (
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    NormalizeAndClipActions,
    UnBatchToIndividualItems,
)
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.utils import force_list

from connectors.algorithms import learner_class, support_for
from connectors.env_to_module import BuildModuleBatch, MapSpaces
from connectors.format_actions import FormatActions
from connectors.learner import BuildTrainBatch
from connectors.module_specs import validated_row_lengths
from connectors.module_to_env import SampleActions
from connectors.multi_agent_runner import MemoryMultiAgentEnvRunner
from connectors.recording import record_without_states
from connectors.saving import require_learners

Piece = TypeVar("Piece", bound=ConnectorV2)


def connect(config: AlgorithmConfig, *, episodes_per_trial: int = 1) -> AlgorithmConfig:
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
        config: A config of PPO, APPO or IMPALA, for one agent or several, or of DQN, SAC, BC or
            MARWIL. It is changed in place.
        episodes_per_trial: Episodes over which a sub-environment keeps its agents' states. With 1
            each episode starts from the initial state.

    Returns:
        The same config.

    Raises:
        ValueError: if the algorithm, its Learner or its EnvRunner class is not supported, if
            `max_seq_len` of a module is missing or wrong, if settings of the algorithm do not fit
            rows, or if `episodes_per_trial` is below 1 or at odds with other settings.
    """
    support = support_for(config)
    learner = learner_class(config, support)
    _check_pipelines(config)
    _check_trials(config, episodes_per_trial)
    support.prepare(config, validated_row_lengths(config))
    record_without_states(config)
    _set_multi_agent_runner(config)
    callbacks = force_list(config.callbacks_on_checkpoint_loaded)
    if require_learners not in callbacks:
        config.callbacks(on_checkpoint_loaded=[*callbacks, require_learners])

    user = _user_builders(config)
    config.env_runners(
        env_to_module_connector=_wrap(
            _build_env_to_module,
            user["env_to_module"],
            map_spaces=_space_mapping(config),
            episodes_per_trial=episodes_per_trial,
        ),
        add_default_connectors_to_env_to_module_pipeline=False,
        module_to_env_connector=_wrap(
            _build_module_to_env,
            user["module_to_env"],
            normalize_actions=config.normalize_actions,
            clip_actions=config.clip_actions,
            several_agents=config.is_multi_agent,
        ),
        add_default_connectors_to_module_to_env_pipeline=False,
    )
    config.learners(
        learner_connector=_wrap(
            _build_learner, user["learner"], bootstrap_slot=support.bootstrap_slot
        ),
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


def _set_multi_agent_runner(config: AlgorithmConfig) -> None:
    """Sets our EnvRunner; one of the user's can stay where episodes are not shared out."""
    if not config.is_multi_agent:
        return
    current = config.env_runner_cls
    if current is None or issubclass(MemoryMultiAgentEnvRunner, current):
        config.env_runners(env_runner_cls=MemoryMultiAgentEnvRunner)
    elif (config.num_learners or 0) > 1 and not issubclass(current, MemoryMultiAgentEnvRunner):
        raise ValueError(
            f"`env_runner_cls` is `{current.__name__}`, whose episodes of several agents cannot be "
            "shared out over several Learners. Derive it from `MemoryMultiAgentEnvRunner`, or use "
            "one Learner."
        )


def _space_mapping(config: AlgorithmConfig) -> Callable[[], MapSpaces] | None:
    """Builds the piece that tells RLlib the spaces of each module; not needed for one agent."""
    if not config.is_multi_agent:
        return None
    spec: Any = config.rl_module_spec
    several = isinstance(spec, MultiRLModuleSpec)
    specs: Any = spec.rl_module_specs if several else set(config.policies)
    return partial(
        MapSpaces, rl_module_specs=specs, agent_to_module_mapping_fn=config.policy_mapping_fn
    )


def _build_env_to_module(
    user: Callable | None,
    env: Any = None,
    spaces: Any = None,
    device: Any = None,
    *,
    map_spaces: Callable[[], MapSpaces] | None,
    episodes_per_trial: int,
) -> list[ConnectorV2]:
    pieces = _user_pieces(user, "env_to_module_connector", env, spaces, device)
    given = _find(pieces, BuildModuleBatch)
    if given is not None and given.episodes_per_trial != episodes_per_trial:
        raise ValueError(
            f"`episodes_per_trial` is {episodes_per_trial} in `connect`, but "
            f"{given.episodes_per_trial} in the `BuildModuleBatch` of your builder. Give both the "
            "same."
        )
    if given is None:
        pieces.append(BuildModuleBatch(device=device, episodes_per_trial=episodes_per_trial))
    if map_spaces is not None and _find(pieces, MapSpaces) is None:
        pieces.append(map_spaces())
    return pieces


def _build_module_to_env(
    user: Callable | None,
    env: Any = None,
    spaces: Any = None,
    *,
    normalize_actions: bool,
    clip_actions: bool,
    several_agents: bool,
) -> list[ConnectorV2]:
    pieces = _user_pieces(user, "module_to_env_connector", env, spaces)
    flags: dict[str, Any] = {
        "normalize_actions": normalize_actions,
        "clip_actions": clip_actions,
    }
    if _find(pieces, SampleActions) is not None:
        return pieces
    if not pieces:
        return [SampleActions(), FormatActions(**flags)]
    # RLlib's own pieces around the user's, which expect single items.
    return [
        SampleActions(),
        UnBatchToIndividualItems(),
        *([ModuleToAgentUnmapping()] if several_agents else []),
        *pieces,
        NormalizeAndClipActions(**flags),
        ListifyDataForVectorEnv(),
    ]


def _build_learner(
    user: Callable | None,
    observation_space: Any,
    action_space: Any,
    *,
    bootstrap_slot: bool,
) -> list[ConnectorV2]:
    pieces = _user_pieces(user, "learner_connector", observation_space, action_space)
    given = _find(pieces, BuildTrainBatch)
    if given is None:
        pieces.append(BuildTrainBatch(bootstrap_slot=bootstrap_slot))
    elif given.bootstrap_slot != bootstrap_slot:
        raise ValueError(
            f"`bootstrap_slot` of the `BuildTrainBatch` in your `learner_connector` is "
            f"{given.bootstrap_slot}, but must be {bootstrap_slot} for this algorithm: V-trace "
            "(APPO, IMPALA) needs that slot, advantages (PPO) are computed without it. Set "
            f"`BuildTrainBatch(bootstrap_slot={bootstrap_slot})`."
        )
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


def _find(pieces: list[ConnectorV2], kind: type[Piece]) -> Piece | None:
    for piece in pieces:
        if isinstance(piece, ConnectorPipelineV2):
            piece = _find(piece.connectors, kind)
        if isinstance(piece, kind):
            return piece
    return None


def _check_trials(config: AlgorithmConfig, episodes_per_trial: Any) -> None:
    if type(episodes_per_trial) is not int or episodes_per_trial < 1:
        raise ValueError(
            f"`episodes_per_trial` is {episodes_per_trial!r}, but must be an integer of at least "
            "1: the number of episodes over which states are kept. Use 1 to start each episode "
            "from the initial state."
        )
    if episodes_per_trial > 1 and config.is_offline:
        raise ValueError(
            f"`episodes_per_trial` is {episodes_per_trial}, but must be 1 to train on recorded "
            "episodes: which of them followed one another is not recorded. Let each episode hold a "
            "whole trial."
        )
    if episodes_per_trial > 1 and config.batch_mode == "complete_episodes":
        raise ValueError(
            f"`episodes_per_trial` is {episodes_per_trial}, but `batch_mode` is "
            '"complete_episodes", with which RLlib resets all environments for each batch and a '
            "trial ends with its first episode. Use "
            '`config.env_runners(batch_mode="truncate_episodes")`.'
        )


def _check_pipelines(config: AlgorithmConfig) -> None:
    if not config.add_default_connectors_to_learner_pipeline:
        raise ValueError(
            "`add_default_connectors_to_learner_pipeline` is False, but must be True: our learner "
            "connector works in front of RLlib's default pieces. Leave the setting alone."
        )
