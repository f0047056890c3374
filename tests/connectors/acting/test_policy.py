"""A policy from a checkpoint does what the EnvRunner did, for any clients in any order."""

import copy
import pickle
import shutil
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.connectors.env_to_module import FlattenObservations, MeanStdFilter
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec

from connectors import AddPreviousActionsRewards, MemoryPolicy, connect
from rlmodules import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    GTrXLConfig,
    GTrXLRLModule,
    MemoryQRLModule,
    MemorySACRLModule,
)

pytestmark = pytest.mark.ray

MODULE = "learner_group/learner/rl_module/default_policy"
SMALL = {"max_seq_len": 8, "d_model": 8, "num_heads": 2, "head_dim": 4, "fcnet_hiddens": [8]}
SMALL |= {"feedforward_dim": 8, "compile": False}


class Observer(gym.Env):
    """A Box action moves a point that is observed in a `Dict`; rewards and lengths vary."""

    def __init__(self, config=None):
        self.observation_space = gym.spaces.Dict(
            {
                "position": gym.spaces.Box(-50.0, 50.0, (2,), np.float32),
                "mode": gym.spaces.Discrete(3),
            }
        )
        self.action_space = (config or {}).get(
            "action_space", gym.spaces.Box(-3.0, 1.0, (2,), np.float32)
        )

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.position = np.zeros(2)
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        self.position = np.clip(0.8 * self.position + np.asarray(action), -50, 50)
        observation = self._observation()
        return observation, float(observation["position"][0]), False, self.t >= 45, {}

    def _observation(self):
        position = self.position + self.np_random.normal(size=2) * 3
        return {
            "position": position.astype(np.float32),
            "mode": int(self.np_random.integers(3)),
        }


def base(config_class, *pieces, env_config=None):
    return (
        config_class()
        .environment(Observer, env_config=env_config or {})
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=2,
            rollout_fragment_length=64,
            env_to_module_connector=lambda env, spaces, device: [piece() for piece in pieces],
        )
        .debugging(seed=0, log_sys_usage=False)
    )


def spec(module_class, config):
    return RLModuleSpec(module_class=module_class, model_config=config)


def ppo(*pieces):
    return base(PPOConfig, *pieces).training(
        train_batch_size_per_learner=128, minibatch_size=64, num_epochs=1, lr=0.01
    )


def deep(*pieces):
    module = spec(DeepLinearAttentionRLModule, DeepLinearAttentionConfig(**SMALL))
    return connect(ppo(*pieces).rl_module(rl_module_spec=module))


def gtrxl():
    module = spec(GTrXLRLModule, GTrXLConfig(memory_inference=6, **SMALL))
    return connect(ppo(FlattenObservations, MeanStdFilter).rl_module(rl_module_spec=module))


def lstm():
    """RLlib's own module and connectors."""
    model = DefaultModelConfig(
        use_lstm=True, max_seq_len=8, lstm_cell_size=8, fcnet_hiddens=[8], vf_share_layers=True
    )
    return ppo(FlattenObservations, MeanStdFilter).rl_module(model_config=model)


def connected_lstm():
    return connect(lstm())


def stateless():
    model = DefaultModelConfig(fcnet_hiddens=[8])
    return ppo(FlattenObservations).rl_module(model_config=model)


def replaying(config, module, **settings):
    """Not trained: one sample fills no buffer."""
    config.rl_module(rl_module_spec=module, model_config={"max_seq_len": 8})
    config.training(
        replay_buffer_config={"type": "EpisodeReplayBuffer", "capacity": 1000},
        num_steps_sampled_before_learning_starts=10_000,
        n_step=1,
        **settings,
    )
    return connect(config)


def dqn():
    config = base(DQNConfig, env_config={"action_space": gym.spaces.Discrete(6)})
    module = spec(MemoryQRLModule, DeepLinearAttentionConfig(**SMALL))
    return replaying(config, module, epsilon=[(0, 1.0), (10_000, 0.0)])


def sac():
    module = spec(MemorySACRLModule, DeepLinearAttentionConfig(**SMALL))
    return replaying(base(SACConfig), module)


def with_previous():
    return deep(AddPreviousActionsRewards)


def vtrace(config_class):
    module = spec(DeepLinearAttentionRLModule, DeepLinearAttentionConfig(**SMALL))
    config = base(config_class).training(train_batch_size_per_learner=128)
    return connect(config.learners(num_learners=0).rl_module(rl_module_spec=module))


def appo():
    return vtrace(APPOConfig)


def impala():
    return vtrace(IMPALAConfig)


CONFIGS = [with_previous, gtrxl, lstm, connected_lstm, stateless, dqn, sac, appo, impala]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Name of the config -> path of its checkpoint, and the greedy episodes of its EnvRunner."""
    made = {}

    def make(build):
        if build not in made:
            algorithm = build().build_algo()
            algorithm.train()
            path = algorithm.save_to_path(str(tmp_path_factory.mktemp(build.__name__)))
            runner = algorithm.env_runner
            # IMPALA's Learner may have gone on since it sent weights.
            saved = RLModule.from_checkpoint(f"{path}/{MODULE}")
            runner.module.set_state(saved.get_state(inference_only=True))
            for piece in runner._env_to_module.connectors:
                if isinstance(piece, MeanStdFilter):
                    piece._update_stats = False
            # Environments are seeded at the first reset, and behind a sample of whole episodes.
            runner.sample(num_episodes=2, explore=False)
            episodes = runner.sample(num_episodes=2, explore=False)
            algorithm.stop()
            made[build] = path, episodes
        return made[build]

    return make


def drive(policy, *, seed=0, client=None, num_steps=45, env_config=None, between=lambda t: None):
    """Actions over the steps of an episode, and its return."""
    env = Observer(env_config)
    observation, _ = env.reset(seed=seed)
    reward, actions, total = 0.0, [], 0.0
    for t in range(num_steps):
        between(t)
        actions.append(policy.act(observation, reward=reward, client=client))
        observation, reward, *_ = env.step(actions[-1])
        total += reward
    return np.array(actions), total


def env_config_of(build):
    return {"action_space": gym.spaces.Discrete(6)} if build is dqn else {}


@pytest.mark.parametrize("build", CONFIGS)
def test_equals_the_env_runner(checkpoints, build):
    """Same seeds, greedy: same actions at each step of two whole episodes a sub-environment."""
    path, episodes = checkpoints(build)
    policy = MemoryPolicy.from_checkpoint(path)
    # The runner seeds its sub-environments with the worker's seed and the numbers behind it.
    for seed in (0, 1):
        actions, total = drive(policy, seed=seed, env_config=env_config_of(build))
        policy.reset()
        equal = [e for e in episodes if np.isclose(e.get_return(), total, rtol=1e-5)]
        assert len(equal) == 1
        recorded = equal[0].get_actions()
        if build is dqn:
            assert len(np.unique(actions)) > 1
            np.testing.assert_array_equal(actions, recorded)
        else:
            unsquashed = -3.0 + (np.clip(recorded, -1.0, 1.0) + 1.0) * 2.0
            np.testing.assert_allclose(actions, unsquashed, rtol=1e-5, atol=1e-5)
            assert len(np.unique(actions, axis=0)) > 10


CLIENTS = ["a", 7, None]


@pytest.mark.parametrize("build", [with_previous, gtrxl, lstm])
def test_clients(checkpoints, build):
    """Interleaved, at different steps, or in one pass: each client acts as if it were alone."""
    path, _ = checkpoints(build)
    alone = [drive(MemoryPolicy.from_checkpoint(path), seed=seed) for seed in range(3)]

    policy = MemoryPolicy.from_checkpoint(path)
    envs = [Observer() for _ in CLIENTS]
    seen = {
        id_: env.reset(seed=i)[0] for i, (id_, env) in enumerate(zip(CLIENTS, envs, strict=True))
    }
    rewards, actions = {}, {id_: [] for id_ in CLIENTS}
    for t in range(200):
        # Any subset, in any order.
        acting = [id_ for i, id_ in enumerate(CLIENTS) if t % (i + 1) == 0][:: (-1) ** t]
        acting = [id_ for id_ in acting if len(actions[id_]) < 45]
        chosen = policy.act_batch({id_: seen[id_] for id_ in acting}, rewards=rewards)
        assert list(chosen) == acting
        for id_ in acting:
            actions[id_].append(chosen[id_])
            seen[id_], rewards[id_], *_ = envs[CLIENTS.index(id_)].step(chosen[id_])
    for id_, (expected, _) in zip(CLIENTS, alone, strict=True):
        np.testing.assert_allclose(np.array(actions[id_]), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("build", [with_previous, gtrxl, lstm, stateless])
def test_state_survives_a_reboot(checkpoints, build):
    """Saved, pickled and restored into a new policy in the middle of an episode: no difference."""
    path, _ = checkpoints(build)
    whole, _ = drive(MemoryPolicy.from_checkpoint(path))

    env = Observer()
    observation, _ = env.reset(seed=0)
    policy, reward, actions, saved = MemoryPolicy.from_checkpoint(path), 0.0, [], None
    for t in range(45):
        if t in (1, 40):
            state = policy.state()
            saved = pickle.dumps(state)
            policy = MemoryPolicy.from_checkpoint(path)
            policy.restore(None, pickle.loads(saved))
        actions.append(policy.act(observation, reward=reward))
        observation, reward, *_ = env.step(actions[-1])
    np.testing.assert_array_equal(actions, whole)
    # What was handed out did not go on with the client.
    assert pickle.dumps(pickle.loads(saved)["states"]) == pickle.dumps(state["states"])
    assert state["episode"]["t"] == 39


def test_a_state_can_be_restored_twice(checkpoints):
    path, _ = checkpoints(with_previous)
    policy = MemoryPolicy.from_checkpoint(path)
    drive(policy, num_steps=10)
    state = policy.state()
    first, _ = drive(policy, seed=5, num_steps=10)
    policy.restore(None, state)
    policy.restore("other", state)
    again, _ = drive(policy, seed=5, num_steps=10)
    other, _ = drive(policy, seed=5, num_steps=10, client="other")
    np.testing.assert_array_equal(first, again)
    np.testing.assert_array_equal(first, other)


def test_reset(checkpoints):
    path, _ = checkpoints(with_previous)
    policy = MemoryPolicy.from_checkpoint(path)
    first, _ = drive(policy, num_steps=10)
    going_on, _ = drive(policy, num_steps=10)
    policy.reset()
    again, _ = drive(policy, num_steps=10)
    assert not np.allclose(first, going_on)
    np.testing.assert_array_equal(first, again)
    policy.reset("never seen")


def test_rewards_matter(checkpoints):
    """Where the module sees them."""
    path, _ = checkpoints(with_previous)
    observation, _ = Observer().reset(seed=0)
    seconds = []
    for reward in (0.0, 5.0):
        policy = MemoryPolicy.from_checkpoint(path)
        policy.act(observation)
        seconds.append(policy.act(observation, reward=reward))
    assert not np.allclose(*seconds)


def test_memory_is_bounded(checkpoints):
    path, _ = checkpoints(gtrxl)
    policy = MemoryPolicy.from_checkpoint(path)
    observation, _ = Observer().reset(seed=0)
    sizes = []
    for t in range(300):
        policy.act(observation)
        if t in (150, 299):
            sizes.append(len(pickle.dumps(policy.state())))
    assert sizes[1] < 1.5 * sizes[0]
    assert policy.state()["episode"]["t"] == 299


@pytest.mark.parametrize("build", [with_previous, lstm, dqn, sac])
def test_sampling(checkpoints, build):
    """Seeded sampling repeats itself, leaves torch's numbers alone, and differs between seeds."""
    path, _ = checkpoints(build)
    runs = [
        drive(
            MemoryPolicy.from_checkpoint(path, explore=True, seed=seed),
            env_config=env_config_of(build),
            between=(lambda t: torch.rand(1)) if i == 1 else (lambda t: None),
        )[0]
        for i, seed in enumerate((0, 0, 1))
    ]
    np.testing.assert_array_equal(runs[0], runs[1])
    greedy, _ = drive(MemoryPolicy.from_checkpoint(path), env_config=env_config_of(build))
    if build is dqn:
        # Epsilon has come to its end, 0.
        np.testing.assert_array_equal(runs[0], greedy)
    else:
        assert not np.allclose(runs[0], runs[2])
        assert not np.allclose(runs[0], greedy)
    policy = MemoryPolicy.from_checkpoint(path, explore=True, seed=0)
    before = torch.get_rng_state()
    drive(policy, env_config=env_config_of(build))
    assert torch.equal(torch.get_rng_state(), before)


def test_filters_are_frozen(checkpoints):
    """Also fails if Ray renames the private attribute that freezes them."""
    path, _ = checkpoints(gtrxl)
    policy = MemoryPolicy.from_checkpoint(path)
    pieces = policy._parts.env_to_module[MeanStdFilter]
    saved = copy.deepcopy(pieces[0].get_state())
    assert saved[None]["running_stats"][0]["num_pushes"] > 100
    drive(policy, num_steps=20)
    assert pickle.dumps(pieces[0].get_state()) == pickle.dumps(saved)


def test_bare_module(checkpoints):
    """Without connectors: raw observations, actions unsquashed to the bounds."""
    path, _ = checkpoints(sac)
    whole, _ = drive(MemoryPolicy.from_checkpoint(path))
    bare, _ = drive(MemoryPolicy.from_checkpoint(Path(path) / MODULE))
    np.testing.assert_array_equal(bare, whole)
    assert bare.min() >= -3.0
    assert bare.max() <= 1.0


def test_a_checkpoint_can_be_moved(checkpoints, tmp_path, monkeypatch):
    """A policy's folder can be copied, and holds what it needs."""
    path, _ = checkpoints(gtrxl)
    moved = tmp_path / "moved"
    shutil.copytree(path, moved)
    for part in ("learner_group/learner/state.pkl", "algorithm_state.pkl"):
        (moved / part).unlink()
    monkeypatch.chdir(tmp_path)
    np.testing.assert_array_equal(
        drive(MemoryPolicy.from_checkpoint("moved"))[0],
        drive(MemoryPolicy.from_checkpoint(path))[0],
    )


def test_wrong_checkpoints(tmp_path, checkpoints):
    path, _ = checkpoints(with_previous)
    for wrong in (tmp_path, tmp_path / "missing", Path(path) / "learner_group"):
        with pytest.raises(ValueError, match="no checkpoint of an Algorithm or of a single"):
            MemoryPolicy.from_checkpoint(wrong)
    with pytest.raises(ValueError, match="no checkpoint of an Algorithm or of a single"):
        MemoryPolicy.from_checkpoint((Path(path) / MODULE).parent)


GOOD = {"position": np.zeros(2, np.float32), "mode": 1}


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (np.zeros(2), "must be a dict with the keys"),
        ({"position": np.zeros(2)}, "must be a dict with the keys"),
        ({**GOOD, "extra": 1}, "must be a dict with the keys"),
        ({**GOOD, "position": np.zeros(3)}, r"`observation\['position'\]` has shape \(3,\)"),
        ({**GOOD, "position": np.zeros((1, 2))}, r"has shape \(1, 2\)"),
        ({**GOOD, "position": ["1", "2"]}, "has dtype"),
        ({**GOOD, "position": None}, "has shape"),
        ({**GOOD, "mode": 1.0}, "has dtype float64"),
        ({**GOOD, "mode": 3}, "not in the space"),
    ],
)
def test_wrong_observations(checkpoints, observation, message):
    """Nobody has acted, nobody's state has changed."""
    path, _ = checkpoints(with_previous)
    policy = MemoryPolicy.from_checkpoint(path)
    with pytest.raises(ValueError, match=message):
        policy.act_batch({"good": GOOD, "bad": observation})
    for client in ("good", "bad"):
        with pytest.raises(ValueError, match="has not acted since"):
            policy.state(client)


class Fails:
    """A connector that writes into the episodes, and raises where it is told to."""

    def __init__(self):
        self.where = None
        self.counts = []

    def __call__(self, *, batch, episodes, **kwargs):
        for episode in episodes:
            episode.custom_data["steps"] = episode.custom_data.get("steps", 0) + 1
            self.counts.append(episode.custom_data["steps"])
        if self.where == "connector":
            raise ZeroDivisionError
        return batch


@pytest.mark.parametrize("where", ["connector", "module", "module-to-env"])
@pytest.mark.parametrize("explore", [False, True])
def test_after_an_error_nobody_has_acted(checkpoints, monkeypatch, where, explore):
    """Clients go on as if there had been none, sampled actions included."""
    path, _ = checkpoints(with_previous)
    seen = [Observer().reset(seed=seed)[0] for seed in range(45)]

    def act(policy, fails, failing):
        actions = []
        for t, observation in enumerate(seen):
            if t in failing:
                fails.where = where
                with pytest.raises(ZeroDivisionError):
                    policy.act_batch({"a": observation, "new": observation}, rewards={"a": 1.0})
                fails.where = None
            actions.append(policy.act(observation, client="a", reward=0.5))
        with pytest.raises(ValueError, match="has not acted since"):
            policy.state("new")
        return np.array(actions), policy.state("a")["episode"]["t"]

    results = []
    for failing in ((), (0, 1, 5, 32, 33, 40)):
        policy = MemoryPolicy.from_checkpoint(path, explore=explore, seed=0)
        fails = Fails()
        first = policy._parts.env_to_module.connectors[0]
        monkeypatch.setattr(type(first), "__call__", with_first(type(first).__call__, fails))
        for name in ("forward_inference", "forward_exploration"):
            module = policy._parts.module
            monkeypatch.setattr(module, name, failing_call(getattr(module, name), fails, "module"))
        policy._parts.module_to_env = failing_call(
            policy._parts.module_to_env, fails, "module-to-env"
        )
        results.append(act(policy, fails, failing))
        assert fails.counts[-1] == len(seen)
        monkeypatch.undo()
    np.testing.assert_array_equal(results[0][0], results[1][0])
    assert results[0][1] == results[1][1] == len(seen) - 1


def with_first(call, first):
    """A connector's call, another one before it."""

    def both(self, *, batch, **kwargs):
        return call(self, batch=first(batch=batch, **kwargs), **kwargs)

    return both


def failing_call(call, fails, where):
    """A call that raises after its work, where it is told to."""

    def wrapped(*args, **kwargs):
        result = call(*args, **kwargs)
        if fails.where == where:
            raise ZeroDivisionError
        return result

    return wrapped


@pytest.mark.parametrize(
    ("build", "bad"),
    [
        *((build, np.nan) for build in (with_previous, gtrxl, lstm, stateless)),
        # Filters, which the others have, clip them.
        *((build, bad) for build in (with_previous, stateless) for bad in (np.inf, 1e300)),
    ],
)
def test_numbers_that_are_not_finite(checkpoints, build, bad):
    """One reading of a sensor would freeze a linear memory for good."""
    path, _ = checkpoints(build)
    clean, policy = MemoryPolicy.from_checkpoint(path), MemoryPolicy.from_checkpoint(path)
    for t, observation in enumerate(Observer().reset(seed=seed)[0] for seed in range(12)):
        if t in (0, 5):
            broken = {**observation, "position": np.array([0.0, bad])}
            with pytest.raises(ValueError, match=r"not finite where the module .* \['b'\]"):
                policy.act_batch({"a": observation, "b": broken})
        actions = policy.act_batch(dict.fromkeys("ab", observation))
        np.testing.assert_array_equal(
            list(actions.values()), list(clean.act_batch(dict.fromkeys("ab", observation)).values())
        )


def test_rewards_that_are_not_finite(checkpoints):
    """Where the module sees them."""
    path, _ = checkpoints(with_previous)
    policy = MemoryPolicy.from_checkpoint(path)
    policy.act(GOOD)
    with pytest.raises(ValueError, match=r"`observation\['previous_reward'\]` holds numbers"):
        policy.act(GOOD, reward=np.nan)


def test_states_that_are_not_numbers(checkpoints):
    """Observations that are finite, but so large that the module overflows."""
    path, _ = checkpoints(with_previous)
    policy = MemoryPolicy.from_checkpoint(path)
    policy.act(GOOD)
    before = pickle.dumps(policy.state())
    with pytest.raises(ValueError, match=r"The states of the clients \[None\] would hold NaN"):
        policy.act({**GOOD, "position": np.full(2, 3e38, np.float32)})
    assert pickle.dumps(policy.state()) == before


def test_integers_beyond_the_dtype(checkpoints):
    """They would be wrapped around."""
    path, _ = checkpoints(with_previous)
    policy = MemoryPolicy.from_checkpoint(path)
    space = gym.spaces.Box(-100, 100, (2,), np.int8)
    policy._parts.observation_space = space
    with pytest.raises(ValueError, match="`observation` holds integers beyond those of int8"):
        policy.act([1, 300])


def test_observations_are_cast(checkpoints):
    """As vector environments do: Python numbers and float64 are fine."""
    path, _ = checkpoints(with_previous)
    policy = MemoryPolicy.from_checkpoint(path)
    expected = policy.act(GOOD, client="float32")
    for client, position in enumerate((np.zeros(2), [0, 0], (0.0, 0.0))):
        action = policy.act({"mode": np.int32(1), "position": position}, client=client)
        np.testing.assert_array_equal(action, expected)
    assert policy.act_batch({}) == {}
