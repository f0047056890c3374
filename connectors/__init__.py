"""How sequences and recurrent states travel between RLlib's EnvRunners and Learners.

Folders are the stages of the way: `rollout` on EnvRunners, `rows` on Learners, `replay` and
`offline` between them, `learners` behind them; `setup` plugs all in, `acting` and `serving` use the
result, and `monitoring` names what is measured.
`agents`, `snapshots`, `trials` and `validation` are the ground that all stages share.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from connectors.acting.policy import MemoryPolicy
    from connectors.acting.saving import save_checkpoint
    from connectors.learners import (
        MemoryAPPOTorchLearner,
        MemoryDQNTorchLearner,
        MemoryIMPALATorchLearner,
        MemoryLearnerMixin,
        MemoryMARWILTorchLearner,
        MemoryPPOTorchLearner,
        MemorySACTorchLearner,
    )
    from connectors.monitoring.callback import MemoryMetrics
    from connectors.offline.recording import RecordingEnvRunner, RecordingMultiAgentEnvRunner
    from connectors.replay.buffer import SequenceReplayBuffer
    from connectors.rollout.build_module_batch import BuildModuleBatch
    from connectors.rollout.divisible_episode import DivisibleEpisode
    from connectors.rollout.format_actions import FormatActions
    from connectors.rollout.multi_agent_runner import MemoryMultiAgentEnvRunner
    from connectors.rollout.previous_steps import AddPreviousActionsRewards
    from connectors.rollout.sample_actions import SampleActions
    from connectors.rows.advantages import ComputeAdvantages
    from connectors.rows.build_train_batch import BuildTrainBatch
    from connectors.setup.connect import connect
    from connectors.setup.starting_point import starting_point
    from connectors.snapshots import StateSnapshot

# Where each public name is. They are imported at first use: `connectors.replay` needs no Learner.
_HOMES = {
    "AddPreviousActionsRewards": "rollout.previous_steps",
    "BuildModuleBatch": "rollout.build_module_batch",
    "BuildTrainBatch": "rows.build_train_batch",
    "ComputeAdvantages": "rows.advantages",
    "DivisibleEpisode": "rollout.divisible_episode",
    "FormatActions": "rollout.format_actions",
    "MemoryAPPOTorchLearner": "learners",
    "MemoryDQNTorchLearner": "learners",
    "MemoryIMPALATorchLearner": "learners",
    "MemoryLearnerMixin": "learners",
    "MemoryMARWILTorchLearner": "learners",
    "MemoryMetrics": "monitoring.callback",
    "MemoryMultiAgentEnvRunner": "rollout.multi_agent_runner",
    "MemoryPPOTorchLearner": "learners",
    "MemoryPolicy": "acting.policy",
    "MemorySACTorchLearner": "learners",
    "RecordingEnvRunner": "offline.recording",
    "RecordingMultiAgentEnvRunner": "offline.recording",
    "SampleActions": "rollout.sample_actions",
    "SequenceReplayBuffer": "replay.buffer",
    "StateSnapshot": "snapshots",
    "connect": "setup.connect",
    "save_checkpoint": "acting.saving",
    "starting_point": "setup.starting_point",
}

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
    "RecordingMultiAgentEnvRunner",
    "SampleActions",
    "SequenceReplayBuffer",
    "StateSnapshot",
    "connect",
    "save_checkpoint",
    "starting_point",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
