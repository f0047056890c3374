"""Features -> inputs of the action distribution, values, action values."""

from __future__ import annotations

from collections.abc import Sequence

import gymnasium as gym
import numpy as np
import torch
from gymnasium import spaces
from ray.rllib.algorithms.dqn.dqn_learner import ATOMS, QF_LOGITS, QF_PREDS, QF_PROBS
from ray.rllib.utils.spaces.space_utils import flatten_space
from torch import Tensor, nn

from rlmodules.networks.distributions import action_dist_class
from rlmodules.networks.encoders import mlp


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


class DiscreteActionValueHead(nn.Module):
    """Features `(..., D)` -> values of all A actions `(..., A)`, or of given ones `(...)`.

    Args:
        input_dim: Width D of the features.
        num_actions: Number A of actions.
        hiddens: Widths of the hidden layers, may be empty.
        activation: Activation after each hidden layer.
    """

    def __init__(
        self, input_dim: int, num_actions: int, hiddens: Sequence[int], activation: str | None
    ) -> None:
        super().__init__()
        self.net = mlp(input_dim, hiddens, activation, output_dim=num_actions, setting="head_fcnet")

    def forward(self, features: Tensor, actions: Tensor | None = None) -> Tensor:
        """Maps features, and actions `(...)` if only their values are wanted, to values."""
        values = self.net(features)
        if actions is None:
            return values
        return values.gather(-1, actions.long()[..., None]).squeeze(-1)


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
        hiddens: Sequence[int],
        activation: str | None,
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


def _num_log_stds(space: gym.Space) -> int:
    return int(np.prod(space.shape)) if isinstance(space, spaces.Box) else 0
