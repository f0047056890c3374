"""The RLModules on a Gated Transformer-XL and their config."""

from dataclasses import dataclass

from ray.rllib.utils.annotations import override

from rlmodules.actor_critic import MemoryRLModule
from rlmodules.configs import MemoryConfig
from rlmodules.memories import GTrXL, Memory
from rlmodules.q_learning import MemoryQRLModule
from rlmodules.sac import MemorySACRLModule


@dataclass(kw_only=True)
class GTrXLConfig(MemoryConfig):
    """Settings of `GTrXLRLModule`: gated units of attention over a window of past steps."""

    d_model: int = 64
    """Width of the units, even."""

    num_layers: int = 2
    """Units."""

    num_heads: int = 4
    """Heads a unit."""

    head_dim: int = 16
    """Width of a head's queries, keys and values."""

    feedforward_dim: int = 128
    """Hidden width of the units' feed-forward parts."""

    memory_inference: int = 64
    """Earlier steps that a step attends to, in each unit. The state holds as many inputs a unit."""

    memory_training: int | None = None
    """How many of these steps a training row puts before its first one. None: all of them, and
    training computes exactly what the rollout did. Fewer are faster, and a row's first steps then
    see less than they saw in the rollout."""

    gate_bias: float = 2.0
    """Above 0, the units start close to passing their input on."""

    @override(MemoryConfig)
    def build_memory(self, input_dim: int) -> Memory:
        """Builds the units."""
        return GTrXL(
            input_dim,
            self.d_model,
            self.num_layers,
            self.num_heads,
            self.head_dim,
            self.feedforward_dim,
            memory_inference=self.memory_inference,
            memory_training=self.memory_training,
            gate_bias=self.gate_bias,
        )


class GTrXLRLModule(MemoryRLModule):
    """A policy and value function on a Gated Transformer-XL.

    Example:
        ```python
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec
        from rlmodules import GTrXLConfig, GTrXLRLModule

        config = PPOConfig().rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=GTrXLRLModule,
                model_config=GTrXLConfig(max_seq_len=64, memory_inference=64),
            )
        )
        ```
    """

    config_class = GTrXLConfig


class GTrXLQRLModule(MemoryQRLModule):
    """Action values on a Gated Transformer-XL, for DQN.

    Used as [`DeepLinearAttentionQRLModule`][rlmodules.DeepLinearAttentionQRLModule] is.
    """

    config_class = GTrXLConfig


class GTrXLSACRLModule(MemorySACRLModule):
    """A policy and Q-functions on a Gated Transformer-XL, for SAC.

    Used as [`DeepLinearAttentionSACRLModule`][rlmodules.DeepLinearAttentionSACRLModule] is.
    """

    config_class = GTrXLConfig
