"""What RLlib's Learners adapt while they train, and leave out of their checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from ray.rllib.core.learner.learner import Learner
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
