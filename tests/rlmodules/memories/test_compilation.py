"""`torch.compile` of the memories: same numbers, few graphs, copies, fallbacks, RLlib."""

import copy
import functools
import logging
import pickle
from collections import Counter
from dataclasses import dataclass, fields

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
from rlmodules import (
    DeepLinearAttentionRLModule,
    GTrXLRLModule,
    MemoryConfig,
    MemoryRLModule,
)
from rlmodules.memories import Memory, compilation
from rlmodules.modules.catalogue import CONFIGS
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
POPGYM = {
    "module_class": MemoryRLModule,
    "memory": "popgym_linear_attention",
    "hidden_size": 25,
}
OPTIONS = {
    "sum": {"positions": "none", "normalizer": "sum"},
    "sine": {"positions": "sine"},
    "popgym": POPGYM,
    "popgym max": {
        **POPGYM,
        "positions": "none",
        "S_aggregator": "max",
        "z_aggregator": "max",
    },
    "gated delta": {"module_class": MemoryRLModule, "memory": "gated_delta"},
    "window": {"module_class": MemoryRLModule, "memory": "window", "window": 3},
    "min_gru": {"module_class": MemoryRLModule, "memory": "min_gru", "state_dim": 6},
    "lru": {"module_class": MemoryRLModule, "memory": "lru", "state_dim": 6},
    "ffm": {"module_class": MemoryRLModule, "memory": "ffm", "num_traces": 3},
}
FORWARD, BACKWARD, NO_GRAD = "forward", "backward", "no grad"
BOX = RandomObservations.observation_space


def forget_graphs():
    torch.compiler.reset()
    compilation._graphs.clear()
    compilation.has_toolchain.cache_clear()


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
    known = {field.name for field in fields(CONFIGS[settings.get("memory", "gtrxl")])}
    small = {key: value for key, value in SMALL.items() if key in known}
    return RLModuleSpec(
        module_class=module_class,
        observation_space=BOX,
        action_space=gym.spaces.Discrete(2),
        model_config={**small, **settings},
    ).build()


def batch_of(module, num_rows):
    generator = torch.Generator().manual_seed(num_rows)
    length = module.model_config["max_seq_len"]
    state = tree.map_structure(
        lambda x: torch.rand(num_rows, *x.shape, generator=generator).to(x.dtype),
        module.get_initial_state(),
    )
    return {
        Columns.OBS: torch.randn(num_rows, length, 3, generator=generator),
        Columns.STATE_IN: state,
        Columns.SEQ_LENS: torch.randint(1, length + 1, (num_rows,), generator=generator),
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


class Block(torch.nn.Module):
    """A leaky sum as a user may write it, with an argument by keyword that has a default."""

    def __init__(self, width=3, power=1):
        super().__init__()
        self.linear = torch.nn.Linear(width, width)
        self.power = power

    def forward(self, x, state, *, valid=None, scale=2.0):
        x = scale * self.linear(x) ** self.power
        if valid is not None:
            x = torch.where(valid[..., None], x, 0.0)
        h, outputs = state["h"], []
        for t in range(x.shape[1]):
            h = h / 2 + x[:, t]
            outputs.append(h)
        return torch.stack(outputs, 1), {"h": h}


class OwnMemory(Memory):
    def __init__(self, width):
        super().__init__()
        self.input_dim = self.output_dim = width
        self.block = Block(width)

    def initial_state(self):
        return {"h": torch.zeros(self.output_dim)}

    def forward(self, x, state, *, valid=None, resets=None):
        assert resets is None
        return self.block(x, state, valid=valid)

    def compilable(self):
        return [self.block]


@dataclass(kw_only=True)
class OwnConfig(MemoryConfig):
    def build_memory(self, input_dim):
        return OwnMemory(input_dim)


class OwnRLModule(MemoryRLModule):
    config_class = OwnConfig


def compiled_block(mode=True, **settings):
    block = Block(**settings)
    assert compilation.compile_blocks([block], mode, torch.device("cpu"))
    return block


def call(block, num_rows=3, length=4, **kwargs):
    """A plain call, compared with that of a copy, which is not compiled."""
    linear = block.linear
    x = torch.randn(num_rows, length, linear.in_features, dtype=linear.weight.dtype)
    state = {"h": torch.randn_like(x[:, 0])}
    actual, expected = block(x, state, **kwargs), copy.deepcopy(block)(x, state, **kwargs)
    torch.testing.assert_close(actual, expected)


def test_own_memory(traces):
    """Compiles through a plain call of its block."""
    settings = {"max_seq_len": T, "fcnet_hiddens": [8]}
    modules = []
    for compile_setting in (False, True):
        torch.manual_seed(0)
        spec = RLModuleSpec(
            module_class=OwnRLModule,
            observation_space=BOX,
            action_space=gym.spaces.Discrete(2),
            model_config={**settings, "compile": compile_setting},
        )
        modules.append(spec.build())
    for num_rows in (4, 6, 1):
        assert_close(run(modules[1], num_rows), run(modules[0], num_rows))
    assert traces == {FORWARD: 1, NO_GRAD: 1}


def test_ways_to_call(traces):
    block = compiled_block()
    x, state = torch.randn(3, 4, 3), {"h": torch.randn(3, 3)}
    expected = copy.deepcopy(block)(x, state, scale=3.0)
    for actual in (
        block(x, state, scale=3.0),
        block(x, state=state, scale=3.0),
        block(scale=3.0, state=state, x=x),
    ):
        torch.testing.assert_close(actual, expected)
    call(block)
    call(block, valid=torch.rand(3, 4) < 0.5)
    assert traces == {FORWARD: 5}


def test_hooks_run_around_the_graph(traces):
    """A graph could hold none of these: they leave torch."""
    block, seen = compiled_block(), []
    x, state = torch.randn(3, 4, 3), {"h": torch.randn(3, 3)}
    expected = block(2 * x, state)[0].numpy(force=True) + 1

    def before(block, args, kwargs):
        seen.append(kwargs)
        return (2 * args[0], *args[1:]), kwargs

    def after(block, args, outputs):
        seen.append(outputs[0].numpy(force=True))
        return outputs[0] + 1, outputs[1]

    block.register_forward_pre_hook(before, with_kwargs=True)
    block.register_forward_hook(after)
    outputs, _ = block(x, state, scale=2.0)
    np.testing.assert_allclose(outputs.numpy(force=True), expected, rtol=1e-6)
    np.testing.assert_allclose(seen[1] + 1, expected, rtol=1e-6)
    assert seen[0] == {"scale": 2.0}
    call(block)
    assert traces == {FORWARD: 2}


def test_any_number_of_models_in_one_process(traces):
    """PyTorch keeps eight graphs a function: it would give up on the ninth."""
    for width in range(1, 6):
        for power in range(1, 4):
            block = compiled_block(width=width, power=power)
            for num_rows in (3, 4, 1):
                call(block, num_rows)
    assert traces == {FORWARD: 15}


def test_any_number_of_lengths_and_dtypes(traces):
    """In two equal models, with gradient, without, and for weights that need none."""
    blocks = [compiled_block(), compiled_block()]
    blocks[1].requires_grad_(False)
    for dtype in (torch.float32, torch.float64):
        for length in range(1, 6):
            for block in blocks:
                call(block.to(dtype), length=length)
                with torch.no_grad():
                    call(block, 5, length)
    assert traces == {FORWARD: 20, NO_GRAD: 20}


@pytest.mark.slow
def test_any_number_of_row_lengths_with_target_networks(traces):
    for length in range(2, 7):
        module = build(max_seq_len=length, num_layers=1, positions="none")
        module.make_target_networks()
        for num_rows in (4, 7):
            expected = run(module, num_rows)[0]
            targets = module.forward_target(batch_of(module, num_rows))
            assert_close(next(iter(targets.values())), expected)
    assert traces == {FORWARD: 5, NO_GRAD: 10}


def test_steps_counted_in_python_are_not_compiled_for_ever(traces):
    """A graph holds the value of a number. The ninth of these is an error of PyTorch."""
    block = compiled_block("auto")
    for step in range(12):
        call(block, scale=float(step))
    assert traces[FORWARD] < 12


def test_rollouts_are_compiled_if_asked_to(traces, monkeypatch):
    monkeypatch.setattr(compilation, "CPU_DELAY", 0.0)
    outputs = {}
    for mode in (False, "auto", True):
        runner = build(compile=mode)
        step = batch_of(runner, 4)
        step[Columns.OBS] = step[Columns.OBS][:, :1]
        del step[Columns.SEQ_LENS]
        with torch.no_grad():
            runner.forward_inference(step)
            assert not traces
            outputs[mode] = [runner.forward_exploration(step) for _ in range(3)]
        assert traces[NO_GRAD] == (1 if mode is True else 0)
    assert_close(outputs[True], outputs[False])


@pytest.mark.slow
def test_inductor():
    """The real compiler: the same numbers, for batches of other sizes as well."""
    eager, compiled = build(compile=False), build()
    for num_rows in (4, 9, 1):
        assert_close(run(compiled, num_rows), run(eager, num_rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gated delta", "window", "min_gru", "lru", "ffm"])
def test_inductor_of_others(name):
    forget_graphs()
    eager, compiled = build(**OPTIONS[name], compile=False), build(**OPTIONS[name])
    for num_rows in (3, 5):
        assert_close(run(compiled, num_rows), run(eager, num_rows))
    assert all(compilation.is_compiled(block) for block in compiled.core.memory.compilable())


def test_cells_are_left_alone(traces):
    """Torch's kernels are one call already; in a stack the others' blocks are compiled."""
    mixed = {"module_class": MemoryRLModule, "memory": "mixed", "layers": ["gru", "min_gru"]}
    eager, compiled = build(**mixed, compile=False), build(**mixed)
    assert_close(run(compiled, 3), run(eager, 3))
    assert [compilation.is_compiled(block) for block in compiled.core.memory.blocks] == [
        False,
        True,
    ]
    assert traces == {FORWARD: 1, NO_GRAD: 1}


def test_names_copies_and_pickles(traces):
    eager, compiled = build(compile=False), build()
    expected = run(eager, 4)
    run(compiled, 4)
    assert compiled.state_dict().keys() == eager.state_dict().keys()
    for other in (copy.deepcopy(compiled), pickle.loads(pickle.dumps(compiled))):
        blocks = list(other.core.memory.blocks)
        assert not any(compilation.is_compiled(block) for block in blocks)
        assert_close(run(other, 4), expected)
        assert all(compilation.is_compiled(block) for block in blocks)
    assert traces == {FORWARD: 1, NO_GRAD: 1}


def test_target_networks_are_compiled(traces):
    module = build()
    module.make_target_networks()
    for num_rows in (4, 6):
        batch = batch_of(module, num_rows)
        expected = run(module, num_rows)[0]
        assert_close(next(iter(module.forward_target(batch).values())), expected)
    assert all(compilation.is_compiled(block) for block in module.target_core.memory.blocks)
    # One more without gradient, for weights that need none: PyTorch's guards know the difference.
    assert traces == {FORWARD: 1, NO_GRAD: 2}


def test_auto_leaves_short_runs_alone(monkeypatch, traces):
    blocks = list(build().core.memory.blocks)
    for delay, compiled in ((1000.0, False), (0.0, True)):
        monkeypatch.setattr(compilation, "CPU_DELAY", delay)
        assert compilation.compile_blocks(blocks, "auto", torch.device("cpu")) == compiled


def test_auto_counts_each_memorys_own_time(monkeypatch, traces):
    """A process may train a second agent after the first, for a short while."""
    clock = [0.0]
    monkeypatch.setattr(compilation.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(compilation, "CPU_DELAY", 300.0)
    first, second = (list(build().core.memory.blocks) for _ in range(2))
    compiled = []
    for clock[0], blocks in ((0.0, first), (300.0, second), (300.0, first), (599.0, second)):
        compiled.append(compilation.compile_blocks(blocks, "auto", torch.device("cpu")))
    assert compiled == [False, False, True, False]


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


@pytest.mark.slow
def test_compile_errors(monkeypatch, caplog, traces):
    """Set to "auto" it says so once and goes on; True raises."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=failing_backend))
    with caplog.at_level(logging.WARNING, logger="rllib_memory"):
        module = build(compile="auto")
        for num_rows in (4, 6):
            assert_close(run(module, num_rows), run(build(compile=False), num_rows))
    # The pass for the values, then that with gradient.
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2
    for message in messages:
        assert "could not be compiled for calls of one kind" in message
        assert "the linker is missing" in message

    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="the linker is missing"):
        run(build(compile=True), 4)


def test_what_fails_leaves_the_rest_compiled(monkeypatch, caplog, traces):
    def backend(graph, example_inputs):
        if any(isinstance(x, torch.Tensor) and x.shape[1:2] == (5,) for x in example_inputs):
            raise RuntimeError("not five")
        return working(graph, example_inputs)

    working = torch.compile.keywords["backend"]
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    with caplog.at_level(logging.WARNING, logger="rllib_memory"):
        for block in (compiled_block("auto"), compiled_block("auto")):
            for length in (4, 5, 6, 5):
                call(block, length=length)
    assert traces == {FORWARD: 2}
    assert len(caplog.records) == 1
    with pytest.raises(torch._dynamo.exc.BackendCompilerFailed, match="not five"):
        call(compiled_block(), length=5)


def test_errors_of_the_model_are_not_taken_for_compile_errors(caplog, traces):
    module = build(compile="auto")
    batch = batch_of(module, 4)
    batch[Columns.STATE_IN].pop("S")
    with pytest.raises(KeyError, match="S"):
        module.forward_train(batch)
    assert not [record for record in caplog.records if record.name == "rllib_memory"]


def ppo(pack_rows=True, **settings):
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
        .debugging(seed=0, log_sys_usage=False),
        pack_rows=pack_rows,
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


@pytest.mark.slow
@pytest.mark.ray
def test_training_needs_one_graph_a_direction(graphs, monkeypatch):
    # Packed rows have graphs of their own, and not every batch has some.
    algorithm = ppo(pack_rows=False)
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
    # Neither the value pass has a gradient, nor a step of the rollout.
    assert graphs == {FORWARD: 1, BACKWARD: 1, NO_GRAD: 2}
    # The EnvRunner acts on the trained weights.
    assert not torch.allclose(outputs[0], outputs[1], atol=1e-3)
    torch.testing.assert_close(outputs[1], trained, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.ray
def test_appo_needs_one_graph_a_direction(graphs, monkeypatch):
    """In its Learner's thread. Neither the target policy's pass has a gradient, nor a step's."""
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
    algorithm = connect(config, pack_rows=False).build_algo()
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
    assert all(compilation.is_compiled(block) for block in module.target_core.memory.blocks)
    assert graphs == {FORWARD: 1, BACKWARD: 1, NO_GRAD: 2}
