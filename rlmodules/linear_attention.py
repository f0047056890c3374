"""The RLModules on linear attention, their configs and presets."""

from dataclasses import dataclass
from typing import Any, Literal, Self

from ray.rllib.utils.annotations import override

from rlmodules.actor_critic import MemoryRLModule
from rlmodules.configs import MemoryConfig
from rlmodules.memories import DeepLinearAttention, Memory, POPGymLinearAttention
from rlmodules.memories.linear_attention import Normalizer, Positions, ShortConvActivation
from rlmodules.q_learning import MemoryQRLModule
from rlmodules.sac import MemorySACRLModule


@dataclass(kw_only=True)
class LinearAttentionConfig(MemoryConfig):
    """Settings of `LinearAttentionRLModule`: one block of linear attention."""

    block: Literal["residual", "popgym"] = "residual"
    """"residual": this package's block, for which the settings up to `normalizer` are. "popgym":
    POPGym's own, which `positions` and the settings from `hidden_size` on are for."""

    d_model: int = 64
    """Width of the memory."""

    num_heads: int = 4
    """Heads a block."""

    head_dim: int = 16
    """Width of a head's queries, keys and values. A head's state holds its square in floats."""

    feedforward_dim: int = 128
    """Hidden width of the blocks' feed-forward parts."""

    positions: Positions = "rotary"
    """How the memory knows what time it is: "none", "rotary" (not with POPGym's block), or one of
    POPGym's encodings."""

    position_horizon: int = 1024
    """Steps that the encodings of POPGym's are laid out for, best the longest episode's. They work
    beyond, but some no longer tell late steps apart."""

    short_conv_size: int = 4
    """Steps that the short causal convolution over queries, keys and values sees. 0: none."""

    short_conv_activation: ShortConvActivation = "silu"
    """What follows the convolution: "silu", or "linear", which starts it at the identity."""

    decay: bool = True
    """Whether heads forget, at a rate they learn."""

    normalizer: Normalizer = "rms"
    """"sum": divide by the keys' sum as the paper does. "rms": normalise each head's output."""

    hidden_size: int = 256
    """POPGym's budget of state floats and width of the memory's output."""

    position_mode: Literal["add", "cat"] = "add"
    """Whether POPGym's encoding is added to the features or set beside them."""

    position_size: int | None = None
    """Width of POPGym's encoding. None: that of the features."""

    scale_positions: bool = True
    """Whether the mix of features and POPGym's encoding is learned."""

    S_aggregator: Literal["sum", "max"] = "sum"
    """How POPGym's block accumulates products of keys and values."""

    z_aggregator: Literal["sum", "max"] = "sum"
    """How POPGym's block accumulates keys."""

    @override(MemoryConfig)
    def build_memory(self, input_dim: int) -> Memory:
        """Builds the block."""
        return _build(self, input_dim, num_layers=1)

    @classmethod
    def popgym(cls, **settings: Any) -> Self:
        """POPGym 1.0.7's model, layer for layer, with the paper's widths."""
        return cls(**{**_POPGYM, "positions": "sine", **settings})


@dataclass(kw_only=True)
class DeepLinearAttentionConfig(LinearAttentionConfig):
    """Settings of `DeepLinearAttentionRLModule`: a stack of linear-attention blocks."""

    num_layers: int = 2
    """Blocks."""

    @override(LinearAttentionConfig)
    def build_memory(self, input_dim: int) -> Memory:
        """Builds the blocks."""
        return _build(self, input_dim, self.num_layers)

    @classmethod
    @override(LinearAttentionConfig)
    def popgym(cls, **settings: Any) -> Self:
        """POPGym 1.0.7's deep model, layer for layer, with the paper's widths."""
        return cls(**{**_POPGYM, "positions": "none", "num_layers": 4, **settings})


_POPGYM = {
    "block": "popgym",
    "fcnet_hiddens": [128],
    "fcnet_activation": "linear",
    "fcnet_norm": True,
    "head_fcnet_hiddens": [128, 128],
    "head_fcnet_activation": "leaky_relu",
}


class DeepLinearAttentionRLModule(MemoryRLModule):
    """A policy and value function on a stack of linear-attention blocks.

    Example:
        ```python
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec
        from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule

        config = PPOConfig().rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=DeepLinearAttentionRLModule,
                model_config=DeepLinearAttentionConfig(max_seq_len=64),
            )
        )
        ```
    """

    config_class = DeepLinearAttentionConfig


class LinearAttentionRLModule(MemoryRLModule):
    """A policy and value function on one linear-attention block.

    Used as [`DeepLinearAttentionRLModule`][rlmodules.DeepLinearAttentionRLModule] is.
    """

    config_class = LinearAttentionConfig


class DeepLinearAttentionQRLModule(MemoryQRLModule):
    """Action values on a stack of linear-attention blocks, for DQN.

    Example:
        ```python
        from ray.rllib.algorithms.dqn import DQNConfig
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec

        from connectors import connect
        from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionQRLModule

        config = (
            DQNConfig()
            .environment("CartPole-v1")
            .rl_module(
                rl_module_spec=RLModuleSpec(
                    module_class=DeepLinearAttentionQRLModule,
                    model_config=DeepLinearAttentionConfig(max_seq_len=20),
                )
            )
        )
        connect(config)
        ```
    """

    config_class = DeepLinearAttentionConfig


class LinearAttentionQRLModule(MemoryQRLModule):
    """Action values on one linear-attention block, for DQN.

    Used as [`DeepLinearAttentionQRLModule`][rlmodules.DeepLinearAttentionQRLModule] is.
    """

    config_class = LinearAttentionConfig


class DeepLinearAttentionSACRLModule(MemorySACRLModule):
    """A policy and Q-functions on a stack of linear-attention blocks, for SAC.

    Example:
        ```python
        from ray.rllib.algorithms.sac import SACConfig
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec

        from connectors import connect
        from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionSACRLModule

        config = (
            SACConfig()
            .environment("Pendulum-v1")
            .rl_module(
                rl_module_spec=RLModuleSpec(
                    module_class=DeepLinearAttentionSACRLModule,
                    model_config=DeepLinearAttentionConfig(max_seq_len=20),
                )
            )
        )
        connect(config)
        ```
    """

    config_class = DeepLinearAttentionConfig


class LinearAttentionSACRLModule(MemorySACRLModule):
    """A policy and Q-functions on one linear-attention block, for SAC.

    Used as [`DeepLinearAttentionSACRLModule`][rlmodules.DeepLinearAttentionSACRLModule] is.
    """

    config_class = LinearAttentionConfig


def _build(config: LinearAttentionConfig, input_dim: int, num_layers: int) -> Memory:
    """The memory of a config."""
    if config.block == "popgym":
        return POPGymLinearAttention(
            input_dim,
            config.hidden_size,
            num_layers,
            positions=config.positions,
            position_mode=config.position_mode,
            position_size=config.position_size,
            scale_positions=config.scale_positions,
            position_horizon=config.position_horizon,
            S_aggregator=config.S_aggregator,
            z_aggregator=config.z_aggregator,
        )
    return DeepLinearAttention(
        input_dim,
        config.d_model,
        num_layers,
        config.num_heads,
        config.head_dim,
        config.feedforward_dim,
        positions=config.positions,
        position_horizon=config.position_horizon,
        short_conv_size=config.short_conv_size,
        short_conv_activation=config.short_conv_activation,
        decay=config.decay,
        normalizer=config.normalizer,
    )
