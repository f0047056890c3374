"""Plugs the connectors into an algorithm's config."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.utils import force_list

from connectors.acting.saving import require_learners
from connectors.offline.recording import record_without_states
from connectors.rollout.multi_agent_runner import MemoryMultiAgentEnvRunner
from connectors.setup.algorithm_settings import check_num_learners
from connectors.setup.algorithms import Support, check_learner_class, support_for
from connectors.setup.environments import check_env
from connectors.setup.module_specs import complete_module_specs, row_lengths
from connectors.setup.pipelines import (
    complete_env_to_module,
    complete_learner,
    complete_module_to_env,
    user_pieces,
)
from connectors.setup.search_spaces import check_search_spaces, has_search_spaces, is_searched

# All that `connect` sets, modules aside. Private attributes of Ray 2.60: a config has setters for
# its builders, but no getters. A test fails if Ray renames them, or if more is set.
ARRANGED = (
    "_env_to_module_connector",
    "add_default_connectors_to_env_to_module_pipeline",
    "_module_to_env_connector",
    "add_default_connectors_to_module_to_env_pipeline",
    "_learner_connector",
    "learner_class",
    "env_runner_cls",
    "callbacks_on_algorithm_init",
    "callbacks_on_checkpoint_loaded",
    "episode_lookback_horizon",
    "replay_buffer_config",
    "offline_data_class",
    "offline_eval_runner_class",
    "prelearner_class",
    "materialize_data",
    "torch_ddp_kwargs",
)


def connect(
    config: AlgorithmConfig, *, episodes_per_trial: int = 1, pack_rows: bool = True
) -> AlgorithmConfig:
    """Plugs the sequence connectors into a config, around connectors it already has.

    Call it after all other settings. Calling it twice changes nothing. What it needs of the
    settings is read, and checked again, when the algorithm is built.

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
        config: A config of PPO, APPO, IMPALA, DQN, SAC, BC or MARWIL, for one agent or several. It
            is changed in place. Where it has a memory's config and names no module
            class, it gets that of the algorithm.
        episodes_per_trial: Episodes over which a sub-environment keeps its agents' states. With 1
            each episode starts from the initial state. To train on recorded episodes, the number
            that they were recorded with.
        pack_rows: Whether a training row of a module of this package may hold several short
            episodes, told apart by `resets`. It computes the same from fewer rows.

    Returns:
        The same config.

    Raises:
        TypeError: if it is no config, but a class.
        ValueError: if the algorithm, its Learner or its EnvRunner class is not supported, if
            module class and model config do not go together, if `max_seq_len` of a module is
            missing or wrong, if settings of the algorithm do not fit rows, if one that has to be
            known is a search space, if the environment is a name that nobody registered, if
            `episodes_per_trial` is below 1 or at odds with other settings, or if `pack_rows` is no
            bool.
    """
    if isinstance(config, type):
        raise TypeError(
            f"`connect` got the class `{config.__name__}`, but needs a config. Make one: "
            f"`connect({config.__name__}())`."
        )
    support = support_for(config)
    check_env(config)
    _arrange(config, support, episodes_per_trial, pack_rows)
    return config


def _arrange(
    config: AlgorithmConfig, support: Support, episodes_per_trial: int, pack_rows: bool
) -> None:
    """Checks and sets all that a config needs, whatever environments this process knows."""
    check_search_spaces(config)
    check_num_learners(config)
    check_learner_class(config, support)
    _check_pipelines(config)
    _check_trials(config, episodes_per_trial)
    _check_packing(pack_rows)
    complete_module_specs(config, support.module_class)
    support.prepare(config, row_lengths(config))
    record_without_states(config)
    _set_multi_agent_runner(config)
    callbacks = force_list(config.callbacks_on_checkpoint_loaded)
    if require_learners not in callbacks:
        config.callbacks(on_checkpoint_loaded=[*callbacks, require_learners])
    _plug_in(config, episodes_per_trial, pack_rows)
    # Ours does all that RLlib's own class does; one of the user's stays.
    if not is_searched(config, "learner_class") and issubclass(
        support.learner_class, config.learner_class
    ):
        config.learners(learner_class=support.learner_class)


@dataclass
class ConnectorBuilder:
    """Builds a pipeline of ours around the user's, from the settings that hold when it is built.

    RLlib calls builders without the config, and carries them from one config into the next. But
    each EnvRunner and Learner makes a copy of its config first, so a builder reads the config that
    it was copied with: a trial's, or that of evaluation, or the one of a restored checkpoint.

    Attributes:
        setting: Which pipeline.
        user: The user's builder.
        config: What to read.
        episodes_per_trial: See `connect`.
        pack_rows: See `connect`.
    """

    setting: str
    user: Callable | None = field(compare=False)
    config: AlgorithmConfig = field(compare=False, repr=False)
    episodes_per_trial: int
    pack_rows: bool

    def __call__(self, *args: Any) -> list[ConnectorV2]:
        """The pieces; `args` are what RLlib passes for this pipeline."""
        verify(self.config, self.episodes_per_trial, self.pack_rows)
        pieces = user_pieces(self.user, self.setting, *args)
        if self.setting == "learner_connector":
            return complete_learner(pieces, self.config, self.episodes_per_trial, self.pack_rows)
        if self.setting == "module_to_env_connector":
            return complete_module_to_env(pieces, self.config)
        device = args[2] if len(args) > 2 else None
        return complete_env_to_module(pieces, self.config, self.episodes_per_trial, device)

    def __deepcopy__(self, memo: dict[int, Any]) -> ConnectorBuilder:
        # A copy is in the memo before its attributes are: the last config there is the one that is
        # being copied. There is none where Tune copies a config's attributes without it.
        copies = [copied for copied in memo.values() if isinstance(copied, AlgorithmConfig)]
        config = copies[-1] if copies else self.config
        return replace(self, user=copy.deepcopy(self.user, memo), config=config)


def verify(config: AlgorithmConfig, episodes_per_trial: int = 1, pack_rows: bool = True) -> None:
    """Checks that a config from which something is being built is still as `connect` leaves one.

    Raises:
        ValueError: if `connect` would refuse or change a setting.
    """
    # Of a config that a trial's was drawn from there is nothing to build.
    if has_search_spaces(config):
        return
    expected = config.copy(copy_frozen=False)
    # Of the copy, since a callback's copy need not equal the callback: no `functools.partial` does.
    found = {
        setting: copy.copy(value) if isinstance(value, list | dict) else value
        for setting, value in _arranged(expected).items()
    }
    if config.in_evaluation:
        # Its lengths and modes are RLlib's; nothing is trained on what it samples.
        _plug_in(expected, episodes_per_trial, pack_rows)
    else:
        _arrange(expected, support_for(expected), episodes_per_trial, pack_rows)
    for setting, value in _arranged(expected).items():
        if found[setting] != value:
            raise ValueError(
                f"`{setting}` was changed after `connect`, or a setting was that decides on it: it "
                f"is {_shown(found[setting])}, but must be {_shown(value)}. Call "
                "`connect(config)` after all other settings; what follows it, such as search "
                "spaces and `evaluation_config`, has to keep what it set."
            )


def _arranged(config: AlgorithmConfig) -> dict[str, Any]:
    arranged = {name.removeprefix("_"): getattr(config, name, None) for name in ARRANGED}
    spec: Any = config.rl_module_spec
    for module_id, module_spec in getattr(spec, "rl_module_specs", {"": spec}).items():
        arranged[f"module_class` of `{module_id}" if module_id else "module_class"] = (
            module_spec.module_class
        )
    return arranged


def _shown(value: Any) -> str:
    if isinstance(value, type):
        return f"`{value.__name__}`"
    if isinstance(value, ConnectorBuilder):
        return "that of `connect`"
    return repr(value)


def _plug_in(config: AlgorithmConfig, episodes_per_trial: int, pack_rows: bool) -> None:
    """Sets our builders around the user's; a builder of ours is not wrapped again."""

    def builder(setting: str) -> ConnectorBuilder:
        user = getattr(config, f"_{setting}")
        user = user.user if isinstance(user, ConnectorBuilder) else user
        return ConnectorBuilder(setting, user, config, episodes_per_trial, pack_rows)

    config.env_runners(
        env_to_module_connector=builder("env_to_module_connector"),
        add_default_connectors_to_env_to_module_pipeline=False,
        module_to_env_connector=builder("module_to_env_connector"),
        add_default_connectors_to_module_to_env_pipeline=False,
    )
    config.learners(learner_connector=builder("learner_connector"))


def _set_multi_agent_runner(config: AlgorithmConfig) -> None:
    """Sets our EnvRunner; one of the user's can stay where episodes are not shared out."""
    if not config.is_multi_agent:
        return
    current = config.env_runner_cls
    if current is None or issubclass(MemoryMultiAgentEnvRunner, current):
        config.env_runners(env_runner_cls=MemoryMultiAgentEnvRunner)
        return
    if is_searched(config, "num_learners") or issubclass(current, MemoryMultiAgentEnvRunner):
        return
    if (config.num_learners or 0) > 1:
        raise ValueError(
            f"`env_runner_cls` is `{current.__name__}`, whose episodes of several agents cannot be "
            "shared out over several Learners. Derive it from `MemoryMultiAgentEnvRunner`, or use "
            "one Learner."
        )


def _check_trials(config: AlgorithmConfig, episodes_per_trial: Any) -> None:
    if type(episodes_per_trial) is not int or episodes_per_trial < 1:
        raise ValueError(
            f"`episodes_per_trial` is {episodes_per_trial!r}, but must be an integer of at least "
            "1: the number of episodes over which states are kept. Use 1 to start each episode "
            "from the initial state."
        )
    if episodes_per_trial > 1 and config.batch_mode == "complete_episodes":
        raise ValueError(
            f"`episodes_per_trial` is {episodes_per_trial}, but `batch_mode` is "
            '"complete_episodes", with which RLlib resets all environments for each batch and a '
            "trial ends with its first episode. Use "
            '`config.env_runners(batch_mode="truncate_episodes")`.'
        )


def _check_packing(pack_rows: Any) -> None:
    if not isinstance(pack_rows, bool):
        raise ValueError(
            f"`pack_rows` is {pack_rows!r}, but must be True or False: whether a training row may "
            "hold several short episodes. Leave it out to pack them."
        )


def _check_pipelines(config: AlgorithmConfig) -> None:
    if not config.add_default_connectors_to_learner_pipeline:
        raise ValueError(
            "`add_default_connectors_to_learner_pipeline` is False, but must be True: our learner "
            "connector works in front of RLlib's default pieces. Leave the setting alone."
        )
