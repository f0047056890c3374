"""One column of a train batch: from items, one a step, to rows."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.spaces.space_utils import BatchedNdArray
from ray.rllib.utils.spaces.space_utils import batch as stack_items

from connectors.agents import batch_key
from connectors.rows.layout import Layout, RowLayout


@dataclass(frozen=True)
class Placement:
    """Where the steps of a module's agents stand in its train batch.

    Args:
        agents: Episodes of the agents.
        steps: Layout of all their steps.
        warm_up: `(E,)` leading steps of each episode that stand in no row.
        rows: Layout of the other steps; None for a module without memory, whose steps stand one
            after the other.
    """

    agents: list[SingleAgentEpisode]
    steps: RowLayout
    warm_up: np.ndarray
    rows: Layout | None

    def lay_out(self, column: str, parts: Any) -> Any:
        """A column's arrays, from a list of one part an episode or the steps of all of them."""
        if self.rows is None:
            return _as_mask(column, _join(parts))
        if self.warm_up.any():
            parts = _without_warm_up(self.steps, parts, self.warm_up)
        return _as_mask(column, _pad(self.rows, parts))

    def holds(self, items: list[list[Any]]) -> bool:
        """Whether these lists of items, one a key, are a column that is laid out."""
        if len(items) != 1 or len(items[0]) != 1:
            return False
        leaf = tree.flatten(items[0][0])[0]
        if not isinstance(leaf, BatchedNdArray):
            return False
        if self.rows is None:
            return len(leaf) == self.steps.num_steps
        # The steps of a single episode may be as many as its rows.
        if len(self.agents) == 1 and self.rows.num_rows == self.steps.num_steps:
            return leaf.shape[:2] == (self.rows.num_rows, self.rows.width)
        return len(leaf) == self.rows.num_rows


def collect_column(
    column: str, data: Any, episodes: list[SingleAgentEpisode], layout: RowLayout
) -> Any:
    """The steps of a column that another piece put into the batch.

    Raises:
        ValueError: if it does not have one item for each step of each episode.
    """
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


def _without_warm_up(layout: RowLayout, parts: Any, warm_up: np.ndarray) -> Any:
    if isinstance(parts, list):
        return [
            tree.map_structure(lambda leaf, start=start: leaf[start:], part)
            for part, start in zip(parts, warm_up.tolist(), strict=True)
        ]
    positions = np.arange(layout.num_steps) - np.repeat(layout.offsets, layout.lengths)
    kept = positions >= np.repeat(warm_up, layout.lengths)
    return tree.map_structure(lambda leaf: leaf[kept], parts)


def _join(parts: Any) -> Any:
    if not isinstance(parts, list):
        return tree.map_structure(BatchedNdArray, parts)
    return tree.map_structure(lambda *leaves: BatchedNdArray(np.concatenate(leaves)), *parts)


def _pad(layout: Layout, parts: Any) -> Any:
    if not isinstance(parts, list):
        return tree.map_structure(lambda leaf: BatchedNdArray(layout.pad(leaf)), parts)
    return tree.map_structure(
        lambda *leaves: BatchedNdArray(layout.pad_parts(leaves)), parts[0], *parts[1:]
    )


def _as_mask(column: str, data: Any) -> Any:
    # RLlib's losses index with it: numbers would pick steps instead of masking them.
    return data.astype(bool) if column == Columns.LOSS_MASK else data
