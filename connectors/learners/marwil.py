"""BC's and MARWIL's Learner for modules with memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from ray.rllib.algorithms.marwil.marwil import MARWILConfig
from ray.rllib.algorithms.marwil.torch.marwil_torch_learner import MARWILTorchLearner
from ray.rllib.connectors.learner import AddNextObservationsFromEpisodesToTrainBatch
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID, ResultDict

from connectors.learner import BuildTrainBatch
from connectors.learners.explained_variance import log_explained_variance
from connectors.learners.mixin import MemoryLearnerMixin
from connectors.offline import RebuildRowStates, read_episodes


class MemoryMARWILTorchLearner(MemoryLearnerMixin, MARWILTorchLearner):
    """BC's and MARWIL's Learner for modules with memory, set by `connect`.

    Beyond `MemoryLearnerMixin` it makes its train batches itself, of whole recorded episodes: with
    the weights it has, each row's state is computed from the episode's first steps, and so are
    MARWIL's value targets. `vf_explained_var` counts real steps only.
    """

    _episodes: Iterator[SingleAgentEpisode] | None = None

    @override(MARWILTorchLearner)
    def build(self) -> None:
        """Builds the Learner and completes its connectors."""
        super().build()
        pipeline = self._learner_connector
        if pipeline is not None:
            pipeline.insert_after(BuildTrainBatch, RebuildRowStates())
            # No loss reads them, and they would come without a time axis.
            pipeline.remove(AddNextObservationsFromEpisodesToTrainBatch)

    @override(MARWILTorchLearner)
    def update(
        self, *args: Any, training_data: TrainingData | None = None, **kwargs: Any
    ) -> ResultDict:
        """Makes `num_iters` updates, each from whole episodes of `minibatch_size` steps or more."""
        # What `RecordedEpisodes` returned, under the name that RLlib has for an iterator or for a
        # batch.
        iterators = training_data and (training_data.data_iterators or training_data.batch)
        if not isinstance(iterators, list):
            return super().update(*args, training_data=training_data, **kwargs)
        num_iters, num_steps = kwargs.pop("num_iters"), kwargs.pop("minibatch_size")
        timesteps = kwargs.pop("timesteps", None)
        if self._episodes is None:
            kwargs.pop("return_state", None)
            # One row is one episode.
            batch_size = self.config.input_read_batch_size or 1
            self._episodes = read_episodes(iterators[0], batch_size=batch_size, **kwargs)
        for _ in range(num_iters):
            episodes: list[Any] = [next(self._episodes)]
            while sum(map(len, episodes)) < num_steps:
                episodes.append(next(self._episodes))
            super().update(
                training_data=TrainingData(episodes=episodes),
                timesteps=timesteps,
                # Once, for all updates, below.
                _no_metrics_reduce=True,
            )
        return self.metrics.reduce()

    @override(MARWILTorchLearner)
    def compute_loss_for_module(
        self,
        *,
        module_id: ModuleID,
        config: MARWILConfig,
        batch: dict[str, Any],
        fwd_out: dict[str, Any],
    ) -> Any:
        """MARWIL's loss, unchanged."""
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        if config.beta and Columns.LOSS_MASK in batch:
            log_explained_variance(self, module_id, batch, fwd_out)
        return loss
