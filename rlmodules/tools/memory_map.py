"""Plays an episode and finds out which steps the memory takes from in it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import gymnasium as gym
import numpy as np
import torch
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.env.env_context import EnvContext

from rlmodules.memories.memory import Memory, NoWeightsError
from rlmodules.modules.base import MemoryCore
from rlmodules.modules.checkpoints import MODULES
from rlmodules.tools.loading import load_object

# A head's look-back is told by the weight on its last so many steps and the present one.
REACHES = (1, 4, 16)


@dataclass
class Layer:
    """What each step takes of each step, in a layer or in a memory as a whole.

    Attributes:
        name: Of the core, and the layer's number.
        heads: `(H, T, T)`.
        kind: "weights": the heads' attention weights. "gradient": how much the memory's output at a
            step changes with the input of each step, as shares, `(1, T, T)`.
    """

    name: str
    heads: np.ndarray
    kind: Literal["weights", "gradient"] = "weights"


@dataclass
class MemoryMap:
    """What the memory did in an episode.

    Attributes:
        layers: What they took from which step.
        actions: What the agent did, step by step.
        rewards: What it got for that.
    """

    layers: list[Layer]
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
    from connectors.setup.environments import registered_creator

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
    env = registered_creator(env) or env
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
    """Plays one episode, or its first steps, and computes the map.

    Args:
        policy: A `MemoryPolicy`, which runs the module to answer.
        module: The module whose memory is looked at.
        env: Where to play.
        seed: Of the environment's reset.
        num_steps: Steps to play at most.

    Raises:
        ValueError: If the policy is one of several agents, or the module has no memory of this
            package.
    """
    if policy.agents:
        raise ValueError(
            f"The checkpoint is that of the agents {policy.agents}, but a map is of one module. "
            f"Give the folder of one, {MODULES / '<module ID>'} in it, and `--env`."
        )
    cores = {name: core for name, core in module.named_children() if isinstance(core, MemoryCore)}
    inputs: dict[str, list[torch.Tensor]] = {name: [] for name in cores}
    if not cores:
        raise ValueError(
            f"`{type(module).__name__}` has no memory of this package, and only these tell what "
            "they take from which step. Give the checkpoint of another module."
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

    # Target networks and others that do not act see nothing.
    seen = {name: torch.cat(steps, 1) for name, steps in inputs.items() if steps}
    layers = [layer for name, x in seen.items() for layer in layers_of(name, cores[name].memory, x)]
    return MemoryMap(layers, actions, rewards)


def layers_of(name: str, memory: Memory, x: torch.Tensor) -> list[Layer]:
    """A memory's attention weights over one row `x (1, T, D)`; without such, its gradient."""
    state = {key: leaf[None] for key, leaf in memory.initial_state().items()}
    try:
        weights = memory.attention_weights(x, state)[0].numpy()
    except NoWeightsError:
        gradient = memory.gradient_map(x, state).numpy()
        return [Layer(name, gradient / gradient.sum(-1, keepdims=True), "gradient")]
    return [Layer(f"{name}, layer {i}", heads) for i, heads in enumerate(weights)]


def look_back(layers: list[Layer]) -> list[dict[str, Any]]:
    """How far back heads look, by absolute values.

    Returns:
        For each layer and head the `kind` of its map, `mean_look_back` in steps, and
        `share_within_<n>`: the share of the present step and the n before it.
    """
    rows = []
    for layer in layers:
        ages = np.arange(layer.heads.shape[-1])[:, None] - np.arange(layer.heads.shape[-1])
        for head, weight in enumerate(np.abs(layer.heads)):
            total = weight.sum()
            row: dict[str, Any] = {"layer": layer.name, "head": head, "kind": layer.kind}
            row["mean_look_back"] = float((weight * ages).sum() / total)
            for reach in REACHES:
                row[f"share_within_{reach}"] = float(weight[ages <= reach].sum() / total)
            rows.append(row)
    return rows
