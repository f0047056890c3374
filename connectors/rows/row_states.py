"""The recurrent state that each row of a train batch starts from."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import batch as stack_items

from connectors.rows.layout import RowLayout
from connectors.snapshots import StateSnapshot, rebuild_states
from connectors.validation import initial_state

WARM_UP = "replay_warm_up"
"""Column of an episode's module outputs that is True on steps which stand in no row. They come
first, and the module is run over them to find the state that the first row starts from."""

StepsBefore = Callable[[int, int], dict[str, Any] | None]
"""Step that a row starts with, how many steps -> the columns of those before it."""


def warm_up_lengths(episodes: list[SingleAgentEpisode]) -> np.ndarray:
    """`(E,)` int64: the leading steps of each episode that are warm-up."""
    lengths = [
        int(np.sum(episode.get_extra_model_outputs(WARM_UP)))
        if WARM_UP in episode.extra_model_outputs
        else 0
        for episode in episodes
    ]
    return np.array(lengths, dtype=np.int64)


@dataclass(slots=True)
class _Start:
    """What is known of the state that a row starts from.

    Attributes:
        state: The state itself, or an earlier one; None for that of an earlier row.
        steps: Columns of the steps from there to the row, to run the module over. None: `state` is
            all there is.
        is_stale: Whether steps are missing, so that the state is that of a shorter past.
        row: Which earlier row; None for the one before.
    """

    state: Any
    steps: dict[str, Any] | None = None
    is_stale: bool = False
    row: int | None = None

    def is_initial(self, first: Any) -> bool:
        """Whether it is known to be the initial state, `first`."""
        return self.state is first and self.steps is None and not self.is_stale


@dataclass(frozen=True)
class RowStates:
    """The state before the first step of each row.

    Attributes:
        states: One a row, trees of arrays without batch axis.
        initial: `(num_rows,)` bool: those that are the module's initial state.
        num_rebuilt: How many rows were rebuilt.
        num_stale: How many had to use an older state than their own.
    """

    states: list[Any]
    initial: np.ndarray
    num_rebuilt: int
    num_stale: int
    _first: Any

    def stack(self, rows: Sequence[int] | np.ndarray) -> Any:
        """Tree of arrays `(len(rows), ...)`, with the dtypes of the module's initial state."""
        return tree.map_structure(
            # One dtype and one order of keys for all batches: RLlib's pieces return int64 or int32
            # by chance, and a compiled module has a graph for each order.
            lambda like, leaf: np.asarray(leaf).astype(like.dtype, copy=False),
            self._first,
            stack_items([self.states[row] for row in rows]),
        )


def row_states(
    module: RLModule,
    episodes: list[SingleAgentEpisode],
    layout: RowLayout,
    steps: dict[str, Any],
    warm_up: np.ndarray,
    *,
    obs_given: bool,
    previous: Sequence[int | None],
    bootstrapped: bool,
) -> RowStates:
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
        previous: See `previous_episodes`.
        bootstrapped: Whether episodes end with RLlib's appended bootstrap step.
    """
    first = tree.map_structure(lambda leaf: leaf.numpy(), initial_state(module, "cpu"))
    starts: list[_Start] = []
    for position, episode in enumerate(episodes):
        warmed = int(warm_up[position])
        at = layout.starts(position)
        if warmed:
            at = range(warmed, int(layout.lengths[position]), layout.max_seq_len)
        steps_before = partial(_steps_before, episode, position, layout, steps, obs_given)
        if Columns.STATE_OUT not in episode.extra_model_outputs:
            rows = list(_from_steps(episode, at, first, steps_before))
            before = previous[position]
            if before is not None:
                rows[0] = _behind(before, layout, steps, bootstrapped)
            starts += rows
            continue
        outputs = episode.get_extra_model_outputs(Columns.STATE_OUT)
        if _holds_snapshots(outputs):
            starts += _from_snapshots(episode, outputs, at, warmed, first, steps_before)
        else:
            starts += _from_states(episode, outputs, at, first)

    return RowStates(
        states=_run(module, starts),
        initial=np.array([start.is_initial(first) for start in starts], dtype=bool),
        num_rebuilt=sum(start.steps is not None and not start.is_stale for start in starts),
        num_stale=sum(start.is_stale for start in starts),
        _first=first,
    )


def _run(module: RLModule, starts: list[_Start]) -> list[Any]:
    """Runs the module over the steps before all rows: rows that wait for others after those."""
    states = [start.state for start in starts]
    left = {row: start.steps for row, start in enumerate(starts) if start.steps is not None}
    while left:
        sources = {row: _source(starts[row], row) for row in left}
        ready = [row for row in left if states[row] is not None or sources[row] not in left]
        known = [states[sources[row] if states[row] is None else row] for row in ready]
        rebuilt = rebuild_states(module, known, [left.pop(row) for row in ready])
        for row, state in zip(ready, rebuilt, strict=True):
            states[row] = state
    return states


def _source(start: _Start, row: int) -> int:
    return row - 1 if start.row is None else start.row


def _behind(position: int, layout: RowLayout, steps: dict[str, Any], bootstrapped: bool) -> _Start:
    """Of the first row of an episode that starts from the last state of another one."""
    # No policy acts on the observation of a bootstrap step.
    end = int(layout.lengths[position]) - bootstrapped
    start = layout.starts(position)[-1]
    columns = {
        column: _take(parts, position, layout, slice(start, end)) for column, parts in steps.items()
    }
    row = int(layout.first_rows[position] + layout.rows_per_episode[position] - 1)
    return _Start(None, columns, row=row)


def _holds_snapshots(outputs: Any) -> bool:
    if isinstance(outputs, np.ndarray):
        return outputs.dtype == object
    return isinstance(outputs, list) and bool(outputs) and isinstance(outputs[0], StateSnapshot)


def _from_snapshots(
    episode: SingleAgentEpisode,
    snapshots: Any,
    starts: range,
    warmed: int,
    first: Any,
    steps_before: StepsBefore,
) -> Iterator[_Start]:
    """Of an episode that our connectors recorded: a snapshot a row of the rollout."""
    for start in starts:
        t = episode.t_started + start
        # A warm-up is run in full, also where a later snapshot is nearer.
        is_warmed = start == warmed > 0
        snapshot = snapshots[0 if is_warmed else start]
        # A trial's later episodes start from a state that is recorded.
        initial = t == 0 and snapshot.state is None
        state = first if initial else None if is_warmed else snapshot.state_at(t)
        if state is not None:
            yield _Start(state)
            continue
        between = steps_before(start, t - snapshot.t)
        known = first if snapshot.state is None else snapshot.state
        yield _Start(known, between, is_stale=between is None)


def _from_states(
    episode: SingleAgentEpisode, states: Any, starts: range, first: Any
) -> Iterator[_Start]:
    """Of an episode that RLlib's default connectors recorded: a state a step."""
    for start in starts:
        if start > 0:
            yield _Start(
                states[start - 1]
                if isinstance(states, list)
                else tree.map_structure(lambda leaf, last=start - 1: leaf[last], states)
            )
        elif episode.t_started == 0:
            yield _Start(first)
        elif not episode.extra_model_outputs[Columns.STATE_OUT].lookback:
            yield _Start(first, is_stale=True)
        else:
            before = episode.get_extra_model_outputs(
                Columns.STATE_OUT, indices=-1, neg_index_as_lookback=True
            )
            yield _Start(before)


def _from_steps(
    episode: SingleAgentEpisode, starts: range, first: Any, steps_before: StepsBefore
) -> Iterator[_Start]:
    """Of an episode without recorded states: from its first step on, where that is at hand."""
    gap = episode.t_started + starts.start
    steps = steps_before(starts.start, gap)
    is_stale = gap > 0 and steps is None
    if is_stale:
        # The chunk's own steps are better than nothing.
        steps = steps_before(starts.start, starts.start)
    for start in starts:
        if start == starts.start:
            yield _Start(first, steps, is_stale)
        else:
            yield _Start(None, steps_before(start, starts.step), is_stale)


def _steps_before(
    episode: SingleAgentEpisode,
    position: int,
    layout: RowLayout,
    steps: dict[str, Any],
    obs_given: bool,
    start: int,
    gap: int,
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
