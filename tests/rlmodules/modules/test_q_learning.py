"""`MemoryQRLModule`: action values, exploration, target networks, weights, spaces."""

import copy
import pickle

import numpy as np
import pytest
import torch
import tree
from gymnasium import spaces
from ray.rllib.algorithms.dqn.dqn_learner import ATOMS, QF_LOGITS, QF_PREDS, QF_PROBS
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import QNetAPI, TargetNetworkAPI

from rlmodules import (
    LinearAttentionConfig,
    MemoryQRLModule,
)
from rlmodules.memories import compilation
from tests.rlmodules.modules import test_base
from tests.rlmodules.modules.test_base import OBSERVATION_SPACES, B, T, assert_trees_equal, batch_of

A = 3


def build(*args, module_class=MemoryQRLModule, **settings):
    return test_base.build(*args, module_class=module_class, **settings)


def with_targets(**settings):
    """A Learner's module; its target networks differ from the others."""
    module = build(**settings)
    module.make_target_networks()
    with torch.no_grad():
        for parameter in (*module.target_core.parameters(), *module.target_q_head.parameters()):
            parameter.add_(0.1 * torch.randn_like(parameter))
    return module


def test_apis():
    module = build()
    assert isinstance(module, QNetAPI)
    assert isinstance(module, TargetNetworkAPI)
    assert module.is_stateful()


@pytest.mark.parametrize("space", list(OBSERVATION_SPACES))
def test_observation_spaces(space):
    module = build(OBSERVATION_SPACES[space])
    module.make_target_networks()
    batch = batch_of(module, seq_lens=[T, 2, 1])
    for outputs in (module.forward_train(batch), module.forward_target(batch)):
        assert outputs[QF_PREDS].shape == (B, T, A)
        assert torch.isfinite(outputs[QF_PREDS]).all()


@pytest.mark.parametrize(
    "space",
    [spaces.Box(-1, 1, (2,)), spaces.Discrete(3, start=1), spaces.MultiDiscrete([2, 2])],
    ids=str,
)
def test_other_actions_are_refused(space):
    with pytest.raises(ValueError, match=r"The action space is .* Discrete space with `start=0`"):
        build(action_space=space)


@pytest.mark.parametrize("dueling", [True, False])
def test_steps_equal_a_row(dueling):
    module = build(dueling=dueling, head_fcnet_hiddens=[5])
    batch = batch_of(module)
    row = module.compute_q_values(batch)
    state = batch[Columns.STATE_IN]
    for t in range(T):
        obs = batch[Columns.OBS][:, t : t + 1]
        step = module.compute_q_values({Columns.OBS: obs, Columns.STATE_IN: state})
        torch.testing.assert_close(step[QF_PREDS][:, 0], row[QF_PREDS][:, t])
        state = step[Columns.STATE_OUT]
    assert_trees_equal(state, row[Columns.STATE_OUT])


@pytest.mark.parametrize("num_atoms", [1, 7])
def test_dueling_head(num_atoms):
    """Eq. 9 of the paper, for each atom; the value alone shifts all actions alike."""
    module = build(dueling=True, num_atoms=num_atoms, v_min=-2.0, v_max=4.0)
    head = module.q_head
    features = torch.randn(B, T, 8)
    outputs = head(features)
    advantages = head.advantages(features).reshape(B, T, A, num_atoms)
    value = head.value(features).reshape(B, T, 1, num_atoms)
    logits = value + advantages - advantages.mean(2, keepdim=True)
    if num_atoms == 1:
        torch.testing.assert_close(outputs[QF_PREDS], logits[..., 0])
        assert outputs.keys() == {QF_PREDS}
        return
    probs = torch.softmax(logits, -1)
    atoms = torch.tensor([-2.0, -1.0, 0.0, 1.0, 2.0, 3.0, 4.0])
    torch.testing.assert_close(outputs[ATOMS], atoms)
    torch.testing.assert_close(outputs[QF_LOGITS], logits)
    torch.testing.assert_close(outputs[QF_PROBS], probs)
    torch.testing.assert_close(outputs[QF_PREDS], (probs * atoms).sum(-1))


def test_a_range_without_width_is_refused():
    with pytest.raises(ValueError, match=r"`v_min` is 1.0 and `v_max` is 1.0"):
        build(num_atoms=5, v_min=1.0, v_max=1.0)


def test_padding_changes_nothing():
    module = with_targets(num_atoms=5)
    batch = batch_of(module, seq_lens=[T, 3, 1])
    valid = torch.arange(T) < batch[Columns.SEQ_LENS][:, None]
    clean, clean_target = module.forward_train(batch), module.forward_target(batch)
    clean[QF_PREDS][valid].sum().backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.requires_grad}
    module.zero_grad()
    batch[Columns.OBS] = torch.where(valid[..., None], batch[Columns.OBS], torch.nan)
    dirty = module.forward_train(batch)
    dirty[QF_PREDS][valid].sum().backward()
    dirty_target = module.forward_target(batch)
    for key in (QF_PREDS, QF_LOGITS, QF_PROBS):
        torch.testing.assert_close(dirty[key][valid], clean[key][valid])
        torch.testing.assert_close(dirty_target[key][valid], clean_target[key][valid])
    for name, gradient in gradients.items():
        torch.testing.assert_close(module.get_parameter(name).grad, gradient)


def test_a_batch_of_rllibs_connectors_is_refused():
    module = with_targets()
    batch = batch_of(module)
    with pytest.raises(ValueError, match=r"`NEXT_OBS`.*connect\(config\)"):
        module.forward_train({**batch, Columns.NEXT_OBS: batch[Columns.OBS]})


# Acting.


@pytest.mark.parametrize("num_rows", [1, 4])
def test_acts_greedily_without_exploration(num_rows):
    module = build(epsilon=0.7)
    batch = batch_of(module, 1, num_rows)
    outputs = module.forward_inference(batch)
    assert outputs[Columns.ACTIONS].shape == (num_rows, 1)
    best = module.compute_q_values(batch)[QF_PREDS].argmax(-1)
    assert torch.equal(outputs[Columns.ACTIONS], best)
    assert outputs.keys() == {Columns.ACTIONS, Columns.STATE_OUT}


def test_explores_each_environment_on_its_own():
    """RLlib's module gives `[B, B]` actions here."""
    module = build(epsilon=[(0, 1.0), (100, 0.3)])
    batch = batch_of(module, 1, 4000)
    best = module.forward_inference(batch)
    for t, epsilon in ((0, 1.0), (100, 0.3), (1000, 0.3)):
        outputs = module.forward_exploration(batch, t=t)
        actions = outputs[Columns.ACTIONS]
        assert actions.shape == (4000, 1)
        assert actions.dtype == torch.int64
        other = (actions != best[Columns.ACTIONS]).float().mean().item()
        # A random action is the best one in a third of the cases.
        assert other == pytest.approx(epsilon * 2 / 3, abs=0.04)
        assert set(actions.unique().tolist()) == {0, 1, 2}
        assert_trees_equal(outputs[Columns.STATE_OUT], best[Columns.STATE_OUT])


def test_forbidden_actions_are_never_taken():
    """Neither for the best nor for a random one; those allowed are equally likely."""
    observations = spaces.Dict(x=test_base.BOX, mask=spaces.MultiBinary(A))
    module = build(observations, epsilon=0.5, action_mask="mask")
    batch = batch_of(module, 1, 4000)
    mask = batch[Columns.OBS]["mask"] = torch.tensor([[1, 0, 1], [1, 1, 1]] * 2000)[:, None]
    values = module.compute_q_values(batch)[QF_PREDS]
    best = module.forward_inference(batch)[Columns.ACTIONS]
    assert torch.equal(best, values.where(mask.bool(), -torch.inf).argmax(-1))
    actions = module.forward_exploration(batch)[Columns.ACTIONS]
    assert mask.gather(-1, actions[..., None]).all()
    other = (actions != best).float().view(2000, 2).mean(0)
    torch.testing.assert_close(other, torch.tensor([0.5 / 2, 0.5 * 2 / 3]), rtol=0, atol=0.05)


# Target networks and weights.


def test_target_networks_have_their_own_weights_and_no_gradient():
    module = with_targets()
    batch = batch_of(module)
    values = module.forward_train(batch)[QF_PREDS]
    target = module.forward_target(batch)[QF_PREDS]
    assert not torch.allclose(values, target)
    assert not target.requires_grad
    for main, target in module.get_target_network_pairs():
        target.load_state_dict(main.state_dict())
    torch.testing.assert_close(values, module.forward_target(batch)[QF_PREDS])


def test_all_weights_have_targets():
    module = with_targets()
    pairs = module.get_target_network_pairs()
    names = {id(p) for main, _ in pairs for p in main.parameters()}
    assert names == {id(p) for p in module.parameters() if p.requires_grad}


def test_weights_go_to_env_runners_without_targets():
    learner, runner = with_targets(), build(inference_only=True)
    runner.set_state(learner.get_state(inference_only=True))
    batch = batch_of(runner)
    assert torch.equal(
        runner.compute_q_values(batch)[QF_PREDS], learner.compute_q_values(batch)[QF_PREDS]
    )
    assert not hasattr(runner, "target_core")
    # RLlib also sends everything, where a Learner's checkpoint is loaded.
    runner.set_state(learner.get_state())


def test_set_state_is_strict():
    module = with_targets()
    state = module.get_state()
    assert any(key.startswith("target_core.") for key in state)
    del state["target_q_head.value.0.bias"]
    with pytest.raises(ValueError, match=r"missing \['target_q_head.value.0.bias'\]"):
        module.set_state(state)
    with pytest.raises(ValueError, match=r"q_head\.value"):
        module.set_state(build(dueling=False).get_state())


def test_atoms_are_no_weights():
    assert not any("atoms" in key for key in build(num_atoms=5).get_state())


def test_copies_and_pickles():
    module = with_targets(epsilon=[(0, 1.0), (10, 0.1)])
    batch = batch_of(module)
    expected = module.forward_train(batch)
    for copied in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
        assert_trees_equal(copied.forward_train(batch), expected)


@pytest.mark.slow
# PyTorch's compiler raises warnings of its own.
@pytest.mark.filterwarnings("ignore")
def test_compiles_both_networks(monkeypatch):
    # Without code generation, to save time; at a width that nothing else compiles.
    compiled = torch.compile
    monkeypatch.setattr(
        torch, "compile", lambda *args, **kwargs: compiled(*args, backend="aot_eager", **kwargs)
    )
    module = with_targets(compile=True, d_model=12)
    batch = batch_of(module)
    eager = module.compute_q_values(batch)[QF_PREDS]
    target = module.forward_target(batch)[QF_PREDS]
    outputs = module.forward_train(batch)
    torch.testing.assert_close(outputs[QF_PREDS], eager)
    torch.testing.assert_close(module.forward_target(batch)[QF_PREDS], target)
    outputs[QF_PREDS].sum().backward()
    for core in (module.core, module.target_core):
        assert all(compilation.is_compiled(block) for block in core.memory.blocks)


def test_config_may_be_a_dataclass_without_dqns_keys():
    """Then DQN's defaults hold, and the module does not explore."""
    module = build(module_class=MemoryQRLModule)
    assert isinstance(module.memory_config, LinearAttentionConfig)
    assert module.q_head.value is not None
    batch = batch_of(module, 1)
    actions = [module.forward_exploration(batch, t=t)[Columns.ACTIONS] for t in range(3)]
    tree.map_structure(lambda a: np.testing.assert_array_equal(a, actions[0]), actions)
