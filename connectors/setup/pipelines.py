"""Our pieces around the user's, one pipeline a function; each reads the config it is given."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala.impala import IMPALAConfig
from ray.rllib.algorithms.marwil.marwil import MARWILConfig
from ray.rllib.algorithms.ppo.ppo import PPOConfig
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.module_to_env import (
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    NormalizeAndClipActions,
    UnBatchToIndividualItems,
)
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec

from connectors.rollout.build_module_batch import BuildModuleBatch, MapSpaces
from connectors.rollout.format_actions import FormatActions
from connectors.rollout.sample_actions import SampleActions
from connectors.rows.build_train_batch import BuildTrainBatch
from connectors.rows.later_columns import LayOutLaterColumns
from connectors.setup.algorithms import support_for

Piece = TypeVar("Piece", bound=ConnectorV2)


def complete_env_to_module(
    pieces: list[ConnectorV2], config: AlgorithmConfig, episodes_per_trial: int, device: Any
) -> list[ConnectorV2]:
    """The user's pieces, then ours.

    Raises:
        ValueError: if the user's builder returns our piece with another `episodes_per_trial`.
    """
    given = _find(pieces, BuildModuleBatch)
    _check_same_trials(given, episodes_per_trial)
    if given is None:
        pieces.append(BuildModuleBatch(device=device, episodes_per_trial=episodes_per_trial))
    if config.is_multi_agent and _find(pieces, MapSpaces) is None:
        # Not the property, which merges it with RLlib's default and wants it valid.
        spec: Any = config._rl_module_spec
        several = isinstance(spec, MultiRLModuleSpec)
        pieces.append(
            MapSpaces(
                rl_module_specs=spec.rl_module_specs if several else set(config.policies),
                agent_to_module_mapping_fn=config.policy_mapping_fn,
            )
        )
    return pieces


def complete_module_to_env(pieces: list[ConnectorV2], config: AlgorithmConfig) -> list[ConnectorV2]:
    """Ours, and where the user has pieces RLlib's own around those, which expect single items."""
    flags: dict[str, Any] = {
        "normalize_actions": config.normalize_actions,
        "clip_actions": config.clip_actions,
    }
    if _find(pieces, SampleActions) is not None:
        return pieces
    if not pieces:
        return [SampleActions(), FormatActions(**flags)]
    return [
        SampleActions(),
        UnBatchToIndividualItems(),
        *([ModuleToAgentUnmapping()] if config.is_multi_agent else []),
        *pieces,
        NormalizeAndClipActions(**flags),
        ListifyDataForVectorEnv(),
    ]


def complete_learner(
    pieces: list[ConnectorV2], config: AlgorithmConfig, episodes_per_trial: int, pack_rows: bool
) -> list[ConnectorV2]:
    """The user's pieces, then ours.

    Raises:
        ValueError: if the user's builder returns our piece with rows for another algorithm, or with
            another `episodes_per_trial`.
    """
    # Elsewhere episodes come with their states.
    if not isinstance(config, MARWILConfig):
        episodes_per_trial = 1
    bootstrap_slot = support_for(config).bootstrap_slot
    given = _find(pieces, BuildTrainBatch)
    _check_same_trials(given, episodes_per_trial)
    if given is None:
        pieces.append(
            BuildTrainBatch(
                bootstrap_slot=bootstrap_slot,
                episodes_per_trial=episodes_per_trial,
                pack_rows=pack_rows,
                minibatch_size=_minibatch_size(config),
            )
        )
    elif given.bootstrap_slot != bootstrap_slot:
        raise ValueError(
            f"`bootstrap_slot` of the `BuildTrainBatch` in your `learner_connector` is "
            f"{given.bootstrap_slot}, but must be {bootstrap_slot} for this algorithm: V-trace "
            "(APPO, IMPALA) needs that slot, advantages (PPO) are computed without it. Set "
            f"`BuildTrainBatch(bootstrap_slot={bootstrap_slot})`."
        )
    else:
        given.pack_rows = given.pack_rows and pack_rows
        given.minibatch_size = _minibatch_size(config)
        # Learners lay out what comes later; aggregator actors have none.
        pieces.append(LayOutLaterColumns())
    return pieces


def _minibatch_size(config: AlgorithmConfig) -> int | None:
    # Replaying algorithms and recorded episodes: an update is one minibatch, whatever is set.
    return config.minibatch_size if isinstance(config, (PPOConfig, IMPALAConfig)) else None


def _check_same_trials(
    given: BuildModuleBatch | BuildTrainBatch | None, episodes_per_trial: int
) -> None:
    if given is not None and given.episodes_per_trial != episodes_per_trial:
        raise ValueError(
            f"`episodes_per_trial` is {episodes_per_trial} in `connect`, but "
            f"{given.episodes_per_trial} in the `{type(given).__name__}` of your builder. Give "
            "both the same."
        )


def user_pieces(builder: Callable | None, setting: str, *args: Any) -> list[ConnectorV2]:
    """What the user's builder returns, as a list.

    Raises:
        ValueError: if that is no connector, and no list.
    """
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
