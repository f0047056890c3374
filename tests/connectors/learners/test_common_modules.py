"""What several Learners agree on before an update, as one of them sees it."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from connectors import MemoryMultiAgentEnvRunner, connect
from connectors.learners import common_modules
from connectors.learners.common_modules import keep_common_modules
from tests.envs import RandomAgents
from tests.test_multi_agent import deep

MODULES = ("a", "b", "c", "d")


def rows(num_steps, trained=True):
    mask = torch.full((num_steps,), trained)
    return SampleBatch({Columns.OBS: torch.zeros(num_steps), Columns.LOSS_MASK: mask})


def agree(mine, others, monkeypatch):
    """What a Learner keeps that has the batches `mine`, next to others' owners and steps."""
    learner = SimpleNamespace(
        module=dict.fromkeys(MODULES),
        device="cpu",
        config=SimpleNamespace(num_learners=3),
        metrics=MetricsLogger(root=True),
    )
    monkeypatch.setattr(common_modules, "sum_over_learners", lambda own, _: own + np.array(others))
    batch, num_steps = keep_common_modules(learner, MultiAgentBatch(mine, 10))
    counts = {
        module_id: values["memory"]["num_skipped_batches"]
        for module_id, values in learner.metrics.reduce().items()
    }
    return batch, num_steps, counts


def test_what_all_have_is_kept(monkeypatch):
    mine = {"d": rows(5), "b": rows(3), "a": rows(7)}
    # Two others: one of them has no steps of "b", both have some of "c".
    batch, num_steps, counts = agree(mine, [[2, 20], [1, 9], [2, 9], [2, 40]], monkeypatch)
    assert list(batch.policy_batches) == ["a", "d"]
    assert num_steps == 15
    assert counts == {"a": 0, "b": 1, "d": 0}
    assert batch.env_steps() == 10


def test_bootstrap_steps_are_nothing_to_train_on(monkeypatch):
    mine = {"a": rows(5), "b": rows(2, trained=False), "c": rows(0)}
    batch, _, counts = agree(mine, [[2, 9], [2, 9], [2, 9], [2, 9]], monkeypatch)
    assert list(batch.policy_batches) == ["a"]
    assert counts == {"a": 0, "b": 1, "c": 1}


def test_nothing_in_common(monkeypatch):
    batch, num_steps, counts = agree({"a": rows(5)}, [[0, 0], [2, 9], [2, 9], [0, 0]], monkeypatch)
    assert not batch.policy_batches
    assert (num_steps, batch.env_steps()) == (0, 0)
    assert counts == {"a": 1}


def config_of(config_class):
    return connect(
        config_class()
        .environment(RandomAgents, env_config={"num_agents": 2})
        .env_runners(num_env_runners=0, rollout_fragment_length=20)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=20, minibatch_size=None, num_epochs=1, lr=0.01)
        .multi_agent(
            policies={"p0", "p1"}, policy_mapping_fn=lambda agent, *_, **__: f"p{agent[1:]}"
        )
        .rl_module(rl_module_spec=deep(4))
        .debugging(seed=0, log_sys_usage=False)
    )


def make_learner(config):
    env = RandomAgents(config.env_config)
    spaces = {
        f"p{k}": (env.observation_spaces[agent], env.action_spaces[agent])
        for k, agent in enumerate(env.possible_agents)
    }
    spec = config.get_multi_rl_module_spec(spaces=spaces)
    learner = config.learner_class(config=config, module_spec=spec)
    learner.build()
    return learner


def moved(learner, update):
    """The modules whose weights an update changes."""

    def weights():
        return {
            module_id: [parameter.clone() for parameter in module.parameters()]
            for module_id, module in learner.module.items()
        }

    before = weights()
    update()
    return {
        module_id
        for module_id, after in weights().items()
        if not all(map(torch.equal, before[module_id], after))
    }


@pytest.mark.ray
def test_a_nan_in_one_module_leaves_the_others_alone():
    config = config_of(PPOConfig)
    learner, runner = make_learner(config), MemoryMultiAgentEnvRunner(config=config)
    results = []

    def update():
        results.append(learner.update(episodes=runner.sample()))

    assert moved(learner, update) == {"p0", "p1"}
    parameter = next(learner.module["p0"].value_head.parameters())
    handle = parameter.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))
    assert moved(learner, update) == {"p1"}
    handle.remove()
    assert moved(learner, update) == {"p0", "p1"}
    counts = {
        key: [result[key]["memory"]["num_nonfinite_gradients"].peek() for result in results]
        for key in ("p0", "p1", "__all_modules__")
    }
    assert counts == {"p0": [0, 1, 0], "p1": [0, 0, 0], "__all_modules__": [0, 1, 0]}


@pytest.mark.ray
def test_nothing_to_train_on_is_no_error():
    config = config_of(PPOConfig).multi_agent(policies_to_train=[])
    learner, runner = make_learner(config), MemoryMultiAgentEnvRunner(config=config)
    assert not moved(learner, lambda: learner.update(episodes=runner.sample()))


@pytest.mark.ray
@pytest.mark.parametrize("present", [{"p0"}, {"p0", "p1"}])
def test_momentum_does_not_move_what_is_not_trained_on(present):
    """Several IMPALA Learners give modules that are not in a minibatch gradients of zeros."""
    learner = make_learner(config_of(IMPALAConfig))

    def step(zeros=()):
        gradients = {
            ref: torch.zeros_like(p) if any(p is q for m in zeros for q in params[m]) else p.sign()
            for ref, p in learner._params.items()
        }
        learner.apply_gradients(learner.postprocess_gradients(gradients))

    params = {id_: list(module.parameters()) for id_, module in learner.module.items()}
    learner._module_ids = {"p0", "p1"}
    try:
        assert moved(learner, step) == {"p0", "p1"}
        learner._module_ids = present
        assert moved(learner, lambda: step(zeros=["p1"])) == present
    finally:
        learner.shutdown()
