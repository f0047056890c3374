"""Columns that come into the batch once its rows are laid out."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.utils.annotations import override

from connectors.agents import batch_key, has_items
from connectors.rows.columns import Placement, collect_column
from connectors.rows.vtrace import neutralize

PLACEMENTS = "row_placements"
"""Key of `shared_data`: the `Placement` of each module whose rows are laid out, by module ID."""

# Of rows, or of no order.
_OTHER_COLUMNS = (Columns.STATE_IN, Columns.SEQ_LENS, Columns.INFOS)


class LayOutLaterColumns(ConnectorV2):
    """Lays out in rows what pieces behind `BuildTrainBatch` put into the batch.

    RLlib's pieces add one item a step, for instance the next observations, and leave the time axis
    to a piece that stands aside where it finds `STATE_IN`. Columns that are in rows stay.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
    ):
        super().__init__(input_observation_space, input_action_space)

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {}

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        rl_module: Any,
        batch: dict[str, Any],
        episodes: list[Any],
        explore: bool | None = None,
        shared_data: dict | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Changes the columns of the batch, which has none of the modules' IDs yet."""
        placements: dict[str, Placement] = (shared_data or {}).get(PLACEMENTS, {})
        for module_id, placement in placements.items():
            first = batch_key(placement.agents[0])
            later = False
            for column, data in batch.items():
                if column in _OTHER_COLUMNS or not has_items(data, placement.agents):
                    continue
                own = _items_of(data, module_id)
                if placement.holds(list(own.values())):
                    continue
                parts = collect_column(column, data, placement.agents, placement.steps)
                others = {key: items for key, items in data.items() if key not in own}
                batch[column] = {**others, first: [placement.lay_out(column, parts)]}
                later = True
            if later and placement.rows is not None and placement.rows.real is not None:
                columns = {
                    column: data[first][0] for column, data in batch.items() if first in data
                }
                neutralize(columns, placement.rows.real)
                batch[Columns.LOSS_MASK][first] = [columns[Columns.LOSS_MASK]]
        return batch


def _items_of(data: Any, module_id: str) -> dict[Any, list[Any]]:
    """The lists of one module's items. RLlib's keys end in the module's ID if there are several."""
    if not isinstance(data, dict):
        return {}
    return {key: items for key, items in data.items() if len(key) == 1 or key[-1] == module_id}
