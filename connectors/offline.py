"""Recorded episodes on their way to the Learner, and the states of their rows."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import gymnasium as gym
import tree
from ray.data import DataIterator
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.offline.offline_data import OfflineData
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space

from connectors.layout import RowLayout
from connectors.measures import MEMORY, NUM_REBUILT_ROWS
from connectors.snapshots import rebuild_states
from connectors.validation import row_length


class RecordedEpisodes(OfflineData):
    """Hands recorded episodes to the Learners as they are.

    RLlib turns them into train batches in processes of their own, whose module keeps the weights
    of the first iteration. States and values computed there would be those of an untrained policy.
    """

    def __init__(self, config: AlgorithmConfig):
        super().__init__(config)
        # So that RLlib's `sample` maps nothing.
        self.data_is_mapped = True

    @override(OfflineData)
    def sample(
        self,
        num_samples: int,
        return_iterator: bool = False,
        num_shards: int = 1,
        module_state: dict[str, Any] | None = None,
    ) -> list[DataIterator]:
        """One iterator a Learner, also where RLlib asks for a batch: our Learner takes both."""
        iterators: Any = super().sample(num_samples, return_iterator=True, num_shards=num_shards)
        return iterators


def read_episodes(iterator: DataIterator, **kwargs: Any) -> Iterator[SingleAgentEpisode]:
    """Reads and decodes recorded episodes, again and again, each once a pass.

    RLlib's own recorder on Ray 2.60 writes an episode into several files. Module outputs are left
    out: no offline Learner needs those of the policy that recorded.

    Args:
        iterator: Over rows as RLlib records episodes.
        kwargs: For `DataIterator.iter_batches`.

    Raises:
        ValueError: if there are none, or one does not begin with a reset.
    """
    # Here, as RLlib does it: Ray does not install `msgpack_numpy`.
    import msgpack
    import msgpack_numpy

    while True:
        seen: set[str] = set()
        for rows in iterator.iter_batches(**kwargs):
            for row in rows["item"]:
                state = msgpack.unpackb(row, object_hook=msgpack_numpy.decode)
                if state["id_"] in seen:
                    continue
                seen.add(state["id_"])
                episode = SingleAgentEpisode.from_state({**state, "extra_model_outputs": None})
                if episode.t_started > 0:
                    raise ValueError(
                        f"Recorded episode {episode.id_} starts at its step {episode.t_started}. "
                        "The steps before are needed for the policy's state: record with "
                        '`config.env_runners(batch_mode="complete_episodes")`.'
                    )
                _restore_tuples(episode.observations)
                _restore_tuples(episode.actions)
                yield episode.to_numpy()
        if not seen:
            raise ValueError(
                "`input_` holds no episodes. Point it to files recorded with "
                "`config.offline_data(output=..., output_write_episodes=True)`."
            )


def _restore_tuples(buffer: InfiniteLookbackBuffer) -> None:
    """Makes tuples of lists again, which is how msgpack returns both."""
    struct = None if buffer.space is None else get_base_struct_from_space(buffer.space)
    if not tree.is_nested(struct):
        return
    buffer.data = [tree.unflatten_as(struct, tree.flatten(item)) for item in buffer.data]


class RebuildRowStates(ConnectorV2):
    """Computes each row's `STATE_IN` with the module's present weights, from episodes' first steps.

    Stands behind `BuildTrainBatch` and expects whole episodes. The rows of all episodes run through
    the module together, the first ones, then the second ones, without gradient; so the pass costs
    what inference on the batch costs.
    """

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {}

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
    ):
        super().__init__(input_observation_space, input_action_space)

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[str, Any],
        episodes: list[SingleAgentEpisode],
        explore: bool | None = None,
        shared_data: dict | None = None,
        metrics: MetricsLogger | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Writes into the arrays of `STATE_IN`."""
        module = rl_module[DEFAULT_MODULE_ID].unwrapped()
        max_seq_len = row_length(module)
        if max_seq_len is None:
            return batch
        layout = RowLayout([len(episode) for episode in episodes], max_seq_len)
        observations, states = (
            next(iter(batch[column].values()))[0] for column in (Columns.OBS, Columns.STATE_IN)
        )
        for position in range(int(layout.rows_per_episode.max()) - 1):
            # Rows that another one of the same episode follows: they are full.
            rows = layout.first_rows[layout.rows_per_episode > position + 1] + position
            after = rebuild_states(
                module,
                [_row(states, row) for row in rows],
                [{Columns.OBS: _row(observations, row)} for row in rows],
            )
            for row, state in zip(rows, after, strict=True):
                _set_row(states, row + 1, state)
        if metrics is not None:
            metrics.log_value(
                (DEFAULT_MODULE_ID, MEMORY, NUM_REBUILT_ROWS),
                layout.num_rows - len(episodes),
                reduce="sum",
            )
        return batch


def _row(columns: Any, row: int) -> Any:
    return tree.map_structure(lambda leaf: leaf[row], columns)


def _set_row(columns: Any, row: int, values: Any) -> None:
    for leaf, value in zip(tree.flatten(columns), tree.flatten(values), strict=True):
        leaf[row] = value
