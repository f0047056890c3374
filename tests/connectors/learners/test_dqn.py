"""DQN's loss against loops, and real runs: what is learned from is what was sampled."""

import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.dqn.dqn_learner import (
    ATOMS,
    QF_LOGITS,
    QF_LOSS_KEY,
    QF_MAX_KEY,
    QF_MEAN_KEY,
    QF_MIN_KEY,
    QF_PREDS,
    QF_PROBS,
    TD_ERROR_MEAN_KEY,
)
from ray.rllib.algorithms.dqn.torch.default_dqn_torch_rl_module import DefaultDQNTorchRLModule
from ray.rllib.connectors.learner import (
    AddNextObservationsFromEpisodesToTrainBatch,
    AddOneTsToEpisodesAndTruncate,
)
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import MemoryDQNTorchLearner, SequenceReplayBuffer, connect
from connectors.learners.dqn import (
    n_step_returns,
    project,
    trained_steps,
)
from rlmodules import DeepLinearAttentionConfig, MemoryQRLModule
from tests.connectors.helpers import BOX, DISCRETE
from tests.envs import RandomObservations, RememberFirst

B, T, A, N = 5, 7, 3, 6
GAMMA = 0.9
SMALL = {
    "fcnet_hiddens": [8],
    "d_model": 8,
    "num_heads": 2,
    "head_dim": 4,
    "feedforward_dim": 8,
    "compile": False,
}


# The loss.


def random_batch(*, rows_without_bootstrap=False):
    """Rows of 1 to 6 steps with their last observation, some of which end terminated."""
    generator = torch.Generator().manual_seed(3)
    lengths = torch.tensor([6, 6, 4, 1, 3])
    terminateds = torch.zeros(B, T, dtype=torch.bool)
    for row in (1, 2):
        terminateds[row, lengths[row] - 1] = True
    mask = torch.arange(T) < lengths[:, None]
    if rows_without_bootstrap:
        # A row whose last observation stands in the next row.
        mask[0] = True
    rewards = torch.randn(B, T, generator=generator, dtype=torch.float64)
    return {
        Columns.STATE_IN: {},
        Columns.REWARDS: rewards,
        Columns.ACTIONS: torch.randint(0, A, (B, T), generator=generator),
        Columns.TERMINATEDS: terminateds,
        Columns.LOSS_MASK: mask,
    }


def random_outputs(num_atoms):
    """What `forward_train` and `forward_target` return."""
    generator = torch.Generator().manual_seed(4)
    q, target = torch.randn(2, B, T, A, generator=generator, dtype=torch.float64)
    outputs, targets = {QF_PREDS: q.requires_grad_()}, {QF_PREDS: target}
    if num_atoms > 1:
        logits, target = torch.randn(2, B, T, A, N, generator=generator, dtype=torch.float64)
        outputs[QF_LOGITS] = logits.requires_grad_()
        outputs[ATOMS] = torch.linspace(-2.0, 2.0, N, dtype=torch.float64)
        targets[QF_PROBS] = target.softmax(-1)
    return outputs, targets


def reference(batch, outputs, targets, *, n_step, double_q, loss_fn, num_atoms):
    """Losses, TD errors and values of the trained steps, one at a time in plain Python."""
    mask = batch[Columns.LOSS_MASK].tolist()
    rewards = batch[Columns.REWARDS].tolist()
    ends = batch[Columns.TERMINATEDS].tolist()
    actions = batch[Columns.ACTIONS].tolist()
    q = outputs[QF_PREDS].tolist()
    target = targets[QF_PREDS].tolist()
    losses, errors, values = [], [], []
    for b in range(B):
        for t in range(T - 1):
            if not mask[b][t]:
                continue
            total, discount, ahead = 0.0, 1.0, t
            while True:
                total += discount * rewards[b][ahead]
                discount *= 0.0 if ends[b][ahead] else GAMMA
                ahead += 1
                if ahead - t == n_step or ends[b][ahead - 1]:
                    break
                if ahead == T - 1 or not mask[b][ahead]:
                    break
            best = int(np.argmax((q if double_q else target)[b][ahead]))
            value = q[b][t][actions[b][t]]
            if num_atoms == 1:
                error = value - (total + discount * target[b][ahead][best])
                errors.append(abs(error))
                quadratic = loss_fn == "mse" or abs(error) <= 1
                factor = 1.0 if loss_fn == "mse" else 0.5
                losses.append(factor * error**2 if quadratic else abs(error) - 0.5)
            else:
                probs = targets[QF_PROBS][b, ahead, best].tolist()
                moved = reference_projection(total, discount, probs, outputs[ATOMS].tolist())
                logp = outputs[QF_LOGITS][b, t, actions[b][t]].log_softmax(-1).tolist()
                losses.append(-sum(p * q for p, q in zip(moved, logp, strict=True)))
                errors.append(losses[-1])
            values.append(value)
    return losses, errors, values


def reference_projection(total, discount, probs, atoms):
    """Algorithm 1 of Bellemare et al. 2017."""
    width = atoms[1] - atoms[0]
    moved = [0.0] * len(atoms)
    for p, atom in zip(probs, atoms, strict=True):
        place = (min(max(total + discount * atom, atoms[0]), atoms[-1]) - atoms[0]) / width
        lower, upper = int(np.floor(place)), int(np.ceil(place))
        if lower == upper:
            moved[lower] += p
        else:
            moved[lower] += p * (upper - place)
            moved[upper] += p * (place - lower)
    return moved


@pytest.fixture(scope="module")
def learner():
    config = connect(dqn_config())
    spec = config.get_rl_module_spec(
        spaces={"default_policy": (BOX, DISCRETE), "__env_single__": (BOX, DISCRETE)}
    )
    built = config.learner_class(config=config, module_spec=spec)
    built.build()
    return built


def loss_of(learner, batch, outputs, targets, **settings):
    learner.module["default_policy"].forward_target = lambda _: targets
    config = learner.config.copy(copy_frozen=False).training(gamma=GAMMA, **settings)
    return learner.compute_loss_for_module(
        module_id="default_policy", config=config, batch=batch, fwd_out=outputs
    )


@pytest.mark.ray
@pytest.mark.parametrize("num_atoms", [1, N])
@pytest.mark.parametrize("double_q", [True, False])
@pytest.mark.parametrize("n_step", [1, 2, 3, 6])
@pytest.mark.parametrize("loss_fn", ["huber", "mse"])
def test_loss_equals_a_loop(learner, loss_fn, n_step, double_q, num_atoms):
    for rows_without_bootstrap in (False, True):
        batch = random_batch(rows_without_bootstrap=rows_without_bootstrap)
        outputs, targets = random_outputs(num_atoms)
        loss = loss_of(
            learner,
            batch,
            outputs,
            targets,
            n_step=n_step,
            double_q=double_q,
            td_error_loss_fn=loss_fn,
            num_atoms=num_atoms,
        )
        losses, errors, values = reference(
            batch,
            outputs,
            targets,
            n_step=n_step,
            double_q=double_q,
            loss_fn=loss_fn,
            num_atoms=num_atoms,
        )
        assert len(losses) == 20
        assert loss.item() == pytest.approx(np.mean(losses), rel=1e-12)
        for key, expected in (
            (QF_LOSS_KEY, np.mean(losses)),
            (TD_ERROR_MEAN_KEY, np.mean(errors)),
            (QF_MEAN_KEY, np.mean(values)),
            (QF_MAX_KEY, np.max(values)),
            (QF_MIN_KEY, np.min(values)),
        ):
            logged = learner.metrics.peek(("default_policy", key))
            assert float(logged) == pytest.approx(expected, rel=1e-6), key


@pytest.mark.ray
@pytest.mark.parametrize("num_atoms", [1, N])
def test_nothing_but_trained_steps_counts(learner, num_atoms):
    """Neither the values of other slots nor their gradients, nor the targets' gradients."""
    settings = {"n_step": 3, "num_atoms": num_atoms}
    batch, (outputs, targets) = random_batch(), random_outputs(num_atoms)
    key = QF_PREDS if num_atoms == 1 else QF_LOGITS
    loss = loss_of(learner, batch, outputs, targets, **settings)
    loss.backward()
    gradient = outputs[key].grad
    mask = batch[Columns.LOSS_MASK]
    assert (gradient[mask].abs().flatten(1).sum(1) > 0).all()
    assert not gradient[~mask].any()
    garbage = {**batch}
    for column in (Columns.REWARDS, Columns.TERMINATEDS, Columns.ACTIONS):
        other = torch.full_like(batch[column], 1 if column != Columns.REWARDS else torch.nan)
        garbage[column] = batch[column].where(mask, other)
    assert torch.equal(loss_of(learner, garbage, outputs, targets, **settings), loss)


def test_trained_steps_have_their_next_observation_in_the_row():
    mask = torch.tensor([[True, True, True], [True, False, False]])
    assert trained_steps(mask).tolist() == [[True, True, False], [True, False, False]]
    assert mask.all(1).tolist() == [True, False]


def test_n_step_returns():
    rewards = torch.tensor([[1.0, 2.0, 4.0, 8.0, 0.0], [1.0, 2.0, 0.0, 0.0, 0.0]])
    mask = torch.tensor([[True] * 4 + [False], [True] * 2 + [False] * 3])
    ends = torch.zeros(2, 5, dtype=torch.bool)
    ends[1, 1] = True
    returns, discounts, slots = n_step_returns(rewards, ends, mask, 0.5, 3)
    assert returns[0, :4].tolist() == [1 + 1 + 1, 2 + 2 + 2, 4 + 4, 8]
    assert discounts[0, :4].tolist() == [0.125, 0.125, 0.25, 0.5]
    assert slots[0, :4].tolist() == [3, 4, 4, 4]
    assert returns[1, :2].tolist() == [2.0, 2.0]
    assert discounts[1, :2].tolist() == [0.0, 0.0]


def test_projection():
    generator = torch.Generator().manual_seed(0)
    atoms = torch.linspace(-1.0, 1.0, 5, dtype=torch.float64)
    probs = torch.rand(2, 3, 5, generator=generator, dtype=torch.float64).softmax(-1)
    returns = torch.tensor([[0.0, 0.5, -0.1], [3.0, -3.0, 0.33]], dtype=torch.float64)
    discounts = torch.tensor([[1.0, 0.0, 0.9], [0.9, 0.9, 0.5]], dtype=torch.float64)
    moved = project(returns, discounts, probs, atoms)
    torch.testing.assert_close(moved.sum(-1), torch.ones_like(returns))
    torch.testing.assert_close(moved[0, 0], probs[0, 0])
    for index in np.ndindex(2, 3):
        numbers = returns[index].item(), discounts[index].item(), probs[index].tolist()
        expected = reference_projection(*numbers, atoms.tolist())
        torch.testing.assert_close(moved[index], torch.tensor(expected, dtype=torch.float64))


@pytest.mark.ray
def test_a_module_without_action_values_is_told(learner):
    outputs, targets = random_outputs(1)
    del outputs[QF_PREDS]
    with pytest.raises(ValueError, match="`forward_train` of module `default_policy` returned"):
        loss_of(learner, random_batch(), outputs, targets)


# Real runs.


class RecordingQRLModule(MemoryQRLModule):
    """Has the episodes record the action values."""

    def _forward_exploration(self, batch, **kwargs):
        values = self.compute_q_values(batch)[QF_PREDS]
        return {**super()._forward_exploration(batch, **kwargs), "recorded": values}


class RecordingLearner(MemoryDQNTorchLearner):
    """Keeps each train batch and how far its action values are from those of the rollout."""

    def build(self):
        super().build()
        self.batches, self.errors, self.target_errors, self.errors_without_state = [], [], [], []

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        mask = batch[Columns.LOSS_MASK]

        def error(values):
            return (values.detach() - batch["recorded"])[mask].abs().max().item()

        self.batches.append(dict(batch))
        self.errors.append(error(fwd_out[QF_PREDS]))
        targets = self.module[module_id].forward_target(batch)
        self.target_errors.append(error(targets[QF_PREDS]))
        zeros = tree.map_structure(torch.zeros_like, batch[Columns.STATE_IN])
        with torch.no_grad():
            outputs = self.module[module_id].compute_q_values({**batch, Columns.STATE_IN: zeros})
        self.errors_without_state.append(error(outputs[QF_PREDS]))
        return super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )


def dqn_config(env=RandomObservations, *, module_class=MemoryQRLModule, max_seq_len=8, **training):
    settings = {
        "num_steps_sampled_before_learning_starts": 40,
        "train_batch_size": 96,
        "target_network_update_freq": 30,
        **training,
    }
    return (
        DQNConfig()
        .environment(env)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=3, rollout_fragment_length=5)
        .learners(num_learners=0)
        .training(**settings)
        .reporting(min_sample_timesteps_per_iteration=90)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=module_class,
                model_config=DeepLinearAttentionConfig(max_seq_len=max_seq_len, **SMALL),
            )
        )
        .debugging(seed=0, log_sys_usage=False)
    )


@pytest.mark.ray
@pytest.mark.parametrize(
    ("fragment", "training"),
    [
        pytest.param("auto", {}, id="one step a fragment"),
        pytest.param(19, {"n_step": 3}, id="fragments end inside rows"),
        pytest.param(8, {"burn_in_len": 5, "num_atoms": 5}, id="burn-in"),
        pytest.param(40, {"max_seq_len": 64, "dueling": False}, id="rows longer than episodes"),
    ],
)
@pytest.mark.parametrize("truncate", [False, True])
def test_learners_see_what_env_runners_saw(fragment, training, truncate):
    """Without an update, action values of any replayed slice are those of the rollout."""
    config = dqn_config(module_class=RecordingQRLModule, lr=0.0, **training)
    config.environment(env_config={"truncate": truncate})
    config.env_runners(rollout_fragment_length=fragment)
    config.learners(learner_class=RecordingLearner)
    algorithm = connect(config).build_algo()
    try:
        algorithm.train()
        results = algorithm.train()
        learner = algorithm.learner_group._learner
    finally:
        algorithm.stop()
    assert len(learner.errors) >= 2
    assert max(learner.errors) <= 1e-5
    assert max(learner.target_errors) <= 1e-5
    assert all((batch[Columns.LOSS_MASK].sum() >= 96) for batch in learner.batches)
    assert not any(Columns.NEXT_OBS in batch for batch in learner.batches)
    T = training.get("max_seq_len", 8)
    assert all(batch[Columns.LOSS_MASK].shape[1] == T for batch in learner.batches)
    metrics = results["learners"]["default_policy"]
    assert metrics["memory"]["num_stale_rows"] == 0
    if T == 8:
        # The test sees a wrong state.
        assert min(learner.errors_without_state) > 1e-4
        assert metrics["memory"]["num_rebuilt_rows"] > 0
    key = Columns.TRUNCATEDS if truncate else Columns.TERMINATEDS
    assert any(batch[key].any() for batch in learner.batches)
    if truncate:
        assert not any(batch[Columns.TERMINATEDS].any() for batch in learner.batches)
    assert metrics["num_target_updates"] >= 1


@pytest.mark.ray
@pytest.mark.slow
def test_learns_what_only_a_memory_can():
    """Each of four cues is right once in four times without memory: a mean return of -0.5."""
    config = dqn_config(
        RememberFirst,
        max_seq_len=16,
        lr=1e-3,
        num_steps_sampled_before_learning_starts=500,
        train_batch_size=256,
        target_network_update_freq=200,
        epsilon=[(0, 1.0), (4000, 0.05)],
    )
    config.environment(env_config={"num_cues": 4})
    config.env_runners(num_envs_per_env_runner=8, rollout_fragment_length=4)
    config.reporting(min_sample_timesteps_per_iteration=1000)
    config.evaluation(evaluation_interval=1, evaluation_duration=50)
    size = {"fcnet_hiddens": [32], "d_model": 32, "head_dim": 16, "feedforward_dim": 64}
    config.rl_module(
        rl_module_spec=RLModuleSpec(
            module_class=MemoryQRLModule,
            model_config=DeepLinearAttentionConfig(max_seq_len=16, **{**SMALL, **size}),
        )
    )
    algorithm = connect(config).build_algo()
    try:
        for _ in range(20):
            results = algorithm.train()
            if results["evaluation"]["env_runners"]["episode_return_mean"] == 1.0:
                return
    finally:
        algorithm.stop()
    pytest.fail("not learned within 20,000 steps")


@pytest.mark.slow
@pytest.mark.ray
def test_remote_runner_and_learner():
    config = dqn_config(RememberFirst, burn_in_len=2)
    config.env_runners(num_env_runners=1, num_envs_per_env_runner=2)
    config.learners(num_learners=1)
    algorithm = connect(config).build_algo()
    try:
        results = algorithm.train()
    finally:
        algorithm.stop()
    metrics = results["learners"]["default_policy"]
    assert metrics["memory"]["num_stale_rows"] == 0
    assert metrics["memory"]["num_rebuilt_rows"] > 0
    assert np.isfinite(metrics["qf_loss"])


@pytest.mark.ray
def test_evaluation_and_checkpoint(tmp_path):
    config = dqn_config(RememberFirst)
    config.evaluation(evaluation_interval=1, evaluation_duration=4)
    algorithm = connect(config).build_algo()
    try:
        results = algorithm.train()
        assert results["evaluation"]["env_runners"]["num_episodes"] >= 4
        stored = algorithm.local_replay_buffer.get_state()
        path = algorithm.save_to_path(str(tmp_path))
        weights = algorithm.learner_group.get_state()["learner"]["rl_module"]
    finally:
        algorithm.stop()
    restored = type(algorithm).from_checkpoint(path)
    try:
        again = restored.learner_group.get_state()["learner"]["rl_module"]
        tree.map_structure(np.testing.assert_array_equal, again, weights)
        assert any(key.startswith("target_core") for key in again["default_policy"])
        # RLlib's checkpoints hold no buffer; its `get_state` lets one keep it.
        buffer = restored.local_replay_buffer
        assert type(buffer) is SequenceReplayBuffer
        assert len(buffer) == 0
        buffer.set_state(stored)
        assert len(buffer) >= 90
        size = len(buffer)
        restored.train()
        assert len(buffer) > size
    finally:
        restored.stop()


@pytest.mark.ray
def test_modules_without_memory_are_left_to_rllib():
    config = dqn_config().rl_module(
        rl_module_spec=RLModuleSpec(
            module_class=DefaultDQNTorchRLModule,
            model_config=DefaultModelConfig(fcnet_hiddens=[8], head_fcnet_hiddens=[8]),
        )
    )
    config.env_runners(num_envs_per_env_runner=1)
    algorithm = connect(config).build_algo()
    try:
        results = algorithm.train()["learners"]["default_policy"]
        pipeline = algorithm.learner_group._learner._learner_connector
    finally:
        algorithm.stop()
    assert config.replay_buffer_config["type"] == "PrioritizedEpisodeReplayBuffer"
    assert pipeline[AddNextObservationsFromEpisodesToTrainBatch]
    assert not pipeline[AddOneTsToEpisodesAndTruncate]
    assert np.isfinite(results["qf_loss"])


@pytest.mark.parametrize(
    ("training", "message"),
    [
        ({"n_step": 8}, "`n_step` is 8, but must be an integer from 1 to 7"),
        ({"n_step": 0}, "`n_step` is 0"),
        ({"n_step": (1, 3)}, r"`n_step` is \(1, 3\)"),
        ({"noisy": True}, "`noisy` is True"),
        ({"burn_in_len": -1}, "`burn_in_len` is -1"),
        ({"replay_buffer_config": {"alpha": 0.7}}, "SequenceReplayBuffer"),
    ],
)
def test_connect_checks_settings(training, message):
    with pytest.raises(ValueError, match=message):
        connect(dqn_config(**training))


def test_connect_refuses_rllibs_lstm():
    config = dqn_config().rl_module(
        rl_module_spec=RLModuleSpec(
            module_class=DefaultDQNTorchRLModule,
            model_config=DefaultModelConfig(use_lstm=True, max_seq_len=8),
        )
    )
    with pytest.raises(ValueError, match="`DefaultDQNTorchRLModule` with `use_lstm`"):
        connect(config)


def test_connect_sets_learner_and_buffer():
    config = connect(dqn_config())
    assert config.learner_class is MemoryDQNTorchLearner
    assert connect(config).learner_class is MemoryDQNTorchLearner
    assert config.replay_buffer_config == {
        "type": "EpisodeReplayBuffer",
        "sequence_buffer": "connectors.replay.buffer.SequenceReplayBuffer",
        "capacity": 50_000,
    }
