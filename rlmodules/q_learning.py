"""Action values around a memory, for DQN."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from ray.rllib.algorithms.dqn.dqn_learner import (
    ATOMS,
    QF_LOGITS,
    QF_PREDS,
    QF_PROBS,
)
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, QNetAPI, TargetNetworkAPI
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.annotations import override
from ray.rllib.utils.schedules.scheduler import Scheduler
from torch import Tensor, nn

from rlmodules.base import BaseMemoryRLModule
from rlmodules.configs import MemoryConfig
from rlmodules.core import check_rows, module_inputs
from rlmodules.encoders import mlp

# What `forward_train` returns of the target networks, of the same steps as the others' outputs.
QF_TARGET_PREDS = "qf_target_preds"
QF_TARGET_PROBS = "qf_target_probs"


class MemoryQRLModule(BaseMemoryRLModule, QNetAPI, TargetNetworkAPI):
    """Action values with memory, for DQN.

    Subclasses name their `config_class`, which builds the memory. DQN's own settings `dueling`,
    `num_atoms`, `v_min`, `v_max` and `epsilon` reach the module through its model config. Batches
    are those of `MemoryRLModule`. Training needs `connectors.connect`.

    Raises:
        ValueError: From the constructor, if the config or a space is not supported.
    """

    @override(BaseMemoryRLModule)
    def build(self, config: MemoryConfig) -> None:
        """Builds core and heads."""
        space = self.action_space
        if not isinstance(space, gym.spaces.Discrete) or space.start != 0:
            raise ValueError(
                f"The action space is {space}, but action values need a Discrete space with "
                "`start=0`. Convert actions in an action wrapper, or use SAC for a Box."
            )
        self.core = self.build_core(config)
        self.q_head = QHead(
            self.core.memory.output_dim,
            int(space.n),
            config.head_fcnet_hiddens,
            config.head_fcnet_activation,
            dueling=self.model_config.get("dueling", True),
            num_atoms=self.model_config.get("num_atoms", 1),
            v_min=self.model_config.get("v_min", -10.0),
            v_max=self.model_config.get("v_max", 10.0),
        )
        self.epsilon_schedule = Scheduler(
            fixed_value_or_schedule=self.model_config.get("epsilon", 0.0), framework="torch"
        )

    @override(RLModule)
    def get_initial_state(self) -> dict:
        """The state before an episode's first step: tensors without a batch axis."""
        return self.core.memory.initial_state()

    # Forward passes.

    @override(TorchRLModule)
    def _forward(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The best actions `(B, T)` and the states after the last valid steps."""
        outputs = self.compute_q_values(batch)
        return {
            Columns.ACTIONS: outputs[QF_PREDS].argmax(-1),
            Columns.STATE_OUT: outputs[Columns.STATE_OUT],
        }

    @override(TorchRLModule)
    def _forward_exploration(
        self, batch: Mapping[str, Any], *, t: int = 0, **kwargs: Any
    ) -> dict[str, Any]:
        """As `_forward`, but each action is random with a probability of epsilon.

        Args:
            batch: Input of the module.
            t: Environment steps sampled so far, which epsilon's schedule depends on.
        """
        outputs = self._forward(batch)
        best = outputs[Columns.ACTIONS]
        epsilon = self.epsilon_schedule.update(t)
        explores = torch.rand(best.shape, device=best.device) < epsilon
        random = torch.randint_like(best, self.q_head.num_actions)
        return {**outputs, Columns.ACTIONS: torch.where(explores, random, best)}

    @override(TorchRLModule)
    def _forward_train(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Action values `(B, T, A)` of both networks, at the same steps.

        With several atoms also logits `(B, T, A, N)` and the target's probabilities.

        Raises:
            ValueError: If the batch is that of RLlib's own connectors.
        """
        check_rows(batch)
        self.compile_cores()
        outputs = self.compute_q_values(batch)
        target = self.forward_target(batch)
        outputs[QF_TARGET_PREDS] = target[QF_PREDS]
        if QF_PROBS in target:
            outputs[QF_TARGET_PROBS] = target[QF_PROBS]
        del outputs[Columns.STATE_OUT]
        return outputs

    @override(QNetAPI)
    def compute_q_values(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Action values `(B, T, A)` and the states after the last valid steps."""
        return self._q_values(batch, self.core, self.q_head)

    @override(TargetNetworkAPI)
    def forward_target(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What `compute_q_values` returns, of the target networks and without gradient."""
        with torch.no_grad():
            return self._q_values(batch, self.target_core, self.target_q_head)

    def _q_values(
        self, batch: Mapping[str, Any], core: nn.Module, head: nn.Module
    ) -> dict[str, Any]:
        features, state = core(*module_inputs(batch))
        return {**head(features), Columns.STATE_OUT: state}

    # Target networks.

    @override(TargetNetworkAPI)
    def make_target_networks(self) -> None:
        """Copies core and head."""
        self.target_core = make_target_network(self.core)
        self.target_q_head = make_target_network(self.q_head)

    @override(TargetNetworkAPI)
    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """The networks with their targets."""
        return [(self.core, self.target_core), (self.q_head, self.target_q_head)]

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        """What an EnvRunner does without."""
        return ["target_core", "target_q_head"]


class QHead(nn.Module):
    """Features -> action values, or distributions of returns over fixed atoms.

    Args:
        input_dim: Width D of the features.
        num_actions: Number A of actions.
        hiddens: Widths of the hidden layers, may be empty.
        activation: Activation after each hidden layer.
        dueling: Whether a value and advantages, which are centred over the actions, have networks
            of their own.
        num_atoms: Number N of atoms; 1 for plain action values.
        v_min: The first atom.
        v_max: The last atom.

    Raises:
        ValueError: If there are several atoms, but no range for them.

    References:
        Wang et al. 2016, https://arxiv.org/abs/1511.06581, eq. 9; Bellemare et al. 2017,
        https://arxiv.org/abs/1707.06887; both together as in Hessel et al. 2018,
        https://arxiv.org/abs/1710.02298.
    """

    atoms: Tensor

    def __init__(
        self,
        input_dim: int,
        num_actions: int,
        hiddens: list[int],
        activation: str,
        *,
        dueling: bool,
        num_atoms: int,
        v_min: float,
        v_max: float,
    ) -> None:
        super().__init__()
        if num_atoms > 1 and not v_min < v_max:
            raise ValueError(
                f"`v_min` is {v_min} and `v_max` is {v_max}, but the atoms of a distribution need "
                "`v_min` < `v_max`: bounds on the discounted return. Set "
                "`config.training(v_min=..., v_max=...)`."
            )
        self.num_actions = num_actions
        self.num_atoms = num_atoms

        def net(output_dim: int) -> nn.Sequential:
            return mlp(input_dim, hiddens, activation, output_dim=output_dim, setting="head_fcnet")

        self.advantages = net(num_actions * num_atoms)
        self.value = net(num_atoms) if dueling else None
        atoms = torch.linspace(v_min, v_max, num_atoms)
        # Follows from the config: stays out of checkpoints.
        self.register_buffer("atoms", atoms, persistent=False)

    def forward(self, features: Tensor) -> dict[str, Tensor]:
        """Maps features `(..., D)` to RLlib's columns.

        Returns:
            `QF_PREDS (..., A)`; with several atoms also `QF_LOGITS` and `QF_PROBS (..., A, N)` and
            `ATOMS (N,)`.
        """
        logits = self.advantages(features).unflatten(-1, (self.num_actions, self.num_atoms))
        if self.value is not None:
            value = self.value(features).unsqueeze(-2)
            logits = value + logits - logits.mean(-2, keepdim=True)
        if self.num_atoms == 1:
            return {QF_PREDS: logits.squeeze(-1)}
        probs = logits.softmax(-1)
        return {
            QF_PREDS: (probs * self.atoms).sum(-1),
            QF_LOGITS: logits,
            QF_PROBS: probs,
            ATOMS: self.atoms,
        }
