"""What the two EnvRunner pipelines share from step to step."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.core.rl_module.rl_module import RLModule

from connectors.snapshots import StateSnapshot
from connectors.validation import row_length

_KEY = "rllib_memory_rollout"


class RolloutMemory:
    """States of all sub-environments between two steps; RLlib drops it when it resets them.

    Attributes:
        module: The module that the states belong to.
        row_length: Its `max_seq_len`, None if it has no memory.
        state_in: Tree of batched tensors that the next (or running) module pass starts from.
        state_out: Tree of batched tensors that the last module pass returned; None once used.
        episode_ids: Episode of each row of `state_in`.
        snapshots: Snapshot of the row that each sub-environment is filling.
    """

    __slots__ = ("episode_ids", "module", "row_length", "snapshots", "state_in", "state_out")

    def __init__(self, module: RLModule):
        self.module = module
        self.row_length = row_length(module)
        if isinstance(module, torch.nn.Module):
            # RLlib sets this mode for each pass anyway, and back: a walk over all submodules that
            # it leaves out if there is nothing to set back.
            module.eval()
        self.state_in: Any = None
        self.state_out: Any = None
        self.episode_ids: list[str] = []
        self.snapshots: list[StateSnapshot | None] = []


def rollout_memory(shared_data: dict[str, Any], module: RLModule) -> RolloutMemory:
    """The memory kept in the runner's `shared_data`; a new one for a new module."""
    memory = shared_data.get(_KEY)
    if memory is None or memory.module is not module:
        memory = shared_data[_KEY] = RolloutMemory(module)
    return memory
