"""What `connect` does for each algorithm: its Learner, its checks, the settings it completes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.cql.cql import CQLConfig
from ray.rllib.algorithms.iql.iql import IQLConfig
from ray.rllib.algorithms.marwil.marwil import MARWILConfig
from ray.rllib.algorithms.ppo.ppo import PPOConfig

from connectors.learners import (
    MemoryLearnerMixin,
    MemoryMARWILTorchLearner,
    MemoryPPOTorchLearner,
)
from connectors.offline import RecordedEpisodes

RowLengths = Mapping[str, int]
"""`max_seq_len` of each module with memory, by module ID."""


@dataclass(frozen=True)
class Support:
    """How one algorithm is served.

    Args:
        config_class: The algorithm's config.
        learner_class: Our Learner for it.
        prepare: Checks and completes its settings, in place.
    """

    config_class: type[AlgorithmConfig]
    learner_class: type[MemoryLearnerMixin]
    prepare: Callable[[AlgorithmConfig, RowLengths], None]


def support_for(config: AlgorithmConfig) -> Support:
    """The first entry whose config class the config is an instance of.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(config, UNSUPPORTED):
        raise ValueError(
            f"`connect` got a `{type(config).__name__}`, whose losses count padding as real steps "
            "and run critics without a state. Clone recorded episodes with BC or MARWIL instead."
        )
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


def check_minibatch_size(config: AlgorithmConfig, row_lengths: RowLengths) -> None:
    """Refuses minibatches that are smaller than a row.

    Raises:
        ValueError: if they are.
    """
    minibatch_size = getattr(config, "minibatch_size", None)
    max_seq_len = max(row_lengths.values(), default=0)
    if minibatch_size is not None and minibatch_size < max_seq_len:
        raise ValueError(
            f"`minibatch_size` is {minibatch_size}, but must be at least `max_seq_len` "
            f"({max_seq_len}): a minibatch is made of whole rows, and RLlib would loop forever on "
            f"empty ones. Set `config.training(minibatch_size=...)` to {max_seq_len} or more."
        )


def _prepare_ppo(config: AlgorithmConfig, row_lengths: RowLengths) -> None:
    check_minibatch_size(config, row_lengths)
    keep_lookback(config, row_lengths)


def _prepare_marwil(config: AlgorithmConfig, row_lengths: RowLengths) -> None:
    settings: Any = config
    if not config.input_read_episodes:
        raise ValueError(
            "`input_read_episodes` is False, but must be True: only whole episodes tell a policy "
            "with memory what it would remember. Record with `config.offline_data(output=..., "
            "output_write_episodes=True)` and read with `input_read_episodes=True`."
        )
    if not config.dataset_num_iters_per_learner:
        raise ValueError(
            f"`dataset_num_iters_per_learner` is {config.dataset_num_iters_per_learner}, but must "
            "be at least 1: the number of updates an iteration. Set it with "
            "`config.offline_data(dataset_num_iters_per_learner=...)`."
        )
    if settings.burnin_len:
        raise ValueError(
            f"`burnin_len` is {settings.burnin_len}, but must be 0: states are computed from the "
            "episodes' first steps and need no burn-in, which would only leave steps out."
        )
    if settings.bc_logstd_coeff:
        raise ValueError(
            f"`bc_logstd_coeff` is {settings.bc_logstd_coeff}, but must be 0: Ray 2.60 cannot "
            "compute that term for batches with a `LOSS_MASK`, and fails in the first update."
        )
    for setting in ("prelearner_class", "offline_data_class"):
        value = getattr(config, setting)
        if value is not None and not issubclass(value, RecordedEpisodes):
            raise ValueError(
                f"`{setting}` is `{value.__name__}`, but episodes go to the Learner as they were "
                "recorded. Change them in a learner connector: "
                "`config.learners(learner_connector=...)`."
            )
    if settings.beta == 0.0 and (config.num_learners or 0) > 1:
        # Cloning trains no value function, and torch's DDP has to be told so.
        config.framework(
            torch_ddp_kwargs={**settings.torch_ddp_kwargs, "find_unused_parameters": True}
        )
    config.offline_data(
        offline_data_class=RecordedEpisodes,
        # Nothing is mapped: where mapped data should be kept, BC's default, keep the episodes.
        # Reading files anew for each pass takes seconds.
        materialize_data=config.materialize_data or config.materialize_mapped_data,
    )


SUPPORTED = (
    Support(PPOConfig, MemoryPPOTorchLearner, _prepare_ppo),
    # BC's config too, which inherits from MARWIL's.
    Support(MARWILConfig, MemoryMARWILTorchLearner, _prepare_marwil),
)
# They inherit from configs above.
UNSUPPORTED = (CQLConfig, IQLConfig)
