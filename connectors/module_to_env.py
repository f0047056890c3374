"""From the module's outputs to actions, and to what the episodes record."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.module_to_env import GetActions
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.numpy import convert_to_numpy

from connectors.agents import agent_at, is_multi_agent, modules_by_id
from connectors.rollout import RolloutMemory, rollout_of


class SampleActions(ConnectorV2):
    """Samples actions, keeps the modules' states, and opens a state snapshot where a row starts.

    Returns numpy columns `[B, ...]` without time axis. `STATE_OUT` becomes a `(B,)` object array:
    for each agent a reference to the `StateSnapshot` of the row it is filling. A row starts at the
    first step of an agent's episode (or of its continuation after a cut) and then every
    `max_seq_len` of its own steps.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
    ):
        super().__init__(input_observation_space, input_action_space)
        # Exploration, distributions and log-probabilities stay RLlib's own.
        self._get_actions = GetActions()

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {}

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        rl_module: RLModule,
        batch: dict[str, Any],
        episodes: list[Any],
        explore: bool | None = None,
        shared_data: dict | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns numpy columns, actions not yet made ready for the environment.

        `{column: [B, ...]}`, or `{module ID: {column: [B, ...]}}` for several agents.
        """
        several = is_multi_agent(episodes)
        outputs = batch if several else {DEFAULT_MODULE_ID: batch}
        rollout = rollout_of(shared_data)
        rollout.acted = True
        modules = modules_by_id(rl_module, outputs)
        memories = {id_: rollout.memory(id_, module) for id_, module in modules.items()}
        states = {id_: output.pop(Columns.STATE_OUT, None) for id_, output in outputs.items()}
        batch = cast(
            "dict[str, Any]",
            self._get_actions(
                rl_module=cast("RLModule", rl_module if several else modules[DEFAULT_MODULE_ID]),
                batch=batch,
                episodes=episodes,
                explore=explore,
                shared_data=shared_data,
            ),
        )
        batch = cast("dict[str, Any]", convert_to_numpy(batch))
        outputs = batch if several else {DEFAULT_MODULE_ID: batch}
        if several:
            rollout.follow_cuts(episodes)
        for module_id, memory in memories.items():
            if memory.row_length is not None:
                outputs[module_id] = _record(
                    memory, outputs[module_id], states[module_id], episodes
                )
        return outputs if several else outputs[DEFAULT_MODULE_ID]


def _record(
    memory: RolloutMemory, columns: dict[str, Any], state_out: Any, episodes: list[Any]
) -> dict[str, Any]:
    """Removes the time axis; puts references to snapshots in the place of the states."""
    name = type(memory.module).__name__
    if state_out is None:
        raise ValueError(
            f"`{name}` has an initial state, but its output has no `STATE_OUT`. Return the state "
            "after the last step under `Columns.STATE_OUT` from `_forward`."
        )
    if memory.state_in is None:
        raise ValueError(
            f"`SampleActions` found no `STATE_IN` of `{name}`. It needs `BuildModuleBatch` in the "
            "env-to-module pipeline: call `connect(config)` after all other settings."
        )
    columns = tree.map_structure(lambda leaf: np.squeeze(leaf, axis=1), columns)
    agents = [agent_at(row, episodes) for row in memory.rows]
    columns[Columns.STATE_OUT] = memory.record(
        cast("list[SingleAgentEpisode]", agents), tree.map_structure(torch.Tensor.detach, state_out)
    )
    return columns
