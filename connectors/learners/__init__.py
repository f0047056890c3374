"""Learners that install the connectors' own pieces and guard the weights, one algorithm a file."""

from connectors.learners.marwil import MemoryMARWILTorchLearner
from connectors.learners.mixin import NUM_NONFINITE_GRADIENTS, MemoryLearnerMixin
from connectors.learners.ppo import MemoryPPOTorchLearner

__all__ = [
    "NUM_NONFINITE_GRADIENTS",
    "MemoryLearnerMixin",
    "MemoryMARWILTorchLearner",
    "MemoryPPOTorchLearner",
]
