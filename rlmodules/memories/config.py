"""What every module with memory can be configured with, and the check of a config's keys."""

from __future__ import annotations

import abc
import dataclasses
import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, Self

from rlmodules.memories.memory import Memory
from rlmodules.memories.options import Count, Range, check_options

# Keys that RLlib's algorithms add to every module's model config (`_model_config_auto_includes`
# in Ray 2.60). They configure RLlib's own modules.
ALGORITHM_KEYS = frozenset(
    {"twin_q", "double_q", "dueling", "epsilon", "num_atoms", "std_init", "v_max", "v_min"}
)


@dataclass(kw_only=True)
class MemoryConfig(abc.ABC):
    """Settings that all modules with memory share: what stands before and behind the memory.

    Subclasses add the memory's own settings and build it. Those of this package have a constant
    `memory` besides, by which RLModules know them. Every value is checked against its annotation.

    Raises:
        ValueError: From the constructor, if a value is not what its annotation says.
    """

    max_seq_len: Count
    """Steps T per row in training: how far gradients reach back. The memory itself reaches
    further, since a row starts from the state that the rollout had there."""

    fcnet_hiddens: list[Count] = field(default_factory=lambda: [64])
    """Widths of the encoder's layers, which turn an observation into features."""

    fcnet_activation: str | None = "relu"
    """Activation after each of the encoder's layers."""

    fcnet_norm: bool = False
    """Whether a LayerNorm without learned parameters follows the encoder's layers."""

    action_mask: str | None = None
    """Key of a `Dict` observation that holds the mask of allowed actions: 1 or 0 for each. The
    encoder does not see it. For `Discrete` and `MultiDiscrete` actions."""

    conv_filters: list | None = None
    """RLlib's convolutions for image observations, `[channels, kernel, stride]` each. None:
    RLlib's default for the image's size."""

    conv_activation: str = "relu"
    """Activation after each convolution."""

    one_hot_max_values: Annotated[int, Range(0)] = 0
    """Integers in a `Box` become one-hot vectors, one a number, where its bounds allow each number
    at most so many values. 0: none do. For grids of kinds and other numbers that name something."""

    head_fcnet_hiddens: list[Count] = field(default_factory=list)
    """Widths of the hidden layers of the policy and the value head."""

    head_fcnet_activation: str | None = "relu"
    """Activation after each of the heads' hidden layers."""

    free_log_std: bool = False
    """Whether the log standard deviations of Gaussian actions are parameters of their own instead
    of outputs of the policy head."""

    log_std_clip_param: Annotated[float, Range(0, above=True)] = 20.0
    """Bound on the absolute value of Gaussian actions' log standard deviations."""

    vf_share_layers: bool = True
    """Whether policy and value function share encoder and memory. False gives each its own, and
    twice the state."""

    compile: Literal["auto"] | bool = "auto"
    """Whether the memory runs compiled: True, in training and in rollouts; False; or "auto", in
    training where a compiler exists, on CPUs only after five minutes of it, since compiling takes
    half a minute to two."""

    def __new__(cls, *args: Any, **settings: Any) -> Self:
        """Refuses misspelt names: Python's own error has no suggestion."""
        check_names(settings, cls)
        return super().__new__(cls)

    def __post_init__(self) -> None:
        check_options(self)
        # Lists of its own: neither a preset's nor the caller's.
        self.fcnet_hiddens = list(self.fcnet_hiddens)
        self.head_fcnet_hiddens = list(self.head_fcnet_hiddens)

    @abc.abstractmethod
    def build_memory(self, input_dim: int) -> Memory:
        """Builds the memory for features of width `input_dim`."""

    @classmethod
    def from_dict(cls, model_config: Mapping[str, Any]) -> Self:
        """Builds the config from a model config as a module receives it.

        Args:
            model_config: Field names and values. Keys that RLlib's algorithms add are ignored.

        Raises:
            ValueError: On an unknown key, with the closest known one, and on a missing
                `max_seq_len`.
        """
        ignored = ALGORITHM_KEYS - {field.name for field in dataclasses.fields(cls)}
        settings = {key: value for key, value in model_config.items() if key not in ignored}
        check_names(settings, cls)
        if "max_seq_len" not in model_config:
            raise ValueError(
                f"`max_seq_len` is missing in the model config of {cls.__name__}. Set it to the "
                "number of timesteps a training row holds, for example 64."
            )
        return cls(**settings)


def check_names(settings: Iterable[str], config_class: Any) -> None:
    """Refuses names that a config has no field of.

    Raises:
        ValueError: With the closest field's name, or all of them.
    """
    known = {field.name for field in dataclasses.fields(config_class)}
    for name in settings:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"Did you mean `{close[0]}`?" if close else f"Known keys: {sorted(known)}."
            raise ValueError(f"`{name}` is no setting of {config_class.__name__}. {hint}")
