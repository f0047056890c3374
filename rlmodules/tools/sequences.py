"""What an algorithm's settings mean for its sequences: rows, minibatches, padding, stored states.

All numbers are those of full fragments, which no episode ends in.
"""

from __future__ import annotations

import math
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.impala.impala import IMPALAConfig


def algorithm_settings(config: AlgorithmConfig, connected: bool) -> dict[str, Any]:
    """The settings that sequences depend on.

    Args:
        config: The algorithm's config.
        connected: Whether `connect` was called on it.
    """
    settings: Any = config
    facts = {
        "algorithm": _name(config),
        "connected": connected,
        "num_env_runners": config.num_env_runners,
        "num_envs_per_env_runner": config.num_envs_per_env_runner,
        "rollout_fragment_length": config.get_rollout_fragment_length(),
        "batch_mode": config.batch_mode,
        "num_learners": config.num_learners,
        "train_batch_size": config.total_train_batch_size,
        "minibatch_size": getattr(settings, "minibatch_size", None),
        "num_epochs": getattr(settings, "num_epochs", None),
    }
    if config.is_offline:
        for key in ("num_env_runners", "num_envs_per_env_runner", "rollout_fragment_length"):
            del facts[key]
    return facts


def rows(config: AlgorithmConfig, max_seq_len: int, connected: bool) -> dict[str, Any]:
    """Rows and padding of a module with memory.

    Args:
        config: The algorithm's config.
        max_seq_len: Steps T of a row.
        connected: Whether `connect` was called on the config.

    Returns:
        `slots_per_row`; `rows_per_fragment`, of which some hold nothing but a bootstrap step where
        `padding` is high; `rows_per_batch` for all Learners together; `rows_per_minibatch`;
        `padding`, the share of slots that hold nothing. None where it depends on the data: on
        recorded episodes, and on when which of several agents acts.
    """
    T = max_seq_len
    facts: dict[str, Any] = {
        "max_seq_len": T,
        "slots_per_row": T,
        "rows_per_fragment": None,
        "rows_per_batch": None,
        "rows_per_minibatch": None,
        "padding": None,
    }
    if config.is_offline:
        return facts
    if replays(config):
        # A row of T observations is T - 1 steps.
        facts["rows_per_batch"] = math.ceil(config.total_train_batch_size / (T - 1))
        facts["padding"] = 0.0
        return facts
    L = config.get_rollout_fragment_length()
    if connected and isinstance(config, IMPALAConfig):
        # Each row has a slot for the step that it bootstraps from.
        facts["slots_per_row"] = T + 1
        per_fragment = math.ceil(L / T)
        filled = L + per_fragment
    else:
        per_fragment = math.ceil((L + 1) / T)
        filled = L + 1
    facts["rows_per_fragment"] = per_fragment
    facts["padding"] = 1 - filled / (per_fragment * facts["slots_per_row"])
    if config.is_multi_agent:
        return facts
    fragments = num_fragments(config)
    facts["rows_per_batch"] = fragments * per_fragment
    minibatch_size = getattr(config, "minibatch_size", None)
    if minibatch_size is not None:
        trained = fragments * (math.ceil(L / T) if connected else per_fragment)
        filled = fragments * min(filled, trained // fragments * facts["slots_per_row"])
        per_learner = max(1, config.num_learners or 0)
        minibatches = max(1, round(filled / per_learner / minibatch_size))
        facts["rows_per_minibatch"] = math.ceil(trained / per_learner / minibatches)
    return facts


def num_fragments(config: AlgorithmConfig) -> int:
    """Fragments of a train batch: all EnvRunners sample until there are enough steps."""
    # IMPALA and APPO take what single EnvRunners send.
    num_runners = 1 if isinstance(config, IMPALAConfig) else config.num_env_runners or 1
    num_envs = num_runners * (config.num_envs_per_env_runner or 1)
    steps = num_envs * config.get_rollout_fragment_length()
    return math.ceil(config.total_train_batch_size / steps) * num_envs


def stored_states(
    config: AlgorithmConfig | None, max_seq_len: int, state_bytes: int
) -> dict[str, dict[str, int]]:
    """Bytes of states in episodes, in the two ways to store them.

    Args:
        config: The algorithm's config, None for a module alone.
        max_seq_len: Steps T of a row.
        state_bytes: Bytes of one state.

    Returns:
        `per_row`, and `per_train_batch` where that does not depend on the data; in each `connect`,
        one state a row, and `rllib`, one a step.
    """
    stored = {"per_row": {"connect": state_bytes, "rllib": max_seq_len * state_bytes}}
    if config is None or config.is_offline or config.is_multi_agent or replays(config):
        return stored
    L, fragments = config.get_rollout_fragment_length(), num_fragments(config)
    stored["per_train_batch"] = {
        "connect": fragments * math.ceil((L + 1) / max_seq_len) * state_bytes,
        "rllib": fragments * L * state_bytes,
    }
    return stored


def replays(config: AlgorithmConfig) -> bool:
    """Whether the algorithm trains on what a replay buffer returns."""
    return bool(getattr(config, "replay_buffer_config", None))


def _name(config: AlgorithmConfig) -> str:
    return getattr(config.algo_class, "__name__", type(config).__name__)
