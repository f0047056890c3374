"""Actions as the environments want them."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.annotations import override
from ray.rllib.utils.spaces.space_utils import (
    clip_action,
    get_base_struct_from_space,
    unbatch,
    unsquash_action,
)

from connectors.agents import Row, is_multi_agent
from connectors.rollout.states import rollout_of


class FormatActions(ConnectorV2):
    """Unsquashes or clips actions for the environment and hands each column out by environment.

    Does for all sub-environments at once what RLlib's `NormalizeAndClipActions` and
    `ListifyDataForVectorEnv` do one by one, with the same numbers, in the dtype of the space.
    RLlib leaves actions of float16 as they are. Expects the numpy columns of `SampleActions`; the
    episodes record the actions as sampled.

    Args:
        input_observation_space: See `ConnectorV2`.
        input_action_space: See `ConnectorV2`.
        normalize_actions: `config.normalize_actions`.
        clip_actions: `config.clip_actions`.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        normalize_actions: bool,
        clip_actions: bool,
    ):
        self._action_space_struct: Any = None
        # For several agents: one name for all that have the same space.
        self._space_of_agent: dict[Any, Any] = {}
        super().__init__(input_observation_space, input_action_space)
        self._normalize_actions = normalize_actions
        self._clip_actions = clip_actions

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        kwargs = {
            "normalize_actions": self._normalize_actions,
            "clip_actions": self._clip_actions,
        }
        return (self.input_observation_space, self.input_action_space), kwargs

    @override(ConnectorV2)
    def recompute_output_action_space(
        self, input_observation_space: gym.Space, input_action_space: gym.Space
    ) -> gym.Space:
        self._action_space_struct = get_base_struct_from_space(input_action_space)
        if isinstance(input_action_space, gym.spaces.Dict):
            spaces = input_action_space.spaces
            self._space_of_agent = {
                agent: next(other for other in spaces if spaces[other] == space)
                for agent, space in spaces.items()
            }
        return input_action_space

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
        """Returns columns that can be indexed by sub-environment.

        With a single agent actions are batched; with several each item is `{agent ID: value}`.
        """
        if not is_multi_agent(episodes):
            return self._format(batch)
        columns: dict[str, list[dict[Any, Any]]] = {}
        rows_by_module = rollout_of(shared_data).rows
        for module_id, outputs in batch.items():
            rows = rows_by_module[module_id]
            for column, items in self._format_agents(outputs, rows).items():
                by_environment = columns.setdefault(column, [{} for _ in episodes])
                for (i, agent_id), item in zip(rows, items, strict=True):
                    by_environment[i][agent_id] = item
        return columns

    def _format(self, columns: dict[str, Any]) -> dict[str, Any]:
        if self._normalize_actions or self._clip_actions:
            columns[Columns.ACTIONS_FOR_ENV] = self._convert(
                columns[Columns.ACTIONS], self._action_space_struct
            )
        for column, data in columns.items():
            is_actions = column in (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)
            if not is_actions and not isinstance(data, np.ndarray):
                columns[column] = unbatch(data)
        return columns

    def _format_agents(self, columns: dict[str, Any], rows: list[Row]) -> dict[str, Any]:
        """Each column as one item a row."""
        if self._normalize_actions or self._clip_actions:
            columns[Columns.ACTIONS_FOR_ENV] = self._convert_agents(
                columns[Columns.ACTIONS], [agent_id for _, agent_id in rows]
            )
        return {
            column: data if isinstance(data, (np.ndarray, list)) else unbatch(data)
            for column, data in columns.items()
        }

    def _convert_agents(self, actions: Any, agent_ids: list[Any]) -> Any:
        spaces = [self._space_of_agent[agent_id] for agent_id in agent_ids]
        struct = self._action_space_struct
        if spaces.count(spaces[0]) == len(spaces):
            return self._convert(actions, struct[spaces[0]])
        return [
            self._convert(action, struct[space])
            for action, space in zip(unbatch(actions), spaces, strict=True)
        ]

    def _convert(self, actions: Any, struct: Any) -> Any:
        # RLlib's functions broadcast over a leading axis.
        convert = unsquash_action if self._normalize_actions else clip_action
        converted = convert(actions, tree.map_structure(widened, struct))
        # A copy, so that environments that write into their action do not change the recorded one.
        return tree.map_structure(
            lambda action, space: np.array(action, space.dtype), converted, struct
        )


def widened(space: gym.Space) -> gym.Space:
    """A `Box` of float16 as one of float32, as which RLlib's functions serve it; others as is."""
    if not isinstance(space, gym.spaces.Box) or space.dtype != np.float16:
        return space
    return gym.spaces.Box(space.low.astype(np.float32), space.high.astype(np.float32))
