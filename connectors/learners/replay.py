"""What the Learners of replaying algorithms share."""

from __future__ import annotations

from typing import Any

from ray.rllib.connectors.learner import (
    AddNextObservationsFromEpisodesToTrainBatch,
    AddOneTsToEpisodesAndTruncate,
)
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.annotations import override
from torch import Tensor

from connectors.learners.mixin import MemoryLearnerMixin
from connectors.replay.shares import unpacked


class ReplayLearnerMixin(MemoryLearnerMixin):
    """Trains on the rows that `connectors.replay` describes; put it before RLlib's Learner class.

    A slice's last observation goes into the row behind its last step, in place of the second set
    of rows, one step later, that RLlib adds as `NEXT_OBS`. Modules without memory are trained as
    RLlib trains them. Several Learners get their slices in one piece each.
    """

    @override(TorchLearner)
    def update(self, *args: Any, training_data: TrainingData | None = None, **kwargs: Any) -> Any:
        """Trains on the slices of this Learner's share."""
        if training_data is not None and training_data.episodes is not None:
            training_data.episodes = unpacked(training_data.episodes)
        return super().update(*args, training_data=training_data, **kwargs)

    @override(TorchLearner)
    def build(self) -> None:
        """Builds the Learner and exchanges the connector of the next observations."""
        super().build()
        pipeline = self._learner_connector
        if pipeline is not None and self.module.is_stateful():
            # SAC has two of them in Ray 2.60: one from its config, one from DQN's Learner.
            while pipeline[AddNextObservationsFromEpisodesToTrainBatch]:
                pipeline.remove(AddNextObservationsFromEpisodesToTrainBatch)
            pipeline.prepend(AddOneTsToEpisodesAndTruncate())


def trained_steps(loss_mask: Tensor) -> Tensor:
    """`(B, T)` bool: the steps whose next observation stands in the same row."""
    mask = loss_mask.clone()
    mask[:, -1] = False
    return mask


def masked_mean(x: Tensor, mask: Tensor) -> Tensor:
    """Mean of `x (B, T)` where `mask` is True; NaN elsewhere does no harm."""
    # A sum instead of `x[mask]`: indexing by a mask synchronises the device.
    return x.where(mask, 0.0).sum() / mask.sum()
