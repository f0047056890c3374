"""Policy and value function around a memory, for PPO and its relatives."""

from collections.abc import Mapping
from typing import Any, Self

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, TargetNetworkAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.apis.target_network_api import TARGET_NETWORK_ACTION_DIST_INPUTS
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.annotations import override
from torch import Tensor, nn

from rlmodules.memories.config import MemoryConfig
from rlmodules.modules.base import ACTOR, CRITIC, BaseMemoryRLModule
from rlmodules.modules.batches import module_inputs
from rlmodules.networks.distributions import action_dist_class
from rlmodules.networks.heads import PolicyHead, ValueHead


class MemoryRLModule(BaseMemoryRLModule, ValueFunctionAPI, TargetNetworkAPI):
    """A policy and a value function with memory, for PPO, APPO, IMPALA, BC and MARWIL.

    The config says which memory: one of this package's configs, or a dict with its name under
    `memory`. For a config of your own, name it in a subclass: `config_class = MyConfig`. Batches
    hold `OBS` with leaves `(B, T, ...)`, `STATE_IN` with leaves `(B, ...)` and, where rows are
    padded on the right, `SEQ_LENS (B,)`. Runs on RLlib's default connectors and, faster, with
    `connectors.connect`.

    Raises:
        ValueError: From the constructor, if the config or a space is not supported.

    Example:
        ```python
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec
        from rlmodules import GTrXLConfig, MemoryRLModule

        config = PPOConfig().rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=MemoryRLModule,
                model_config=GTrXLConfig(max_seq_len=64, memory_inference=64),
            )
        )
        ```
    """

    @override(BaseMemoryRLModule)
    def build(self, config: MemoryConfig) -> None:
        """Builds core, policy head and value head."""
        self.action_dist_cls = action_dist_class(self.action_space)
        self.core = self.build_core(config)
        if not config.vf_share_layers:
            # Stays on EnvRunners: the critic's states are collected in the rollout.
            self.critic_core = self.build_core(config)
        head = (config.head_fcnet_hiddens, config.head_fcnet_activation)
        width = self.core.memory.output_dim
        self.policy_head = PolicyHead(
            width,
            self.action_space,
            *head,
            free_log_std=config.free_log_std,
            log_std_clip=config.log_std_clip_param,
        )
        self.value_head = ValueHead(width, *head)

    # States.

    @override(RLModule)
    def get_initial_state(self) -> dict:
        """The state before an episode's first step: tensors without a batch axis."""
        if self.memory_config.vf_share_layers:
            return self.core.memory.initial_state()
        return {
            ACTOR: self.core.memory.initial_state(),
            CRITIC: self.critic_core.memory.initial_state(),
        }

    # Forward passes.

    @override(TorchRLModule)
    def _forward(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Action distribution inputs `(B, T, n)` and the states after the last valid steps."""
        obs, state, *masks = module_inputs(batch)
        if self.memory_config.vf_share_layers:
            features, state = self.core(obs, state, *masks)
        else:
            features, actor_state = self.core(obs, state[ACTOR], *masks)
            _, critic_state = self.critic_core(obs, state[CRITIC], *masks)
            state = {ACTOR: actor_state, CRITIC: critic_state}
        return {
            Columns.ACTION_DIST_INPUTS: self.masked(self.policy_head(features), obs),
            Columns.STATE_OUT: state,
        }

    @override(TorchRLModule)
    def _forward_train(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Action distribution inputs `(B, T, n)` and the value head's features `(B, T, D)`."""
        self.compile_cores()
        obs, state, *masks = module_inputs(batch)
        if self.memory_config.vf_share_layers:
            features = critic_features = self.core(obs, state, *masks)[0]
        else:
            features = self.core(obs, state[ACTOR], *masks)[0]
            critic_features = self.critic_core(obs, state[CRITIC], *masks)[0]
        return {
            Columns.ACTION_DIST_INPUTS: self.masked(self.policy_head(features), obs),
            Columns.EMBEDDINGS: critic_features,
        }

    @override(BaseMemoryRLModule)
    def acting_copy(self) -> Self:
        """A copy that acts as this module does, without the critic and its state."""
        acting = super().acting_copy()
        if not self.memory_config.vf_share_layers:
            acting.memory_config.vf_share_layers = True
            del acting.critic_core
        return acting

    @override(ValueFunctionAPI)
    def compute_values(self, batch: Mapping[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Values `(B, T)`.

        Args:
            batch: A train batch.
            embeddings: What `forward_train` returned under `EMBEDDINGS`. Without them the values
                are computed from the batch, in eval mode and without gradient.
        """
        if embeddings is not None:
            return self.value_head(embeddings)
        self.compile_cores()
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                return self._values(*module_inputs(batch))
        finally:
            self.train(was_training)

    def _values(self, obs: Any, state: Any, *masks: Tensor | None) -> Tensor:
        if self.memory_config.vf_share_layers:
            return self.value_head(self.core(obs, state, *masks)[0])
        return self.value_head(self.critic_core(obs, state[CRITIC], *masks)[0])

    # Target networks.

    @override(TargetNetworkAPI)
    def make_target_networks(self) -> None:
        """Copies core and policy head."""
        self.target_core = make_target_network(self.core)
        self.target_policy_head = make_target_network(self.policy_head)

    @override(TargetNetworkAPI)
    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """The networks with their targets."""
        return [
            (self.core, self.target_core),
            (self.policy_head, self.target_policy_head),
        ]

    @override(TargetNetworkAPI)
    def forward_target(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """The target policy's action distribution inputs `(B, T, n)`."""
        self.compile_cores()
        obs, state, *masks = module_inputs(batch)
        state = state if self.memory_config.vf_share_layers else state[ACTOR]
        with torch.no_grad():
            features, _ = self.target_core(obs, state, *masks)
            inputs = self.masked(self.target_policy_head(features), obs)
            return {TARGET_NETWORK_ACTION_DIST_INPUTS: inputs}

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        """What an EnvRunner does without."""
        return ["value_head", "target_core", "target_policy_head"]
