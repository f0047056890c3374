"""DQN's Learner for modules with memory."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.algorithms.dqn.dqn_learner import (
    ATOMS,
    QF_LOGITS,
    QF_LOSS_KEY,
    QF_MAX_KEY,
    QF_MEAN_KEY,
    QF_MIN_KEY,
    QF_PREDS,
    QF_PROBS,
    TD_ERROR_MEAN_KEY,
)
from ray.rllib.algorithms.dqn.torch.dqn_torch_learner import DQNTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID
from torch import Tensor, nn

from connectors.learners.replay import ReplayLearnerMixin, masked_mean, trained_steps


class MemoryDQNTorchLearner(ReplayLearnerMixin, DQNTorchLearner):
    """DQN's Learner for modules with memory, set by `connect`.

    One pass of each network over the rows gives the values of the steps and of the observations
    that follow them, in the next slots. RLlib runs each twice, over rows that are one step apart.
    Losses and metrics are means over the steps that `LOSS_MASK` names.

    Any module with memory is trained whose `forward_train` returns `QF_PREDS (B, T, A)` and whose
    `forward_target`, of RLlib's `TargetNetworkAPI`, returns the same of its target network; with
    several atoms `ATOMS`, `QF_LOGITS` and `QF_PROBS` besides, as RLlib's `QNetAPI` names them.
    """

    @override(DQNTorchLearner)
    def compute_loss_for_module(
        self,
        *,
        module_id: ModuleID,
        config: Any,
        batch: dict[str, Any],
        fwd_out: dict[str, Any],
    ) -> Any:
        """The TD loss of n-step returns, plain or of a distribution over atoms.

        Raises:
            ValueError: If a module's `forward_train` returns no action values.
        """
        if Columns.STATE_IN not in batch:
            return super().compute_loss_for_module(
                module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
            )
        if QF_PREDS not in fwd_out:
            raise ValueError(
                f"`forward_train` of module `{module_id}` returned {sorted(fwd_out)}, but must "
                f"return `{QF_PREDS}`, the action values `(B, T, A)`. Return them, or derive the "
                "module from `MemoryQRLModule`."
            )
        module: Any = self.module[module_id].unwrapped()
        with torch.no_grad():
            target_out = module.forward_target(batch)
        q, target = fwd_out[QF_PREDS], target_out[QF_PREDS]
        mask = trained_steps(batch[Columns.LOSS_MASK])
        returns, discounts, slots = n_step_returns(
            batch[Columns.REWARDS], batch[Columns.TERMINATEDS], mask, config.gamma, config.n_step
        )
        actions = batch[Columns.ACTIONS].long()
        best = (q if config.double_q else target).detach().argmax(-1)
        q_selected = _select(q, actions)
        if config.num_atoms > 1:
            next_probs = _gather_slots(_select(target_out[QF_PROBS], best), slots)
            expected = project(returns, discounts, next_probs, fwd_out[ATOMS])
            logits = _select(fwd_out[QF_LOGITS], actions)
            losses = td_errors = -(expected * logits.log_softmax(-1)).sum(-1)
        else:
            next_values = _gather_slots(_select(target, best), slots)
            expected = returns + discounts * next_values
            td_errors = (q_selected - expected).abs()
            loss_fn = nn.HuberLoss if config.td_error_loss_fn == "huber" else nn.MSELoss
            losses = loss_fn(reduction="none")(q_selected, expected)

        loss = masked_mean(losses, mask)
        q_selected, infinity = q_selected.detach(), float("inf")
        self.metrics.log_dict(
            {
                QF_LOSS_KEY: loss.detach(),
                QF_MEAN_KEY: masked_mean(q_selected, mask),
                QF_MAX_KEY: q_selected.where(mask, -infinity).max(),
                QF_MIN_KEY: q_selected.where(mask, infinity).min(),
                TD_ERROR_MEAN_KEY: masked_mean(td_errors.detach(), mask),
            },
            key=module_id,
            window=1,
        )
        return loss


def n_step_returns(
    rewards: Tensor, terminateds: Tensor, mask: Tensor, gamma: float, n_step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns over up to n steps, and what they have to be bootstrapped with.

    The target of a step is `return + discount * value`, the value being that of the observation in
    `slot`. It lies n steps ahead, or where the row's steps end if that is earlier.

    Args:
        rewards: `(B, T)`.
        terminateds: `(B, T)` bool, True where the episode ended with the step.
        mask: `(B, T)` bool, False where there is no step. A row's steps are its first slots.
        gamma: Discount factor.
        n_step: Number n of steps.

    Returns:
        Returns, discounts (0 where the episode ended within the n steps) and slots, `(B, T)`.
        Meaningless where `mask` is False.
    """
    T = rewards.shape[1]
    # The last slot holds no step; whatever it takes for its successor is not used.
    successors = torch.arange(1, T + 1, device=rewards.device).clamp(max=T - 1)
    continues = gamma * (~terminateds).to(rewards.dtype)
    goes_on = mask[:, successors]
    returns, discounts = rewards, continues
    slots = successors.expand_as(rewards)
    for _ in range(n_step - 1):
        ahead = (x[:, successors] for x in (returns, discounts, slots))
        next_returns, next_discounts, next_slots = ahead
        returns = rewards + continues * next_returns.where(goes_on, 0.0)
        discounts = continues * next_discounts.where(goes_on, 1.0)
        slots = next_slots.where(goes_on, successors)
    return returns, discounts, slots


def project(returns: Tensor, discounts: Tensor, probs: Tensor, atoms: Tensor) -> Tensor:
    """The distribution of `return + discount * z`, `z` being atoms, as one over the atoms.

    Args:
        returns: `(B, T)`.
        discounts: `(B, T)`.
        probs: Probabilities of the atoms, `(B, T, N)`.
        atoms: `(N,)`, ascending at equal distances.

    Returns:
        Probabilities `(B, T, N)`: each moved atom's is shared by its two neighbours.
    """
    moved = (returns[..., None] + discounts[..., None] * atoms).clamp(atoms[0], atoms[-1])
    distances = (moved[..., None, :] - atoms[:, None]).abs() / (atoms[1] - atoms[0])
    return ((1 - distances).clamp(min=0) * probs[..., None, :]).sum(-1)


def _select(x: Tensor, actions: Tensor) -> Tensor:
    """Takes `(B, T, ...)` of the actions `(B, T)` from `x (B, T, A, ...)`."""
    index = actions.view(*actions.shape, *(1,) * (x.dim() - 2)).expand(-1, -1, 1, *x.shape[3:])
    return x.gather(2, index).squeeze(2)


def _gather_slots(x: Tensor, slots: Tensor) -> Tensor:
    """Takes what stands in the slots `(B, T)` of the rows `x (B, T, ...)`."""
    return x.gather(1, slots.view(*slots.shape, *(1,) * (x.dim() - 2)).expand_as(x))
