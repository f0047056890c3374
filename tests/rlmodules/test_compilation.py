"""`torch.compile` of the memories: same numbers, few graphs, copies, fallbacks, RLlib."""

import copy
import functools
import logging
import pickle
from collections import Counter

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from functorch.compile import make_boxed_func
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch._dynamo.backends.common import aot_autograd

from connectors import connect
from rlmodules import DeepLinearAttentionRLModule, GTrXLRLModule, compilation
from tests.envs import RandomObservations

# PyTorch and its compiler raise a dozen kinds of their own, as does RLlib for a second algorithm.
pytestmark = pytest.mark.filterwarnings("ignore")

T = 8
SMALL = {
    "max_seq_len": T,
    "fcnet_hiddens": [8],
    "d_model": 8,
    "num_heads": 2,
    "head_dim": 4,
    "feedforward_dim": 8,
    "compile": True,
}
OPTIONS = {
    "sum": {"positions": "none", "normalizer": "sum"},
    "sine": {"positions": "sine"},
    "popgym": {"block": "popgym", "hidden_size": 25, "num_layers": 1, "positions": "sine"},
    "popgym max": {
        "block": "popgym",
        "positions": "none",
        "hidden_size": 25,
        "num_layers": 1,
        "S_aggregator": "max",
        "z_aggregator": "max",
    },
}
FORWARD, BACKWARD, NO_GRAD = "forward", "backward", "no grad"
BOX = RandomObservations.observation_space


def forget_graphs():
    torch.compiler.reset()
    compilation._kinds.clear()
    compilation._compiled.clear()
    compilation.has_toolchain.cache_clear()
    compilation._first_call.cache_clear()


@pytest.fixture(autouse=True)
def _no_delay(monkeypatch):
    monkeypatch.setattr(compilation, "CPU_DELAY", 0.0)


@pytest.fixture
def graphs(monkeypatch):
    """Counts graphs by direction. They are traced and differentiated, but run without new code."""
    counts = Counter()

    def compiler(direction):
        def compile_graph(graph, example_inputs):
            counts[direction] += 1
            return make_boxed_func(graph.forward)

        return compile_graph

    backend = aot_autograd(
        fw_compiler=compiler(FORWARD),
        bw_compiler=compiler(BACKWARD),
        inference_compiler=compiler(NO_GRAD),
    )
    yield from use_backend(backend, counts, monkeypatch)


@pytest.fixture
def traces(monkeypatch):
    """Counts graphs that are only traced, which is faster; autograd differentiates them."""
    counts = Counter()

    def backend(graph, example_inputs):
        counts[FORWARD if torch.is_grad_enabled() else NO_GRAD] += 1
        return graph.forward

    yield from use_backend(backend, counts, monkeypatch)


def use_backend(backend, counts, monkeypatch):
    forget_graphs()
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    yield counts
    forget_graphs()


def build(module_class=DeepLinearAttentionRLModule, **settings):
    torch.manual_seed(0)
    return RLModuleSpec(
        module_class=module_class,
        observation_space=BOX,
        action_space=gym.spaces.Discrete(2),
        model_config={**SMALL, **settings},
    ).build()


def batch_of(module, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    state = tree.map_structure(
        lambda x: torch.rand(num_rows, *x.shape, generator=generator).to(x.dtype),
        module.get_initial_state(),
    )
    return {
        Columns.OBS: torch.randn(num_rows, T, 3, generator=generator),
        Columns.STATE_IN: state,
        Columns.SEQ_LENS: torch.randint(1, T + 1, (num_rows,), generator=generator),
    }


def run(module, num_rows):
    """Logits, values of the value pass and gradients, as an update computes them."""
    batch = batch_of(module, num_rows)
    values = module.compute_values(batch)
    module.zero_grad()
    out = module.forward_train(batch)
    logits = out[Columns.ACTION_DIST_INPUTS]
    trained = module.compute_values(batch, embeddings=out[Columns.EMBEDDINGS])
    (logits.square().sum() + trained.square().sum()).backward()
    return logits.detach(), values, [p.grad for p in module.parameters()]


def assert_close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_one_graph_a_direction(graphs):
    """For all batch sizes, blocks, memories and modules; one more for passes without gradient."""
    eager, first = build(compile=False), build()
    for num_rows in (T, 3, 1, 2, 64):
        assert_close(run(first, num_rows), run(eager, num_rows))
    second = build(num_layers=3, vf_share_layers=False)
    for num_rows in (5, 1, 33):
        run(second, num_rows)
    assert graphs == {FORWARD: 1, BACKWARD: 1, NO_GRAD: 1}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name, traces):
    eager, compiled = build(**OPTIONS[name], compile=False), build(**OPTIONS[name])
    for num_rows in (3, 1, 8):
        assert_close(run(compiled, num_rows), run(eager, num_rows))
    assert traces == {FORWARD: 1, NO_GRAD: 1}


@pytest.mark.parametrize("memory_inference", [3, 5 * T])
def test_gtrxl(memory_inference, traces):
    settings = {"module_class": GTrXLRLModule, "memory_inference": memory_inference}
    eager, compiled = build(**settings, compile=False), build(**settings)
    for num_rows in (3, 1, 8):
        assert_close(run(compiled, num_rows), run(eager, num_rows))
    assert traces == {FORWARD: 1, NO_GRAD: 1}


def test_autocast(traces):
    eager, compiled = build(compile=False), build()
    with torch.autocast("cpu", torch.bfloat16):
        actual, expected = run(compiled, 4), run(eager, 4)
    torch.testing.assert_close(actual, expected, rtol=0.05, atol=0.05)
    assert traces == {FORWARD: 1, NO_GRAD: 1}


class Doubled(torch.nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def test_any_number_of_models_in_one_process(traces):
    """PyTorch keeps eight graphs a function: it would give up on the ninth."""
    for width in range(1, 13):
        block = Doubled(width, 2)
        assert compilation.compile_blocks([block], True, torch.device("cpu"))
        for num_rows in (3, 4):
            x = torch.randn(num_rows, width)
            torch.testing.assert_close(compilation.call_block(block, x), block(x))
    assert traces == {FORWARD: 12}


def test_rollouts_are_not_compiled(traces):
    runner = build()
    runner.forward_exploration(batch_of(runner, 4))
    assert not traces


def test_inductor():
    """The real compiler: the same numbers, for batches of other sizes as well."""
    eager, compiled = build(compile=False), build()
    for num_rows in (4, 9, 1):
        assert_close(run(compiled, num_rows), run(eager, num_rows))


def test_names_copies_and_pickles(traces):
    eager, compiled = build(compile=False), build()
    expected = run(eager, 4)
    run(compiled, 4)
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        blocks = list(other.core.memory.blocks)
        assert not any(block in compilation._compiled for block in blocks)
        assert_close(run(other, 4), expected)
        assert all(block in compilation._compiled for block in blocks)
    assert traces == {FORWARD: 1, NO_GRAD: 1}


def test_target_networks_are_compiled(traces):
    module = build()
    module.make_target_networks()
    for num_rows in (4, 6):
        batch = batch_of(module, num_rows)
        expected = run(module, num_rows)[0]
        assert_close(next(iter(module.forward_target(batch).values())), expected)
    assert all(block in compilation._compiled for block in module.target_core.memory.blocks)
    # One more without gradient, for weights that need none: PyTorch's guards know the difference.
    assert traces == {FORWARD: 1, NO_GRAD: 2}


def test_auto_leaves_short_runs_alone(monkeypatch, traces):
    blocks = list(build().core.memory.blocks)
    for delay, compiled in ((1000.0, False), (0.0, True)):
        monkeypatch.setattr(compilation, "CPU_DELAY", delay)
        assert compilation.compile_blocks(blocks, "auto", torch.device("cpu")) == compiled


def test_no_compiler(monkeypatch, caplog, traces):
    monkeypatch.setattr(compilation.shutil, "which", lambda _: None)
    module = build(compile="auto")
    with caplog.at_level(logging.WARNING, logger="rllib_memory"):
        for num_rows in (4, 6):
            assert_close(run(module, num_rows), run(build(compile=False), num_rows))
    assert not traces
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "no C++ compiler found" in messages[0]


def test_no_triton(monkeypatch, caplog, traces):
    monkeypatch.setattr(compilation.importlib.util, "find_spec", lambda _: None)
    with caplog.at_level(logging.WARNING, logger="rllib_memory"):
        blocks = list(build().core.memory.blocks)
        assert not compilation.compile_blocks(blocks, "auto", torch.device("cuda"))
    assert "no Triton found" in caplog.text


def failing_backend(graph, example_inputs):
    raise RuntimeError("the linker is missing")


def test_compile_errors(monkeypatch, caplog, traces):
    """Set to "auto" it says so once and goes on; True raises."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=failing_backend))
    with caplog.at_level(logging.WARNING, logger="rllib_memory"):
        module = build(compile="auto")
        for num_rows in (4, 6):
            assert_close(run(module, num_rows), run(build(compile=False), num_rows))
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 1
    assert "could not be compiled and runs uncompiled" in messages[0]
    assert "the linker is missing" in messages[0]

    forget_graphs()
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="the linker is missing"):
        run(build(compile=True), 4)


def test_errors_of_the_model_are_not_taken_for_compile_errors(traces):
    module = build(compile="auto")
    batch = batch_of(module, 4)
    batch[Columns.STATE_IN].pop("S")
    with pytest.raises(KeyError, match="S"):
        module.forward_train(batch)


def ppo(**settings):
    return connect(
        PPOConfig()
        .environment(RandomObservations)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=3)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=96, minibatch_size=None, num_epochs=2, lr=1e-3)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=DeepLinearAttentionRLModule, model_config={**SMALL, **settings}
            )
        )
        .debugging(seed=0, log_sys_usage=False)
    ).build_algo()


def row_counts(algorithm, monkeypatch):
    """The batch sizes that the module is trained on, as they come."""
    module = algorithm.learner_group._learner.module["default_policy"]
    rows = []
    forward_train = module._forward_train

    def counting(batch, **kwargs):
        rows.append(len(batch[Columns.SEQ_LENS]))
        return forward_train(batch, **kwargs)

    monkeypatch.setattr(module, "_forward_train", counting)
    return rows


@pytest.mark.ray
def test_training_needs_one_graph_a_direction(graphs, monkeypatch):
    algorithm = ppo()
    try:
        rows = row_counts(algorithm, monkeypatch)
        learner = algorithm.learner_group._learner.module["default_policy"]
        runner = algorithm.env_runner.module
        probe = batch_of(runner, 3)
        outputs = [runner.forward_inference(probe)[Columns.ACTION_DIST_INPUTS]]
        for _ in range(20):
            algorithm.train()
        outputs.append(runner.forward_inference(probe)[Columns.ACTION_DIST_INPUTS])
        trained = learner.forward_inference(probe)[Columns.ACTION_DIST_INPUTS]
    finally:
        algorithm.stop()
    assert len(set(rows)) >= 4
    # The value pass has no gradient: two forward graphs in all.
    assert graphs == {FORWARD: 1, BACKWARD: 1, NO_GRAD: 1}
    # The EnvRunner acts on the trained weights.
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    torch.testing.assert_close(outputs[1], trained, rtol=1e-5, atol=1e-5)


@pytest.mark.ray
def test_training_with_inductor():
    """Weights after an iteration are those of an uncompiled run."""
    weights = []
    for compile_setting in (False, True):
        algorithm = ppo(compile=compile_setting)
        try:
            algorithm.train()
            weights.append(algorithm.get_module().get_state())
        finally:
            algorithm.stop()
    for key, expected in weights[0].items():
        np.testing.assert_allclose(weights[1][key], expected, rtol=0, atol=1e-4)


@pytest.mark.ray
def test_appo_needs_one_graph_a_direction(graphs, monkeypatch):
    """In its Learner's thread. The target policy's pass is the one without gradient."""
    config = (
        APPOConfig()
        .environment(RandomObservations)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=3, rollout_fragment_length=T * 4)
        .learners(num_learners=0)
        .training(train_batch_size_per_learner=96, lr=1e-3, target_network_update_freq=0.1)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=DeepLinearAttentionRLModule, model_config=SMALL
            )
        )
        .reporting(min_time_s_per_iteration=0)
        .debugging(seed=0, log_sys_usage=False)
    )
    algorithm = connect(config).build_algo()
    try:
        rows = row_counts(algorithm, monkeypatch)
        module = algorithm.learner_group._learner.module["default_policy"]
        target_updates = 0
        for _ in range(20):
            learners = algorithm.train()["learners"]["default_policy"]
            target_updates = max(target_updates, learners.get("num_target_updates", 0))
    finally:
        algorithm.stop()
    assert len(set(rows)) >= 4
    assert target_updates > 1
    assert all(block in compilation._compiled for block in module.target_core.memory.blocks)
    assert graphs == {FORWARD: 1, BACKWARD: 1, NO_GRAD: 1}
