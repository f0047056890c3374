"""Observations from outside, checked and cast as gymnasium's vector environments would."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tree


def conform(observation: Any, space: gym.Space, name: str = "observation") -> Any:
    """The observation with the structure, shapes and dtypes of a space.

    Args:
        observation: What the environment returned.
        space: The environment's observation space.
        name: Names the (part of the) observation in messages.

    Returns:
        The same values, arrays cast to the space's dtype.

    Raises:
        ValueError: if structure, shape or kind of dtype differ, an integer does not fit the dtype,
            or a discrete value is unknown.
    """
    if isinstance(space, gym.spaces.Dict):
        keys = list(space.spaces)
        if not isinstance(observation, Mapping) or observation.keys() != set(keys):
            given = (
                sorted(map(str, observation))
                if isinstance(observation, Mapping)
                else type(observation).__name__
            )
            raise ValueError(
                f"`{name}` is {given}, but must be a dict with the keys {keys}, as in the "
                "environment that the agent was trained in."
            )
        return {key: conform(observation[key], space[key], f"{name}[{key!r}]") for key in keys}
    if isinstance(space, gym.spaces.Tuple):
        if not isinstance(observation, (tuple, list)) or len(observation) != len(space.spaces):
            raise ValueError(
                f"`{name}` is a {type(observation).__name__}, but must be a tuple of "
                f"{len(space.spaces)} parts, as in the environment that the agent was trained in."
            )
        return tuple(
            conform(part, child, f"{name}[{i}]")
            for i, (part, child) in enumerate(zip(observation, space.spaces, strict=True))
        )
    if space.shape is None or space.dtype is None:
        _check_contained(observation, space, name)
        return observation
    return _conform_array(observation, space, name)


def conform_agents(observations: Any, spaces: gym.spaces.Dict) -> dict[Any, Any]:
    """Observations of several agents, each as `conform` returns it.

    Args:
        observations: By agent, of those that act.
        spaces: The agents' observation spaces.

    Raises:
        ValueError: as `conform`; or if these are no observations by agent.
    """
    if not isinstance(observations, Mapping):
        raise ValueError(
            f"`observation` is a {type(observations).__name__}, but must be a dict with the "
            f"observation of each agent that acts, of {list(spaces)}. Or name its agent: "
            "`act(observation, agent=...)`."
        )
    check_agents(observations, list(spaces))
    return {
        agent: conform(observation, spaces[agent], f"observation[{agent!r}]")
        for agent, observation in observations.items()
    }


def conform_rewards(rewards: Any, agents: Sequence[Hashable]) -> dict[Any, float]:
    """Rewards of several agents; none for a reward of 0.

    Args:
        rewards: By agent.
        agents: All that there are.

    Raises:
        ValueError: if these are no rewards by agent.
    """
    if isinstance(rewards, Mapping):
        check_agents(rewards, agents)
        return {agent: float(reward) for agent, reward in rewards.items()}
    if rewards != 0:
        raise ValueError(
            f"`reward` is {rewards!r}, but must be a dict with the reward of each agent, of "
            f"{list(agents)}. Or name its agent: `act(observation, reward=..., agent=...)`."
        )
    return {}


def check_agents(given: Iterable[Hashable], agents: Sequence[Hashable]) -> None:
    """Checks that agents were trained.

    Raises:
        ValueError: if one was not.
    """
    for agent in given:
        if agent not in agents:
            raise ValueError(
                f"`agent` is {agent!r}, but the environment of the training had the agents "
                f"{list(agents)}. Name one of these."
            )


def as_dtype(array: np.ndarray, dtype: np.dtype, name: str) -> np.ndarray:
    """The array in a dtype; floats beyond it become infinite.

    Raises:
        ValueError: if the dtype is one of integers and does not hold all of the numbers.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        result = array.astype(dtype)
    if "f" not in (dtype.kind, array.dtype.kind) and not np.array_equal(result, array):
        raise ValueError(
            f"`{name}` holds integers beyond those of {dtype}, the dtype that the agent was "
            "trained with."
        )
    return result


def check_finite(observations: Any, clients: Sequence[Hashable]) -> None:
    """Checks what a module is about to read.

    Args:
        observations: A tree of batched tensors.
        clients: Whose they are, in the order of the batch.

    Raises:
        ValueError: if a number is not finite.
    """
    for path, leaf in tree.flatten_with_path(observations):
        bad = _clients_with(~torch.isfinite(leaf), clients)
        if bad:
            name = "observation" + "".join(f"[{key!r}]" for key in path)
            raise ValueError(
                f"`{name}` holds numbers that are not finite where the module reads it, of the "
                f"clients {bad}. They would stay in the memory until the end of the episode. "
                "Replace them in the environment, or in an env-to-module connector that the agent "
                "is trained with."
            )


def check_states(states: Any, clients: Sequence[Hashable]) -> None:
    """Checks the states after a step.

    Args:
        states: A tree of batched tensors.
        clients: As for `check_finite`.

    Raises:
        ValueError: if one holds a NaN.
    """
    for leaf in tree.flatten(states):
        bad = _clients_with(torch.isnan(leaf), clients)
        if bad:
            raise ValueError(
                f"The states of the clients {bad} would hold NaN after this step, until the end of "
                "their episodes: their observations are so large that the module overflows, or its "
                "weights hold NaN."
            )


def _clients_with(flags: torch.Tensor, clients: Sequence[Hashable]) -> list[Hashable]:
    if not flags.any():
        return []
    rows = flags.reshape(len(clients), -1).any(1).tolist()
    return [client for client, flag in zip(clients, rows, strict=True) if flag]


def _conform_array(observation: Any, space: Any, name: str) -> Any:
    try:
        array = np.asarray(observation)
    except ValueError:
        array = np.asarray(None)  # nested lists of unequal lengths
    if array.shape != space.shape:
        raise ValueError(
            f"`{name}` has shape {array.shape}, but must have {space.shape}: one observation of "
            "the environment, without batch or time axis, and before any connector."
        )
    if not np.can_cast(array.dtype, space.dtype, casting="same_kind"):
        raise ValueError(
            f"`{name}` has dtype {array.dtype}, but must be of the kind of {space.dtype}. Convert "
            "it as the environment did in training."
        )
    array = as_dtype(array, space.dtype, name)
    if not isinstance(space, gym.spaces.Box):
        _check_contained(array[()], space, name)
    # A zero-dimensional array becomes a scalar, as in a vector environment.
    return array[()]


def _check_contained(observation: Any, space: gym.Space, name: str) -> None:
    if not space.contains(observation):
        raise ValueError(
            f"`{name}` is {observation!r}, which is not in the space {space} that the agent was "
            "trained with."
        )
