"""How sequences and recurrent states travel between RLlib's EnvRunners and Learners."""

from connectors.advantages import ComputeAdvantages
from connectors.connect import connect
from connectors.env_to_module import BuildModuleBatch
from connectors.learner import BuildTrainBatch
from connectors.learners import (
    MemoryLearnerMixin,
    MemoryMARWILTorchLearner,
    MemoryPPOTorchLearner,
)
from connectors.module_to_env import FormatActions, SampleActions
from connectors.previous_steps import AddPreviousActionsRewards
from connectors.recording import RecordingEnvRunner
from connectors.snapshots import StateSnapshot

__all__ = [
    "AddPreviousActionsRewards",
    "BuildModuleBatch",
    "BuildTrainBatch",
    "ComputeAdvantages",
    "FormatActions",
    "MemoryLearnerMixin",
    "MemoryMARWILTorchLearner",
    "MemoryPPOTorchLearner",
    "RecordingEnvRunner",
    "SampleActions",
    "StateSnapshot",
    "connect",
]
