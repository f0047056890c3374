"""BC's and MARWIL's Learner for modules with memory."""

from __future__ import annotations

from typing import Any

from ray.rllib.algorithms.marwil.marwil import MARWILConfig
from ray.rllib.algorithms.marwil.torch.marwil_torch_learner import MARWILTorchLearner
from ray.rllib.connectors.learner import AddNextObservationsFromEpisodesToTrainBatch
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID, ResultDict

from connectors.learners.explained_variance import log_explained_variance
from connectors.learners.mixin import MemoryLearnerMixin


class MemoryMARWILTorchLearner(MemoryLearnerMixin, MARWILTorchLearner):
    """BC's and MARWIL's Learner for modules with memory, set by `connect`.

    Beyond `MemoryLearnerMixin` it makes its train batches itself, of whole recorded episodes: with
    the weights it has, each row's state is computed from the episode's first steps, and so are
    MARWIL's value targets. `vf_explained_var` counts real steps only.
    """

    @override(MARWILTorchLearner)
    def build(self) -> None:
        """Builds the Learner and completes its connectors."""
        super().build()
        pipeline = self._learner_connector
        if pipeline is not None:
            # No loss reads them, and they would come without a time axis.
            pipeline.remove(AddNextObservationsFromEpisodesToTrainBatch)

    @override(MARWILTorchLearner)
    def update(
        self, *args: Any, training_data: TrainingData | None = None, **kwargs: Any
    ) -> ResultDict:
        """Makes an update from each list of episodes that `RecordedEpisodes` dealt this Learner."""
        # Under the name that RLlib has for iterators or for a batch.
        dealt = training_data and (training_data.data_iterators or training_data.batch)
        if not isinstance(dealt, list):
            return super().update(*args, training_data=training_data, **kwargs)
        for episodes in dealt[0]:
            super().update(
                training_data=TrainingData(episodes=episodes),
                timesteps=kwargs.get("timesteps"),
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
        """MARWIL's loss, unchanged; its moving average doesn't take up what is not finite."""
        averages: Any = self.moving_avg_sqd_adv_norms_per_module
        before = averages[module_id]
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        averages[module_id] = averages[module_id].where(averages[module_id].isfinite(), before)
        if config.beta:
            log_explained_variance(self, module_id, batch)
        return loss
