"""What the Learners of all algorithms share."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.connectors.learner import (
    AgentToModuleMapping,
    BatchIndividualItems,
    GeneralAdvantageEstimation,
)
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID

from connectors.learners.guarded_gradients import GuardedGradients
from connectors.learners.kept_resets import check_packed_memory
from connectors.learners.measuring import MeasuredUpdates
from connectors.learners.minibatches import EqualMinibatches
from connectors.learners.saved_state import ReportedRestore, SavedAdaptations
from connectors.rows.advantages import ComputeAdvantages
from connectors.rows.build_train_batch import BuildTrainBatch
from connectors.rows.later_columns import LayOutLaterColumns


class MemoryLearnerMixin(
    GuardedGradients, MeasuredUpdates, EqualMinibatches, ReportedRestore, SavedAdaptations
):
    """What every Learner needs for modules with memory; put it before RLlib's Learner class.

    - A module whose gradients hold a NaN or an infinity is not updated: weights and optimizer stay
      as they are, and its metric `num_nonfinite_gradients` counts it. RLlib would set such
      gradients to 0 or a huge number and step.
    - RLlib's advantage connector is replaced by `ComputeAdvantages`.
    - Every row of a batch is trained on equally often, see `RowMinibatches`.
    - Several Learners update the same modules, in equally many minibatches.
    - Checkpoints hold what RLlib leaves out of them: coefficients, moving averages and the times of
      target updates, so that a resumed run makes the update that the saved one would have made.

    Attributes:
        measures_memory: Whether to log what `docs/how-to/metrics.md` lists for Learners;
            `MemoryMetrics` sets it.
        restored: Whether a checkpoint's Learner was restored since `require_learners` looked.
    """

    @override(TorchLearner)
    def configure_optimizers_for_module(self, module_id: ModuleID, config: Any = None) -> None:
        """Makes the module's optimizers; those of RLlib's default class step in one operator."""
        super().configure_optimizers_for_module(module_id, config)
        for _, optimizer in self.get_optimizers_for_module(module_id):
            # Exactly RLlib's default: what a Learner of the user's own has chosen stays.
            if type(optimizer) is torch.optim.Adam and optimizer.defaults["foreach"] is None:
                for group in optimizer.param_groups:
                    group["fused"] = True if group["fused"] is None else group["fused"]

    @override(TorchLearner)
    def build(self) -> None:
        """Builds the Learner, swaps the advantage connector, and has later columns laid out.

        Raises:
            ValueError: if rows are packed for a memory that resets do not reach.
        """
        super().build()
        pipeline = self._learner_connector
        if pipeline is None:
            return
        # Without `connect` RLlib's own pieces make the rows, which are padded.
        pieces: Any = pipeline[BuildTrainBatch]
        if any(piece.pack_rows for piece in pieces):
            for module_id, module in self.module.items():
                check_packed_memory(module.unwrapped(), module_id)
        if pipeline[GeneralAdvantageEstimation]:
            pipeline.insert_after(GeneralAdvantageEstimation, ComputeAdvantages(config=self.config))
            pipeline.remove(GeneralAdvantageEstimation)
        # RLlib's default pieces bring columns into their last form from here on.
        form = AgentToModuleMapping if self.config.is_multi_agent else BatchIndividualItems
        pipeline.insert_before(form, LayOutLaterColumns())
