"""Distributions of actions: RLlib's, where they are right, and ours where they are not."""

from __future__ import annotations

import functools
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
import tree
from gymnasium import spaces
from ray.rllib.core.distribution.distribution import Distribution
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchDeterministic,
    TorchMultiDistribution,
    TorchSquashedGaussian,
)
from ray.rllib.core.models.catalog import Catalog
from ray.rllib.utils.annotations import override
from torch import Tensor

from rlmodules.networks.encoders import Path, path_text, space_leaves


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


class SquashedGaussian(TorchSquashedGaussian):
    """RLlib's squashed Gaussian, whose most likely action is squashed as well.

    RLlib 2.60 takes the mean before the squashing, which the bounds then cut off.
    """

    @override(TorchSquashedGaussian)
    def to_deterministic(self) -> TorchDeterministic:
        return TorchDeterministic(loc=torch.tanh(torch.as_tensor(self.loc)))


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
        if len(space.shape) != 1:
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
