"""From the module's outputs to actions, and to what the episodes record."""

from __future__ import annotations

from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.module_to_env import GetActions
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.spaces.space_utils import (
    clip_action,
    get_base_struct_from_space,
    unbatch,
    unsquash_action,
)

from connectors.rollout import RolloutMemory, rollout_memory
from connectors.snapshots import StateSnapshot, copy_rows
from connectors.validation import check_single_agent, single_module


class SampleActions(ConnectorV2):
    """Samples actions, keeps the module's states, and opens a state snapshot where a row starts.

    Returns numpy columns `[B, ...]` without time axis. `STATE_OUT` becomes a `(B,)` object array:
    for each sub-environment a reference to the `StateSnapshot` of the row it is filling. A row
    starts at the first step of an episode (or of its continuation after a cut) and then every
    `max_seq_len` steps.
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
        episodes: list[SingleAgentEpisode],
        explore: bool | None = None,
        shared_data: dict | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns `{column: numpy [B, ...]}`, actions not yet made ready for the environment."""
        check_single_agent(episodes, self)
        module = single_module(rl_module)
        memory = rollout_memory(shared_data if shared_data is not None else {}, module)
        state_out = batch.pop(Columns.STATE_OUT, None)
        batch = self._get_actions(
            rl_module=module,
            batch=batch,
            episodes=cast("list[Any]", episodes),
            explore=explore,
            shared_data=shared_data,
        )
        batch = cast("dict[str, Any]", convert_to_numpy(batch))
        if memory.row_length is None:
            return batch

        _check_states(memory, state_out)
        memory.state_out = tree.map_structure(torch.Tensor.detach, state_out)
        _open_snapshots(memory, episodes, memory.row_length)
        references = np.empty(len(episodes), dtype=object)
        references[:] = memory.snapshots
        batch = tree.map_structure(lambda leaf: np.squeeze(leaf, axis=1), batch)
        batch[Columns.STATE_OUT] = references
        return batch


def _check_states(memory: RolloutMemory, state_out: Any) -> None:
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


def _open_snapshots(
    memory: RolloutMemory, episodes: list[SingleAgentEpisode], row_length: int
) -> None:
    """Opens a snapshot in each sub-environment whose coming step is the first of a row."""
    rows: list[int] = []
    opened: list[StateSnapshot] = []
    for row, episode in enumerate(episodes):
        t = episode.t
        previous = memory.snapshots[row]
        if previous is not None and (t - episode.t_started) % row_length:
            continue
        # An episode without a reset observation only waits for its environment to reset.
        if not episode.is_reset:
            continue
        state = previous.end_state if previous is not None and previous.end_t == t else None
        snapshot = memory.snapshots[row] = StateSnapshot(t, state)
        if t == 0:
            continue
        if state is None:
            rows.append(row)
            opened.append(snapshot)
        if t == episode.t_started:
            _forget_lookback(episode, snapshot)
    if rows:
        for snapshot, state in zip(opened, copy_rows(memory.state_in, rows), strict=True):
            snapshot.state = state


def _forget_lookback(episode: SingleAgentEpisode, snapshot: StateSnapshot) -> None:
    """Lets go of the states before a cut, which would be pickled again and are never used."""
    lookback = episode.extra_model_outputs.get(Columns.STATE_OUT)
    if lookback is not None and lookback.lookback:
        episode.set_extra_model_outputs(
            key=Columns.STATE_OUT,
            new_data=[snapshot] * lookback.lookback,
            at_indices=list(range(-lookback.lookback, 0)),
            neg_index_as_lookback=True,
        )


class FormatActions(ConnectorV2):
    """Unsquashes or clips actions for the environment and hands each column out by environment.

    Does for all sub-environments at once what RLlib's `NormalizeAndClipActions` and
    `ListifyDataForVectorEnv` do one by one, with the same numbers. Expects the numpy columns of
    `SampleActions`; the episodes record the actions as sampled.

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
        return input_action_space

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
        """Returns columns that can be indexed by sub-environment, actions batched."""
        if self._normalize_actions or self._clip_actions:
            # RLlib's functions broadcast over a leading axis. The copy keeps environments that
            # write into their action from changing the recorded one.
            actions = tree.map_structure(np.copy, batch[Columns.ACTIONS])
            convert = unsquash_action if self._normalize_actions else clip_action
            batch[Columns.ACTIONS_FOR_ENV] = convert(actions, self._action_space_struct)
        for column, data in batch.items():
            is_actions = column in (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV)
            if not is_actions and not isinstance(data, np.ndarray):
                batch[column] = unbatch(data)
        return batch
