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
from ray.rllib.utils.annotations import override
from ray.rllib.utils.numpy import convert_to_numpy

from connectors.agents import is_multi_agent, modules_by_id
from connectors.rollout.states import Rollout, rollout_of


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
        modules = modules_by_id(rl_module, outputs)
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
        rollout.settle(episodes)
        for module_id, module in modules.items():
            if rollout.row_length(module_id, module) is None:
                continue
            references = _record(rollout, module_id, module, states[module_id], episodes)
            columns = tree.map_structure(lambda leaf: np.squeeze(leaf, axis=1), outputs[module_id])
            outputs[module_id] = {**columns, Columns.STATE_OUT: references}
        return outputs if several else outputs[DEFAULT_MODULE_ID]


def _record(
    rollout: Rollout, module_id: str, module: RLModule, state_out: Any, episodes: list[Any]
) -> np.ndarray:
    """References to snapshots, in the place of the states."""
    name = type(module).__name__
    if state_out is None:
        raise ValueError(
            f"`{name}` has an initial state, but its output has no `STATE_OUT`. Return the state "
            "after the last step under `Columns.STATE_OUT` from `_forward`."
        )
    detached = tree.map_structure(torch.Tensor.detach, state_out)
    references = rollout.end(module_id, detached, episodes)
    if references is None:
        raise ValueError(
            f"`SampleActions` found no `STATE_IN` of `{name}`. It needs `BuildModuleBatch` in the "
            "env-to-module pipeline: call `connect(config)` after all other settings. In a script "
            "of your own, give both pipelines the same `shared_data` dict."
        )
    return references
