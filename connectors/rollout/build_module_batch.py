"""From the environments' latest observations to the modules' input batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import gymnasium as gym
import torch
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import AgentToModuleMapping
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.spaces.space_utils import batch as stack_items
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from connectors.agents import (
    Row,
    acting_agents,
    batch_key,
    has_items,
    is_multi_agent,
    modules_by_id,
)
from connectors.rollout.states import Rollout, rollout_of
from connectors.validation import device_of


class BuildModuleBatch(ConnectorV2):
    """Builds the whole input batch of a module pass, in place of RLlib's default pieces.

    Columns that earlier pieces put into the batch are kept; `OBS` comes from the episodes if none
    did. For a module with memory each column gets a time axis, `[B, 1, ...]`, and `STATE_IN` is
    one batched tensor tree, still on its device: for each agent the `STATE_OUT` of its last step,
    or what its episode starts from.

    Pieces behind this one see tensors.

    Args:
        input_observation_space: See `ConnectorV2`.
        input_action_space: See `ConnectorV2`.
        device: Where the batch goes; None for the device of the module.
        episodes_per_trial: See `connect`.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        device: torch.device | str | None = None,
        episodes_per_trial: int = 1,
    ):
        super().__init__(input_observation_space, input_action_space)
        self._device = None if device is None else str(device)
        self.episodes_per_trial = episodes_per_trial

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        kwargs = {"device": self._device, "episodes_per_trial": self.episodes_per_trial}
        return (self.input_observation_space, self.input_action_space), kwargs

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
        """Returns `{column: tensors}`, or `{module ID: {column: tensors}}` for several agents.

        A row is a sub-environment, or an agent that has to act.
        """
        several = is_multi_agent(episodes)
        if several and all(episode.is_done for episode in episodes):
            # RLlib shows the last observations to the pieces in front of this one. No agent acts.
            return {}
        if shared_data is None:
            shared_data = {}
        rollout = rollout_of(shared_data, self.episodes_per_trial)
        rollout.observe(episodes)
        acting = acting_agents(episodes)
        batches = {}
        for module_id, module in modules_by_id(rl_module, acting).items():
            rollout.rows[module_id] = [row for row, _ in acting[module_id]]
            batches[module_id] = self._build(
                rollout, module_id, module, batch, acting[module_id], episodes
            )

        # RLlib's `UnBatchToIndividualItems` finds the agent of each row here.
        if not several:
            shared_data["memorized_map_structure"] = [episode.id_ for episode in episodes]
            return batches[DEFAULT_MODULE_ID]
        shared_data["memorized_map_structure"] = {
            module_id: [(episodes[i].id_, agent) for i, agent in rows]
            for module_id, rows in rollout.rows.items()
        }
        return batches

    def _build(
        self,
        rollout: Rollout,
        module_id: str,
        module: RLModule,
        batch: dict[str, Any],
        acting: list[tuple[Row, SingleAgentEpisode]],
        episodes: list[Any],
    ) -> dict[str, Any]:
        device = self._device or device_of(module)
        agents = [agent for _, agent in acting]
        columns = {
            column: _select_items(column, data, agents)
            for column, data in batch.items()
            if has_items(data, agents)
        }
        infos = columns.pop(Columns.INFOS, None)
        obs_given = not columns.keys() <= {Columns.STATE_IN}
        columns = {column: _stack(items) for column, items in columns.items()}
        if Columns.OBS not in columns:
            columns[Columns.OBS] = stack_items([agent.get_observations(-1) for agent in agents])
        tensors: dict[str, Any] = convert_to_torch_tensor(columns, device=device)

        if rollout.row_length(module_id, module) is not None:
            given = tensors.pop(Columns.STATE_IN, None)
            tensors = tree.map_structure(lambda leaf: leaf.unsqueeze(1), tensors)
            tensors[Columns.STATE_IN] = rollout.begin(
                module_id,
                module,
                acting,
                episodes,
                device=device,
                given=given,
                obs_given=obs_given,
            )
        if infos is not None:
            tensors[Columns.INFOS] = infos
        return tensors


class MapSpaces(AgentToModuleMapping):
    """Tells RLlib which spaces the modules of several agents have; leaves the batch alone.

    Args:
        input_observation_space: See `ConnectorV2`.
        input_action_space: See `ConnectorV2`.
        rl_module_specs: The modules' specs by ID, or just the IDs.
        agent_to_module_mapping_fn: `config.policy_mapping_fn`.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        rl_module_specs: Any,
        agent_to_module_mapping_fn: Callable | None,
    ):
        # Spaces given to RLlib's constructor are mapped before it has set these.
        self._rl_module_specs = rl_module_specs
        self._agent_to_module_mapping_fn = agent_to_module_mapping_fn
        super().__init__(
            input_observation_space,
            input_action_space,
            rl_module_specs=rl_module_specs,
            agent_to_module_mapping_fn=agent_to_module_mapping_fn,
        )

    @override(AgentToModuleMapping)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        kwargs = {
            "rl_module_specs": self._rl_module_specs,
            "agent_to_module_mapping_fn": self._agent_to_module_mapping_fn,
        }
        return (self.input_observation_space, self.input_action_space), kwargs

    @override(AgentToModuleMapping)
    def __call__(self, *, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Returns the batch as it is: `BuildModuleBatch` has done the mapping."""
        return batch


def _stack(items: Any) -> Any:
    if isinstance(items, list):
        return stack_items(items, individual_items_already_have_batch_dim="auto")
    return items


def _select_items(column: str, data: Any, agents: Sequence[SingleAgentEpisode]) -> Any:
    """One item an agent, in order, from any of the forms that RLlib knows; batches stay as is."""
    if not (isinstance(data, dict) and data and isinstance(next(iter(data)), tuple)):
        return data
    keys = [batch_key(agent) for agent in agents]
    missing = [key for key in keys if key not in data]
    if missing:
        raise ValueError(
            f"Column `{column}` has no item for {len(missing)} of {len(keys)} episodes (first: "
            f"{missing[0]}). An env-to-module connector must add an item for each episode, e.g. "
            "with `self.add_batch_item(batch, column, item, episode)`."
        )
    return [item for key in keys for item in data[key]]
