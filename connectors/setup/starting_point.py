"""Settings of algorithms from which memories learn, in the place of RLlib's own."""

from __future__ import annotations

from typing import Any, TypeVar

from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo.appo import APPOConfig
from ray.rllib.algorithms.dqn.dqn import DQNConfig
from ray.rllib.algorithms.impala.impala import IMPALAConfig
from ray.rllib.algorithms.ppo.ppo import PPOConfig
from ray.rllib.algorithms.sac.sac import SACConfig

Config = TypeVar("Config", bound=AlgorithmConfig)

NUM_ENVS = 16
"""Environments an EnvRunner: a step of a memory for 16 takes little longer than for one."""

PPO: dict[str, Any] = {
    # Memories of some 100,000 weights; RLlib's 5e-5 is twenty times slower.
    "lr": 1e-3,
    # Steps: some eighty episodes of fifty steps.
    "train_batch_size_per_learner": 4096,
    # Steps, and a minibatch is made of whole rows: 16 rows of 64. RLlib's 128 is two of them.
    "minibatch_size": 1024,
    # RLlib's 30 overfit a batch this small.
    "num_epochs": 8,
    # RLlib's 1.0 adds up the noise of all later rewards.
    "lambda_": 0.95,
    # Enough to go on trying until the memory holds something; RLlib has 0.
    "entropy_coeff": 0.003,
    # Bounds the gradient's norm: through time it now and then grows by orders of magnitude.
    "grad_clip": 0.5,
    "clip_param": 0.2,
    # RLlib's KL loss stays on: clipping alone lets an iteration move a policy nearly sure of
    # its actions by several nats, and what it had learned is lost. RLlib's 0.01 slows it down.
    "kl_target": 0.03,
    # No clipping of the value loss: with 10, RLlib's, larger errors have no gradient.
    "vf_clip_param": 1e6,
}
IMPALA: dict[str, Any] = {
    "lr": 5e-4,
    "train_batch_size_per_learner": 1024,
    # RLlib passes over a batch once. V-trace corrects for what the policy has learnt since.
    "num_epochs": 4,
    # Unlike PPO's, these advantages are as small as the rewards are, so an entropy bonus weighs
    # more: 0.003 kept a policy random where a step earns 1/48. RLlib has 0.01.
    "entropy_coeff": 0.0,
    # RLlib's 40 bounds nothing.
    "grad_clip": 0.5,
}
APPO: dict[str, Any] = {
    **IMPALA,
    # Ratios are clipped, as PPO's: a larger step, more often.
    "lr": 1e-3,
    "num_epochs": 8,
    "clip_param": 0.2,
    # RLlib draws batches from a buffer at random, whose oldest ones it drops.
    "use_circular_buffer": False,
    # The policy that ratios are clipped around follows each batch. RLlib multiplies the three: its
    # 2, 8 and 2 leave that policy 32 batches behind.
    "target_network_update_freq": 1,
    "circular_buffer_num_batches": 1,
    "circular_buffer_iterations_per_batch": 1,
}
DQN: dict[str, Any] = {
    "lr": 1e-3,
    # Steps, of rows of up to `max_seq_len` steps: RLlib's 32 are less than one.
    "train_batch_size_per_learner": 256,
    "target_network_update_freq": 200,
}
SAC: dict[str, Any] = {
    # RLlib's actor has 3e-5.
    "actor_lr": 3e-3,
    "critic_lr": 3e-3,
    "alpha_lr": 3e-3,
    "train_batch_size_per_learner": 256,
    # RLlib's 1.0 drowns returns around 1 in entropy.
    "initial_alpha": 0.1,
    # RLlib's 0.005 lets targets lag behind learning rates like these.
    "tau": 0.05,
}
SETTINGS: tuple[tuple[type[AlgorithmConfig], dict[str, Any]], ...] = (
    (PPOConfig, PPO),
    # APPO's config inherits from IMPALA's.
    (APPOConfig, APPO),
    (IMPALAConfig, IMPALA),
    # SAC's config inherits from DQN's.
    (SACConfig, SAC),
    (DQNConfig, DQN),
)


def starting_point(config: Config) -> Config:
    """Sets what a memory learns with, in the place of RLlib's defaults.

    Call it first: what is set afterwards wins. `gamma` and the module's `max_seq_len` stay as they
    are, since they follow from the task.

    | | PPO | APPO | IMPALA | DQN | SAC |
    |---|---|---|---|---|---|
    | `lr` | 1e-3 | 1e-3 | 5e-4 | 1e-3 | all three 3e-3 |
    | `train_batch_size_per_learner` | 4096 | 1024 | 1024 | 256 | 256 |
    | `minibatch_size` | 1024 | RLlib's: all | RLlib's: all | | |
    | `num_epochs` | 8 | 8 | 4 | | |
    | `lambda_` | 0.95 | | | | |
    | `entropy_coeff` | 0.003 | 0 | 0 | | |
    | `grad_clip` | 0.5 | 0.5 | 0.5 | RLlib's | RLlib's |
    | `clip_param` | 0.2 | 0.2 | | | |
    | `vf_clip_param` | 1e6 | | | | |
    | `kl_target` | 0.03 | RLlib's: no KL loss | | | |
    | `use_circular_buffer` | | False | | | |
    | target network | | each batch | | each 200 steps | `tau` 0.05 |
    | `initial_alpha` | | | | | 0.1 |
    | `num_envs_per_env_runner` | 16 | 16 | 16 | 16 | 16 |

    Args:
        config: A config of PPO, APPO, IMPALA, DQN or SAC. It is changed in place.

    Returns:
        The same config.

    Raises:
        ValueError: If the config is another algorithm's.

    Example:
        ```python
        from ray.rllib.algorithms.ppo import PPOConfig

        from connectors import starting_point

        config = starting_point(PPOConfig()).training(gamma=0.9, lr=5e-4)
        ```
    """
    for config_class, settings in SETTINGS:
        if isinstance(config, config_class):
            config.env_runners(num_envs_per_env_runner=NUM_ENVS)
            config.training(**settings)
            return config
    raise ValueError(
        f"`starting_point` got a `{type(config).__name__}`, but knows PPO, APPO, IMPALA, DQN and "
        "SAC. Leave it out: what is learnt from recordings needs no exploration, and RLlib's "
        "settings are a start."
    )
