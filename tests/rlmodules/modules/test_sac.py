"""`MemorySACRLModule`: sequences, gradients of each loss, states, target networks, weights."""

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from gymnasium import spaces
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule

from rlmodules import MemorySACRLModule
from rlmodules.networks.heads import ActionValueHead
from tests.rlmodules.modules.test_base import BOX, T, assert_trees_equal, batch_of
from tests.rlmodules.modules.test_base import build as build_module

ACTIONS = spaces.Box(-2.0, 3.0, (2,), np.float32)
SEQ_LENS = [T, 4, 2]
DISCRETE = spaces.Discrete(3)
SPACES = pytest.mark.parametrize("space", [ACTIONS, DISCRETE], ids=["box", "discrete"])
MASKED = spaces.Dict(observations=BOX, action_mask=spaces.MultiBinary(3))
SHARINGS = pytest.mark.parametrize("vf_share_layers", [True, False], ids=["shared", "separate"])


def build(observation_space=BOX, action_space=ACTIONS, targets=True, **settings):
    settings = {"module_class": MemorySACRLModule, **settings}
    module = build_module(observation_space, action_space, **settings)
    if targets:
        module.make_target_networks()
        with torch.no_grad():
            for name, parameter in module.named_parameters():
                if name.startswith("target_"):
                    parameter.mul_(0.9)
    return module


def replayed(module, seq_lens=SEQ_LENS):
    """Rows of one episode each; the last observation of each follows its last step."""
    batch = batch_of(module, T, len(seq_lens), seq_lens)
    shape = (len(seq_lens), T, *module.action_space.shape)
    numbers = torch.rand(*shape, generator=torch.Generator().manual_seed(2))
    discrete = isinstance(module.action_space, spaces.Discrete)
    batch[Columns.ACTIONS] = (3 * numbers).long() if discrete else 2 * numbers - 1
    return batch


def mask_of(batch):
    return torch.arange(T) < batch[Columns.SEQ_LENS][:, None] - 1


def names_with_gradient(module):
    """Beginnings of the names of all parameters that have a gradient, and of those without."""
    parameters = [(name.split(".")[0], x.grad) for name, x in module.named_parameters()]
    return {n for n, x in parameters if x is not None and x.any()}


@SHARINGS
@pytest.mark.parametrize("twin_q", [True, False])
@SPACES
def test_rows_agree_with_single_steps(vf_share_layers, twin_q, space):
    """Every output of a row is what running the module step by step gives."""
    module = build(action_space=space, vf_share_layers=vf_share_layers, twin_q=twin_q)
    batch = replayed(module)
    outputs = module.forward_train(batch)
    for row, length in enumerate(SEQ_LENS):
        state = tree.map_structure(lambda x, row=row: x[row : row + 1], batch[Columns.STATE_IN])
        for t in range(length):
            step = {
                column: batch[column][row : row + 1, t : t + 1]
                for column in (Columns.OBS, Columns.ACTIONS)
            }
            step[Columns.STATE_IN] = state
            acting = module.forward_exploration(step)
            q = module.compute_q_values(step)
            expected = outputs["qf_preds"][row, t]
            if twin_q:
                expected = torch.minimum(expected, outputs["qf_twin_preds"][row, t])
            torch.testing.assert_close(q[0, 0], expected)
            torch.testing.assert_close(
                acting[Columns.ACTION_DIST_INPUTS][0, 0],
                outputs[Columns.ACTION_DIST_INPUTS][row, t],
            )
            state = acting[Columns.STATE_OUT]
    assert ("qf_twin_preds" in outputs) == twin_q


@SPACES
def test_next_values_come_from_a_memory_of_the_row(space, monkeypatch):
    """Where every sample is the mean, the next step's values are this step's, one step later."""
    monkeypatch.setattr(torch.distributions.Normal, "rsample", lambda self, *_: self.loc)
    monkeypatch.setattr(torch.distributions.Normal, "sample", lambda self, *_: self.loc)
    module = build(action_space=space, targets=False)
    module.make_target_networks()
    outputs = module.forward_train(replayed(module))
    for row, length in enumerate(SEQ_LENS):
        for now, later in (
            ("logp_resampled", "logp_next_resampled"),
            ("q_curr", "q_target_next"),
        ):
            torch.testing.assert_close(
                outputs[later][row, : length - 1], outputs[now][row, 1:length], msg=f"{now} {row}"
            )


@SHARINGS
@SPACES
def test_each_loss_trains_its_own_networks(vf_share_layers, space):
    module = build(action_space=space, vf_share_layers=vf_share_layers)
    outputs = module.forward_train(replayed(module))
    policy_loss = outputs["logp_resampled"].sum() - outputs["q_curr"].sum()
    policy_loss.backward(retain_graph=True)
    policy = {"pi"} if vf_share_layers else {"pi", "pi_encoder"}
    assert names_with_gradient(module) == policy
    module.zero_grad()
    (outputs["qf_preds"] + outputs["qf_twin_preds"]).sum().backward()
    assert names_with_gradient(module) == {"qf_encoder", "qf", "qf_twin"}
    for column in ("logp_next_resampled", "q_target_next"):
        assert not outputs[column].requires_grad


@SPACES
def test_q_values_reach_the_policy_through_its_actions(space):
    module = build(action_space=space)
    outputs = module.forward_train(replayed(module))
    (gradient,) = torch.autograd.grad(outputs["q_curr"].sum(), module.pi.net[-1].weight)
    assert gradient.abs().sum() > 0


@SHARINGS
@SPACES
def test_padding_is_inert(vf_share_layers, space):
    module = build(action_space=space, vf_share_layers=vf_share_layers)

    def run(batch):
        torch.manual_seed(0)
        outputs = module.forward_train(batch)
        mask = mask_of(batch)
        valid = {name: x[mask] for name, x in outputs.items()}
        module.zero_grad()
        sum(x.sum() for x in valid.values()).backward()
        gradients = {name: x.grad for name, x in module.named_parameters() if x.requires_grad}
        return valid, gradients

    batch = replayed(module)
    expected = run(batch)
    padding = torch.arange(T) >= batch[Columns.SEQ_LENS][:, None]
    batch[Columns.OBS] = batch[Columns.OBS].masked_fill(padding[..., None], float("nan"))
    if space is DISCRETE:
        batch[Columns.ACTIONS] = batch[Columns.ACTIONS].masked_fill(padding, -1)
    else:
        batch[Columns.ACTIONS][padding] = float("nan")
    assert_trees_equal(run(batch), expected)


@SHARINGS
def test_forbidden_actions_are_never_taken_and_count_for_nothing(vf_share_layers):
    """Where all but one are, the policy has no entropy and the next value is that one's."""
    module = build(MASKED, DISCRETE, vf_share_layers=vf_share_layers, action_mask="action_mask")
    batch = replayed(module)
    mask = torch.zeros(len(SEQ_LENS), T, 3, dtype=torch.int8)
    mask[..., 1] = 1
    batch[Columns.OBS]["action_mask"] = mask
    batch[Columns.ACTIONS] = torch.ones_like(batch[Columns.ACTIONS])
    outputs = module.forward_train(batch)
    steps = mask_of(batch)
    assert not outputs["logp_resampled"][steps].any()
    smallest = torch.minimum(outputs["qf_preds"], outputs["qf_twin_preds"])
    torch.testing.assert_close(outputs["q_curr"][steps], smallest[steps])
    target = module.forward_target(batch).roll(-1, dims=1)
    torch.testing.assert_close(outputs["q_target_next"][steps], target[steps])
    (outputs["logp_resampled"] - outputs["q_curr"]).sum().backward()
    assert all(x.grad.isfinite().all() for x in module.pi.parameters())
    dist_inputs = module.forward_exploration(batch)[Columns.ACTION_DIST_INPUTS]
    policy = module.get_exploration_action_dist_cls().from_logits(dist_inputs)
    assert (policy.sample()[steps] == 1).all()


def test_masks_of_a_box_are_refused():
    with pytest.raises(ValueError, match="Only Discrete and MultiDiscrete actions can be masked"):
        build(MASKED, action_mask="action_mask")


@SHARINGS
def test_states(vf_share_layers):
    module = build(vf_share_layers=vf_share_layers)
    state = module.get_initial_state()
    one = module.qf_encoder.memory.initial_state()
    expected = one if vf_share_layers else {"actor": one, "critic": one}
    assert_trees_equal(state, expected)
    outputs = module.forward_inference(batch_of(module))
    for after, before in zip(
        tree.flatten(outputs[Columns.STATE_OUT]), tree.flatten(state), strict=True
    ):
        assert after.shape[1:] == before.shape


@SHARINGS
@pytest.mark.parametrize("twin_q", [True, False])
def test_target_networks(vf_share_layers, twin_q):
    module = build(vf_share_layers=vf_share_layers, twin_q=twin_q, targets=False)
    module.make_target_networks()
    batch = replayed(module)
    torch.testing.assert_close(module.forward_target(batch), module.compute_q_values(batch))
    pairs = module.get_target_network_pairs()
    followed = {id(x) for network, _ in pairs for x in network.parameters()}
    trained = {
        id(x)
        for name, x in module.named_parameters()
        if x.requires_grad and not name.startswith("pi")
    }
    assert followed == trained
    assert not any(x.requires_grad for _, target in pairs for x in target.parameters())
    with torch.no_grad():
        module.target_qf_encoder.memory.norm.weight.mul_(2)
    assert not torch.allclose(module.forward_target(batch), module.compute_q_values(batch))


@SHARINGS
def test_an_env_runner_has_no_q_heads_and_acts_the_same(vf_share_layers):
    module = build(vf_share_layers=vf_share_layers)
    acting = build(vf_share_layers=vf_share_layers, inference_only=True, targets=False)
    names = {name.split(".")[0] for name in acting.state_dict()}
    assert names == {"qf_encoder", "pi"} | (set() if vf_share_layers else {"pi_encoder"})
    acting.set_state(module.get_state(inference_only=True))
    acting.set_state(module.get_state())
    batch = batch_of(module)
    assert_trees_equal(acting.forward_exploration(batch), module.forward_exploration(batch))


def test_a_checkpoint_acts_without_a_learner(tmp_path):
    """A module restored on its own has no target networks, which only Learners make."""
    module = build()
    module.save_to_path(tmp_path)
    restored = RLModule.from_checkpoint(tmp_path)
    batch = batch_of(module)
    assert_trees_equal(restored.forward_inference(batch), module.forward_inference(batch))


def test_rows_of_next_observations_are_refused():
    module = build()
    batch = replayed(module)
    batch[Columns.NEXT_OBS] = batch[Columns.OBS]
    with pytest.raises(ValueError, match="`NEXT_OBS`"):
        module.forward_train(batch)


def test_the_most_likely_action_is_squashed():
    module = build()
    inputs = torch.tensor([[[3.0, -0.5, 0.0, 0.0]]])
    policy = module.get_inference_action_dist_cls().from_logits(inputs)
    torch.testing.assert_close(policy.to_deterministic().sample(), torch.tanh(inputs[..., :2]))


def test_the_best_action_depends_on_the_features():
    torch.manual_seed(0)
    head = ActionValueHead(4, 2, [], "relu")
    actions = torch.zeros(5, 2, requires_grad=True)
    (gradient,) = torch.autograd.grad(head(torch.randn(5, 4), actions).sum(), actions)
    assert not torch.allclose(gradient[0], gradient[1])


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Discrete(3, start=1), "Use `start=0`"),
        (spaces.Dict({"a": ACTIONS}), "PPO"),
        (spaces.Box(-np.inf, np.inf, (2,), np.float32), "finite bounds"),
        (spaces.Box(-1.0, 1.0, (2, 2), np.float32), r"Box of shape \(4,\)"),
        (spaces.Box(0, 3, (2,), np.int64), "MultiDiscrete"),
    ],
)
def test_other_action_spaces_are_refused(space: gym.Space, message: str):
    with pytest.raises(ValueError, match=message):
        build(action_space=space)


@pytest.mark.parametrize(
    "space",
    [
        spaces.Discrete(5),
        spaces.Dict({"a": spaces.MultiDiscrete([2, 3]), "b": BOX}),
    ],
    ids=["discrete", "dict"],
)
def test_observation_spaces(space):
    module = build(observation_space=space, module_class=MemorySACRLModule)
    outputs = module.forward_train(replayed(module))
    assert all(torch.isfinite(x).all() for x in outputs.values())
