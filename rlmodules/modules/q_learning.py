"""Action values around a memory, for DQN."""

from collections.abc import Mapping
from typing import Any

import gymnasium as gym
import torch
from ray.rllib.algorithms.dqn.dqn_learner import QF_PREDS
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, QNetAPI, TargetNetworkAPI
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.annotations import override
from ray.rllib.utils.schedules.scheduler import Scheduler
from torch import nn

from rlmodules.memories.config import MemoryConfig
from rlmodules.modules.base import BaseMemoryRLModule
from rlmodules.modules.batches import check_rows, module_inputs
from rlmodules.networks.heads import QHead


class MemoryQRLModule(BaseMemoryRLModule, QNetAPI, TargetNetworkAPI):
    """Action values with memory, for DQN.

    The config says which memory, as for `MemoryRLModule`. DQN's own settings `dueling`,
    `num_atoms`, `v_min`, `v_max` and `epsilon` reach the module through its model config. Batches
    are those of `MemoryRLModule`. Training needs `connectors.connect`.

    Raises:
        ValueError: From the constructor, if the config or a space is not supported.

    Example:
        ```python
        from ray.rllib.algorithms.dqn import DQNConfig
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec

        from connectors import connect
        from rlmodules import DeepLinearAttentionConfig, MemoryQRLModule

        config = DQNConfig().environment("CartPole-v1")
        config.rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=MemoryQRLModule,
                model_config=DeepLinearAttentionConfig(max_seq_len=20),
            )
        )
        connect(config)
        ```
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
        """As `_forward`, but each action is any allowed one with a probability of epsilon.

        Args:
            batch: Input of the module.
            t: Environment steps sampled so far, which epsilon's schedule depends on.
        """
        outputs = self.compute_q_values(batch)
        values = outputs[QF_PREDS]
        best = values.argmax(-1)
        random = self.masked(torch.rand_like(values), batch[Columns.OBS]).argmax(-1)
        explores = torch.rand(best.shape, device=best.device) < self.epsilon_schedule.update(t)
        return {
            Columns.ACTIONS: torch.where(explores, random, best),
            Columns.STATE_OUT: outputs[Columns.STATE_OUT],
        }

    @override(TorchRLModule)
    def _forward_train(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Action values `(B, T, A)`; with several atoms also logits and probabilities of each.

        Raises:
            ValueError: If the batch is that of RLlib's own connectors.
        """
        check_rows(batch)
        self.compile_cores()
        outputs = self.compute_q_values(batch)
        del outputs[Columns.STATE_OUT]
        return outputs

    @override(QNetAPI)
    def compute_q_values(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Action values `(B, T, A)` and the states after the last valid steps.

        Values of actions that `action_mask` forbids are very low, so that none is the best.
        """
        return self._q_values(batch, self.core, self.q_head)

    @override(TargetNetworkAPI)
    def forward_target(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """What `compute_q_values` returns, of the target networks and without gradient."""
        with torch.no_grad():
            return self._q_values(batch, self.target_core, self.target_q_head)

    def _q_values(
        self, batch: Mapping[str, Any], core: nn.Module, head: nn.Module
    ) -> dict[str, Any]:
        obs, state, *masks = module_inputs(batch)
        features, state = core(obs, state, *masks)
        outputs = head(features)
        values = self.masked(outputs[QF_PREDS], obs)
        return {**outputs, QF_PREDS: values, Columns.STATE_OUT: state}

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
