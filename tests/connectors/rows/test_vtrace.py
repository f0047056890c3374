"""V-trace over our rows, against the paper's formula; what RLlib's own rows make of it."""

import copy
import dataclasses
import logging
import math

import numpy as np
import pytest
import torch
import tree
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.minibatch_utils import MiniBatchCyclicIterator

from connectors import BuildTrainBatch, connect
from connectors.rows.vtrace import NEUTRAL_LOGP, VTraceLayout
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.connectors.helpers import BOX, DISCRETE, make_episodes, with_snapshots

T = 4
CHUNKS = [
    (3, 0, "terminated"),
    (9, 0, "truncated"),
    (4, 0, "terminated"),
    (8, 0, "cut"),
    (1, 0, "truncated"),
    (1, 3, "terminated"),
    (6, 5, "cut"),
    (4, 8, "truncated"),
    (12, 4, "truncated"),
    (7, 4, "cut"),
]
GAMMA, CLIP_RHO, CLIP_PG, CLIP_PPO = 0.9, 1.3, 1.7, 0.2
VF_COEFF, ENTROPY_COEFF = 0.7, 0.05


# The layout.


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=8),
    st.integers(1, 20),
    st.sampled_from([(), (2,)]),
)
def test_layout_equals_a_plain_loop(real_lengths, max_seq_len, shape):
    lengths = [length + 1 for length in real_lengths]
    steps = np.arange(1, sum(lengths) * math.prod(shape) + 1).reshape(-1, *shape)
    parts = np.split(steps, np.cumsum(lengths)[:-1])
    rows, real, seq_lens, starts = [], [], [], []
    for part in parts:
        own_starts = list(range(0, max(1, len(part) - 1), max_seq_len))
        starts.append(own_starts)
        for start in own_starts:
            content = part[start : start + max_seq_len + 1]
            row = np.zeros((max_seq_len + 1, *shape), steps.dtype)
            row[: len(content)] = content
            rows.append(row)
            seq_lens.append(len(content))
            real.append([slot < len(content) - 1 for slot in range(max_seq_len + 1)])
    layout = VTraceLayout(lengths, max_seq_len)
    assert np.array_equal(layout.pad(steps), np.stack(rows))
    assert np.array_equal(layout.pad_parts(parts), np.stack(rows))
    assert np.array_equal(layout.unpad(np.stack(rows)), steps)
    assert layout.seq_lens.tolist() == seq_lens
    assert layout.real.tolist() == real
    assert [list(layout.starts(episode)) for episode in range(len(parts))] == starts
    assert layout.real.sum() == sum(real_lengths)


# The reference.


@dataclasses.dataclass
class Row:
    """Sums over the steps of one row, in float64."""

    policy: float = 0.0
    value: float = 0.0
    entropy: float = 0.0
    steps: int = 0

    def __add__(self, other):
        pairs = zip(dataclasses.astuple(self), dataclasses.astuple(other), strict=True)
        return Row(*(a + b for a, b in pairs))

    @property
    def loss(self):
        total = self.policy + VF_COEFF * self.value + ENTROPY_COEFF * self.entropy
        return total / self.steps


def vtrace(values, rewards, discounts, ratios):
    """Targets and advantages: equation 1 and section 4.2 of the paper, term by term.

    Espeholt et al. 2018, https://arxiv.org/abs/1802.01561.
    """
    targets = []
    for s in range(len(rewards)):
        target = values[s]
        for t in range(s, len(rewards)):
            trace = math.prod(discounts[i] * min(1.0, ratios[i]) for i in range(s, t))
            error = rewards[t] + discounts[t] * values[t + 1] - values[t]
            target += trace * min(CLIP_RHO, ratios[t]) * error
        targets.append(target)
    targets.append(values[-1])
    advantages = [
        min(CLIP_PG, ratios[s]) * (rewards[s] + discounts[s] * targets[s + 1] - values[s])
        for s in range(len(rewards))
    ]
    return targets[:-1], advantages


def log_probabilities(logits):
    return torch.log_softmax(logits.double(), dim=-1)


def reference_rows(module, episodes, max_seq_len, algorithm):
    """Every row of every chunk, one step of the module at a time.

    Args:
        module: The module.
        episodes: Chunks that hold the state of each step, without appended bootstrap steps.
        max_seq_len: Steps of a row.
        algorithm: "APPO" or "IMPALA".
    """
    return [
        _reference_row(module, episode, start, min(start + max_seq_len, len(episode)), algorithm)
        for episode in episodes
        for start in range(0, len(episode), max_seq_len)
    ]


def _reference_row(module, episode, start, end, algorithm):
    state = target_state = _state_before(module, episode, start)
    values, log_probs, old_log_probs = [], [], []
    # One observation more than there are steps: the one that bootstraps.
    for t in range(start, end + 1):
        obs = torch.as_tensor(episode.get_observations(t))[None, None]
        inputs = {Columns.OBS: obs, Columns.STATE_IN: state}
        values.append(module.compute_values(inputs).item())
        with torch.no_grad():
            outputs = module.forward_inference(inputs)
            state = outputs[Columns.STATE_OUT]
            log_probs.append(log_probabilities(outputs[Columns.ACTION_DIST_INPUTS][0, 0]))
            if algorithm == "APPO":
                features, target_state = module.target_core(obs, target_state, None, None)
                logits = module.target_policy_head(features)
                old_log_probs.append(log_probabilities(logits[0, 0]))

    steps = range(start, end)
    actions = [int(episode.get_actions(t)) for t in steps]
    rewards = [float(episode.get_rewards(t)) for t in steps]
    behaviour = [float(episode.get_extra_model_outputs("action_logp", t)) for t in steps]
    is_last = [t == len(episode) - 1 for t in steps]
    discounts = [0.0 if last and episode.is_terminated else GAMMA for last in is_last]
    logp = [log_probs[i][action].item() for i, action in enumerate(actions)]
    old_logp = logp
    if algorithm == "APPO":
        old_logp = [old_log_probs[i][action].item() for i, action in enumerate(actions)]
    ratios = [math.exp(old - behaved) for old, behaved in zip(old_logp, behaviour, strict=True)]
    targets, advantages = vtrace(values, rewards, discounts, ratios)

    row = Row()
    for i, advantage in enumerate(advantages):
        if algorithm == "APPO":
            clipped = min(max(math.exp(behaviour[i] - old_logp[i]), 0.0), 2.0)
            ratio = clipped * math.exp(logp[i] - behaviour[i])
            bounded = min(max(ratio, 1 - CLIP_PPO), 1 + CLIP_PPO)
            policy = -min(advantage * ratio, advantage * bounded)
        else:
            policy = -advantage * logp[i]
        value = 0.5 * (values[i] - targets[i]) ** 2
        entropy = (log_probs[i].exp() * log_probs[i]).sum().item()
        row += Row(policy, value, entropy, 1)
    return row


def _state_before(module, episode, t):
    if episode.t_started + t == 0:
        state = module.get_initial_state()
    else:
        state = episode.get_extra_model_outputs(
            Columns.STATE_OUT, t - 1, neg_index_as_lookback=True
        )
    return tree.map_structure(lambda leaf: torch.as_tensor(leaf)[None], state)


# RLlib's loss.


def make_config(algorithm, max_seq_len):
    spec = RLModuleSpec(
        module_class=DeepLinearAttentionRLModule,
        model_config=DeepLinearAttentionConfig(
            max_seq_len=max_seq_len,
            fcnet_hiddens=[8],
            d_model=8,
            num_heads=2,
            head_dim=4,
            feedforward_dim=8,
            compile=False,
        ),
    )
    config = APPOConfig() if algorithm == "APPO" else IMPALAConfig()
    config.environment("CartPole-v1").rl_module(rl_module_spec=spec).learners(num_learners=0)
    config.training(
        gamma=GAMMA,
        vtrace_clip_rho_threshold=CLIP_RHO,
        vtrace_clip_pg_rho_threshold=CLIP_PG,
        vf_loss_coeff=VF_COEFF,
        entropy_coeff=ENTROPY_COEFF,
    )
    if algorithm == "APPO":
        config.training(clip_param=CLIP_PPO)
    return config


@pytest.fixture
def make_learner():
    """Builds Learners and stops their threads; target networks differ from the main ones."""
    learners = []

    def build(config):
        spaces = {"default_policy": (BOX, DISCRETE), "__env_single__": (BOX, DISCRETE)}
        learner_class = config.learner_class
        learner = learner_class(config=config, module_spec=config.get_rl_module_spec(spaces=spaces))
        learner.build()
        learners.append(learner)
        torch.manual_seed(1)
        for name, parameter in learner.module["default_policy"].named_parameters():
            # Large enough that values and policies matter, and targets differ.
            parameter.data += 0.3 * torch.randn_like(parameter)
            assert parameter.requires_grad != name.startswith("target_")
        return learner

    yield build
    for learner in learners:
        learner.shutdown()


def train_batch(learner, episodes):
    batch = learner._learner_connector(
        rl_module=learner.module,
        batch={},
        episodes=copy.deepcopy(episodes),
        shared_data={},
    )["default_policy"]
    # Says which row is which after shuffling; the loss does not look at it.
    batch["row"] = torch.arange(len(batch[Columns.SEQ_LENS]))
    return batch


def loss_of(learner, batch):
    return learner.compute_loss_for_module(
        module_id="default_policy",
        config=learner.config,
        batch=batch,
        fwd_out=learner.module["default_policy"].forward_train(batch),
    )


def take(batch, rows):
    return tree.map_structure(lambda leaf: leaf[torch.as_tensor(rows)], dict(batch))


ALGORITHMS = pytest.mark.parametrize("algorithm", ["IMPALA", "APPO"])


@pytest.mark.ray
@ALGORITHMS
@pytest.mark.parametrize("max_seq_len", [1, T, 64])
def test_loss_equals_the_reference(algorithm, max_seq_len, make_learner):
    learner = make_learner(connect(make_config(algorithm, max_seq_len), pack_rows=False))
    module = learner.module["default_policy"]
    episodes = make_episodes(module, CHUNKS)
    batch = train_batch(learner, with_snapshots(module, episodes, max_seq_len))
    rows = reference_rows(module, episodes, max_seq_len, algorithm)
    assert batch[Columns.LOSS_MASK].sum() == sum(length for length, _, _ in CHUNKS)
    assert len(rows) == len(batch[Columns.SEQ_LENS])

    loss = loss_of(learner, batch)
    assert loss.item() == pytest.approx(sum(rows, Row()).loss, rel=1e-5)
    # Each row by itself, so that no error hides in the mean.
    for index, row in enumerate(rows):
        single = loss_of(learner, take(batch, [index]))
        assert single.item() == pytest.approx(row.loss, rel=1e-4, abs=1e-5)
    loss.backward()
    gradients = [p.grad for p in module.parameters() if p.requires_grad]
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.ray
@ALGORITHMS
def test_rows_may_be_shuffled_and_cut_into_minibatches(algorithm, make_learner):
    learner = make_learner(connect(make_config(algorithm, T), pack_rows=False))
    module = learner.module["default_policy"]
    episodes = make_episodes(module, CHUNKS)
    batch = train_batch(learner, with_snapshots(module, episodes, T))
    rows = reference_rows(module, episodes, T, algorithm)
    sample_batch = SampleBatch(batch, _zero_padded=True)
    sample_batch.enable_slicing_by_batch_id()
    sample_batch.shuffle()
    orders = []
    for minibatch in MiniBatchCyclicIterator(
        MultiAgentBatch({"default_policy": sample_batch}, env_steps=60),
        minibatch_size=20,
        num_epochs=2,
        shuffle_batch_per_epoch=True,
    ):
        columns = dict(minibatch["default_policy"])
        orders.append(columns["row"].tolist())
        expected = sum((rows[row] for row in orders[-1]), Row()).loss
        assert loss_of(learner, columns).item() == pytest.approx(expected, rel=1e-5)
    flat = [row for order in orders for row in order]
    assert set(flat) == set(range(len(rows)))
    assert flat[: len(rows)] != sorted(flat[: len(rows)])
    assert len(orders) > 4


@pytest.mark.ray
@ALGORITHMS
def test_rllib_loses_bootstrap_values(algorithm, make_learner):
    """What the rows are for. Should this fail, RLlib has changed and needs them no more."""
    learner = make_learner(make_config(algorithm, T))
    module = learner.module["default_policy"]

    def relative_error(chunks, order=None):
        episodes = make_episodes(module, chunks)
        batch = train_batch(learner, episodes)
        if order is not None:
            batch = take(batch, order)
        expected = sum(reference_rows(module, episodes, T, algorithm), Row()).loss
        return abs(loss_of(learner, batch).item() / expected - 1)

    # Right: terminated; or the bootstrap step opens a row, and the rows keep their order.
    assert relative_error([(6, 0, "terminated")]) < 1e-5
    assert relative_error([(8, 0, "truncated"), (4, 0, "cut")]) < 1e-5
    # Wrong: the bootstrap step shares the row; the rows were shuffled.
    assert relative_error([(6, 0, "truncated")] * 3) > 1e-2
    assert relative_error([(8, 0, "truncated"), (4, 0, "cut")], order=[3, 0, 2, 4, 1]) > 1e-3


# The Learner's thread.


def update(learner, episodes, **settings):
    training_data = TrainingData(episodes=copy.deepcopy(episodes))
    return learner.update(training_data, timesteps={}, **settings)


@pytest.mark.ray
def test_an_epoch_over_all_rows_is_one_update(make_learner):
    """RLlib's count of a whole batch falls short of our rows, which hold some steps twice."""
    config = connect(make_config("IMPALA", T).training(num_epochs=3), pack_rows=False)
    learner = make_learner(config)
    module = learner.module["default_policy"]
    num_rows = []
    forward_train = module.forward_train

    def spy(batch):
        num_rows.append(len(batch[Columns.SEQ_LENS]))
        return forward_train(batch)

    module.forward_train = spy
    update(learner, make_episodes(module, CHUNKS), num_epochs=3)
    assert len(num_rows) == 3
    assert len(set(num_rows)) == 1
    assert num_rows[0] == sum(-(-length // T) for length, _, _ in CHUNKS)


@pytest.mark.ray
@ALGORITHMS
def test_nonfinite_gradients_leave_the_weights_alone(algorithm, make_learner, caplog):
    config = make_config(algorithm, T)
    if algorithm == "APPO":
        config.training(circular_buffer_iterations_per_batch=1)
    learner = make_learner(connect(config))
    module = learner.module["default_policy"]
    episodes = make_episodes(module, CHUNKS)

    def weights():
        return {name: p.clone() for name, p in module.named_parameters() if p.requires_grad}

    update(learner, episodes)
    before = weights()
    parameter = next(module.value_head.parameters())
    handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
    with caplog.at_level(logging.WARNING, logger="rllib_memory"):
        result = update(learner, episodes)
    handle.remove()
    assert result["__all_modules__"]["memory"]["num_nonfinite_gradients"] == 1
    assert "Skipped an update" in caplog.text
    assert all(torch.equal(before[name], weight) for name, weight in weights().items())
    result = update(learner, episodes)
    assert result["__all_modules__"]["memory"]["num_nonfinite_gradients"] == 0
    assert any(not torch.equal(before[name], weight) for name, weight in weights().items())


# The rows.


class MaskFrom(ConnectorV2):
    def __init__(self, first):
        super().__init__()
        self.first = first

    def __call__(self, *, batch, **kwargs):
        for mask in batch[Columns.LOSS_MASK].values():
            mask[self.first :] = [False] * len(mask[self.first :])
        return batch


@pytest.mark.ray
def test_slots_that_are_no_real_steps_count_nothing(make_learner):
    learner = make_learner(connect(make_config("APPO", T), pack_rows=False))
    module = learner.module["default_policy"]
    episodes = make_episodes(module, CHUNKS)
    batch = train_batch(learner, with_snapshots(module, episodes, T))
    mask = batch[Columns.LOSS_MASK]
    assert mask.shape[1] == T + 1
    assert not mask[:, -1].any()
    assert (batch[Columns.ACTION_LOGP][~mask] == NEUTRAL_LOGP).all()
    for column in (Columns.REWARDS, Columns.TERMINATEDS, Columns.TRUNCATEDS):
        assert not batch[column][~mask].any()
    assert batch[Columns.TERMINATEDS].sum() == 3
    # The memory reads the bootstrap slot and nothing behind it.
    assert torch.equal(batch[Columns.SEQ_LENS], mask.sum(1) + 1)

    # Whatever stands there, and however sure the policy is of it, only its value matters.
    loss = loss_of(learner, batch)
    for column, garbage in ((Columns.ACTIONS, 1), (Columns.REWARDS, 0), ("row", 7)):
        batch[column][~mask if batch[column].ndim > 1 else slice(None)] = garbage
    assert torch.equal(loss_of(learner, batch), loss)


@pytest.mark.ray
def test_masked_steps_bootstrap_those_before_them(make_learner):
    """A connector that masks steps out leaves V-trace exact on the others."""
    learner = make_learner(connect(make_config("IMPALA", T)))
    module = learner.module["default_policy"]
    full = make_episodes(module, [(4, 0, "cut")])
    masked = copy.deepcopy(with_snapshots(module, full, T))
    learner._learner_connector.insert_before(BuildTrainBatch, MaskFrom(2))
    batch = train_batch(learner, masked)
    assert batch[Columns.LOSS_MASK].tolist() == [[True, True, False, False, False]]
    row = _reference_row(module, full[0], 0, 2, "IMPALA")
    assert loss_of(learner, batch).item() == pytest.approx(row.loss, rel=1e-5)


@pytest.mark.ray
def test_log_probabilities_are_needed(make_learner):
    learner = make_learner(connect(make_config("IMPALA", T)))
    module = learner.module["default_policy"]
    episodes = make_episodes(module, [(5, 0, "cut")])
    del episodes[0].extra_model_outputs[Columns.ACTION_LOGP]
    with pytest.raises(ValueError, match="`action_logp` was not recorded in the rollout"):
        train_batch(learner, with_snapshots(module, episodes, T))
