"""What all RLModules with memory share: their core, their states, strict weights."""

import abc
import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, Self

from ray.rllib.core.rl_module.apis import InferenceOnlyAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.annotations import override
from torch import Tensor, nn

from rlmodules.memories import Memory, MemoryConfig, State
from rlmodules.memories.compilation import compile_blocks
from rlmodules.modules.catalogue import config_class_of
from rlmodules.modules.checkpoint_version import (
    CHECKPOINT_VERSION,
    VERSION_KEY,
    check_version,
    differing_settings,
    read_settings,
    read_version,
)
from rlmodules.networks.encoders import ObservationEncoder
from rlmodules.networks.masks import ActionMask

# Parts of the states where policy and value function have a memory each.
ACTOR = "actor"
CRITIC = "critic"


class MemoryCore(nn.Module):
    """Encoder and memory: observations and a state -> features and a state."""

    def __init__(self, encoder: nn.Module, memory: Memory):
        super().__init__()
        self.encoder = encoder
        self.memory = memory

    def forward(
        self, obs: Any, state: State, valid: Tensor | None, resets: Tensor | None
    ) -> tuple[Tensor, State]:
        """Runs both over `obs`, a tree with leaves `(B, T, ...)`; masks as in `Memory.forward`."""
        return self.memory(self.encoder(obs), state, valid=valid, resets=resets)


class BaseMemoryRLModule(TorchRLModule, InferenceOnlyAPI, abc.ABC):
    """An RLModule with a memory, without its heads.

    The memory is the one that the config names, or that of the `config_class` which a subclass
    names. Subclasses build what the algorithm needs around it, and call `masked` on what they
    choose actions by. Batches hold `OBS` with leaves `(B, T, ...)`, `STATE_IN`
    with leaves `(B, ...)` and, where rows are padded on the right, `SEQ_LENS (B,)`.
    """

    config_class: ClassVar[type[MemoryConfig] | None] = None

    @classmethod
    def read_config(cls, model_config: Mapping[str, Any]) -> MemoryConfig:
        """The checked config of a model config.

        Raises:
            ValueError: If it names no memory that there is, or holds a wrong key or value.
        """
        config_class = cls.config_class or config_class_of(model_config)
        return config_class.from_dict(model_config)

    @abc.abstractmethod
    def build(self, config: Any) -> None:
        """Builds the networks that a config asks for."""

    @override(TorchRLModule)
    def setup(self) -> None:
        """Builds the networks."""
        settings = dict(self.model_config)
        check_version(settings.pop(VERSION_KEY, CHECKPOINT_VERSION), type(self).__name__)
        try:
            config = self.memory_config = self.read_config(settings)
            if config.action_mask is not None:
                self.action_mask = ActionMask(
                    config.action_mask, self.observation_space, self.action_space
                )
            self.build(config)
        except AttributeError as error:
            # RLlib 2.60 takes an AttributeError for an outdated constructor and hides it behind a
            # message about that.
            raise RuntimeError(f"Building {type(self).__name__} failed: {error}") from error

    def build_encoder(self, config: MemoryConfig) -> nn.Module:
        """What turns observations into the memory's features; override it for one of your own.

        Called once for each memory.

        Returns:
            A module from `OBS`, leaves `(B, T, ...)`, to features `(B, T, output_dim)`, which
            says what its `output_dim` is.
        """
        masked = config.action_mask is not None
        return ObservationEncoder(
            self.action_mask.encoded_space if masked else self.observation_space,
            config.fcnet_hiddens,
            config.fcnet_activation,
            norm=config.fcnet_norm,
            model_config={
                "conv_filters": config.conv_filters,
                "conv_activation": config.conv_activation,
            },
            one_hot_max_values=config.one_hot_max_values,
        )

    def build_core(self, config: MemoryConfig) -> MemoryCore:
        """An encoder for the observation space with a memory behind it."""
        encoder: Any = self.build_encoder(config)
        return MemoryCore(encoder, config.build_memory(encoder.output_dim))

    def masked(self, scores: Tensor, obs: Any) -> Tensor:
        """Logits or values of actions `(B, T, n)`, very low for those that `obs` does not allow.

        Without the config's `action_mask` they come back as they are.
        """
        if self.memory_config.action_mask is None:
            return scores
        return self.action_mask.apply(scores, obs)

    @override(TorchRLModule)
    def forward_exploration(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """RLlib's; where `compile` is True, a rollout's steps run compiled as well.

        Not with "auto": an EnvRunner that compiles for a minute may miss RLlib's deadline.
        """
        if self.memory_config.compile is True:
            self.compile_cores()
        return super().forward_exploration(batch, **kwargs)

    def compile_cores(self) -> None:
        """Compiles the memories, if the config says so and they are not compiled yet."""
        device = next(self.parameters()).device
        for core in self.children():
            if isinstance(core, MemoryCore):
                compile_blocks(core.memory.compilable(), self.memory_config.compile, device)

    def acting_copy(self) -> Self:
        """A copy that acts as this module does, without what serves training only."""
        acting = copy.deepcopy(self)
        for name in acting.get_non_inference_attributes():
            if hasattr(acting, name):
                delattr(acting, name)
        return acting

    @override(nn.Module)
    def eval(self) -> Self:
        """Sets eval mode; where the module is in it, so are its parts, and nothing is done.

        RLlib calls this at each step of a rollout, where a walk over all parts takes its time.
        """
        return super().eval() if self.training else self

    @override(TorchRLModule)
    def get_metadata(self) -> dict[str, Any]:
        """RLlib's, with the version of the checkpoint's format."""
        return {**super().get_metadata(), VERSION_KEY: CHECKPOINT_VERSION}

    @override(TorchRLModule)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        """RLlib's, with the version: a later one may have settings that are unknown here."""
        args, kwargs = super().get_ctor_args_and_kwargs()
        settings = {**kwargs["model_config"], VERSION_KEY: CHECKPOINT_VERSION}
        return args, {**kwargs, "model_config": settings}

    @override(TorchRLModule)
    def restore_from_path(self, path: str | Path, *, filesystem: Any = None, **kwargs: Any) -> None:
        """Loads weights from a module's checkpoint, all or none.

        Raises:
            ValueError: If the checkpoint is of another version, or its weights do not fit: the
                message then names the settings that differ.
        """
        check_version(read_version(path, filesystem), type(self).__name__)
        try:
            super().restore_from_path(path, filesystem=filesystem, **kwargs)
        except ValueError as error:
            _, own = self.get_ctor_args_and_kwargs()
            differing = differing_settings(read_settings(path, filesystem), own)
            if not differing:
                raise
            raise ValueError(
                f"The checkpoint of this {type(self).__name__} was saved with other settings, and "
                f"its weights do not fit: {differing}. Nothing was loaded. Build the module with "
                "the checkpoint's settings, or train a new one."
            ) from error

    @override(TorchRLModule)
    def set_state(self, state: Mapping[str, Any]) -> None:
        """Loads weights, all or none.

        A state of an inference-only module is a whole one: what serves training only, and is not
        in it, stays as it is. RLlib sends such states to the EnvRunners, whose modules are
        complete where they come from a `MultiRLModuleSpec`.

        Raises:
            ValueError: On missing, unexpected or mis-shaped entries, which it names. The weights
                stay as they were.
        """
        own = self.state_dict()
        names = self.get_non_inference_attributes()
        training_only = tuple(f"{name}." for name in names)
        # An EnvRunner has none of these, and only a Learner makes target networks.
        not_here = tuple(f"{name}." for name in names if not hasattr(self, name))
        missing = own.keys() - state.keys()
        if not any(key.startswith(training_only) for key in state):
            missing = {key for key in missing if not key.startswith(training_only)}
        unexpected = {key for key in state.keys() - own.keys() if not key.startswith(not_here)}
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
        super().set_state({key: state[key] for key in own if key in state})
