"""States of episodes that are under way and of which nothing was kept from step to step."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import batch as stack_items

from connectors.snapshots import StateSnapshot, rebuild_states
from connectors.validation import initial_state


def rebuild_lost(
    module: RLModule, episodes: list[SingleAgentEpisode], *, obs_given: bool, device: str
) -> Any:
    """The states before the coming steps of episodes, from what these recorded under `STATE_OUT`.

    Where that is an earlier snapshot, the module runs over the steps since.

    Args:
        module: The module with memory.
        episodes: Each at a later step than its first.
        obs_given: Whether another connector makes the module's input. What it made of earlier
            steps is not known.
        device: Where the batch is.

    Returns:
        Tree of batched tensors.

    Raises:
        ValueError: if a state cannot be found.
    """
    first = tree.map_structure(lambda leaf: leaf.numpy(), initial_state(module, "cpu"))
    states: list[Any] = []
    gaps: dict[int, dict[str, Any]] = {}
    for position, episode in enumerate(episodes):
        recorded = _last_recorded(episode)
        if isinstance(recorded, StateSnapshot):
            state = recorded.state_at(episode.t)
            observations = _observations_since(episode, recorded.t)
            if state is None and observations is not None and not obs_given:
                gaps[position] = {Columns.OBS: observations}
                state = first if recorded.state is None else recorded.state
        else:
            state = recorded
        if state is None:
            raise ValueError(
                f"`shared_data` has no state of episode {episode.id_}, which is at its step "
                f"{episode.t}, and the episode does not tell it either: it needs `STATE_OUT` among "
                "the outputs recorded with its last step, and its observations must be what the "
                "module sees. Give both pipelines the same `shared_data` dict at each step of an "
                "episode, or act with `MemoryPolicy`."
            )
        states.append(state)
    if gaps:
        rebuilt = rebuild_states(module, [states[i] for i in gaps], list(gaps.values()))
        for position, state in zip(gaps, rebuilt, strict=True):
            states[position] = state
    return tree.map_structure(
        lambda like, *leaves: torch.as_tensor(np.stack(leaves).astype(like.dtype), device=device),
        first,
        *states,
    )


def _last_recorded(episode: SingleAgentEpisode) -> Any:
    """What the last step recorded: a snapshot, a plain state after the step, or None."""
    outputs = episode.extra_model_outputs.get(Columns.STATE_OUT)
    # One that was not recorded at every step says nothing about the last.
    if outputs is None or len(outputs) != len(episode) or not len(outputs) + outputs.lookback:
        return None
    if isinstance(outputs.data, (list, np.ndarray)):
        return outputs.data[-1]
    return tree.map_structure(lambda leaf: leaf[-1], outputs.data)


def _observations_since(episode: SingleAgentEpisode, t: int) -> Any:
    """The observations of steps `t` to the last one, None if they are not all there."""
    if t < episode.t_started - episode.observations.lookback or t >= episode.t:
        return None
    observations = episode.get_observations(
        slice(t - episode.t_started, len(episode)), neg_index_as_lookback=True
    )
    return stack_items(observations) if isinstance(observations, list) else observations
