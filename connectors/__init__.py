"""How sequences and recurrent states travel between RLlib's EnvRunners and Learners."""

from connectors.advantages import ComputeAdvantages
from connectors.connect import connect
from connectors.env_to_module import BuildModuleBatch
from connectors.learner import BuildTrainBatch
from connectors.learners import (
    MemoryDQNTorchLearner,
    MemoryLearnerMixin,
    MemoryPPOTorchLearner,
    MemorySACTorchLearner,
)
from connectors.module_to_env import FormatActions, SampleActions
from connectors.replay import SequenceReplayBuffer
from connectors.snapshots import StateSnapshot

__all__ = [
    "BuildModuleBatch",
    "BuildTrainBatch",
    "ComputeAdvantages",
    "FormatActions",
    "MemoryDQNTorchLearner",
    "MemoryLearnerMixin",
    "MemoryPPOTorchLearner",
    "MemorySACTorchLearner",
    "SampleActions",
    "SequenceReplayBuffer",
    "StateSnapshot",
    "connect",
]
