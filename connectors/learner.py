"""From episodes to a train batch of padded rows."""

from __future__ import annotations

from itertools import chain
from typing import Any

import gymnasium as gym
import numpy as np
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.spaces.space_utils import BatchedNdArray
from ray.rllib.utils.spaces.space_utils import batch as stack_items

from connectors.agents import agents_by_module, batch_key, has_items, modules_by_id
from connectors.layout import RowLayout
from connectors.measures import MEMORY, NUM_REBUILT_ROWS, NUM_STALE_ROWS
from connectors.row_states import WARM_UP, row_states, warm_up_lengths
from connectors.validation import row_length
from connectors.vtrace import VTraceLayout, neutralize


class BuildTrainBatch(ConnectorV2):
    """Lays every column of the episodes out in `[B, T]` rows and adds each row's `STATE_IN`.

    Stands in front of RLlib's default learner pieces, which find their work done. The rows, their
    order, padding and values are those of RLlib's own pieces. Columns that earlier pieces put into
    the batch, one item or one `BatchedNdArray` slice a step, are laid out too. Where no module has
    memory, all is left to RLlib; next to modules with memory the others get their steps without
    rows.

    States come from the snapshots that the episodes hold (see `StateSnapshot`); from the states of
    single steps where RLlib's default connectors recorded the episodes; and are the initial state
    where nothing was recorded. Replayed episodes start with a warm-up, which the module reads to
    find the first row's state (see `connectors.replay`).

    Pieces behind this one see each column as one array under a single key.

    Args:
        input_observation_space: See `ConnectorV2`.
        input_action_space: See `ConnectorV2`.
        bootstrap_slot: Whether each row has one slot more, for the step that follows its last one,
            as V-trace needs it. For episodes that end in RLlib's appended bootstrap step.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        bootstrap_slot: bool = False,
    ):
        super().__init__(input_observation_space, input_action_space)
        self.bootstrap_slot = bootstrap_slot

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        kwargs = {"bootstrap_slot": self.bootstrap_slot}
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
        metrics: MetricsLogger | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Returns `{column: {key: [one array (B, T, ...)]}}`, a key a module."""
        if rl_module is None or Columns.STATE_IN in batch or not episodes:
            return batch
        groups = agents_by_module(episodes)
        modules = modules_by_id(rl_module, groups)
        row_lengths = {module_id: row_length(module) for module_id, module in modules.items()}
        if all(length is None for length in row_lengths.values()):
            return batch
        if shared_data is None:
            shared_data = {}

        given = {column: data for column, data in batch.items() if column != Columns.INFOS}
        # RLlib's default pieces stand aside for all modules where they find this column.
        result: dict[str, Any] = {Columns.STATE_IN: {}}
        for module_id, agents in groups.items():
            max_seq_len = row_lengths.get(module_id)
            layout_class = VTraceLayout if self.bootstrap_slot and max_seq_len else RowLayout
            layout = layout_class([len(agent) for agent in agents], max_seq_len or 1)
            memory = modules.get(module_id) if max_seq_len else None
            columns, counts = _build(memory, layout, given, agents)
            for column, data in columns.items():
                result.setdefault(column, {})[batch_key(agents[0])] = [data]
            if Columns.STATE_IN not in columns:
                continue
            # RLlib asks for this before it shuffles rows.
            shared_data[f"_zero_padded_for_mid={module_id}"] = True
            if metrics is not None:
                for name, count in counts.items():
                    metrics.log_value((module_id, MEMORY, name), count, reduce="sum")
        batch.update(result)
        return batch


def _build(
    module: RLModule | None,
    layout: RowLayout,
    given: dict[str, Any],
    agents: list[SingleAgentEpisode],
) -> tuple[dict[str, Any], dict[str, int]]:
    """All columns of a module, in rows if it is given; how many rows had which states.

    Args:
        module: The module; None if it has no memory.
        layout: Of its agents' steps.
        given: Columns that earlier pieces built.
        agents: Its agents' episodes.
    """
    # Lists of one part an episode, or the concatenated steps of all episodes.
    steps = {
        column: _collect_column(column, data, agents, layout)
        for column, data in given.items()
        if has_items(data, agents)
    }
    obs_given = Columns.OBS in steps
    _add_episode_columns(steps, agents)
    if module is None:
        return {column: _join_column(parts) for column, parts in steps.items()}, {}

    warm_up = warm_up_lengths(agents)
    states, num_rebuilt, num_stale = row_states(
        module, agents, layout, steps, warm_up, obs_given=obs_given
    )
    if warm_up.any():
        steps = {
            column: _without_warm_up(layout, parts, warm_up) for column, parts in steps.items()
        }
        layout = RowLayout((layout.lengths - warm_up).tolist(), layout.max_seq_len)
    columns = {column: _pad_column(layout, parts) for column, parts in steps.items()}
    columns[Columns.SEQ_LENS] = BatchedNdArray(layout.seq_lens)
    if Columns.LOSS_MASK not in columns:
        columns[Columns.LOSS_MASK] = BatchedNdArray(layout.valid)
    if isinstance(layout, VTraceLayout):
        neutralize(columns, layout.real)
    columns[Columns.STATE_IN] = tree.map_structure(BatchedNdArray, states)
    return columns, {NUM_REBUILT_ROWS: num_rebuilt, NUM_STALE_ROWS: num_stale}


def _without_warm_up(layout: RowLayout, parts: Any, warm_up: np.ndarray) -> Any:
    if isinstance(parts, list):
        return [
            tree.map_structure(lambda leaf, start=start: leaf[start:], part)
            for part, start in zip(parts, warm_up.tolist(), strict=True)
        ]
    positions = np.arange(layout.num_steps) - np.repeat(layout.offsets, layout.lengths)
    kept = positions >= np.repeat(warm_up, layout.lengths)
    return tree.map_structure(lambda leaf: leaf[kept], parts)


def _join_column(parts: Any) -> Any:
    if not isinstance(parts, list):
        return tree.map_structure(BatchedNdArray, parts)
    return tree.map_structure(lambda *leaves: BatchedNdArray(np.concatenate(leaves)), *parts)


def _pad_column(layout: RowLayout, parts: Any) -> Any:
    if not isinstance(parts, list):
        return tree.map_structure(lambda leaf: BatchedNdArray(layout.pad(leaf)), parts)
    return tree.map_structure(
        lambda *leaves: BatchedNdArray(layout.pad_parts(leaves)), parts[0], *parts[1:]
    )


def _collect_column(
    column: str, data: Any, episodes: list[SingleAgentEpisode], layout: RowLayout
) -> Any:
    """The steps of a column that an earlier piece put into the batch."""
    try:
        items = [data[batch_key(episode)] for episode in episodes]
    except (KeyError, TypeError, IndexError):
        raise ValueError(
            f"Column `{column}` does not hold one list of items an episode, as a learner connector "
            "must add them. Use `self.add_n_batch_items(batch, column, items, len(episode), "
            "episode)` for each episode."
        ) from None

    # Lists of Python scalars, as the flags that RLlib adds: one conversion for all episodes.
    if isinstance(items[0], list) and items[0] and isinstance(items[0][0], (bool, int, float)):
        parts: Any = np.array(list(chain.from_iterable(items)))
        lengths = [len(part) for part in items]
    else:
        parts = [
            stack_items(part, individual_items_already_have_batch_dim="auto") for part in items
        ]
        lengths = [len(tree.flatten(part)[0]) for part in parts]
    for episode, length, steps in zip(episodes, lengths, layout.lengths.tolist(), strict=True):
        if length != steps:
            raise ValueError(
                f"Column `{column}` has {length} items for the {steps} timesteps of episode "
                f"{episode.id_}. A learner connector must add one item a timestep."
            )
    return parts


def _add_episode_columns(steps: dict[str, Any], episodes: list[SingleAgentEpisode]) -> None:
    """Adds the columns that RLlib's default pieces take from the episodes."""
    spans = [(episode, slice(0, len(episode))) for episode in episodes]
    if Columns.OBS not in steps:
        steps[Columns.OBS] = [_array(episode.get_observations(span)) for episode, span in spans]
    if Columns.ACTIONS not in steps:
        steps[Columns.ACTIONS] = [_array(episode.get_actions(span)) for episode, span in spans]
    if Columns.REWARDS not in steps:
        steps[Columns.REWARDS] = [_array(episode.get_rewards(span)) for episode, span in spans]
    for column, flag in (
        (Columns.TERMINATEDS, "is_terminated"),
        (Columns.TRUNCATEDS, "is_truncated"),
    ):
        if column not in steps:
            steps[column] = [_last_step_flag(episode, flag) for episode in episodes]

    skipped = {*steps, Columns.STATE_IN, Columns.STATE_OUT, WARM_UP}
    columns = dict.fromkeys(chain.from_iterable(e.extra_model_outputs for e in episodes))
    for column in columns:
        if column in skipped:
            continue
        missing = sum(column not in episode.extra_model_outputs for episode in episodes)
        if missing:
            raise ValueError(
                f"`{column}` was recorded in {len(episodes) - missing} of {len(episodes)} episodes "
                "only. Record it in all of them (episodes of random actions have no module outputs)"
                ", or in none."
            )
        steps[column] = [
            _array(episode.get_extra_model_outputs(key=column, indices=span))
            for episode, span in spans
        ]


def _array(items: Any) -> Any:
    return stack_items(items) if isinstance(items, list) else items


def _last_step_flag(episode: SingleAgentEpisode, flag: str) -> np.ndarray:
    flags = np.zeros(len(episode), dtype=bool)
    flags[-1:] = getattr(episode, flag)
    return flags
