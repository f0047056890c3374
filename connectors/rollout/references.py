"""The references to snapshots that an episode holds under `STATE_OUT`."""

from __future__ import annotations

from typing import Any

import numpy as np
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.utils.annotations import override

from connectors.snapshots import StateSnapshot


class SnapshotBuffer(InfiniteLookbackBuffer):
    """An episode's references to snapshots, in a form that can be sent.

    RLlink packs an episode's state; it knows arrays of objects, but not the objects themselves. In
    an array each snapshot also travels once.
    """

    @override(InfiniteLookbackBuffer)
    def get_state(self) -> dict[str, Any]:
        """Returns RLlib's dict, the references as an array."""
        if self.finalized:
            return super().get_state()
        references = np.empty(len(self.data), dtype=object)
        references[:] = self.data
        return {**super().get_state(), "data": references, "finalized": True}


def forget_lookback(episode: SingleAgentEpisode, snapshot: StateSnapshot) -> None:
    """Lets go of the states before a cut, which would be pickled again and are never used."""
    lookback = episode.extra_model_outputs.get(Columns.STATE_OUT)
    if lookback is not None and lookback.lookback:
        episode.set_extra_model_outputs(
            key=Columns.STATE_OUT,
            new_data=[snapshot] * lookback.lookback,
            at_indices=list(range(-lookback.lookback, 0)),
            neg_index_as_lookback=True,
        )


def prepare_buffer(episode: SingleAgentEpisode) -> None:
    """Has an episode keep its references in a form that can be sent."""
    recorded = episode.extra_model_outputs.get(Columns.STATE_OUT)
    if recorded is None and len(episode) == 0:
        episode.extra_model_outputs[Columns.STATE_OUT] = SnapshotBuffer()
    elif type(recorded) is InfiniteLookbackBuffer:
        recorded.__class__ = SnapshotBuffer


def drop_unused_buffer(episode: SingleAgentEpisode) -> None:
    """Where a script does not record the module's outputs."""
    recorded = episode.extra_model_outputs.get(Columns.STATE_OUT)
    if type(recorded) is SnapshotBuffer and not len(recorded.data) and len(episode):
        del episode.extra_model_outputs[Columns.STATE_OUT]
