"""What `connect` does for each algorithm: the table of its modules and Learners."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo.appo import APPOConfig
from ray.rllib.algorithms.cql.cql import CQLConfig
from ray.rllib.algorithms.dqn.dqn import DQNConfig
from ray.rllib.algorithms.impala.impala import IMPALAConfig
from ray.rllib.algorithms.iql.iql import IQLConfig
from ray.rllib.algorithms.marwil.marwil import MARWILConfig
from ray.rllib.algorithms.ppo.ppo import PPOConfig
from ray.rllib.algorithms.sac.sac import SACConfig
from ray.rllib.algorithms.tqc.tqc import TQCConfig

from connectors.learners import (
    MemoryAPPOTorchLearner,
    MemoryDQNTorchLearner,
    MemoryIMPALATorchLearner,
    MemoryLearnerMixin,
    MemoryMARWILTorchLearner,
    MemoryPPOTorchLearner,
    MemorySACTorchLearner,
)
from connectors.setup import algorithm_settings as settings
from connectors.setup.search_spaces import is_searched
from rlmodules.modules.actor_critic import MemoryRLModule
from rlmodules.modules.base import BaseMemoryRLModule
from rlmodules.modules.q_learning import MemoryQRLModule
from rlmodules.modules.sac import MemorySACRLModule


@dataclass(frozen=True)
class Support:
    """How one algorithm is served.

    Args:
        config_class: The algorithm's config.
        module_class: Our module for it, which any memory's config can be given to.
        learner_class: Our Learner for it.
        prepare: Checks and completes its settings, in place.
        bootstrap_slot: Whether its rows need a slot for the step that follows their last one.
    """

    config_class: type[AlgorithmConfig]
    module_class: type[BaseMemoryRLModule]
    learner_class: type[MemoryLearnerMixin]
    prepare: Callable[[Any, settings.RowLengths], None]
    bootstrap_slot: bool = False


def support_for(config: AlgorithmConfig) -> Support:
    """The first entry whose config class the config is an instance of.

    Raises:
        ValueError: if there is none.
    """
    if isinstance(config, UNSUPPORTED):
        raise ValueError(
            f"`connect` got a `{type(config).__name__}`, whose losses count padding as real steps "
            "and run critics without a state. Use SAC, or BC and MARWIL on recorded episodes."
        )
    for support in SUPPORTED:
        if isinstance(config, support.config_class):
            return support
    names = ", ".join(f"`{support.config_class.__name__}`" for support in SUPPORTED)
    raise ValueError(
        f"`connect` got a `{type(config).__name__}`, but supports {names} only. Use one of them, "
        "or leave `connect` out: modules with memory also run on RLlib's default connectors."
    )


def check_learner_class(config: AlgorithmConfig, support: Support) -> None:
    """Takes RLlib's own Learner, or the user's where it is made for modules with memory.

    Raises:
        ValueError: if it is neither.
    """
    if is_searched(config, "learner_class"):
        return
    ours, current = support.learner_class, config.learner_class
    if not issubclass(current, MemoryLearnerMixin) and not issubclass(ours, current):
        raise ValueError(
            f"`learner_class` is `{current.__name__}`, which lacks what modules with memory need. "
            f"Derive it from `{ours.__name__}`, or put `MemoryLearnerMixin` first among its bases."
        )


SUPPORTED = (
    Support(PPOConfig, MemoryRLModule, MemoryPPOTorchLearner, settings.prepare_ppo),
    # A subclass of IMPALA's config, so before it.
    Support(
        APPOConfig,
        MemoryRLModule,
        MemoryAPPOTorchLearner,
        settings.prepare_impala,
        bootstrap_slot=True,
    ),
    Support(
        IMPALAConfig,
        MemoryRLModule,
        MemoryIMPALATorchLearner,
        settings.prepare_impala,
        bootstrap_slot=True,
    ),
    Support(DQNConfig, MemoryQRLModule, MemoryDQNTorchLearner, settings.prepare_dqn),
    Support(SACConfig, MemorySACRLModule, MemorySACTorchLearner, settings.prepare_sac),
    # BC's config too, which inherits from MARWIL's.
    Support(MARWILConfig, MemoryRLModule, MemoryMARWILTorchLearner, settings.prepare_marwil),
)
# They inherit from configs above.
UNSUPPORTED = (CQLConfig, IQLConfig, TQCConfig)
