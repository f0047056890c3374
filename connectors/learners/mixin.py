"""What the Learners of all algorithms share: guarded weights, our advantages."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterable, Iterator
from typing import Any

import ray
import torch
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core import ALL_MODULES, COMPONENT_OPTIMIZER
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.policy.sample_batch import MultiAgentBatch
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID, ParamDict

from connectors.advantages import ComputeAdvantages
from connectors.learners.common_modules import KeepCommonModules
from connectors.learners.minibatches import RowMinibatches
from connectors.learners.saved_state import ADAPTED_STATE, adapted_state, restore_adapted_state
from connectors.measures import (
    FORWARD_TIME,
    LARGEST_GRADIENT,
    MEMORY,
    NUM_NONFINITE_GRADIENTS,
    log_rows,
)

logger = logging.getLogger("rllib_memory")


class MemoryLearnerMixin(TorchLearner):
    """What every Learner needs for modules with memory; put it before RLlib's Learner class.

    - An update whose gradients hold a NaN or an infinity is skipped: weights and optimizer stay as
      they are, and the metric `num_nonfinite_gradients` (under `__all_modules__`, `memory`) counts
      it. RLlib would set such gradients to 0 or a huge number and step.
    - RLlib's advantage connector is replaced by `ComputeAdvantages`.
    - Every row of a batch is trained on equally often, see `RowMinibatches`.
    - Several Learners update the same modules, see `KeepCommonModules`.
    - Checkpoints hold what RLlib leaves out of them: coefficients, moving averages and the times of
      target updates, so that a resumed run makes the update that the saved one would have made.

    Attributes:
        measures_memory: Whether to log what `docs/how-to/metrics.md` lists for Learners;
            `MemoryMetrics` sets it.
        restored: Whether a checkpoint's Learner was restored since `require_learners` looked.
    """

    measures_memory = False
    restored = False
    _restore_error: Exception | None = None
    _largest_raw_gradient: torch.Tensor | None = None
    _minibatch_at = 0.0

    @override(TorchLearner)
    def build(self) -> None:
        """Builds the Learner and swaps the advantage connector."""
        super().build()
        # RLlib's flag means "do not check": its checks synchronise twice a parameter, do not
        # protect the weights, and are made needless by ours. This is the Learner's own copy of the
        # config.
        self.config.torch_skip_nan_gradients = True
        pipeline = self._learner_connector
        if pipeline is not None and pipeline[GeneralAdvantageEstimation]:
            config: Any = self.config
            pipeline.insert_after(
                GeneralAdvantageEstimation,
                ComputeAdvantages(gamma=config.gamma, lambda_=config.lambda_),
            )
            pipeline.remove(GeneralAdvantageEstimation)
        if pipeline is not None and self.distributed and len(self.module) > 1:
            pipeline.append(KeepCommonModules())

    @override(TorchLearner)
    def _create_iterator_if_necessary(
        self,
        *,
        training_data: TrainingData,
        num_total_minibatches: int = 0,
        num_epochs: int = 1,
        minibatch_size: int | None = None,
        shuffle_batch_per_epoch: bool = False,
        **kwargs: Any,
    ) -> Iterable:
        """Replaces RLlib's minibatches by `RowMinibatches`.

        Private in Ray 2.60, where the class of the minibatches can't be chosen. A test fails if Ray
        no longer calls it.
        """
        if training_data.data_iterators:
            return super()._create_iterator_if_necessary(
                training_data=training_data,
                num_total_minibatches=num_total_minibatches,
                num_epochs=num_epochs,
                minibatch_size=minibatch_size,
                shuffle_batch_per_epoch=shuffle_batch_per_epoch,
                **kwargs,
            )
        # Without a minibatch size RLlib's iterator yields the whole batch, once.
        whole = super()._create_iterator_if_necessary(training_data=training_data, **kwargs)
        for batch in whole:
            minibatches = RowMinibatches(
                batch,
                minibatch_size=minibatch_size,
                num_epochs=num_epochs,
                shuffle=shuffle_batch_per_epoch and num_epochs > 1,
                num_total_minibatches=num_total_minibatches,
            )
            if not self.measures_memory:
                return minibatches
            log_rows(self.metrics, batch.policy_batches)
            return self._timed(minibatches)
        return []

    def _timed(self, minibatches: Iterable[MultiAgentBatch]) -> Iterator[MultiAgentBatch]:
        for minibatch in minibatches:
            self._minibatch_at = time.perf_counter()
            yield minibatch

    @override(TorchLearner)
    def compute_losses(
        self, *, fwd_out: dict[str, Any], batch: dict[str, Any]
    ) -> dict[ModuleID, Any]:
        """Logs how long the forward pass took, and computes the losses from it."""
        if self.measures_memory:
            # Not synchronised: on a GPU the time to launch the pass.
            seconds = time.perf_counter() - self._minibatch_at
            self.metrics.log_value((ALL_MODULES, MEMORY, FORWARD_TIME), seconds, reduce="mean")
        return super().compute_losses(fwd_out=fwd_out, batch=batch)

    @override(TorchLearner)
    def postprocess_gradients(self, gradients_dict: ParamDict) -> ParamDict:
        """Clips gradients and remembers their largest entry from before."""
        # Clipping by value turns an infinity into a valid number. Here and not where gradients are
        # computed: IMPALA's Learners have averaged them by now, so that all decide the same.
        self._largest_raw_gradient = _largest(gradients_dict)
        return super().postprocess_gradients(gradients_dict)

    @override(TorchLearner)
    def apply_gradients(self, gradients_dict: ParamDict) -> None:
        """Steps the optimizers, unless a gradient is NaN or infinite."""
        # Loss scaling for float16 meets infinities by design and skips such steps itself.
        if self._grad_scalers is not None:
            super().apply_gradients(gradients_dict)
            return
        largest = _largest(gradients_dict)
        if self._largest_raw_gradient is not None:
            largest = torch.maximum(largest, self._largest_raw_gradient)
        # The only device synchronisation of an update.
        largest = float(largest)
        finite = math.isfinite(largest)
        # All Learners have the same gradients by now: one of them counts.
        counts = not self.distributed or torch.distributed.get_rank() == 0
        key = (ALL_MODULES, MEMORY)
        self.metrics.log_value(
            (*key, NUM_NONFINITE_GRADIENTS), int(counts and not finite), reduce="sum"
        )
        if self.measures_memory and finite:
            self.metrics.log_value((*key, LARGEST_GRADIENT), largest, reduce="max")
        if not finite:
            logger.warning("Skipped an update: its gradients hold NaN or infinite numbers.")
            return
        super().apply_gradients(gradients_dict)

    @override(TorchLearner)
    def restore_from_path(self, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint.

        RLlib 2.60 takes a Learner actor that raises here out of service, and fails later for having
        none. So an actor raises when RLlib asks for the restored weights, which it does at once.
        """
        self._restore_error = None
        try:
            super().restore_from_path(*args, **kwargs)
        except Exception as error:
            if not (ray.is_initialized() and ray.get_runtime_context().get_actor_id()):
                raise
            self._restore_error = error
        self.restored = True

    @override(TorchLearner)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state, with what it leaves out where optimizers are asked for."""
        if self._restore_error is not None:
            raise self._restore_error
        state = super().get_state(*args, **kwargs)
        if COMPONENT_OPTIMIZER in state:
            state[ADAPTED_STATE] = adapted_state(self)
        return state

    @override(TorchLearner)
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned.

        Raises:
            ValueError: if optimizers come without what else this Learner goes on from.
        """
        if COMPONENT_OPTIMIZER not in state:
            super().set_state(state)
            return
        restore_adapted_state(self, state.get(ADAPTED_STATE, {}))
        super().set_state(state)
        # Population based training resumes with another learning rate than the checkpoint's, which
        # RLlib 2.60 would use for an update more. Private, as Learners don't show their schedules;
        # a test fails if Ray renames them.
        schedules: Any = self._optimizer_lr_schedules
        for optimizer, schedule in schedules.items():
            if not schedule.use_schedule:
                self._set_optimizer_lr(optimizer, lr=schedule.get_current_value())


def _largest(gradients: ParamDict) -> torch.Tensor:
    """The largest absolute gradient: NaN or infinite if any is."""
    tensors: list[Any] = [gradient for gradient in gradients.values() if gradient is not None]
    return torch.nn.utils.get_total_norm(tensors, norm_type=float("inf"))
