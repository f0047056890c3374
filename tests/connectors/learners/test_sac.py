"""SAC's Learner: losses against a reference, padding, optimizers, target networks."""

import copy
import functools
import math
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.sac import SAC, SACConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME

from connectors import MemorySACTorchLearner, SequenceReplayBuffer, connect
from rlmodules import DeepLinearAttentionConfig, MemorySACRLModule
from rlmodules.memories import compilation
from rlmodules.modules.batches import module_inputs
from tests.envs import RandomObservations, RememberCue, RememberFirst

pytestmark = pytest.mark.ray

OBSERVATIONS = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)
DISCRETE = gym.spaces.Discrete(3)
T = 5
# Observations of each row, one more than steps.
SEQ_LENS = [5, 3, 2, 4]
GAMMA = 0.9
# What "samples" of a Gaussian are here, in standard deviations.
NOISE, NEXT_NOISE = 0.7, -0.4
SHARINGS = pytest.mark.parametrize("vf_share_layers", [True, False], ids=["shared", "separate"])


def small(**settings):
    sizes = {
        "max_seq_len": T,
        "fcnet_hiddens": [8],
        "d_model": 8,
        "num_heads": 2,
        "head_dim": 4,
        "feedforward_dim": 8,
        "num_layers": 1,
        "compile": False,
    }
    return DeepLinearAttentionConfig(**{**sizes, **settings})


def make_learner(training=None, action_space=ACTIONS, **settings):
    torch.manual_seed(0)
    spec = RLModuleSpec(module_class=MemorySACRLModule, model_config=small(**settings))
    config = (
        SACConfig()
        .environment(observation_space=OBSERVATIONS, action_space=action_space)
        .rl_module(rl_module_spec=spec)
        .learners(learner_class=MemorySACTorchLearner)
        .training(gamma=GAMMA, initial_alpha=0.3, **(training or {}))
    )
    spaces = (OBSERVATIONS, action_space)
    learner = MemorySACTorchLearner(
        config=config,
        module_spec=config.get_multi_rl_module_spec(spaces={DEFAULT_MODULE_ID: spaces}),
    )
    learner.build()
    with torch.no_grad():
        for name, parameter in module_of(learner).named_parameters():
            # Values and distributions far from their near-zero start, targets of their own.
            if ".net." in name:
                parameter.add_(0.3 * torch.randn_like(parameter))
            if name.startswith("target_"):
                parameter.mul_(0.9)
    return learner


def module_of(learner):
    return learner.module[DEFAULT_MODULE_ID].unwrapped()


def make_batch(module, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.rand(*shape, generator=generator, dtype=torch.float64).to(dtype)

    B = len(SEQ_LENS)
    seq_lens = torch.tensor(SEQ_LENS)
    mask = torch.arange(T) < seq_lens[:, None] - 1
    # Steps that the memory reads, but nothing is learned from.
    mask[0, :2] = False
    # A step whose next observation does not stand in its row.
    mask[0, -1] = True
    ends = torch.arange(T) == seq_lens[:, None] - 2
    terminateds = ends & torch.tensor([False, True, False, False])[:, None]
    is_discrete = isinstance(module.action_space, gym.spaces.Discrete)
    actions = (3 * random(B, T)).long() if is_discrete else 1.8 * random(B, T, 2) - 0.9
    return {
        Columns.OBS: random(B, T, 3),
        Columns.ACTIONS: actions,
        Columns.REWARDS: random(B, T) - 0.5,
        Columns.TERMINATEDS: terminateds,
        Columns.TRUNCATEDS: ends & ~terminateds,
        Columns.SEQ_LENS: seq_lens,
        Columns.LOSS_MASK: mask,
        Columns.STATE_IN: tree.map_structure(
            lambda x: random(B, *x.shape) if x.is_floating_point() else x.expand(B, *x.shape) + 3,
            module.get_initial_state(),
        ),
    }


def losses_of(learner, batch):
    """All metrics of one pass and the gradients by name, before any update."""
    batches = {DEFAULT_MODULE_ID: batch}
    outputs = learner.module.forward_train(batches)
    loss = learner.compute_losses(fwd_out=outputs, batch=batches)
    learner.compute_gradients(loss)
    metrics = {
        key: value.peek()
        for key, value in learner.metrics.stats[DEFAULT_MODULE_ID].items()
        if key != "num_module_steps_trained"
    }
    metrics["total"] = loss[DEFAULT_MODULE_ID].item()
    gradients = {name: x.grad for name, x in module_of(learner).named_parameters()}
    metrics = {key: torch.as_tensor(value).item() for key, value in metrics.items()}
    return metrics, gradients


@pytest.fixture
def _fixed_noise(monkeypatch):
    normal = torch.distributions.Normal
    monkeypatch.setattr(normal, "rsample", lambda self, *_: self.loc + NOISE * self.scale)
    monkeypatch.setattr(normal, "sample", lambda self, *_: self.loc + NEXT_NOISE * self.scale)


def squashed_sample(dist_inputs, noise):
    """An action and its log-probability, from the definition."""
    mean, log_std = dist_inputs.chunk(2)
    std = log_std.clamp(-5, 2).exp()
    action = torch.tanh(mean + noise * std)
    logp = 0.0
    for a, s in zip(action.tolist(), std.tolist(), strict=True):
        density = math.exp(-(noise**2) / 2) / (s * math.sqrt(2 * math.pi))
        logp += math.log(density / (1 - a**2))
    return action, logp


def under_policy(dist_inputs, qfs, features, noise):
    """Log-probability and smallest value of a sampled action, or their means over all actions."""
    if len(dist_inputs) == 4:
        action, logp = squashed_sample(dist_inputs, noise)
        return logp, min(q(features, action).item() for q in qfs)
    probs = dist_inputs.softmax(0).tolist()
    values = [min(q(features, torch.tensor(a)).item() for q in qfs) for a in range(3)]
    return (
        sum(p * math.log(p) for p in probs),
        sum(p * value for p, value in zip(probs, values, strict=True)),
    )


def reference(module, batch, log_alpha):
    """Losses step by step, in plain numbers."""
    alpha = math.exp(log_alpha)
    separate = not module.memory_config.vf_share_layers
    count = qf = qf_twin = policy = entropy = 0
    for row, length in enumerate(SEQ_LENS):
        state = tree.map_structure(lambda x, row=row: x[row : row + 1], batch[Columns.STATE_IN])
        critic_state = target_state = state["critic"] if separate else state
        actor_state = state["actor"] if separate else None
        features, target_features, dist_inputs = [], [], []
        for obs in batch[Columns.OBS][row, :length]:
            x, critic_state = module.qf_encoder(obs[None, None], critic_state, None, None)
            features.append(x[0, 0])
            if separate:
                x, actor_state = module.pi_encoder(obs[None, None], actor_state, None, None)
            dist_inputs.append(module.pi(x[0, 0]))
            x, target_state = module.target_qf_encoder(obs[None, None], target_state, None, None)
            target_features.append(x[0, 0])

        for t in range(length - 1):
            if not batch[Columns.LOSS_MASK][row, t]:
                continue
            logp, value = under_policy(
                dist_inputs[t + 1], module._target_qfs(), target_features[t + 1], NEXT_NOISE
            )
            value -= alpha * logp
            target = batch[Columns.REWARDS][row, t].item()
            if not batch[Columns.TERMINATEDS][row, t]:
                target += GAMMA * value
            errors = [
                q(features[t], batch[Columns.ACTIONS][row, t]).item() - target
                for q in module._qfs()
            ]
            huber = [0.5 * e**2 if abs(e) < 1 else abs(e) - 0.5 for e in errors]
            qf += huber[0]
            qf_twin += huber[-1]
            logp, value = under_policy(dist_inputs[t], module._qfs(), features[t], NOISE)
            policy += alpha * logp - value
            entropy += logp
            count += 1
    return {
        "qf_loss": qf / count,
        "qf_twin_loss": qf_twin / count,
        "policy_loss": policy / count,
        # The entropy that is aimed at, which RLlib takes from the number of the actions' axes.
        "alpha_loss": -log_alpha * (entropy / count - np.prod(module.action_space.shape)),
        "logps": entropy / count,
    }


@SHARINGS
@pytest.mark.parametrize("twin_q", [True, False], ids=["twin", "one"])
@pytest.mark.parametrize("space", [ACTIONS, DISCRETE], ids=["box", "discrete"])
@pytest.mark.usefixtures("_fixed_noise")
def test_losses_equal_the_reference(vf_share_layers, twin_q, space):
    learner = make_learner({"twin_q": twin_q}, space, vf_share_layers=vf_share_layers)
    module = module_of(learner).double()
    batch = make_batch(module, torch.float64)
    with torch.no_grad():
        expected = reference(module, batch, math.log(0.3))
    metrics, _ = losses_of(learner, batch)
    if not twin_q:
        assert "qf_twin_loss" not in metrics
        del expected["qf_twin_loss"]
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6, abs=1e-7), name
    losses = [value for name, value in expected.items() if name.endswith("loss")]
    assert metrics["total"] == pytest.approx(sum(losses), rel=1e-6)


@SHARINGS
def test_padding_changes_nothing(vf_share_layers):
    learner = make_learner(vf_share_layers=vf_share_layers)
    batch = make_batch(module_of(learner))
    torch.manual_seed(1)
    expected = losses_of(learner, dict(batch))
    padding = torch.arange(T) >= batch[Columns.SEQ_LENS][:, None]
    for column in (Columns.OBS, Columns.ACTIONS):
        batch[column] = batch[column].masked_fill(padding[..., None], float("nan"))
    batch[Columns.REWARDS] = batch[Columns.REWARDS].masked_fill(padding, float("nan"))
    batch[Columns.TERMINATEDS] = batch[Columns.TERMINATEDS] | padding
    torch.manual_seed(1)
    metrics, gradients = losses_of(learner, batch)
    assert metrics == expected[0]
    for name, gradient in gradients.items():
        if not name.startswith("target_"):
            assert torch.equal(gradient, expected[1][name]), name


@SHARINGS
def test_each_parameter_has_one_optimizer(vf_share_layers):
    learner = make_learner(vf_share_layers=vf_share_layers)
    module = module_of(learner)
    names = {id(x): name for name, x in module.named_parameters()}
    names[id(learner.curr_log_alpha[DEFAULT_MODULE_ID])] = "log_alpha"
    trained = {
        optimizer_name: [
            names[id(x)].split(".")[0] for group in optimizer.param_groups for x in group["params"]
        ]
        for optimizer_name, optimizer in learner.get_optimizers_for_module(DEFAULT_MODULE_ID)
    }
    assert sum(map(len, trained.values())) == 1 + sum(
        not name.startswith("target_") for name, _ in module.named_parameters()
    )
    assert set(trained["qf"]) == {"qf_encoder", "qf", "qf_twin"}
    assert set(trained["policy"]) == ({"pi"} if vf_share_layers else {"pi", "pi_encoder"})
    assert trained["alpha"] == ["log_alpha"]


def test_target_networks_follow():
    learner = make_learner({"tau": 0.25})
    module = module_of(learner)
    before = {name: x.clone() for name, x in module.state_dict().items()}
    learner.after_gradient_based_update(timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: 100})
    after = module.state_dict()
    targets = [name for name in before if name.startswith("target_")]
    assert targets
    for name in targets:
        source = before[name.removeprefix("target_")]
        torch.testing.assert_close(after[name], 0.25 * source + 0.75 * before[name])
    for name in before.keys() - set(targets):
        assert torch.equal(after[name], before[name])


def test_a_nan_reward_leaves_everything_alone():
    learner = make_learner()
    batch = make_batch(module_of(learner))
    batch[Columns.REWARDS][1, 0] = float("nan")
    before = {key: np.copy(value) for key, value in state_of(learner).items()}
    losses_of(learner, batch)
    gradients = {ref: parameter.grad for ref, parameter in learner._params.items()}
    learner.apply_gradients(gradients)
    for key, value in state_of(learner).items():
        np.testing.assert_array_equal(value, before[key], err_msg=str(key))
    count = learner.metrics.peek(("__all_modules__", "memory", "num_nonfinite_gradients"))
    assert count == 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler raises warnings of its own.
@SHARINGS
def test_compiled_memories_get_the_same_gradients(vf_share_layers, monkeypatch):
    """Without code generation, to save time; at a width that nothing else compiles."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))
    gradients = []
    for compiled in (True, False):
        learner = make_learner(vf_share_layers=vf_share_layers, d_model=24, compile=compiled)
        module = module_of(learner)
        torch.manual_seed(1)
        gradients.append(losses_of(learner, make_batch(module))[1])
        for core in (module.qf_encoder, module.target_qf_encoder):
            assert all(compilation.is_compiled(x) == compiled for x in core.memory.blocks)
    for name, expected in gradients[1].items():
        if not name.startswith("target_"):
            torch.testing.assert_close(gradients[0][name], expected, rtol=1e-4, atol=1e-6)


class RecordingRLModule(MemorySACRLModule):
    """Also records what the Q heads get to see."""

    def _forward(self, batch, **kwargs):
        obs, state, *masks = module_inputs(batch)
        features, _ = self.qf_encoder(obs, self._critic_state(state), *masks)
        return {**super()._forward(batch, **kwargs), "critic_features": features}


class RecordingLearner(MemorySACTorchLearner):
    """Keeps each train batch and how far its numbers are from those of the rollout."""

    def build(self):
        super().build()
        self.batches, self.errors, self.errors_without_state = [], [], []

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        module = self.module[module_id].unwrapped()
        mask = batch[Columns.LOSS_MASK]

        def errors(batch):
            with torch.no_grad():
                outputs = module.forward_exploration(batch)
            dist_class = module.get_train_action_dist_cls()
            dist = dist_class.from_logits(outputs[Columns.ACTION_DIST_INPUTS])
            logp = dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
            features = outputs["critic_features"] - batch["critic_features"]
            return [x[mask].abs().max().item() for x in (logp, features)]

        self.batches.append(dict(batch))
        self.errors.append(errors(batch))
        zeros = tree.map_structure(torch.zeros_like, batch[Columns.STATE_IN])
        self.errors_without_state.append(errors({**batch, Columns.STATE_IN: zeros}))
        return super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )


def make_config(model_config, *, learner_class=None, fragment=19, **training):
    config = (
        SACConfig()
        .environment(
            RandomObservations,
            env_config={"action_space": gym.spaces.Box(-2.0, 2.0, (2,), np.float32)},
        )
        .env_runners(num_env_runners=0, num_envs_per_env_runner=3, rollout_fragment_length=fragment)
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=120,
            num_steps_sampled_before_learning_starts=400,
            actor_lr=1e-2,
            critic_lr=1e-2,
            **training,
        )
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
        .rl_module(
            rl_module_spec=RLModuleSpec(module_class=RecordingRLModule, model_config=model_config)
        )
        .debugging(seed=0, log_sys_usage=False)
    )
    if learner_class is not None:
        config.learners(learner_class=learner_class)
    return connect(config)


def learner_of(algorithm):
    return algorithm.learner_group._learner


def state_of(learner):
    """Weights, moments of the optimizers and temperatures, in one flat dict."""
    state = learner.get_state(components=["rl_module", "optimizer"])
    return dict(tree.flatten_with_path({k: v for k, v in state.items() if isinstance(v, dict)}))


def assert_states_equal(actual, expected):
    actual, expected = state_of(actual), state_of(expected)
    assert actual.keys() == expected.keys()
    assert {path[0] for path in actual} == {"rl_module", "optimizer", "adapted_state"}
    for key, value in expected.items():
        np.testing.assert_array_equal(np.asarray(actual[key]), np.asarray(value), err_msg=str(key))


@SHARINGS
@pytest.mark.parametrize("fragment", [1, 19])
def test_a_replayed_row_is_the_rollout(vf_share_layers, fragment):
    """With the weights that sampled, from the state that the buffer has for the row."""
    config = make_config(
        small(max_seq_len=8, vf_share_layers=vf_share_layers),
        learner_class=RecordingLearner,
        fragment=fragment,
    )
    algorithm = config.build_algo()
    try:
        learner = algorithm.learner_group._learner
        while not learner.batches:
            results = algorithm.train()
    finally:
        algorithm.stop()
    assert max(learner.errors[0]) <= 1e-5
    # The test sees a wrong state, and rows that start inside episodes.
    assert min(learner.errors_without_state[0]) > 1e-4
    batch = learner.batches[0]
    assert batch[Columns.LOSS_MASK].shape[1] == 8
    assert batch[Columns.LOSS_MASK].sum() >= 120
    results = results["learners"][DEFAULT_MODULE_ID]
    for name in ("qf_loss", "qf_twin_loss", "policy_loss", "alpha_loss", "logps", "td_error_mean"):
        assert math.isfinite(results[name]), name


def test_a_restored_run_goes_on_as_the_saved_one(tmp_path):
    """Weights, target networks, optimizers and the temperature, and so the next update."""
    saved = make_config(small(max_seq_len=8), alpha_lr=0.1).build_algo()
    restored = None
    try:
        for _ in range(12):
            saved.train()
        alpha = learner_of(saved).curr_log_alpha[DEFAULT_MODULE_ID].item()
        assert abs(alpha) > 0.05
        saved.save_to_path(tmp_path)
        restored = SAC.from_checkpoint(tmp_path)
        assert_states_equal(learner_of(restored), learner_of(saved))
        assert isinstance(restored.local_replay_buffer, SequenceReplayBuffer)

        episodes = saved.local_replay_buffer.sample(120)
        for algorithm in (saved, restored):
            torch.manual_seed(3)
            learner_of(algorithm).update(
                episodes=copy.deepcopy(episodes),
                timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: 10_000},
                training_data=None,
            )
        assert_states_equal(learner_of(restored), learner_of(saved))
        assert learner_of(saved).curr_log_alpha[DEFAULT_MODULE_ID].item() != alpha
        restored.train()
    finally:
        saved.stop()
        if restored is not None:
            restored.stop()


def note_init(**kwargs):
    """A callback of the user's."""


class MyBuffer(SequenceReplayBuffer):
    """A buffer of the user's."""


def test_connect_sets_the_buffer_and_keeps_callbacks():
    buffer = {"capacity": 5000, "burn_in_len": 3}
    config = make_config(small(max_seq_len=8), replay_buffer_config=buffer)
    config.callbacks(on_algorithm_init=note_init)
    connect(connect(config))
    (create, kept) = config.callbacks_on_algorithm_init
    assert kept is note_init
    algorithm = SimpleNamespace(config=config)
    create(algorithm=algorithm)
    assert type(algorithm.local_replay_buffer) is SequenceReplayBuffer
    assert algorithm.local_replay_buffer.capacity == 5000
    assert algorithm.local_replay_buffer.batch_length_T == 8
    assert algorithm.local_replay_buffer.burn_in_len == 3
    config.validate()


def test_connect_keeps_a_buffer_of_the_users():
    kind = f"{MyBuffer.__module__}.MyBuffer"
    config = make_config(small(max_seq_len=8), replay_buffer_config={"type": kind})
    connect(config)
    (create,) = config.callbacks_on_algorithm_init
    algorithm = SimpleNamespace(config=config)
    create(algorithm=algorithm)
    assert type(algorithm.local_replay_buffer) is MyBuffer


def test_a_module_without_the_outputs_is_told():
    learner = make_learner()
    batch = make_batch(module_of(learner))
    with pytest.raises(ValueError, match=r"also need \['q_curr', 'q_target_next'\]"):
        learner.compute_loss_for_module(
            module_id=DEFAULT_MODULE_ID,
            config=learner.config,
            batch=batch,
            fwd_out=dict.fromkeys(("qf_preds", "logp_resampled", "logp_next_resampled")),
        )


def test_n_step_is_refused():
    with pytest.raises(ValueError, match="`n_step` is 3"):
        make_config(small(), n_step=3)


def test_a_module_without_memory_trains_as_on_rllib():
    """The same weights after a few updates, prioritised replay included."""
    states = []
    for connected in (True, False):
        config = (
            SACConfig()
            .environment(RandomObservations, env_config={"action_space": ACTIONS})
            .env_runners(num_env_runners=0, num_envs_per_env_runner=2, rollout_fragment_length=4)
            .learners(num_learners=0)
            .training(
                train_batch_size_per_learner=16,
                num_steps_sampled_before_learning_starts=20,
                replay_buffer_config={"capacity": 1000},
            )
            .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
            .rl_module(model_config={"fcnet_hiddens": [8]})
            .debugging(seed=0, log_sys_usage=False)
        )
        algorithm = (connect(config) if connected else config).build_algo()
        algorithm.local_replay_buffer.rng = np.random.default_rng(0)
        try:
            for _ in range(6):
                algorithm.train()
            states.append(module_of(learner_of(algorithm)).state_dict())
        finally:
            algorithm.stop()
    for name, expected in states[1].items():
        torch.testing.assert_close(states[0][name], expected, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.slow
@SHARINGS
@pytest.mark.parametrize(("env", "goal"), [(RememberCue, -0.1), (RememberFirst, 0.9)])
def test_learns_to_remember(vf_share_layers, env, goal):
    """Actions of a `Box`, -1 without memory, and `Discrete` ones, 0 without memory.

    Needs about 20,000 steps, half a minute.
    """
    model_config = DeepLinearAttentionConfig(
        max_seq_len=9,
        fcnet_hiddens=[32],
        d_model=32,
        num_heads=2,
        head_dim=16,
        feedforward_dim=64,
        num_layers=1,
        head_fcnet_hiddens=[32],
        vf_share_layers=vf_share_layers,
        compile=False,
    )
    spec = RLModuleSpec(module_class=MemorySACRLModule, model_config=model_config)
    config = (
        SACConfig()
        .environment(env)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=8, rollout_fragment_length=8)
        .learners(num_learners=0)
        .training(
            actor_lr=3e-3,
            critic_lr=3e-3,
            alpha_lr=3e-3,
            initial_alpha=0.1,
            tau=0.05,
            replay_buffer_config={"capacity": 20_000},
        )
        .reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=1000)
        .rl_module(rl_module_spec=spec)
        .debugging(seed=0, log_sys_usage=False)
    )
    algorithm = connect(config).build_algo()
    best = -1.0
    try:
        while best < goal:
            results = algorithm.train()
            best = max(best, results["env_runners"]["episode_return_mean"])
            assert results["num_env_steps_sampled_lifetime"] < 60_000, best
        episodes = algorithm.env_runner.sample(num_episodes=100, explore=False)
        assert np.mean([episode.get_return() for episode in episodes]) > goal
    finally:
        algorithm.stop()
