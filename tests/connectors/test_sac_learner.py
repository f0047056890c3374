"""SAC's Learner: losses against a reference, padding, optimizers, target networks."""

import math

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import MemorySACTorchLearner
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionSACRLModule

pytestmark = pytest.mark.ray

OBSERVATIONS = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)
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


def make_learner(training=None, **settings):
    torch.manual_seed(0)
    spec = RLModuleSpec(module_class=DeepLinearAttentionSACRLModule, model_config=small(**settings))
    config = (
        SACConfig()
        .environment(observation_space=OBSERVATIONS, action_space=ACTIONS)
        .rl_module(rl_module_spec=spec)
        .learners(learner_class=MemorySACTorchLearner)
        .training(gamma=GAMMA, initial_alpha=0.3, **(training or {}))
    )
    spaces = (OBSERVATIONS, ACTIONS)
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
    ends = torch.arange(T) == seq_lens[:, None] - 2
    terminateds = ends & torch.tensor([False, True, False, False])[:, None]
    return {
        Columns.OBS: random(B, T, 3),
        Columns.ACTIONS: 1.8 * random(B, T, 2) - 0.9,
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
            x, critic_state = module.qf_encoder(obs[None, None], critic_state, None)
            features.append(x[0, 0])
            if separate:
                x, actor_state = module.pi_encoder(obs[None, None], actor_state, None)
            dist_inputs.append(module.pi(x[0, 0]))
            x, target_state = module.target_qf_encoder(obs[None, None], target_state, None)
            target_features.append(x[0, 0])

        for t in range(length - 1):
            if not batch[Columns.LOSS_MASK][row, t]:
                continue
            action, logp = squashed_sample(dist_inputs[t + 1], NEXT_NOISE)
            targets = [q(target_features[t + 1], action) for q in module._target_qfs()]
            value = min(x.item() for x in targets) - alpha * logp
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
            action, logp = squashed_sample(dist_inputs[t], NOISE)
            policy += alpha * logp - min(q(features[t], action).item() for q in module._qfs())
            entropy += logp
            count += 1
    return {
        "qf_loss": qf / count,
        "qf_twin_loss": qf_twin / count,
        "policy_loss": policy / count,
        "alpha_loss": -log_alpha * (entropy / count - 2.0),
        "logps": entropy / count,
    }


@SHARINGS
@pytest.mark.parametrize("twin_q", [True, False], ids=["twin", "one"])
@pytest.mark.usefixtures("_fixed_noise")
def test_losses_equal_the_reference(vf_share_layers, twin_q):
    learner = make_learner({"twin_q": twin_q}, vf_share_layers=vf_share_layers)
    module = module_of(learner).double()
    batch = make_batch(module, torch.float64)
    with torch.no_grad():
        expected = reference(module, batch, math.log(0.3))
    metrics, _ = losses_of(learner, batch)
    if not twin_q:
        assert "qf_twin_loss" not in metrics
        del expected["qf_twin_loss"]
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=1e-6), name
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
