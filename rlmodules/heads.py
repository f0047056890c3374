"""Features -> inputs of the action distribution, and features -> value."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
import tree
from gymnasium import spaces
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import TorchMultiDistribution
from ray.rllib.core.models.catalog import Catalog
from ray.rllib.utils.annotations import override
from ray.rllib.utils.spaces.space_utils import flatten_space
from torch import Tensor, nn

from rlmodules.encoders import Path, mlp, path_text, space_leaves


def action_dist_class(action_space: gym.Space) -> type[Distribution]:
    """RLlib's distribution class for an action space.

    `Dict` and `Tuple` spaces get a subclass of RLlib's that computes log-probabilities correctly
    for sequences of one step, which is what EnvRunners compute them for.

    Raises:
        ValueError: If RLlib has no distribution that samples from the space.
    """
    for path, leaf in space_leaves(action_space):
        _check_leaf(path, leaf)
    catalog = _ActionCatalog(action_space, action_space, {})
    dist_class: Any = catalog.get_action_dist_cls("torch")
    if not issubclass(dist_class, TorchMultiDistribution):
        return dist_class
    return type("MultiDistribution", (_SequenceMultiDistribution, dist_class), {})


class PolicyHead(nn.Module):
    """Features -> inputs of the action distribution.

    Args:
        input_dim: Width D of the features.
        action_space: The action space.
        hiddens: Widths of the hidden layers, may be empty.
        activation: Activation after each hidden layer.
        free_log_std: Whether the log standard deviations of Gaussians are parameters of their own
            rather than outputs of the network.
        log_std_clip: Bound on the absolute value of log standard deviations; inf for none.

    Attributes:
        output_dim: Number of distribution inputs.

    Raises:
        ValueError: If the action space is not supported, or has no `Box` for `free_log_std`.
    """

    def __init__(
        self,
        input_dim: int,
        action_space: gym.Space,
        hiddens: Sequence[int],
        activation: str | None,
        *,
        free_log_std: bool = False,
        log_std_clip: float = 20.0,
    ) -> None:
        super().__init__()
        self.output_dim = int(action_dist_class(action_space).required_input_dim(action_space))
        # A distribution's inputs, leaf by leaf, are its logits or means, then its log stds.
        leaves = flatten_space(action_space)
        self._log_stds = [_num_log_stds(leaf) for leaf in leaves]
        sizes = [int(action_dist_class(leaf).required_input_dim(leaf)) for leaf in leaves]
        self._others = [n - m for n, m in zip(sizes, self._log_stds, strict=True)]
        num_log_std = sum(self._log_stds)
        if free_log_std and not num_log_std:
            raise ValueError(
                f"`free_log_std` is True, but the action space {action_space} holds no Box and so "
                "no standard deviation. Leave it False."
            )
        self._clip = log_std_clip
        self.log_std = nn.Parameter(torch.zeros(num_log_std)) if free_log_std else None
        net_dim = self.output_dim - num_log_std if free_log_std else self.output_dim
        self.net = mlp(input_dim, hiddens, activation, output_dim=net_dim, setting="head_fcnet")

    def forward(self, features: Tensor) -> Tensor:
        """Maps features `(..., D)` to distribution inputs `(..., output_dim)`."""
        out = self.net(features)
        num_log_std = sum(self._log_stds)
        if not num_log_std:
            return out
        if self.log_std is None:
            others, log_std = out.split([self.output_dim - num_log_std, num_log_std], dim=-1)
        else:
            others, log_std = out, self.log_std.to(out.dtype).expand(*out.shape[:-1], -1)
        log_std = log_std.clamp(-self._clip, self._clip)
        leaves = zip(
            others.split(self._others, dim=-1), log_std.split(self._log_stds, dim=-1), strict=True
        )
        return torch.cat([part for leaf in leaves for part in leaf], dim=-1)


class ValueHead(nn.Module):
    """Features `(..., D)` -> values `(...)`.

    Args:
        input_dim: Width D of the features.
        hiddens: Widths of the hidden layers, may be empty.
        activation: Activation after each hidden layer.
    """

    def __init__(self, input_dim: int, hiddens: Sequence[int], activation: str | None) -> None:
        super().__init__()
        self.net = mlp(input_dim, hiddens, activation, output_dim=1, setting="head_fcnet")

    def forward(self, features: Tensor) -> Tensor:
        """Maps features `(..., D)` to values `(...)`."""
        return self.net(features).squeeze(-1)


class ActionValueHead(nn.Module):
    """Features `(..., D)` and actions `(..., A)` -> values `(...)`.

    Args:
        input_dim: Width D of the features.
        action_dim: Width A of the actions.
        hiddens: Widths of the hidden layers. If empty, one as wide as the features: without any,
            the best action would be the same whatever the features.
        activation: Activation after each hidden layer.
    """

    def __init__(
        self, input_dim: int, action_dim: int, hiddens: Sequence[int], activation: str | None
    ) -> None:
        super().__init__()
        self.net = mlp(
            input_dim + action_dim,
            hiddens or [input_dim],
            activation,
            output_dim=1,
            setting="head_fcnet",
        )

    def forward(self, features: Tensor, actions: Tensor) -> Tensor:
        """Maps features and actions to values."""
        return self.net(torch.cat([features, actions], dim=-1)).squeeze(-1)


class _ActionCatalog(Catalog):
    """RLlib's Catalog for its distributions alone: builds no encoder, accepts any observation."""

    @override(Catalog)
    def _determine_components_hook(self) -> None:
        self._action_dist_class_fn = functools.partial(
            self._get_dist_cls_from_action_space, action_space=self.action_space
        )


class _SequenceMultiDistribution(TorchMultiDistribution):
    """Log-probabilities `(B, T)` of nested actions, T = 1 included.

    RLlib takes the time axis of a discrete action of shape (B, 1) for a superfluous one and drops
    it; the log-probabilities then broadcast to (B, B).
    """

    @override(TorchMultiDistribution)
    def logp(self, value: Any) -> Tensor:
        if isinstance(value, Tensor):
            return cast(Tensor, super().logp(value))
        children = zip(self._flat_child_distributions, tree.flatten(value), strict=True)
        return torch.stack([child.logp(action) for child, action in children]).sum(0)

    @override(TorchMultiDistribution)
    def to_deterministic(self) -> TorchMultiDistribution:
        children = super().to_deterministic()._original_struct
        return _DeterministicMultiDistribution(
            children, torch.zeros_like(cast(Tensor, self.entropy()))
        )


class _DeterministicMultiDistribution(TorchMultiDistribution):
    """The most likely nested action; its log-probability is 0, as RLlib's deterministic ones."""

    def __init__(self, children: Any, logp: Tensor) -> None:
        super().__init__(children)
        self._logp = logp

    @override(TorchMultiDistribution)
    def logp(self, value: Any) -> Tensor:
        return self._logp


def _num_log_stds(space: gym.Space) -> int:
    return int(np.prod(space.shape)) if isinstance(space, spaces.Box) else 0


def _check_leaf(path: Path, space: gym.Space) -> None:
    remedy = _remedy(space)
    if remedy is None:
        return
    raise ValueError(
        f"The action space{path_text(path)} is {space}, which RLlib's distributions do not serve. "
        f"{remedy}"
    )


def _remedy(space: gym.Space) -> str | None:
    """What to do about an unsupported leaf; None if it is supported."""
    if isinstance(space, spaces.Box):
        if not np.issubdtype(space.dtype, np.floating):
            return "Use a MultiDiscrete space, or a Box of floats and round in an action wrapper."
        if len(space.shape) > 1:
            size = int(np.prod(space.shape))
            return f"Use a Box of shape ({size},) and reshape actions in an action wrapper."
        return None
    if isinstance(space, spaces.Discrete):
        if space.start != 0:
            return "Use `start=0` and add the start in an action wrapper."
        return None
    if isinstance(space, spaces.MultiDiscrete):
        if len(space.shape) > 1:
            return "Use a MultiDiscrete space of one axis and reshape in an action wrapper."
        if space.start.any():
            return "Use `start=0` and add the start in an action wrapper."
        return None
    if isinstance(space, spaces.MultiBinary):
        return f"Use MultiDiscrete([2] * {int(np.prod(space.shape))}), which holds the same values."
    return (
        "Use Discrete, MultiDiscrete, a one-dimensional Box of floats, or Dict or Tuple of these."
    )
