"""From episodes to a train batch of rows."""

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
from connectors.monitoring.measures import MEMORY, NUM_REBUILT_ROWS, NUM_STALE_ROWS
from connectors.rows.columns import Placement, collect_column
from connectors.rows.later_columns import PLACEMENTS
from connectors.rows.layout import RowLayout
from connectors.rows.packing import PackedLayout, minibatches_an_epoch, pack
from connectors.rows.row_states import WARM_UP, row_states, warm_up_lengths
from connectors.rows.vtrace import VTraceLayout, neutralize
from connectors.trials import previous_episodes
from connectors.validation import row_length
from rlmodules.modules.base import BaseMemoryRLModule
from rlmodules.modules.batches import RESETS


class BuildTrainBatch(ConnectorV2):
    """Lays every column of the episodes out in `[B, T]` rows and adds each row's `STATE_IN`.

    Stands in front of RLlib's default learner pieces, which find their work done. The rows, their
    order, padding and values are those of RLlib's own pieces. Rows of modules of this
    package are then packed: short ones are moved together, and a column `RESETS (B, T)` tells them
    apart. Columns that earlier pieces put into the batch, one item or one `BatchedNdArray` slice a
    step, are laid out too. Where no module has memory, all is left to RLlib; next to modules with
    memory the others get their steps without rows.

    States come from the snapshots that the episodes hold (see `StateSnapshot`); from the states of
    single steps where RLlib's default connectors recorded the episodes; and are rebuilt from an
    episode's first step on where nothing was recorded. Replayed episodes start with a warm-up,
    which the module reads to find the first row's state (see `connectors.replay`).

    Pieces behind this one see each column as one array under a single key. What they add as RLlib's
    pieces do, one item a step, `LayOutLaterColumns` lays out.

    Args:
        input_observation_space: See `ConnectorV2`.
        input_action_space: See `ConnectorV2`.
        bootstrap_slot: Whether each row has one slot more, for the step that follows its last one,
            as V-trace needs it. For episodes that end in RLlib's appended bootstrap step.
        episodes_per_trial: See `connect`. For recorded episodes only, which come without states: a
            trial's later episodes start from those that its earlier ones lead to.
        pack_rows: See `connect`.
        minibatch_size: Steps of a minibatch; None: a batch is not cut. Rows of a module are not
            packed where minibatches would then be more than its rows.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        bootstrap_slot: bool = False,
        episodes_per_trial: int = 1,
        pack_rows: bool = True,
        minibatch_size: int | None = None,
    ):
        super().__init__(input_observation_space, input_action_space)
        self.bootstrap_slot = bootstrap_slot
        self.episodes_per_trial = episodes_per_trial
        self.pack_rows = pack_rows
        self.minibatch_size = minibatch_size

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        kwargs = {
            "bootstrap_slot": self.bootstrap_slot,
            "episodes_per_trial": self.episodes_per_trial,
            "pack_rows": self.pack_rows,
            "minibatch_size": self.minibatch_size,
        }
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
        placements = shared_data[PLACEMENTS] = {}
        # What RLlib's piece leaves that appends bootstrap steps; BC has none.
        bootstrapped = bool(shared_data.get("_added_loss_mask_for_valid_episode_ts"))
        most_steps = max(sum(map(len, agents)) for agents in groups.values())
        min_rows = None
        if self.pack_rows:
            min_rows = minibatches_an_epoch(most_steps, self.minibatch_size)
        for module_id, agents in groups.items():
            max_seq_len = row_lengths.get(module_id)
            layout_class = VTraceLayout if self.bootstrap_slot and max_seq_len else RowLayout
            layout = layout_class([len(agent) for agent in agents], max_seq_len or 1)
            memory = modules.get(module_id) if max_seq_len else None
            previous = previous_episodes(agents, self.episodes_per_trial if memory else 1)
            columns, counts, placements[module_id] = _build(
                memory, layout, given, agents, previous, bootstrapped, min_rows
            )
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
    previous: list[int | None],
    bootstrapped: bool,
    min_rows: int | None,
) -> tuple[dict[str, Any], dict[str, int], Placement]:
    """All columns of a module, in rows if it is given; how many rows had which states; the rows.

    Args:
        module: The module; None if it has no memory.
        layout: Of its agents' steps.
        given: Columns that earlier pieces built.
        agents: Its agents' episodes.
        previous: See `previous_episodes`.
        bootstrapped: See `row_states`.
        min_rows: See `pack`. None: rows stay padded.
    """
    # Lists of one part an episode, or the concatenated steps of all episodes.
    steps = {
        column: collect_column(column, data, agents, layout)
        for column, data in given.items()
        if has_items(data, agents)
    }
    obs_given = Columns.OBS in steps
    _add_episode_columns(steps, agents)
    warm_up = warm_up_lengths(agents)
    if module is None:
        placement = Placement(agents, layout, warm_up, rows=None)
        return {column: placement.lay_out(column, steps[column]) for column in steps}, {}, placement

    starts = row_states(
        module,
        agents,
        layout,
        steps,
        warm_up,
        obs_given=obs_given,
        previous=previous,
        bootstrapped=bootstrapped,
    )
    rows = layout
    if warm_up.any():
        rows = RowLayout((layout.lengths - warm_up).tolist(), layout.max_seq_len)
    if min_rows is not None and isinstance(module, BaseMemoryRLModule):
        rows = pack(rows, starts.initial, min_rows)
    placement = Placement(agents, layout, warm_up, rows)
    columns = {column: placement.lay_out(column, steps[column]) for column in steps}
    columns[Columns.SEQ_LENS] = BatchedNdArray(rows.seq_lens)
    if Columns.LOSS_MASK not in columns:
        columns[Columns.LOSS_MASK] = BatchedNdArray(rows.valid)
    if rows.real is not None:
        neutralize(columns, rows.real)
    heads = np.arange(rows.num_rows)
    if isinstance(rows, PackedLayout):
        columns[RESETS] = BatchedNdArray(rows.resets)
        heads = rows.heads
    columns[Columns.STATE_IN] = tree.map_structure(BatchedNdArray, starts.stack(heads))
    counts = {NUM_REBUILT_ROWS: starts.num_rebuilt, NUM_STALE_ROWS: starts.num_stale}
    return columns, counts, placement


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
