"""PPO on POPGym: the environments, the policies to choose from, one set of hyperparameters.

Those of single tasks are in `examples.popgym_tasks`.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import gymnasium as gym
import ray
from popgym import envs as popgym_envs
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.registry import register_env

from connectors import AddPreviousActionsRewards, MemoryMetrics, connect, starting_point
from examples import runner
from examples.popgym_tasks import TRAIN_BATCH_SIZE
from rlmodules import (
    DeepLinearAttentionConfig,
    FFMConfig,
    GatedDeltaConfig,
    GRUConfig,
    GTrXLConfig,
    LinearAttentionConfig,
    LRUConfig,
    LSTMConfig,
    MemoryConfig,
    MemoryRLModule,
    MinGRUConfig,
    MixedConfig,
    WindowAttentionConfig,
)

ENVS = {env.__name__: env for env in popgym_envs.ALL}
# Positions of steps, and convolutions and normaliser that change less of what they mix.
SINE = {"positions": "sine", "short_conv_activation": "linear", "normalizer": "sum"}
OURS: dict[str, Callable[..., MemoryConfig]] = {
    "deep": DeepLinearAttentionConfig,
    "deep_sine": functools.partial(DeepLinearAttentionConfig, **SINE),
    "linear": LinearAttentionConfig,
    "gated_delta": GatedDeltaConfig,
    "gtrxl": GTrXLConfig,
    "window": WindowAttentionConfig,
    "window_sine": functools.partial(WindowAttentionConfig, positions="sine"),
    "mixed": MixedConfig,
    "gru": GRUConfig,
    "lstm": LSTMConfig,
    "min_gru": MinGRUConfig,
    "lru": LRUConfig,
    "ffm": FFMConfig,
}
MEMORIES = {
    **{
        name: f"this package's {getattr(build, '__name__', 'DeepLinearAttentionConfig')}"
        for name, build in OURS.items()
    },
    "deep_sine": "this package's DeepLinearAttentionConfig with sine positions, "
    '"linear" convolution, sum',
    "window_sine": "this package's WindowAttentionConfig with sine positions",
    "rllib-lstm": "RLlib's own LSTM, on RLlib's default connectors",
    "mlp": "no memory: RLlib's own MLP",
}
# What differs from `starting_point`.
HYPERPARAMETERS = {
    # Falls with the steps: at a constant 1e-3 a solved task is now and then half forgotten again.
    "lr": [[0, 1e-3], [200_000, 2e-4]],
    "gamma": 0.99,
}
RLLIB_ENV = "popgym"


def make_env(env_config: dict) -> gym.Env:
    """Makes the POPGym environment whose class is named by `env_config["name"]`.

    Raises:
        ValueError: If POPGym has no such environment.
    """
    name = env_config["name"]
    if name not in ENVS:
        raise ValueError(f"`--env` is {name!r}, but it must be one of: {', '.join(sorted(ENVS))}.")
    return ENVS[name]()


register_env(RLLIB_ENV, make_env)


def start_ray(num_cpus: int | None = None) -> None:
    """Starts Ray on this machine, if it does not run yet."""
    if not ray.is_initialized():
        runner.start_ray(num_cpus)
    # Ray forgets what was registered before when it is shut down.
    register_env(RLLIB_ENV, make_env)


def build_config(
    env: str,
    memory: str = "deep",
    *,
    seed: int | None = 0,
    max_seq_len: int = 64,
    fragment: int | None = None,
    num_env_runners: int = 0,
    num_envs_per_env_runner: int = 16,
    num_learners: int = 0,
    num_gpus_per_learner: float = 0,
    evaluation: dict | None = None,
    hyperparameters: dict | None = None,
    model: dict | None = None,
) -> PPOConfig:
    """The PPO config of one run.

    Args:
        env: Name of the POPGym environment's class.
        memory: One of `MEMORIES`.
        seed: Seed of environments, actions and weights.
        max_seq_len: Steps a training row holds.
        fragment: Steps an iteration of one environment; None: those of `fragment_length`.
        num_env_runners: EnvRunner processes beside the main one; 0: the main process samples.
        num_envs_per_env_runner: Environments that an EnvRunner steps at once.
        num_learners: Learner processes beside the main one; 0: the main process learns.
        num_gpus_per_learner: GPUs of a Learner.
        evaluation: Settings for `PPOConfig.evaluation`.
        hyperparameters: Changes to `HYPERPARAMETERS`.
        model: Changes to the module's config, for "rllib-lstm" and "mlp" that of RLlib.

    Returns:
        The config, with this package's connectors where the module is this package's, and with the
        previous action and reward as inputs where the environment needs them.
    """
    num_envs = max(1, num_env_runners) * num_envs_per_env_runner
    fragment = fragment or fragment_length(num_envs, max_seq_len)
    batch_size = num_envs * fragment // max(1, num_learners)
    training = {"train_batch_size_per_learner": batch_size, **HYPERPARAMETERS}
    config = (
        starting_point(PPOConfig())
        .environment(RLLIB_ENV, env_config={"name": env})
        .env_runners(
            num_env_runners=num_env_runners, num_envs_per_env_runner=num_envs_per_env_runner
        )
        .learners(num_learners=num_learners, num_gpus_per_learner=num_gpus_per_learner)
        .training(**{**training, **(hyperparameters or {})})
        .evaluation(**(evaluation or {}))
        .reporting(metrics_num_episodes_for_smoothing=100)
        .debugging(seed=seed, log_level="ERROR")
    )
    previous = [AddPreviousActionsRewards] if needs_previous_step(env) else []
    if memory in OURS:
        if previous:
            config.env_runners(env_to_module_connector=lambda *_: [p() for p in previous])
        # RLlib's annotation of `model_config` names no dataclass but its own.
        model_config: Any = OURS[memory](max_seq_len=max_seq_len, **(model or {}))
        config.rl_module(
            rl_module_spec=RLModuleSpec(module_class=MemoryRLModule, model_config=model_config)
        )
        connect(config.callbacks(MemoryMetrics))
        return config
    # RLlib's own encoders take flat vectors only.
    pieces = [*previous, FlattenObservations]
    config.env_runners(env_to_module_connector=lambda *_: [piece() for piece in pieces])
    settings = {"use_lstm": True, "max_seq_len": max_seq_len} if memory == "rllib-lstm" else {}
    return config.rl_module(model_config=DefaultModelConfig(**{**settings, **(model or {})}))


def needs_previous_step(env: str) -> bool:
    """Whether POPGym says that the best policy has to know its previous action."""
    return getattr(ENVS.get(env), "obs_requires_prev_action", False)


def fragment_length(num_envs: int, max_seq_len: int) -> int:
    """Steps an iteration of one environment: full training rows but for one step.

    That step is taken by the one which RLlib's Learner appends to every piece of an episode. It
    would otherwise start a row of its own.
    """
    return max(1, round(TRAIN_BATCH_SIZE / num_envs / max_seq_len)) * max_seq_len - 1


def count_parameters(algo: Algorithm) -> int:
    """Parameters of the module that is being trained."""
    weights = algo.get_weights()[DEFAULT_MODULE_ID]
    return sum(value.size for value in weights.values())


def mlp_of_size(num_parameters: int, env: str) -> dict:
    """Settings of an MLP with two equal layers and about that many parameters in all."""
    spaces = make_env({"name": env})
    num_inputs = gym.spaces.flatdim(spaces.observation_space)
    if needs_previous_step(env):
        num_inputs += gym.spaces.flatdim(spaces.action_space) + 1
    num_outputs = gym.spaces.flatdim(spaces.action_space) + 1
    # width^2 + (num_inputs + num_outputs + 2) width = num_parameters
    half = (num_inputs + num_outputs + 2) / 2
    width = max(1, round(math.sqrt(half**2 + num_parameters) - half))
    return {"fcnet_hiddens": [width, width], "fcnet_activation": "relu"}
