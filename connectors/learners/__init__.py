"""Learners that install the connectors' own pieces and guard the weights, one algorithm a file."""

from connectors.learners.appo import MemoryAPPOTorchLearner
from connectors.learners.dqn import MemoryDQNTorchLearner
from connectors.learners.impala import MemoryIMPALATorchLearner
from connectors.learners.marwil import MemoryMARWILTorchLearner
from connectors.learners.mixin import MemoryLearnerMixin
from connectors.learners.ppo import MemoryPPOTorchLearner
from connectors.learners.replay import ReplayLearnerMixin
from connectors.learners.sac import MemorySACTorchLearner

__all__ = [
    "MemoryAPPOTorchLearner",
    "MemoryDQNTorchLearner",
    "MemoryIMPALATorchLearner",
    "MemoryLearnerMixin",
    "MemoryMARWILTorchLearner",
    "MemoryPPOTorchLearner",
    "MemorySACTorchLearner",
    "ReplayLearnerMixin",
]
