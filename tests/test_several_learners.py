"""Training moves on, and all Learners stay equal: with any algorithm, policies and episodes."""

import time
from dataclasses import dataclass
from itertools import product
from typing import Any

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import RecordingMultiAgentEnvRunner, connect
from rlmodules import DeepLinearAttentionRLModule, MemoryQRLModule, MemorySACRLModule
from tests.connectors.offline.test_reading import play, sample_action, write
from tests.envs import RandomAgents, RandomObservations
from tests.test_multi_agent import deep

pytestmark = [pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(240)]

T = 4
BOX = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
NUM_UPDATES = 12
LENGTHS = {"equal": [8], "unequal": [1, 2, 3, 60]}


@dataclass(frozen=True)
class Algorithm:
    """How one algorithm is tried.

    Args:
        config: Its config class.
        training: Settings of its own.
        module_class: Its module.
        policies: Numbers of policies.
        broadcast_intervals: Of APPO and IMPALA.
        offline: Whether it reads recorded episodes.
    """

    config: type
    training: dict[str, Any]
    module_class: type = DeepLinearAttentionRLModule
    policies: tuple[int, ...] = (1, 2)
    broadcast_intervals: tuple[int | None, ...] = (None,)
    offline: bool = False


# Until the second agent has lived, its module has nothing to be trained on.
REPLAY = {"num_steps_sampled_before_learning_starts": 160}
ALGORITHMS = {
    "PPO": Algorithm(PPOConfig, {"minibatch_size": 8, "num_epochs": 2}),
    "APPO": Algorithm(APPOConfig, {}, broadcast_intervals=(1, 10)),
    "IMPALA": Algorithm(IMPALAConfig, {"minibatch_size": 20}, broadcast_intervals=(1, 10)),
    "DQN": Algorithm(DQNConfig, {**REPLAY, "lr": 1e-3}, MemoryQRLModule),
    "SAC": Algorithm(
        SACConfig, {**REPLAY, "actor_lr": 1e-3, "critic_lr": 1e-3, "lr": None}, MemorySACRLModule
    ),
    "BC": Algorithm(BCConfig, {}, offline=True),
    "MARWIL": Algorithm(MARWILConfig, {}, offline=True),
}
CASES = [
    pytest.param(name, learners, policies, lengths, interval, id=case_id)
    for name, algorithm in ALGORITHMS.items()
    for learners, policies, lengths, interval in product(
        (1, 2), algorithm.policies, LENGTHS, algorithm.broadcast_intervals
    )
    for case_id in [f"{name}-{learners}L-{policies}P-{lengths}-{interval}"]
]


def make_config(name, num_learners, num_policies, lengths, interval, path):
    algorithm = ALGORITHMS[name]
    training = algorithm.training if interval is None else {
        **algorithm.training, "broadcast_interval": interval
    }  # fmt: skip
    config = (
        algorithm.config()
        .learners(num_learners=num_learners)
        .training(**{"train_batch_size_per_learner": 40, "lr": 1e-3, **training})
        .rl_module(
            rl_module_spec=RLModuleSpec(algorithm.module_class, model_config=deep(T).model_config)
        )
        .reporting(min_time_s_per_iteration=0)
        .debugging(seed=0, log_sys_usage=False)
    )
    env_config = {"lengths": LENGTHS[lengths], "num_agents": 2}
    if name == "SAC":
        env_config |= {"action_space": BOX, "action_spaces": {"a0": BOX, "a1": BOX}}
    # Equal: all act at each step. Unequal: a1 lives rarely, so that Learners lack steps of p1.
    schedule = "together" if lengths == "equal" else "lives"
    if num_policies == 2:
        config.environment(RandomAgents, env_config={**env_config, "schedule": schedule})
        config.multi_agent(
            policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *_, **__: f"p{agent[1:]}"
        )
    else:
        config.environment(RandomObservations, env_config=env_config)
    if algorithm.offline:
        record(config, path)
        set_spaces(config)
        config.offline_data(
            input_=[str(path)], input_read_episodes=True, dataset_num_iters_per_learner=2
        )
        return connect(config)
    config.reporting(min_sample_timesteps_per_iteration=80)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=2, rollout_fragment_length=20)
    return connect(config)


def set_spaces(config):
    """As RLlib wants them where there is no environment: by policy, where there are several."""
    spec = deep(T)
    spec.observation_space = space = RandomObservations.observation_space
    spec.action_space = action_space = RandomObservations().action_space
    if config.is_multi_agent:
        space = gym.spaces.Dict(dict.fromkeys(config.policies, space))
        action_space = gym.spaces.Dict(dict.fromkeys(config.policies, action_space))
    config.environment(env=None, env_config={}, observation_space=space, action_space=action_space)
    config.rl_module(rl_module_spec=spec)


def record(config, path):
    """Plays a dozen episodes in the environment of the config."""
    if not config.is_multi_agent:
        write(play(config.env(config.env_config), 12, sample_action), path)
        return
    recording = PPOConfig().environment(config.env, env_config=config.env_config)
    recording.multi_agent(policies=config.policies, policy_mapping_fn=config.policy_mapping_fn)
    recording.rl_module(rl_module_spec=deep(T)).offline_data(output=str(path))
    runner = RecordingMultiAgentEnvRunner(config=connect(recording.env_runners(num_env_runners=0)))
    runner.sample(num_episodes=12)
    runner.stop()


def of_all_learners(algo, function):
    return [result.get() for result in algo.learner_group.foreach_learner(function)]


def weights(learner):
    """Target networks and SAC's temperatures included."""
    temperatures = getattr(learner, "curr_log_alpha", {})
    alphas = {id_: {"alpha": x.detach().numpy().copy()} for id_, x in temperatures.items()}
    return {
        name: module.unwrapped().get_state() | alphas.get(name, {})
        for name, module in learner.module.items()
    }


def num_updates(learner):
    """Steps of each module's optimizer."""
    optimizers = {
        module_id: learner.get_optimizers_for_module(module_id)[0][1]
        for module_id, _ in learner.module.items()
    }
    return {
        module_id: max(
            (int(entry.get("step", 0)) for entry in [*optimizer.state.values()]), default=0
        )
        for module_id, optimizer in optimizers.items()
    }


def equal(one, other):
    return all(
        np.array_equal(one[name][key], other[name][key]) for name in one for key in one[name]
    )


def settled(algo):
    """Weights and numbers of updates, once no Learner trains any more.

    In APPO and IMPALA Learners train on after `train` has returned, until their queues are empty;
    on a busy machine a step may take longer than the pause between two looks, on one of them too.
    """
    states, counts = [], []
    for _ in range(100):
        before = states, counts
        states, counts = of_all_learners(algo, weights), of_all_learners(algo, num_updates)
        agree = all(equal(states[0], state) for state in states)
        agree = agree and all(count == counts[0] for count in counts)
        if agree and before[1] == counts and equal(before[0][0], states[0]):
            break
        time.sleep(0.2)
    return states, counts


@pytest.mark.parametrize(("name", "num_learners", "num_policies", "lengths", "interval"), CASES)
def test_training_moves_on(name, num_learners, num_policies, lengths, interval, tmp_path):
    config = make_config(name, num_learners, num_policies, lengths, interval, tmp_path)
    algo = config.build_algo()
    try:
        start = of_all_learners(algo, weights)[0]
        done = 0
        while done < NUM_UPDATES:
            algo.train()
            done = min(of_all_learners(algo, num_updates)[0].values())
        states, counts = settled(algo)
    finally:
        algo.stop()
    assert len(states) == num_learners
    assert all(count == counts[0] for count in counts)
    assert all(equal(states[0], state) for state in states)
    for module_id, state in states[0].items():
        assert all(np.isfinite(leaf).all() for leaf in state.values())
        assert any(not np.array_equal(start[module_id][key], state[key]) for key in state)


def only_of_this_rank(module_id, batch=None):
    """Each Learner trains one policy, in Learners; all elsewhere."""
    if not torch.distributed.is_initialized():
        return True
    return module_id == f"p{torch.distributed.get_rank()}"


@pytest.mark.parametrize(
    ("name", "interval"), [("PPO", None), ("IMPALA", 1), ("APPO", 10), ("DQN", None), ("SAC", None)]
)
def test_no_module_in_common(name, interval, tmp_path):
    """Updates are skipped, and training goes on once there is one."""
    config = make_config(name, 2, 2, "equal", interval, tmp_path)
    config.multi_agent(policies_to_train=only_of_this_rank)
    algo = config.build_algo()
    try:
        start = of_all_learners(algo, weights)
        for _ in range(3):
            algo.train()
        # Not to the last bit: target networks moved towards equal weights round.
        for state in settled(algo)[0]:
            for name, module in start[0].items():
                for key, value in module.items():
                    np.testing.assert_allclose(state[name][key], value, atol=1e-6)
    finally:
        algo.stop()
