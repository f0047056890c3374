"""The recurrent state that each row of a train batch starts from."""

from __future__ import annotations

from typing import Any

import numpy as np
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import batch as stack_items

from connectors.layout import RowLayout
from connectors.snapshots import StateSnapshot, rebuild_states
from connectors.validation import initial_state

WARM_UP = "warm_up"
"""Column of an episode's module outputs that is True on steps which stand in no row. They come
first, and the module is run over them to find the state that the first row starts from."""


def warm_up_lengths(episodes: list[SingleAgentEpisode]) -> np.ndarray:
    """`(E,)` int64: the leading steps of each episode that are warm-up."""
    lengths = [
        int(np.sum(episode.get_extra_model_outputs(WARM_UP)))
        if WARM_UP in episode.extra_model_outputs
        else 0
        for episode in episodes
    ]
    return np.array(lengths, dtype=np.int64)


def row_states(
    module: RLModule,
    episodes: list[SingleAgentEpisode],
    layout: RowLayout,
    steps: dict[str, Any],
    warm_up: np.ndarray,
    *,
    obs_given: bool,
) -> tuple[Any, int, int]:
    """Finds the state before the first step of each row.

    Args:
        module: The module with memory.
        episodes: Episodes whose steps fill the rows.
        layout: Layout of all their steps, warm-up included.
        steps: Columns of these steps: a list of one part an episode, or the concatenated steps of
            all.
        warm_up: Leading steps of each episode that stand in no row.
        obs_given: True if `OBS` was made by another connector. What it did to observations before
            the chunk is unknown, so states cannot be rebuilt from a lookback buffer.

    Returns:
        Tree of arrays `(num_rows, ...)` with the dtypes of the module's initial state; how many
        rows were rebuilt; how many had to use an older state than their own.
    """
    first = tree.map_structure(lambda leaf: leaf.numpy(), initial_state(module, "cpu"))
    states: list[Any] = []
    gaps: list[tuple[int, dict[str, Any]]] = []
    num_stale = 0

    for position, episode in enumerate(episodes):
        recorded = episode.extra_model_outputs.get(Columns.STATE_OUT)
        warmed = int(warm_up[position])
        starts = range(warmed, int(layout.lengths[position]), layout.max_seq_len)
        if recorded is None:
            states.extend(first for _ in starts)
            continue
        outputs = episode.get_extra_model_outputs(Columns.STATE_OUT)
        if not _holds_snapshots(outputs):
            plain, stale = _states_of_steps(episode, outputs, first, starts)
            states.extend(plain)
            num_stale += stale
            continue
        for start in starts:
            t = episode.t_started + start
            # A warm-up is run in full, also where a later snapshot is nearer.
            is_warmed = start == warmed > 0
            snapshot = outputs[0 if is_warmed else start]
            state = first if t == 0 else None if is_warmed else snapshot.state_at(t)
            if state is None:
                known = first if snapshot.t == 0 else snapshot.state
                gap = t - snapshot.t
                inputs = _gap_steps(episode, position, layout, steps, start, gap, obs_given)
                if inputs is None:
                    num_stale += 1
                else:
                    gaps.append((len(states), inputs))
                state = known
            states.append(state)

    if gaps:
        rebuilt = rebuild_states(module, [states[row] for row, _ in gaps], [x for _, x in gaps])
        for (row, _), state in zip(gaps, rebuilt, strict=True):
            states[row] = state
    stacked = tree.map_structure(
        # One dtype and one order of keys for all batches: RLlib's pieces return int64 or int32 by
        # chance, and a compiled module has a graph for each order.
        lambda like, leaf: np.asarray(leaf).astype(like.dtype, copy=False),
        first,
        stack_items(states),
    )
    return stacked, len(gaps), num_stale


def _holds_snapshots(outputs: Any) -> bool:
    if isinstance(outputs, np.ndarray):
        return outputs.dtype == object
    return isinstance(outputs, list) and bool(outputs) and isinstance(outputs[0], StateSnapshot)


def _states_of_steps(
    episode: SingleAgentEpisode, outputs: Any, first: Any, starts: range
) -> tuple[list[Any], int]:
    """States of an episode that RLlib's default connectors recorded, one a step."""
    states = [
        outputs[start - 1]
        if isinstance(outputs, list)
        else tree.map_structure(lambda leaf, last=start - 1: leaf[last], outputs)
        for start in starts
        if start > 0
    ]
    if starts.start > 0:
        return states, 0
    if episode.t_started == 0:
        return [first, *states], 0
    if not episode.extra_model_outputs[Columns.STATE_OUT].lookback:
        return [first, *states], 1
    before = episode.get_extra_model_outputs(
        Columns.STATE_OUT, indices=-1, neg_index_as_lookback=True
    )
    return [before, *states], 0


def _gap_steps(
    episode: SingleAgentEpisode,
    position: int,
    layout: RowLayout,
    steps: dict[str, Any],
    start: int,
    gap: int,
    obs_given: bool,
) -> dict[str, Any] | None:
    """The columns of the `gap` steps before `start`, None if they are not all at hand."""
    if gap <= 0:
        return None
    if gap <= start:
        span = slice(start - gap, start)
        return {column: _take(parts, position, layout, span) for column, parts in steps.items()}
    if obs_given or episode.observations.lookback < gap - start:
        return None
    observations = episode.get_observations(slice(start - gap, start), neg_index_as_lookback=True)
    if isinstance(observations, list):
        observations = stack_items(observations)
    return {Columns.OBS: observations}


def _take(parts: Any, position: int, layout: RowLayout, span: slice) -> Any:
    if isinstance(parts, list):
        return tree.map_structure(lambda leaf: leaf[span], parts[position])
    offset = int(layout.offsets[position])
    return tree.map_structure(lambda leaf: leaf[offset + span.start : offset + span.stop], parts)
