"""SAC's Learner for modules with memory."""

from __future__ import annotations

from typing import Any

import torch
from ray.rllib.algorithms.sac.sac import SACConfig
from ray.rllib.algorithms.sac.sac_learner import (
    LOGPS_KEY,
    QF_LOSS_KEY,
    QF_MAX_KEY,
    QF_MEAN_KEY,
    QF_MIN_KEY,
    QF_PREDS,
    QF_TARGET_NEXT,
    QF_TWIN_LOSS_KEY,
    QF_TWIN_PREDS,
    TD_ERROR_MEAN_KEY,
)
from ray.rllib.algorithms.sac.torch.sac_torch_learner import SACTorchLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.learner import POLICY_LOSS_KEY
from ray.rllib.core.learner.torch.torch_learner import TorchLearner
from ray.rllib.utils.annotations import override
from ray.rllib.utils.typing import ModuleID, ParamDict
from torch import Tensor
from torch.nn.functional import huber_loss

from connectors.collectives import sum_over_learners
from connectors.learners.replay import ReplayLearnerMixin, masked_mean, trained_steps

# Keys of `forward_train` that RLlib has no names for.
LOGP, LOGP_NEXT, Q_CURR = "logp_resampled", "logp_next_resampled", "q_curr"
# Beginnings of the names of the policy's parameters, in RLlib's modules and ours.
ACTOR_NETWORKS = ("pi.", "pi_encoder.")


class _OneBackwardPass(SACTorchLearner):
    """One backward pass through the sum of the losses.

    RLlib runs one an optimizer and keeps the graph between them, which compiled memories forbid.
    Each parameter has a gradient from one loss only, so the sum has the same gradients.
    """

    @override(SACTorchLearner)
    def compute_gradients(self, loss_per_module: dict[ModuleID, Any], **kwargs: Any) -> ParamDict:
        # What RLlib's loss leaves there for RLlib's backward passes: private in Ray 2.60, but else
        # the graph of a module without memory would stay until the next update.
        self._temp_losses.clear()
        return TorchLearner.compute_gradients(self, loss_per_module, **kwargs)


class _SharedTemperatures(_OneBackwardPass):
    """Several Learners take the same step of the temperatures.

    They are no part of the modules whose gradients torch's DDP averages: in RLlib each Learner goes
    on with temperatures of its own.
    """

    @override(SACTorchLearner)
    def compute_gradients(self, loss_per_module: dict[ModuleID, Any], **kwargs: Any) -> ParamDict:
        gradients = super().compute_gradients(loss_per_module, **kwargs)
        # The same modules on all Learners.
        alphas: list[Any] = [self.curr_log_alpha[id_] for id_ in sorted(loss_per_module)]
        if self.distributed and alphas:
            own = torch.cat([alpha.grad for alpha in alphas]).cpu().numpy()
            total = torch.as_tensor(sum_over_learners(own, str(self.device)), device=self.device)
            num_learners: Any = self.config.num_learners
            for alpha, gradient in zip(alphas, total / num_learners, strict=True):
                alpha.grad.fill_(gradient)
        return gradients


class MemorySACTorchLearner(ReplayLearnerMixin, _SharedTemperatures):
    """SAC's Learner for modules with memory, set by `connect`.

    Beyond `ReplayLearnerMixin` its losses and metrics are means over the steps that are trained
    on; RLlib's have no mask. One optimizer, `qf`, trains all that the policy's does not: the
    Q-functions may share a memory, with each other and with the policy.
    """

    @override(SACTorchLearner)
    def configure_optimizers_for_module(
        self, module_id: ModuleID, config: SACConfig | None = None
    ) -> None:
        """Registers the optimizers of Q-functions, policy and temperature.

        Raises:
            ValueError: If the policy or the Q-functions have no weights.
        """
        settings: Any = config
        log_alpha: Any = self.curr_log_alpha[module_id]
        actor, critic = [], []
        module: Any = self.module[module_id].unwrapped()
        for name, parameter in module.named_parameters():
            if parameter.requires_grad:
                (actor if name.startswith(ACTOR_NETWORKS) else critic).append(parameter)
        if not (actor and critic):
            raise ValueError(
                f"Of module `{module_id}` SAC's policy has {len(actor)} weights to train and its "
                f"Q-functions {len(critic)}. As in RLlib the policy's networks are `pi` and "
                "`pi_encoder`, all others the Q-functions'; or derive the module from "
                "`MemorySACRLModule`."
            )
        for name, parameters, lr in (
            ("qf", critic, settings.critic_lr),
            ("policy", actor, settings.actor_lr),
            ("alpha", [log_alpha], settings.alpha_lr),
        ):
            self.register_optimizer(
                module_id=module_id,
                optimizer_name=name,
                optimizer=torch.optim.Adam(parameters, eps=1e-7),
                params=parameters,
                lr_or_lr_schedule=lr,
            )

    @override(SACTorchLearner)
    def compute_loss_for_module(
        self,
        *,
        module_id: ModuleID,
        config: SACConfig,
        batch: dict[str, Any],
        fwd_out: dict[str, Any],
    ) -> Any:
        """The sum of the losses of Q-functions, policy and temperature.

        Args:
            module_id: The module that is trained.
            config: Its config.
            batch: Columns `(B, T)`: `REWARDS`, `TERMINATEDS` and `LOSS_MASK`.
            fwd_out: What the module's `forward_train` returned, `(B, T)`.
        """
        if Columns.STATE_IN not in batch:
            return super().compute_loss_for_module(
                module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
            )
        _check_outputs(module_id, fwd_out)
        settings: Any = config
        mask = trained_steps(batch[Columns.LOSS_MASK])

        def mean(x: Tensor) -> Tensor:
            return masked_mean(x, mask)

        log_alpha: Any = self.curr_log_alpha[module_id]
        alpha = log_alpha.detach().exp()
        target_entropy: Any = self.target_entropy[module_id]
        logp, q_curr = fwd_out[LOGP], fwd_out[Q_CURR]

        next_value = fwd_out[QF_TARGET_NEXT] - alpha * fwd_out[LOGP_NEXT]
        continues = ~batch[Columns.TERMINATEDS].bool()
        returns = batch[Columns.REWARDS] + settings.gamma * torch.where(continues, next_value, 0.0)
        # A NaN in the padding would reach the gradients through the difference of both.
        target = torch.where(mask, returns, 0.0).detach()
        predictions = {QF_LOSS_KEY: fwd_out[QF_PREDS]}
        if QF_TWIN_PREDS in fwd_out:
            predictions[QF_TWIN_LOSS_KEY] = fwd_out[QF_TWIN_PREDS]
        qf_losses = {
            key: mean(huber_loss(q, target, reduction="none")) for key, q in predictions.items()
        }
        policy_loss = mean(alpha * logp - q_curr)
        alpha_loss = -mean(log_alpha * (logp.detach() + target_entropy))

        metrics = {
            **qf_losses,
            POLICY_LOSS_KEY: policy_loss,
            "alpha_loss": alpha_loss,
            "alpha_value": alpha[0],
            "log_alpha_value": log_alpha[0],
            "target_entropy": target_entropy,
            LOGPS_KEY: mean(logp),
            QF_MEAN_KEY: mean(q_curr),
            QF_MAX_KEY: q_curr.where(mask, -torch.inf).max(),
            QF_MIN_KEY: q_curr.where(mask, torch.inf).min(),
            TD_ERROR_MEAN_KEY: sum(mean((q - target).abs()) for q in predictions.values())
            / len(predictions),
        }
        self.metrics.log_dict(
            {key: torch.as_tensor(value).detach() for key, value in metrics.items()},
            key=module_id,
            window=1,
        )
        return policy_loss + alpha_loss + sum(qf_losses.values())


def _check_outputs(module_id: ModuleID, fwd_out: dict[str, Any]) -> None:
    needed = {QF_PREDS, QF_TARGET_NEXT, LOGP, LOGP_NEXT, Q_CURR}
    if not needed <= fwd_out.keys():
        raise ValueError(
            f"`forward_train` of module `{module_id}` returned {sorted(fwd_out)}, but SAC's losses "
            f"also need {sorted(needed - fwd_out.keys())}, `(B, T)` each. Derive the module from "
            "`MemorySACRLModule`."
        )
