"""What `connect` checks and completes in the settings of each algorithm, before training starts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.dqn.default_dqn_rl_module import DefaultDQNRLModule
from ray.rllib.algorithms.impala.impala import IMPALAConfig
from ray.rllib.algorithms.ppo.ppo import PPOConfig
from ray.rllib.algorithms.sac.default_sac_rl_module import DefaultSACRLModule
from ray.rllib.algorithms.sac.sac import SACConfig
from ray.rllib.core.rl_module.apis import TargetNetworkAPI

from connectors.offline.evaluation import MemoryOfflineEvaluationRunner, PassRecordedRows
from connectors.offline.reading import RecordedEpisodes
from connectors.setup.module_specs import module_classes
from connectors.setup.replay_settings import use_sequence_replay
from connectors.setup.search_spaces import is_searched

# What decides on how many samples there are for the Learners.
_SAMPLE_SETTINGS = (
    "num_aggregator_actors_per_learner",
    "num_env_runners",
    "num_envs_per_env_runner",
    "rollout_fragment_length",
    "train_batch_size",
    "train_batch_size_per_learner",
)

RowLengths = Mapping[str, int]
"""`max_seq_len` of each module with memory, by module ID."""


def check_num_learners(config: AlgorithmConfig) -> None:
    """Refuses what is no number of Learners.

    Raises:
        ValueError: if it is none.
    """
    num_learners: Any = config.num_learners
    if num_learners is None or is_searched(config, "num_learners"):
        return
    if isinstance(num_learners, bool) or not isinstance(num_learners, int) or num_learners < 0:
        raise ValueError(
            f"`num_learners` is {num_learners!r}, but must be an integer of at least 0: 0 trains "
            "in the process of the algorithm, 1 or more in so many processes of their own. Set "
            "`config.learners(num_learners=...)`."
        )


def keep_lookback(config: AlgorithmConfig, row_lengths: RowLengths) -> None:
    """Has the steps before a cut travel with what follows it.

    With several Learners RLlib cuts episodes to share them out. The state at such a cut is rebuilt
    from the observations before it.
    """
    if not row_lengths or is_searched(config, "episode_lookback_horizon"):
        return
    # More steps than a single Learner needs do no harm.
    if is_searched(config, "num_learners") or (config.num_learners or 0) > 1:
        needed = max(row_lengths.values())
        config.env_runners(
            episode_lookback_horizon=max(config.episode_lookback_horizon or 0, needed)
        )


def check_minibatch_size(
    config: AlgorithmConfig, row_lengths: RowLengths, *, bootstrap_slot: bool = False
) -> None:
    """Refuses minibatches that are smaller than a row.

    Raises:
        ValueError: if they are.
    """
    minibatch_size: Any = config.minibatch_size
    if minibatch_size is None or not row_lengths or is_searched(config, "minibatch_size"):
        return
    slots = max(row_lengths.values()) + bootstrap_slot
    if minibatch_size < slots:
        raise ValueError(
            f"`minibatch_size` is {minibatch_size}, but must be at least {slots}, the slots of a "
            "row: a minibatch is made of whole rows. Set `config.training(minibatch_size=...)` to "
            "that or more, or lower `max_seq_len`."
        )


def prepare_ppo(config: PPOConfig, row_lengths: RowLengths) -> None:
    """Rows and minibatches for PPO.

    Raises:
        ValueError: if a minibatch is smaller than a row, or its size is needed and missing.
    """
    check_minibatch_size(config, row_lengths)
    keep_lookback(config, row_lengths)
    if is_searched(config, "num_learners"):
        return
    num_learners = config.num_learners or 0
    if config.minibatch_size is None and num_learners > 1:
        raise ValueError(
            f"`minibatch_size` is None, but must be a number with {num_learners} Learners: RLlib "
            "computes from it how many minibatches all of them take. Set "
            "`config.training(minibatch_size=...)`, to `train_batch_size_per_learner` for one "
            "minibatch an epoch."
        )


def prepare_impala(config: IMPALAConfig, row_lengths: RowLengths) -> None:
    """Rows, minibatches and samples for APPO and IMPALA.

    Raises:
        ValueError: if they would leave a Learner waiting, or RLlib without an end.
    """
    # Nothing cuts episodes: RLlib shares out what each EnvRunner sent, in one piece.
    check_minibatch_size(config, row_lengths, bootstrap_slot=True)
    if config.minibatch_size is not None and config.rollout_fragment_length == "auto":
        raise ValueError(
            '`rollout_fragment_length` is "auto", but must be a number where `minibatch_size` is '
            "set: RLlib requires the one to divide the other. Set "
            "`config.env_runners(rollout_fragment_length=...)`."
        )
    if is_searched(config, "num_learners"):
        return
    _check_samples_for_all_learners(config, config.num_learners or 0)


def _check_samples_for_all_learners(config: IMPALAConfig, num_learners: int) -> None:
    if num_learners < 2 or is_searched(config, *_SAMPLE_SETTINGS):
        return
    if config.num_aggregator_actors_per_learner:
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


def prepare_dqn(config: Any, row_lengths: RowLengths) -> None:
    """Sequence replay for DQN.

    Raises:
        ValueError: if the module, `n_step`, `noisy` or what is replayed is not supported.
    """
    if not row_lengths:
        return
    _check_modules(config, row_lengths, DefaultDQNRLModule, "MemoryQRLModule")
    n_step, max_seq_len = config.n_step, min(row_lengths.values())
    is_count = isinstance(n_step, int) and not isinstance(n_step, bool)
    if not is_searched(config, "n_step") and not (is_count and 1 <= n_step < max_seq_len):
        raise ValueError(
            f"`n_step` is {n_step!r}, but must be an integer from 1 to {max_seq_len - 1}: a "
            "replayed row has `max_seq_len` - 1 steps. Set `config.training(n_step=...)`."
        )
    if config.noisy and not is_searched(config, "noisy"):
        raise ValueError(
            "`noisy` is True, but modules with memory have no noisy layers. Set "
            "`config.training(noisy=False, epsilon=...)`."
        )
    use_sequence_replay(config, row_lengths)


def prepare_sac(config: SACConfig, row_lengths: RowLengths) -> None:
    """Sequence replay for SAC.

    Raises:
        ValueError: if the module, `n_step` or what is replayed is not supported.
    """
    if not row_lengths:
        return
    _check_modules(config, row_lengths, DefaultSACRLModule, "MemorySACRLModule")
    n_step = config.n_step
    if n_step != 1 and not is_searched(config, "n_step"):
        raise ValueError(
            f"`n_step` is {n_step!r}, but must be 1 for SAC with a memory: its targets are those "
            "of single steps. Set `config.training(n_step=1)`."
        )
    use_sequence_replay(config, row_lengths)


def _check_modules(
    config: AlgorithmConfig, row_lengths: RowLengths, rllibs_class: type, ours: str
) -> None:
    """Refuses RLlib's LSTM, and what has no target network."""
    classes = module_classes(config)
    for module_class in (classes[module_id] for module_id in row_lengths):
        name = module_class.__name__
        if issubclass(module_class, rllibs_class):
            raise ValueError(
                f"`{name}` with `use_lstm` cannot be trained on replayed rows, nor act in several "
                f"environments (Ray 2.60). Use a module of this package, such as `{ours}`."
            )
        if not issubclass(module_class, TargetNetworkAPI):
            raise ValueError(
                f"`{name}` has no target network, but `{type(config).__name__}` learns from one. "
                f"Implement RLlib's `TargetNetworkAPI`, or derive the module from `{ours}`."
            )


def prepare_marwil(config: AlgorithmConfig, row_lengths: RowLengths) -> None:
    """Recorded episodes for BC and MARWIL.

    Raises:
        ValueError: if episodes are not read whole, or if a setting does not fit them.
    """
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
    if settings.burnin_len and not is_searched(config, "burnin_len"):
        raise ValueError(
            f"`burnin_len` is {settings.burnin_len}, but must be 0: states are computed from the "
            "episodes' first steps and need no burn-in, which would only leave steps out."
        )
    if settings.bc_logstd_coeff and not is_searched(config, "bc_logstd_coeff"):
        raise ValueError(
            f"`bc_logstd_coeff` is {settings.bc_logstd_coeff}, but must be 0: Ray 2.60 cannot "
            "compute that term for batches with a `LOSS_MASK`, and fails in the first update."
        )
    for setting in ("prelearner_class", "offline_data_class"):
        value = getattr(config, setting)
        if value is not None and not issubclass(value, (RecordedEpisodes, PassRecordedRows)):
            raise ValueError(
                f"`{setting}` is `{value.__name__}`, but episodes go to the Learner as they were "
                "recorded. Change them in a learner connector: "
                "`config.learners(learner_connector=...)`."
            )
    several_learners = is_searched(config, "num_learners") or (config.num_learners or 0) > 1
    if several_learners and (is_searched(config, "beta") or settings.beta == 0.0):
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
    runner_class = config.offline_eval_runner_class or MemoryOfflineEvaluationRunner
    if config.offline_evaluation_type == "eval_loss" and (
        runner_class is MemoryOfflineEvaluationRunner
    ):
        config.evaluation(offline_eval_runner_class=runner_class)
        # Training does not use it. Evaluation has no other setting for this.
        config.offline_data(prelearner_class=PassRecordedRows)
