"""The Learners: advantages swapped in, weights guarded, explained variance of valid steps."""

import logging
from collections import Counter

import pytest
import torch
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils.torch_utils import explained_variance as rllib_explained_variance

from connectors import ComputeAdvantages, MemoryPPOTorchLearner, connect
from connectors.learners.explained_variance import explained_variance
from tests.connectors.helpers import (
    BOX,
    DISCRETE,
    CountingRLModule,
    lstm_config,
    make_episodes,
)

pytestmark = pytest.mark.ray
T = 4


def make_learner(**training):
    config = connect(lstm_config(T).training(num_epochs=2, **training))
    spec = config.get_rl_module_spec(
        spaces={"default_policy": (BOX, DISCRETE), "__env_single__": (BOX, DISCRETE)}
    )
    learner = config.learner_class(config=config, module_spec=spec)
    learner.build()
    return learner


def update(learner, seed=0):
    episodes = make_episodes(
        learner.module["default_policy"], [(30, 0, "cut"), (11, 0, "terminated")], seed=seed
    )
    return learner.update(
        episodes=episodes, minibatch_size=20, num_epochs=2, timesteps={}, training_data=None
    )


def weights(learner):
    state = learner.module["default_policy"].state_dict()
    return {key: value.clone() for key, value in state.items()}


@pytest.fixture(scope="module")
def built():
    return make_learner()


def test_build_swaps_the_advantage_connector(built):
    kinds = [type(piece) for piece in built._learner_connector.connectors]
    assert kinds[-1] is ComputeAdvantages
    assert GeneralAdvantageEstimation not in kinds
    assert built._learner_connector.connectors[-1].config is built.config


def test_another_learners_state_is_refused(built):
    state = built.get_state()
    del state["adapted_state"]["curr_kl_coeffs_per_module"]
    before = weights(built)
    state["rl_module"]["default_policy"] = {k: v + 1 for k, v in before.items()}
    with pytest.raises(ValueError, match=r"lacks \['curr_kl_coeffs_per_module'\]"):
        built.set_state(state)
    assert all(torch.equal(before[key], value) for key, value in weights(built).items())
    # Weights alone, as RLlib sends them.
    built.set_state({"rl_module": {"default_policy": built.module["default_policy"].get_state()}})


def test_updates_the_weights(built):
    before = weights(built)
    result = update(built)
    assert any(not torch.equal(before[key], value) for key, value in weights(built).items())
    assert result["__all_modules__"]["memory"]["num_nonfinite_gradients"] == 0


def test_each_step_is_trained_on_once_an_epoch(built, monkeypatch):
    trained = Counter()
    compute_loss = type(built).compute_loss_for_module

    def count(self, *, batch, **kwargs):
        trained.update(batch[Columns.REWARDS][batch[Columns.LOSS_MASK]].tolist())
        return compute_loss(self, batch=batch, **kwargs)

    monkeypatch.setattr(type(built), "compute_loss_for_module", count)
    update(built)
    # 41 steps with a reward of their own, two epochs.
    assert len(trained) == 41
    assert set(trained.values()) == {2}


@pytest.mark.parametrize(
    ("poison", "clip"),
    [
        (float("nan"), {}),
        (-float("inf"), {"grad_clip": 1.0, "grad_clip_by": "global_norm"}),
        # Clipping makes a valid number of an infinity.
        (float("inf"), {"grad_clip": 1.0, "grad_clip_by": "value"}),
    ],
)
def test_nonfinite_gradients_leave_weights_and_optimizer_alone(poison, clip, caplog):
    learner = make_learner(**clip)
    update(learner)
    before = weights(learner)
    optimizer = learner.get_optimizer("default_policy")
    steps = [state["step"].item() for state in optimizer.state.values()]
    moments = [state["exp_avg"].clone() for state in optimizer.state.values()]
    parameter = learner.module["default_policy"].vf.net.mlp[-1].bias
    handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, poison))
    with caplog.at_level(logging.WARNING, logger="rllib_memory"):
        result = update(learner)
    handle.remove()
    assert all(torch.equal(before[key], value) for key, value in weights(learner).items())
    assert steps == [state["step"].item() for state in optimizer.state.values()]
    for moment, state in zip(moments, optimizer.state.values(), strict=True):
        assert torch.equal(moment, state["exp_avg"])
    assert result["default_policy"]["memory"]["num_nonfinite_gradients"] > 0
    assert result["__all_modules__"]["memory"]["num_nonfinite_gradients"] > 0
    assert "Skipped an update" in caplog.text
    # Training goes on afterwards.
    update(learner)
    assert any(not torch.equal(before[key], value) for key, value in weights(learner).items())


def test_explained_variance_of_valid_steps():
    torch.manual_seed(0)
    targets, values = torch.randn(5, 7), torch.randn(5, 7)
    values = 0.7 * targets + 0.3 * values
    mask = torch.rand(5, 7) < 0.6
    garbage = torch.where(mask, targets, float("nan"))
    expected = rllib_explained_variance(targets[mask], values[mask])
    torch.testing.assert_close(explained_variance(garbage, values, mask), expected)
    assert explained_variance(targets, -9 * targets, mask) == -1.0


def test_explained_variance_is_reported_for_valid_steps(built, monkeypatch):
    seen = []
    logged = explained_variance

    def spy(targets, values, mask):
        seen.append(logged(targets, values, mask))
        assert mask.shape == targets.shape == values.shape
        return seen[-1]

    monkeypatch.setattr("connectors.learners.explained_variance.explained_variance", spy)
    result = update(built)
    assert result["default_policy"]["vf_explained_var"] == seen[-1].item()


def test_a_module_without_embeddings_runs_twice_a_minibatch(monkeypatch):
    """Once for its actions and once for the loss's values; the metric takes what is there."""
    config = lstm_config(T).rl_module(
        rl_module_spec=RLModuleSpec(CountingRLModule, model_config={"max_seq_len": T})
    )
    learner = connect(config).learner_class(
        config=config,
        module_spec=config.get_rl_module_spec(
            spaces={"default_policy": (BOX, DISCRETE), "__env_single__": (BOX, DISCRETE)}
        ),
    )
    learner.build()
    runs, minibatches = [], []
    run, loss = CountingRLModule._run, type(learner).compute_losses

    def count(module, batch):
        runs.append(torch.is_grad_enabled())
        return run(module, batch)

    def losses(learner, **kwargs):
        minibatches.append(1)
        return loss(learner, **kwargs)

    monkeypatch.setattr(CountingRLModule, "_run", count)
    monkeypatch.setattr(type(learner), "compute_losses", losses)
    result = update(learner)
    # Without gradient: the states of the rollout, and the values for the advantages.
    assert sum(runs) == 2 * len(minibatches) > 2
    assert result["default_policy"]["vf_explained_var"] <= 1


def test_learner_of_the_user_inherits_everything():
    class Mine(MemoryPPOTorchLearner):
        pass

    config = lstm_config(T).learners(learner_class=Mine)
    assert connect(config).learner_class is Mine
    assert Columns.LOSS_MASK == "loss_mask"


def test_only_rllibs_default_optimizer_is_fused(built):
    ((_, optimizer),) = built.get_optimizers_for_module("default_policy")
    assert all(group["fused"] for group in optimizer.param_groups)

    class OwnOptimizer(MemoryPPOTorchLearner):
        def configure_optimizers_for_module(self, module_id, config=None):
            parameters = self.get_parameters(self.module[module_id])
            self.register_optimizer(
                module_id=module_id,
                optimizer=torch.optim.Adam(parameters, foreach=False),
                params=parameters,
                lr_or_lr_schedule=config.lr,
            )

    config = connect(lstm_config(T)).copy(copy_frozen=False).learners(learner_class=OwnOptimizer)
    learner = OwnOptimizer(
        config=config,
        module_spec=config.get_rl_module_spec(
            spaces={"default_policy": (BOX, DISCRETE), "__env_single__": (BOX, DISCRETE)}
        ),
    )
    learner.build()
    ((_, optimizer),) = learner.get_optimizers_for_module("default_policy")
    assert not any(group["fused"] for group in optimizer.param_groups)
