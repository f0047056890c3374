"""The RLModule around a memory: encoder -> memory -> heads."""

import abc
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, TargetNetworkAPI, ValueFunctionAPI
from ray.rllib.core.rl_module.apis.target_network_api import TARGET_NETWORK_ACTION_DIST_INPUTS
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.annotations import override
from torch import Tensor, nn

from rlmodules.compilation import compile_blocks
from rlmodules.configs import MemoryConfig
from rlmodules.encoders import ObservationEncoder
from rlmodules.heads import PolicyHead, ValueHead, action_dist_class
from rlmodules.memories import Memory, State

ACTOR = "actor"
CRITIC = "critic"
# Timesteps that one pass of `compute_values` takes at a time. Bounds its memory; twice as fast as
# 32,768 on CPUs, whose large temporaries come from the system page by page.
VALUE_STEPS = 2048


class MemoryCore(nn.Module):
    """Encoder and memory: observations and a state -> features and a state."""

    def __init__(self, encoder: ObservationEncoder, memory: Memory):
        super().__init__()
        self.encoder = encoder
        self.memory = memory

    def forward(self, obs: Any, state: State, valid: Tensor | None) -> tuple[Tensor, State]:
        """Runs both over `obs`, a tree with leaves `(B, T, ...)`."""
        return self.memory(self.encoder(obs), state, valid=valid)


class MemoryRLModule(TorchRLModule, ValueFunctionAPI, InferenceOnlyAPI, TargetNetworkAPI, abc.ABC):
    """An RLModule with a memory, for PPO, APPO, IMPALA, BC and MARWIL.

    Subclasses name their `config_class` and build their memory. Batches hold `OBS` with leaves
    `(B, T, ...)`, `STATE_IN` with leaves `(B, ...)` and, where rows are padded on the right,
    `SEQ_LENS (B,)`. Runs on RLlib's default connectors and, faster, with `connectors.connect`.

    Raises:
        ValueError: From the constructor, if the config or a space is not supported.
    """

    config_class: ClassVar[type[MemoryConfig]]

    @abc.abstractmethod
    def build_memory(self, config: Any, input_dim: int) -> Memory:
        """Builds the memory for features of width `input_dim`."""

    @override(TorchRLModule)
    def setup(self) -> None:
        """Builds the networks."""
        try:
            self._build(self.config_class.from_dict(self.model_config))
        except AttributeError as error:
            # RLlib 2.60 takes an AttributeError for an outdated constructor and hides it behind a
            # message about that.
            raise RuntimeError(f"Building {type(self).__name__} failed: {error}") from error

    def _build(self, config: MemoryConfig) -> None:
        self.memory_config = config
        self.action_dist_cls = action_dist_class(self.action_space)
        self.core = self._build_core(config)
        if not config.vf_share_layers:
            # Stays on EnvRunners: the critic's states are collected in the rollout.
            self.critic_core = self._build_core(config)
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

    def _build_core(self, config: MemoryConfig) -> MemoryCore:
        encoder = ObservationEncoder(
            self.observation_space,
            config.fcnet_hiddens,
            config.fcnet_activation,
            norm=config.fcnet_norm,
            model_config={
                "conv_filters": config.conv_filters,
                "conv_activation": config.conv_activation,
            },
        )
        return MemoryCore(encoder, self.build_memory(config, encoder.output_dim))

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
        obs, state, valid = _inputs(batch)
        if self.memory_config.vf_share_layers:
            features, state = self.core(obs, state, valid)
        else:
            features, actor_state = self.core(obs, state[ACTOR], valid)
            _, critic_state = self.critic_core(obs, state[CRITIC], valid)
            state = {ACTOR: actor_state, CRITIC: critic_state}
        return {
            Columns.ACTION_DIST_INPUTS: self.policy_head(features),
            Columns.STATE_OUT: state,
        }

    @override(TorchRLModule)
    def _forward_train(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Action distribution inputs `(B, T, n)` and the value head's features `(B, T, D)`."""
        self._compile()
        obs, state, valid = _inputs(batch)
        if self.memory_config.vf_share_layers:
            features = critic_features = self.core(obs, state, valid)[0]
        else:
            features = self.core(obs, state[ACTOR], valid)[0]
            critic_features = self.critic_core(obs, state[CRITIC], valid)[0]
        return {
            Columns.ACTION_DIST_INPUTS: self.policy_head(features),
            Columns.EMBEDDINGS: critic_features,
        }

    @override(ValueFunctionAPI)
    def compute_values(self, batch: Mapping[str, Any], embeddings: Tensor | None = None) -> Tensor:
        """Values `(B, T)`.

        Args:
            batch: A train batch.
            embeddings: What `forward_train` returned under `EMBEDDINGS`. Without them the values
                are computed from the batch: in eval mode, without gradient, and in blocks of rows,
                so that no batch is too large.
        """
        if embeddings is not None:
            return self.value_head(embeddings)
        self._compile()
        was_training = self.training
        self.eval()
        try:
            with torch.no_grad():
                return _in_row_blocks(self._values, *_inputs(batch))
        finally:
            self.train(was_training)

    def _values(self, obs: Any, state: Any, valid: Tensor | None) -> Tensor:
        if self.memory_config.vf_share_layers:
            return self.value_head(self.core(obs, state, valid)[0])
        return self.value_head(self.critic_core(obs, state[CRITIC], valid)[0])

    def _compile(self) -> None:
        """Compiles the memories. Called where training happens, so that EnvRunners do not."""
        device = next(self.parameters()).device
        for core in self.children():
            if isinstance(core, MemoryCore):
                compile_blocks(core.memory.compilable(), self.memory_config.compile, device)

    # Target networks and weights.

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
        self._compile()
        obs, state, valid = _inputs(batch)
        state = state if self.memory_config.vf_share_layers else state[ACTOR]
        with torch.no_grad():
            features, _ = self.target_core(obs, state, valid)
            return {TARGET_NETWORK_ACTION_DIST_INPUTS: self.target_policy_head(features)}

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        """What an EnvRunner does without."""
        return ["value_head", "target_core", "target_policy_head"]

    @override(TorchRLModule)
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Loads weights, all or none.

        Raises:
            ValueError: On missing, unexpected or mis-shaped entries, which it names. The weights
                stay as they were.
        """
        own = self.state_dict()
        training_only = tuple(f"{name}." for name in self.get_non_inference_attributes())
        missing = own.keys() - state.keys()
        unexpected = {
            key
            for key in state.keys() - own.keys()
            if not (self.inference_only and key.startswith(training_only))
        }
        mis_shaped = {
            f"{key} {tuple(state[key].shape)} instead of {tuple(own[key].shape)}"
            for key in own.keys() & state.keys()
            if tuple(state[key].shape) != tuple(own[key].shape)
        }
        if missing or unexpected or mis_shaped:
            raise ValueError(
                f"The state does not fit this {type(self).__name__}: missing {sorted(missing)}, "
                f"unexpected {sorted(unexpected)}, mis-shaped {sorted(mis_shaped)}. Nothing was "
                "loaded. Build the module with the config that the state was saved with."
            )
        super().set_state({key: state[key] for key in own})


def _inputs(batch: Mapping[str, Any]) -> tuple[Any, Any, Tensor | None]:
    """Observations, incoming state and mask of real steps of a batch."""
    obs, seq_lens = batch[Columns.OBS], batch.get(Columns.SEQ_LENS)
    if seq_lens is None:
        return obs, batch[Columns.STATE_IN], None
    leaf = tree.flatten(obs)[0]
    B, T = leaf.shape[:2]
    steps = torch.arange(T, device=leaf.device)
    # RLlib 2.60 may deliver lengths as float32 on the CPU.
    valid = steps < seq_lens.to(leaf.device)[:, None]
    # Whatever stands in the padding, even a NaN must not reach the encoder's gradients.
    obs = tree.map_structure(lambda x: x.where(valid.view(B, T, *[1] * (x.dim() - 2)), 0), obs)
    return obs, batch[Columns.STATE_IN], valid


def _in_row_blocks(function: Callable[..., Tensor], *args: Any) -> Tensor:
    """Calls `function` on blocks of at most `VALUE_STEPS` timesteps and joins the results."""
    B, T = tree.flatten(args[0])[0].shape[:2]
    num_blocks = -(-B // max(1, VALUE_STEPS // T))
    if num_blocks == 1:
        return function(*args)
    # One tuple of row blocks for each leaf; None, an absent mask, stays as it is.
    leaves = [
        [None] * num_blocks if leaf is None else leaf.split(-(-B // num_blocks))
        for leaf in tree.flatten(args)
    ]
    blocks = zip(*leaves, strict=True)
    return torch.cat([function(*tree.unflatten_as(args, block)) for block in blocks])
