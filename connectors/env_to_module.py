"""From the environments' latest observations to the module's input batch."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import torch
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.spaces.space_utils import batch as stack_items
from ray.rllib.utils.torch_utils import convert_to_torch_tensor

from connectors.rollout import RolloutMemory, rollout_memory
from connectors.snapshots import StateSnapshot, copy_rows
from connectors.validation import check_single_agent, device_of, initial_state, single_module


class BuildModuleBatch(ConnectorV2):
    """Builds the whole input batch of a module pass, in place of RLlib's default pieces.

    Columns that earlier pieces put into the batch are kept; `OBS` comes from the episodes if none
    did. For a module with memory each column gets a time axis, `[B, 1, ...]`, and `STATE_IN` is
    one batched tensor tree: the last pass's `STATE_OUT`, still on its device, with the initial
    state in the rows of episodes that have just started.

    Pieces behind this one see tensors.

    Args:
        input_observation_space: See `ConnectorV2`.
        input_action_space: See `ConnectorV2`.
        device: Where the batch goes; None for the device of the module.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        device: torch.device | str | None = None,
    ):
        super().__init__(input_observation_space, input_action_space)
        self._device = None if device is None else str(device)

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {"device": self._device}

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        rl_module: RLModule,
        batch: dict[str, Any],
        episodes: list[SingleAgentEpisode],
        explore: bool | None = None,
        shared_data: dict | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns `{column: tensors}`, a row a sub-environment."""
        check_single_agent(episodes, self)
        if shared_data is None:
            shared_data = {}
        module = single_module(rl_module)
        memory = rollout_memory(shared_data, module)
        device = self._device or device_of(module)
        # RLlib's `UnBatchToIndividualItems` finds each row's episode here.
        shared_data["memorized_map_structure"] = [episode.id_ for episode in episodes]

        infos = batch.pop(Columns.INFOS, None)
        columns = {column: _stack_column(column, data, episodes) for column, data in batch.items()}
        if Columns.OBS not in columns:
            columns[Columns.OBS] = stack_items(
                [episode.get_observations(-1) for episode in episodes]
            )
        state_in = columns.pop(Columns.STATE_IN, None)
        tensors: dict[str, Any] = convert_to_torch_tensor(columns, device=device)

        if memory.row_length is not None:
            tensors = tree.map_structure(lambda leaf: leaf.unsqueeze(1), tensors)
            if state_in is None:
                tensors[Columns.STATE_IN] = _next_states(
                    memory, episodes, memory.row_length, device
                )
            else:
                tensors[Columns.STATE_IN] = convert_to_torch_tensor(state_in, device=device)
            memory.state_in = tensors[Columns.STATE_IN]
        if infos is not None:
            tensors[Columns.INFOS] = _flatten_column(Columns.INFOS, infos, episodes)
        return tensors


def _next_states(
    memory: RolloutMemory, episodes: list[SingleAgentEpisode], row_length: int, device: str
) -> Any:
    """`STATE_IN` of the next pass, `[B, ...]`; fills the `end_state` of rows just completed."""
    states, memory.state_out = memory.state_out, None
    previous_ids = memory.episode_ids
    memory.episode_ids = [episode.id_ for episode in episodes]

    # No module pass since the last call: the environments were reset or acted at random.
    if states is None or len(previous_ids) != len(episodes):
        memory.snapshots = [None] * len(episodes)
        return _expand(initial_state(memory.module, device), len(episodes))

    starts: list[int] = []
    full: list[int] = []
    finished: list[StateSnapshot] = []
    for row, episode in enumerate(episodes):
        t = episode.t
        if t == 0 or episode.id_ != previous_ids[row]:
            starts.append(row)
            memory.snapshots[row] = None
        elif (t - episode.t_started) % row_length == 0 and t > episode.t_started:
            snapshot = memory.snapshots[row]
            if snapshot is not None:
                full.append(row)
                finished.append(snapshot)
    if full:
        # Needed even if the episode is done: its bootstrap step starts from this state.
        for row, snapshot, state in zip(full, finished, copy_rows(states, full), strict=True):
            snapshot.finish(episodes[row].t, state)
    if not starts:
        return states

    started = torch.zeros(len(episodes), dtype=torch.bool)
    started[starts] = True
    started = started.to(device)
    return tree.map_structure(
        lambda leaf, first: torch.where(
            started.view(-1, *(1,) * first.ndim), first.to(leaf.dtype), leaf
        ),
        states,
        initial_state(memory.module, device),
    )


def _expand(state: Any, num_rows: int) -> Any:
    return tree.map_structure(lambda leaf: leaf.expand(num_rows, *leaf.shape).clone(), state)


def _stack_column(column: str, data: Any, episodes: list[SingleAgentEpisode]) -> Any:
    """Batches a column that an earlier piece left in any of the forms RLlib knows."""
    items = _flatten_column(column, data, episodes)
    if isinstance(items, list):
        return stack_items(items, individual_items_already_have_batch_dim="auto")
    return items


def _flatten_column(column: str, data: Any, episodes: list[SingleAgentEpisode]) -> Any:
    """One item a sub-environment, in the episodes' order; batched data is returned as it is."""
    if not (isinstance(data, dict) and data and isinstance(next(iter(data)), tuple)):
        return data
    missing = [episode.id_ for episode in episodes if (episode.id_,) not in data]
    if missing:
        raise ValueError(
            f"Column `{column}` has no item for {len(missing)} of {len(episodes)} episodes (first: "
            f"{missing[0]}). An env-to-module connector must add an item for each episode, e.g. "
            "with `self.add_batch_item(batch, column, item, episode)`."
        )
    return [item for episode in episodes for item in data[(episode.id_,)]]
