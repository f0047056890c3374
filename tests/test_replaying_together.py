"""DQN and SAC with several agents and several Learners: exact states, the steps of one Learner."""

import copy
from collections import Counter

import numpy as np
import pytest
import torch
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.rl_modules.classes.random_rlm import RandomRLModule

from connectors import MemoryMultiAgentEnvRunner, SequenceReplayBuffer, connect
from connectors.replay.blocks import steps_of
from connectors.replay.shares import LearnerShare, unpacked
from rlmodules import DeepLinearAttentionConfig, MemoryQRLModule, MemorySACRLModule
from rlmodules.networks.distributions import SquashedGaussian
from tests.envs import RandomAgents, RememberCue, RememberFirst, RememberFirstAgents
from tests.test_can_i_use import CONFIGS, CONTINUOUS, T, make_config, spec_of, train

pytestmark = pytest.mark.ray

LENGTHS = {"a0": T, "a1": T + 3}


def agents_config(algorithm, schedule="together", *, module_class=None, extra=None, **env_config):
    """Two agents with rows of different lengths, and perhaps a third whose module is given."""
    specs = {
        agent: spec_of(algorithm, max_seq_len=max_seq_len) for agent, max_seq_len in LENGTHS.items()
    }
    for spec in specs.values():
        spec.module_class = module_class or spec.module_class
    if extra is not None:
        specs["a2"] = extra
    env_config = {"num_agents": len(specs), "schedule": schedule, **env_config}
    if algorithm == "SAC":
        env_config["action_spaces"] = dict.fromkeys(specs, CONTINUOUS)
    config = make_config(algorithm).environment(RandomAgents, env_config=env_config)
    config.multi_agent(policies=set(specs), policy_mapping_fn=lambda agent, *_, **__: agent)
    return config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))


# Several agents.


@pytest.mark.parametrize("schedule", ["turns", "rates"])
@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_agents_at_different_times(algorithm, schedule):
    """The first update's outputs are those of the rollout, on every step of each module."""
    config = agents_config(algorithm, schedule, lengths=range(20, 41))
    if algorithm == "DQN":
        config.training(n_step=2, burn_in_len=3)
    learner = train(config.env_runners(rollout_fragment_length=7))
    for module_id, outputs in learner.first_outputs.items():
        # As many steps of each, however rarely its agent acts; then the rows' last observations.
        assert len(outputs) >= 40, module_id


@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_modules_that_are_not_trained(algorithm):
    """They need no memory, and nothing of them is stored."""
    config = agents_config(algorithm, extra=RLModuleSpec(RandomRLModule))
    config.learners(learner_class=config.get_default_learner_class())
    with pytest.raises(ValueError, match="`a2` has no memory, but is trained"):
        connect(config.copy())
    algo = connect(config.multi_agent(policies_to_train=["a1"])).build_algo()
    try:
        results = {}
        while "qf_loss" not in results.get("a1", {}):
            results = algo.train().get("learners", {})
        # The target networks of all follow, as in RLlib.
        assert "qf_loss" not in results.get("a0", {})
        assert "num_module_steps_trained" not in results.get("a0", {})
        buffer = algo.local_replay_buffer
        assert len(buffer) == buffer.get_num_timesteps("a1") > 0 == buffer.get_num_timesteps("a2")
        # What the algorithm's config says later counts.
        algo.config._is_frozen = False
        algo.config.multi_agent(policies_to_train=["a0"])
        buffer.add(algo.env_runner.sample(num_timesteps=20))
        sampled = buffer.sample(num_items=10)
        assert {id_ for episode in sampled for id_ in episode.agent_episodes} == {"a0"}
    finally:
        algo.stop()


def filled_buffer(**settings):
    """A buffer with what an EnvRunner sampled of two agents, and that."""
    config = connect(agents_config("DQN", "rates", lengths=[30, 40]))
    runner = MemoryMultiAgentEnvRunner(config=config)
    buffer = SequenceReplayBuffer(row_length_of=LENGTHS.get, seed=0, **settings)
    samples = [runner.sample(num_timesteps=50) for _ in range(6)]
    for sample in samples:
        buffer.add(sample)
    return buffer, samples


def agent_steps(samples):
    """Steps by module, and by agent episode the observations in order."""
    counts, seen = Counter(), {}
    for episode in (episode for sample in samples for episode in sample):
        for agent_id, agent in episode.agent_episodes.items():
            counts[agent_id] += len(agent)
            steps = seen.setdefault(agent.id_, {})
            for t in range(len(agent) + 1):
                steps[agent.t_started + t] = agent.get_observations(t)
    return counts, seen


def test_each_agents_steps_are_its_own():
    buffer, samples = filled_buffer()
    counts, seen = agent_steps(samples)
    for module_id in LENGTHS:
        assert buffer.get_num_timesteps(module_id) == counts[module_id]
    metrics = buffer.get_metrics()
    assert {k: v.peek() for k, v in metrics["num_module_steps_added"].items()} == counts
    assert metrics["num_env_steps_added"].peek() == sum(counts.values()) == len(buffer)

    sampled = buffer.sample(num_items=100)
    num_steps = Counter()
    for episode in sampled:
        ((agent_id, agent),) = episode.agent_episodes.items()
        assert (agent.agent_id, agent.module_id) == (agent_id, agent_id)
        assert agent.multi_agent_episode_id == episode.id_
        assert episode.module_for(agent_id) == agent_id
        assert len(episode) == len(agent)
        assert 1 <= len(steps_of(agent)) <= LENGTHS[agent_id] - 1
        num_steps[agent_id] += len(steps_of(agent))
        for t in range(len(agent) + 1):
            expected = seen[agent.id_][agent.t_started + t]
            np.testing.assert_array_equal(agent.get_observations(t), expected)
    assert all(100 <= num_steps[id_] < 100 + LENGTHS[id_] for id_ in LENGTHS)
    metrics = buffer.get_metrics()
    assert {k: v.peek() for k, v in metrics["num_agent_steps_sampled"].items()} == num_steps


def test_capacity_is_each_modules():
    buffer, samples = filled_buffer(capacity=40)
    counts, _ = agent_steps(samples)
    for module_id, row_length in LENGTHS.items():
        assert 40 - 2 * row_length < buffer.get_num_timesteps(module_id) <= 40
    assert buffer.get_num_episodes() == sum(map(buffer.get_num_episodes, LENGTHS))
    evicted = buffer.get_metrics()["num_module_steps_evicted"]
    for module_id in LENGTHS:
        stored = buffer.get_num_timesteps(module_id)
        assert evicted[module_id].peek() == counts[module_id] - stored


def test_a_state_holds_all_modules():
    buffer, _ = filled_buffer()
    restored = SequenceReplayBuffer(row_length_of=LENGTHS.get, seed=0)
    restored.set_state(copy.deepcopy(buffer.get_state()))
    assert len(restored) == len(buffer)
    spans = [
        [(e.id_, e.env_t_started, e.env_t) for e in each.sample(num_items=50)]
        for each in (restored, buffer)
    ]
    assert spans[0] == spans[1]


def test_an_empty_buffer_says_so():
    buffer = SequenceReplayBuffer()
    with pytest.raises(ValueError, match="replay buffer is empty"):
        buffer.sample(num_items=10)


# Several Learners.


def test_shares_have_equally_many_steps():
    """RLlib hands each Learner one, in one piece."""
    buffer, _ = filled_buffer(num_learners=2)
    shares = buffer.sample(num_items=120)
    assert [type(share) for share in shares] == [LearnerShare, LearnerShare]
    for share in shares:
        steps = Counter()
        for episode in share.episodes:
            for agent_id, agent in episode.agent_episodes.items():
                steps[agent_id] += len(steps_of(agent))
        assert all(60 <= steps[id_] < 60 + LENGTHS[id_] for id_ in LENGTHS)


class Middle(torch.distributions.Normal):
    """Draws nothing but the mean, so that several Learners draw what one does."""

    def rsample(self, sample_shape=()):
        return self.loc

    sample = rsample


class WithoutNoise(SquashedGaussian):
    def _get_torch_distribution(self, loc, scale):
        return Middle(loc, scale, validate_args=False)


class NoiselessSACRLModule(MemorySACRLModule):
    def setup(self):
        super().setup()
        self.action_dist_cls = WithoutNoise


def gradients(learner):
    """Of all modules, and of SAC's temperatures."""
    found = {
        (module_id, name): parameter.grad.numpy()
        for module_id, module in learner.module.items()
        for name, parameter in module.unwrapped().named_parameters()
        if parameter.grad is not None
    }
    temperatures = getattr(learner, "curr_log_alpha", {})
    return found | {(id_, "alpha"): alpha.grad.numpy() for id_, alpha in temperatures.items()}


def of_all_learners(algo, function):
    return [result.get() for result in algo.learner_group.foreach_learner(function)]


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_two_learners_compute_the_gradients_of_one(algorithm):
    """On the same steps, where both have equally many of each of two agents."""
    algos = []
    for num_learners in (0, 2):
        module_class = NoiselessSACRLModule if algorithm == "SAC" else None
        config = agents_config(algorithm, module_class=module_class, lengths=[60])
        algos.append(connect(config.learners(num_learners=num_learners)).build_algo())
    one, two = algos
    try:
        two.learner_group.set_state(one.learner_group.get_state())
        one.env_runner.set_state({"rl_module": one.get_weights(), "weights_seq_no": 1})
        two.local_replay_buffer.add(one.env_runner.sample(num_timesteps=100))
        # Rows are full, of 3 and of 6 steps.
        shares = two.local_replay_buffer.sample(num_items=2 * 36)
        assert [len(share.episodes) for share in shares] == [12 + 6] * 2
        results = two.learner_group.update(episodes=copy.deepcopy(shares), timesteps={})
        for result in results:
            for module_id in LENGTHS:
                memory = result[module_id]["memory"]
                assert memory["num_stale_rows"].peek() == 0 < memory["num_rebuilt_rows"].peek()
        one.learner_group.update(episodes=unpacked(shares), timesteps={})
        (expected,) = of_all_learners(one, gradients)
        # Of the first update, and of what follows from it: weights, targets and temperatures.
        for found in of_all_learners(two, gradients):
            assert found.keys() == expected.keys()
            for name, gradient in expected.items():
                np.testing.assert_allclose(found[name], gradient, rtol=0, atol=1e-6, err_msg=name)
        for module_id in LENGTHS:
            sizes = [abs(g).max() for (id_, _), g in expected.items() if id_ == module_id]
            assert max(sizes) > 1e-3
    finally:
        one.stop()
        two.stop()


# Learning.

SIZE = {
    "fcnet_hiddens": [32],
    "d_model": 32,
    "num_heads": 2,
    "head_dim": 16,
    "feedforward_dim": 64,
    "compile": False,
}
# Without memory an agent's mean return is -0.5 in DQN's game and -1 in SAC's.
GOALS = {"DQN": 0.75, "SAC": -0.2}
LEARNING = {
    "DQN": {
        "lr": 1e-3,
        "num_steps_sampled_before_learning_starts": 500,
        "target_network_update_freq": 200,
        "epsilon": [(0, 1.0), (4000, 0.05)],
    },
    "SAC": {
        "actor_lr": 3e-3,
        "critic_lr": 3e-3,
        "alpha_lr": 3e-3,
        "initial_alpha": 0.1,
        "tau": 0.05,
        "num_steps_sampled_before_learning_starts": 1500,
    },
}


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["agents", "Learners"])
@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_learns_what_only_a_memory_can(algorithm, kind):
    """Two agents in turns, each with a module of its own, or one agent and two Learners."""
    game = {"DQN": RememberFirst, "SAC": RememberCue}[algorithm]
    model_config = DeepLinearAttentionConfig(max_seq_len=9, **SIZE)
    module_class = {"DQN": MemoryQRLModule, "SAC": MemorySACRLModule}[algorithm]
    num_learners, num_agents = (2, 1) if kind == "Learners" else (0, 2)
    config = (
        CONFIGS[algorithm]()
        .environment(game, env_config={"num_cues": 4})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8, rollout_fragment_length=4)
        .learners(num_learners=num_learners)
        .training(
            train_batch_size_per_learner=256 // (num_learners or 1),
            replay_buffer_config={"capacity": 20_000},
            **LEARNING[algorithm],
        )
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=1000)
        .rl_module(rl_module_spec=RLModuleSpec(module_class, model_config=model_config))
        .debugging(seed=0, log_sys_usage=False)
    )
    if num_agents == 2:
        env_config = {"num_cues": 4, "game": game, "turns": True}
        config.environment(RememberFirstAgents, env_config=env_config).multi_agent(
            policies={"a0", "a1"}, policy_mapping_fn=lambda agent, *_, **__: agent
        )
    algo = connect(config).build_algo()
    try:
        results = {"num_env_steps_sampled_lifetime": 0}
        best = -1.0
        while best < GOALS[algorithm]:
            assert results["num_env_steps_sampled_lifetime"] < 60_000, best
            results = algo.train()
            episodes = algo.env_runner.sample(num_episodes=40, explore=False)
            best = max(best, np.mean([e.get_return() for e in episodes]) / num_agents)
    finally:
        algo.stop()
