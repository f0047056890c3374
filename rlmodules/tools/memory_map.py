"""Plays an episode and finds out which steps the memory attends to in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.env_context import EnvContext
from ray.tune.registry import ENV_CREATOR, _global_registry

from rlmodules.core import MemoryCore
from rlmodules.tools.loading import load_object

# A head's look-back is told by the weight on its last so many steps and the present one.
REACHES = (1, 4, 16)


@dataclass
class MemoryMap:
    """The weights of an episode.

    Attributes:
        weights: By the layer's name, `(H, T, T)`: what each step takes of each step.
        actions: What the agent did, step by step.
        rewards: What it got for that.
    """

    weights: dict[str, np.ndarray]
    actions: list[Any]
    rewards: list[float]


def make_env(config: AlgorithmConfig | None, name: str | None) -> gym.Env:
    """Makes an environment outside of RLlib's EnvRunners.

    Args:
        config: Of the algorithm; None for a module alone.
        name: A gymnasium ID, a name registered with RLlib, or the place of a class. None: the
            config's environment.

    Raises:
        ValueError: If there is no such environment.
    """
    env: Any = name
    env_config: dict = {}
    if name is None:
        if config is None or config.env is None:
            raise ValueError(
                "The checkpoint names no environment to play in. Give one with `--env`."
            )
        env, env_config = config.env, config.env_config
    elif name.rpartition(":")[2].isidentifier() and ":" in name:
        env = load_object(name)
    context = EnvContext(env_config, worker_index=0)
    # Private in Ray 2.60, which has no other way to ask for what `register_env` was given. A test
    # fails if Ray renames it.
    if not callable(env) and _global_registry.contains(ENV_CREATOR, env):
        env = _global_registry.get(ENV_CREATOR, env)
    if callable(env):
        return cast("gym.Env", env(context))
    try:
        return gym.make(env, **context)
    except gym.error.UnregisteredEnv as error:
        raise ValueError(
            f"`--env` is {env!r}, which gymnasium does not know: {error} Give an ID, or the "
            "place of a class, `package.module:name` or `path.py:name`."
        ) from error


def play(policy: Any, module: Any, env: gym.Env, *, seed: int, num_steps: int) -> MemoryMap:
    """Plays one episode, or its first steps, and computes the weights.

    Args:
        policy: Has `act(observation, reward=...)`, and runs the module to answer.
        module: The module whose memory is looked at.
        env: Where to play.
        seed: Of the environment's reset.
        num_steps: Steps to play at most.

    Raises:
        ValueError: If the module has no memory of this package, or one without attention weights.
    """
    cores = {name: core for name, core in module.named_children() if isinstance(core, MemoryCore)}
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in cores}
    if not cores:
        raise ValueError(
            f"`{type(module).__name__}` has no memory of this package, and only these tell what "
            "they attend to. Give the checkpoint of another module."
        )

    def record(name: str) -> Any:
        return lambda memory, args: inputs[name].append(args[0])

    hooks = [core.memory.register_forward_pre_hook(record(name)) for name, core in cores.items()]
    actions, rewards = [], []
    try:
        observation, _ = env.reset(seed=seed)
        reward, done = 0.0, False
        while not done and len(actions) < num_steps:
            actions.append(policy.act(observation, reward=reward))
            observation, reward, terminated, truncated, _ = env.step(actions[-1])
            rewards.append(float(reward))
            done = terminated or truncated
    finally:
        for hook in hooks:
            hook.remove()

    weights = {}
    for name, steps in inputs.items():
        # Target networks and others that do not act see nothing.
        if not steps:
            continue
        memory = cores[name].memory
        state = {key: leaf[None] for key, leaf in memory.initial_state().items()}
        layers = memory.attention_weights(torch.cat(steps, 1), state)[0]
        for i, layer in enumerate(layers):
            weights[f"{name}, layer {i}"] = layer.numpy()
    return MemoryMap(weights, actions, rewards)


def look_back(weights: dict[str, np.ndarray]) -> list[dict[str, Any]]:
    """How far back heads look, by the absolute values of their weights.

    Returns:
        For each layer and head `mean_look_back` in steps, and `share_within_<n>`: the share of the
        weights on the present step and the n before it.
    """
    rows = []
    for name, layer in weights.items():
        ages = np.arange(layer.shape[-1])[:, None] - np.arange(layer.shape[-1])
        for head, weight in enumerate(np.abs(layer)):
            total = weight.sum()
            mean = float((weight * ages).sum() / total)
            row: dict[str, Any] = {"layer": name, "head": head, "mean_look_back": mean}
            for reach in REACHES:
                row[f"share_within_{reach}"] = float(weight[ages <= reach].sum() / total)
            rows.append(row)
    return rows
