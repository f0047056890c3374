"""What `connect` does for each algorithm: its Learner, its checks, the settings it completes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo.appo import APPOConfig
from ray.rllib.algorithms.dqn.default_dqn_rl_module import DefaultDQNRLModule
from ray.rllib.algorithms.dqn.dqn import DQNConfig
from ray.rllib.algorithms.impala.impala import IMPALAConfig
from ray.rllib.algorithms.ppo.ppo import PPOConfig
from ray.rllib.algorithms.sac.sac import SACConfig

from connectors.learners import (
    MemoryAPPOTorchLearner,
    MemoryDQNTorchLearner,
    MemoryIMPALATorchLearner,
    MemoryLearnerMixin,
    MemoryPPOTorchLearner,
    MemorySACTorchLearner,
)
from connectors.replay_settings import use_sequence_replay, use_sequence_replay_in_sac

RowLengths = Mapping[str, int]
"""`max_seq_len` of each module with memory, by module ID."""


@dataclass(frozen=True)
class Support:
    """How one algorithm is served.

    Args:
        config_class: The algorithm's config.
        learner_class: Our Learner for it.
        prepare: Checks and completes its settings, in place.
        bootstrap_slot: Whether its rows need a slot for the step that follows their last one.
    """

    config_class: type[AlgorithmConfig]
    learner_class: type[MemoryLearnerMixin]
    prepare: Callable[[Any, RowLengths], None]
    bootstrap_slot: bool = False


def support_for(config: AlgorithmConfig) -> Support:
    """The first entry whose config class the config is an instance of.

    Raises:
        ValueError: if there is none.
    """
    for support in SUPPORTED:
        if isinstance(config, support.config_class):
            return support
    names = ", ".join(f"`{support.config_class.__name__}`" for support in SUPPORTED)
    raise ValueError(
        f"`connect` got a `{type(config).__name__}`, but supports {names} only. Use one of them, "
        "or leave `connect` out: modules with memory also run on RLlib's default connectors."
    )


def learner_class(config: AlgorithmConfig, support: Support) -> type:
    """Our Learner, or the user's own where it is made for modules with memory.

    Raises:
        ValueError: if it is not.
    """
    ours, current = support.learner_class, config.learner_class
    if issubclass(current, MemoryLearnerMixin):
        return current
    # Ours does all that RLlib's own class does, and that of no one else.
    if issubclass(ours, current):
        return ours
    raise ValueError(
        f"`learner_class` is `{current.__name__}`, which lacks what modules with memory need. "
        f"Derive it from `{ours.__name__}`, or put `MemoryLearnerMixin` first among its bases."
    )


def keep_lookback(config: AlgorithmConfig, row_lengths: RowLengths) -> None:
    """Has the steps before a cut travel with what follows it.

    With several Learners RLlib cuts episodes to share them out. The state at such a cut is rebuilt
    from the observations before it.
    """
    if row_lengths and (config.num_learners or 0) > 1:
        needed = max(row_lengths.values())
        config.env_runners(
            episode_lookback_horizon=max(config.episode_lookback_horizon or 0, needed)
        )


def check_minibatch_size(
    config: AlgorithmConfig, row_lengths: RowLengths, *, bootstrap_slot: bool = False
) -> None:
    """Refuses minibatches that may hold no row.

    Raises:
        ValueError: if they may.
    """
    minibatch_size = getattr(config, "minibatch_size", None)
    if minibatch_size is None or not row_lengths:
        return
    slots = max(row_lengths.values()) + bootstrap_slot
    # One more than the slots: RLlib takes `int(B * (minibatch_size / N))` rows, and 49 full ones
    # times 1 / 49 is less than 1 to a computer.
    needed = slots + 1
    if minibatch_size < needed:
        raise ValueError(
            f"`minibatch_size` is {minibatch_size}, but must be at least {needed}, above the "
            f"{slots} slots of a row: a minibatch is made of whole rows, and RLlib would loop "
            "forever on empty ones. Set `config.training(minibatch_size=...)` to that or more, or "
            "lower `max_seq_len`."
        )


def _prepare_ppo(config: PPOConfig, row_lengths: RowLengths) -> None:
    check_minibatch_size(config, row_lengths)
    keep_lookback(config, row_lengths)


def _prepare_impala(config: IMPALAConfig, row_lengths: RowLengths) -> None:
    # Nothing cuts episodes: RLlib shares out what each EnvRunner sent, in one piece.
    check_minibatch_size(config, row_lengths, bootstrap_slot=True)
    num_learners = config.num_learners or 0
    if config.minibatch_size is not None and config.rollout_fragment_length == "auto":
        raise ValueError(
            '`rollout_fragment_length` is "auto", but must be a number where `minibatch_size` is '
            "set: RLlib requires the one to divide the other. Set "
            "`config.env_runners(rollout_fragment_length=...)`."
        )
    if config.minibatch_size is not None and num_learners > 1:
        raise ValueError(
            f"`minibatch_size` is {config.minibatch_size}, but must be None with {num_learners} "
            "Learners: each would cut its rows into a number of minibatches of its own, and the "
            "Learners would wait for one another for ever. Lower `train_batch_size_per_learner` "
            "instead."
        )
    _check_samples_for_all_learners(config, num_learners)


def _check_samples_for_all_learners(config: IMPALAConfig, num_learners: int) -> None:
    if num_learners < 2 or config.num_aggregator_actors_per_learner:
        return
    steps = (config.num_envs_per_env_runner or 1) * config.get_rollout_fragment_length()
    # RLlib deals out whole samples, and a Learner without one fails while the others wait for it.
    if math.ceil(config.total_train_batch_size / steps) < num_learners:
        raise ValueError(
            f"`train_batch_size_per_learner` is {config.train_batch_size_per_learner}, but must be "
            f"at least {steps} with {num_learners} Learners: an EnvRunner sends so many steps in "
            "one piece (`rollout_fragment_length` times `num_envs_per_env_runner`), and each "
            "Learner needs a piece for each batch. Raise it, or lower one of those."
        )


def _prepare_dqn(config: Any, row_lengths: RowLengths) -> None:
    if not row_lengths:
        return
    module_class = config.rl_module_spec.module_class
    if issubclass(module_class, DefaultDQNRLModule):
        raise ValueError(
            f"`{module_class.__name__}` with `use_lstm` cannot be trained on replayed rows, and "
            "explores for one environment only. Use a module of this package, such as "
            "`DeepLinearAttentionQRLModule`."
        )
    n_step, max_seq_len = config.n_step, max(row_lengths.values())
    if isinstance(n_step, bool) or not isinstance(n_step, int) or not 1 <= n_step < max_seq_len:
        raise ValueError(
            f"`n_step` is {n_step!r}, but must be an integer from 1 to {max_seq_len - 1}: a "
            "replayed row has `max_seq_len` - 1 steps. Set `config.training(n_step=...)`."
        )
    if config.noisy:
        raise ValueError(
            "`noisy` is True, but modules with memory have no noisy layers. Set "
            "`config.training(noisy=False, epsilon=...)`."
        )
    use_sequence_replay(config, row_lengths, config.burn_in_len)


def _prepare_sac(config: AlgorithmConfig, row_lengths: RowLengths) -> None:
    n_step = getattr(config, "n_step", 1)
    if row_lengths and n_step != 1:
        raise ValueError(
            f"`n_step` is {n_step!r}, but must be 1 for SAC with a memory: its targets are those "
            "of single steps. Set `config.training(n_step=1)`."
        )
    use_sequence_replay_in_sac(config, row_lengths)


SUPPORTED = (
    Support(PPOConfig, MemoryPPOTorchLearner, _prepare_ppo),
    # A subclass of IMPALA's config, so before it.
    Support(APPOConfig, MemoryAPPOTorchLearner, _prepare_impala, bootstrap_slot=True),
    Support(IMPALAConfig, MemoryIMPALATorchLearner, _prepare_impala, bootstrap_slot=True),
    Support(DQNConfig, MemoryDQNTorchLearner, _prepare_dqn),
    Support(SACConfig, MemorySACTorchLearner, _prepare_sac),
)
