"""How sequences and recurrent states travel between RLlib's EnvRunners and Learners."""

from connectors.advantages import ComputeAdvantages
from connectors.connect import connect
from connectors.divisible import DivisibleEpisode
from connectors.env_to_module import BuildModuleBatch
from connectors.format_actions import FormatActions
from connectors.learner import BuildTrainBatch
from connectors.learners import (
    MemoryAPPOTorchLearner,
    MemoryDQNTorchLearner,
    MemoryIMPALATorchLearner,
    MemoryLearnerMixin,
    MemoryMARWILTorchLearner,
    MemoryPPOTorchLearner,
    MemorySACTorchLearner,
)
from connectors.metrics import MemoryMetrics
from connectors.module_to_env import SampleActions
from connectors.multi_agent_runner import MemoryMultiAgentEnvRunner
from connectors.policy import MemoryPolicy
from connectors.previous_steps import AddPreviousActionsRewards
from connectors.recording import RecordingEnvRunner
from connectors.replay import SequenceReplayBuffer
from connectors.saving import save_checkpoint
from connectors.snapshots import StateSnapshot

__all__ = [
    "AddPreviousActionsRewards",
    "BuildModuleBatch",
    "BuildTrainBatch",
    "ComputeAdvantages",
    "DivisibleEpisode",
    "FormatActions",
    "MemoryAPPOTorchLearner",
    "MemoryDQNTorchLearner",
    "MemoryIMPALATorchLearner",
    "MemoryLearnerMixin",
    "MemoryMARWILTorchLearner",
    "MemoryMetrics",
    "MemoryMultiAgentEnvRunner",
    "MemoryPPOTorchLearner",
    "MemoryPolicy",
    "MemorySACTorchLearner",
    "RecordingEnvRunner",
    "SampleActions",
    "SequenceReplayBuffer",
    "StateSnapshot",
    "connect",
    "save_checkpoint",
]
