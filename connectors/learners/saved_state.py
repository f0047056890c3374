"""What RLlib's Learners leave out of their checkpoints, and errors of restoring them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ray
import torch
from ray.rllib.core import COMPONENT_OPTIMIZER
from ray.rllib.core.learner.learner import Learner
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.schedules.scheduler import Scheduler
from torch import Tensor

ADAPTED_STATE = "adapted_state"
# Attributes of Ray 2.60's Learners: dicts by module ID. The underscored one is private; without it
# APPO would update its target networks at once after a resume. A test resumes each algorithm and
# fails if Ray renames one.
_ATTRIBUTES = (
    "curr_kl_coeffs_per_module",
    "entropy_coeff_schedulers_per_module",
    "curr_log_alpha",
    "moving_avg_sqd_adv_norms_per_module",
    "last_update_ts_by_mid",
    "_last_update_ts_by_mid",
)


class SavedAdaptations(TorchLearner):
    """Saves and restores what the Learner adapts while it trains."""

    @override(TorchLearner)
    def get_state(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """RLlib's state, with what it leaves out where optimizers are asked for."""
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


class ReportedRestore(TorchLearner):
    """Has a Learner that could not be restored say why.

    RLlib 2.60 takes a Learner actor that raises while it restores out of service, and fails later
    for having none. So an actor raises when RLlib asks for the restored weights, which it does at
    once.
    """

    restored = False
    _restore_error: Exception | None = None

    @override(TorchLearner)
    def restore_from_path(self, *args: Any, **kwargs: Any) -> None:
        """Restores a checkpoint, and keeps the error if that fails in an actor."""
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
        """RLlib's state, unless restoring it failed."""
        if self._restore_error is not None:
            raise self._restore_error
        return super().get_state(*args, **kwargs)


def adapted_state(learner: Learner) -> dict[str, dict[str, Any]]:
    """By attribute and module, what the Learner adapted; tensors as numpy arrays."""
    state = {}
    for name, by_module in _present(learner).items():
        values = {id_: _current(by_module[id_]) for id_, _ in learner.module.items()}
        state[name] = {
            id_: value.detach().cpu().numpy().copy() if isinstance(value, Tensor) else value
            for id_, value in values.items()
        }
    return state


def restore_adapted_state(learner: Learner, state: Mapping[str, Mapping[str, Any]]) -> None:
    """Restores what `adapted_state` returned.

    Raises:
        ValueError: if it is not all there. Then nothing was restored.
    """
    present = _present(learner)
    missing = present.keys() - state.keys()
    if missing:
        raise ValueError(
            f"The checkpoint's Learner lacks {sorted(missing)}, which {type(learner).__name__} "
            "goes on from: a Learner of another class saved it, without `connect` perhaps. Restore "
            "the modules alone: `restore_from_path(..., component='learner_group/learner/"
            "rl_module')`."
        )
    for name, by_module in present.items():
        for id_, value in state[name].items():
            if id_ not in learner.module:
                continue
            current = _current(by_module[id_])
            if isinstance(current, Tensor):
                # In place: optimizers and schedules hold these tensors.
                with torch.no_grad():
                    current.copy_(torch.as_tensor(value))
            elif not isinstance(by_module[id_], Scheduler):
                by_module[id_] = value


def _present(learner: Learner) -> dict[str, Any]:
    return {name: getattr(learner, name) for name in _ATTRIBUTES if hasattr(learner, name)}


def _current(value: Any) -> Any:
    """A number, or the tensor that holds it."""
    return value.get_current_value() if isinstance(value, Scheduler) else value
