"""Exported files do, step by step, what the module does; without Ray and this package."""

import dataclasses
import functools
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import gymnasium as gym
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import tree
from ray.rllib.algorithms.ppo.ppo_catalog import PPOCatalog
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import MemoryPolicy
from rlmodules import (
    DeepLinearAttentionRLModule,
    LinearAttentionRLModule,
    MemoryQRLModule,
    MemoryRLModule,
    MemorySACRLModule,
    POPGymLinearAttentionConfig,
    export_onnx,
    export_torch,
)
from rlmodules.memories import compilation
from rlmodules.memories.positions import POSITIONS
from rlmodules.modules.base import BaseMemoryRLModule
from rlmodules.modules.catalogue import CONFIGS

ROOT = Path(__file__).parents[3]
NUM_STEPS = 50
# Both far below the number of steps.
T, WINDOW = 4, 3

FLOATS = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
GRID = gym.spaces.Box(0, 4, (3, 3), np.uint8)
IMAGE = gym.spaces.Box(0, 255, (8, 8, 3), np.uint8)
NESTED = gym.spaces.Dict(
    {
        "hand": gym.spaces.Box(-1.0, 1.0, (2, 2), np.float64),
        "cards": gym.spaces.Tuple(
            (gym.spaces.Discrete(3, start=-1), gym.spaces.MultiDiscrete([2, 3]))
        ),
        "flags": gym.spaces.MultiBinary(3),
    }
)
MASKED = gym.spaces.Dict({"observations": FLOATS, "action_mask": gym.spaces.MultiBinary(5)})
DISCRETE = gym.spaces.Discrete(4)
MULTI_DISCRETE = gym.spaces.MultiDiscrete([2, 3])
BOX = gym.spaces.Box(np.float32([-3, 0]), np.float32([1, 2]))
UNBOUNDED = gym.spaces.Box(-np.inf, np.inf, (2,), np.float32)
TREE = gym.spaces.Dict(
    {"move": BOX, "speak": gym.spaces.Tuple((DISCRETE, UNBOUNDED, MULTI_DISCRETE))}
)

HEADS = {"max_seq_len": T, "fcnet_hiddens": [8], "head_fcnet_hiddens": [8]}
FRAME = {**HEADS, "d_model": 8, "feedforward_dim": 8}
SIZES = {**FRAME, "num_heads": 2, "head_dim": 4}
SMALL = {**SIZES, "memory": "deep_linear_attention"}
LINEAR = {**SIZES, "memory": "linear_attention"}
GTRXL = {**SIZES, "memory": "gtrxl", "memory_inference": WINDOW}
SEPARATE = {"vf_share_layers": False}
SUM = {"positions": "none", "normalizer": "sum", "decay": False, "short_conv_size": 0}
POPGYM = dataclasses.asdict(POPGymLinearAttentionConfig(**HEADS, hidden_size=25))
DEEP_POPGYM = dataclasses.asdict(
    POPGymLinearAttentionConfig.deep(**HEADS, hidden_size=50, num_layers=2)
)
IMAGES = {"conv_filters": [[4, 3, 2]]}
MASKS = {"action_mask": "action_mask"}
MAX = {"S_aggregator": "max", "z_aggregator": "max"}
OURS = (MemoryRLModule, MemoryQRLModule, MemorySACRLModule)
LSTM = {"use_lstm": True, "max_seq_len": T, "lstm_cell_size": 8, "fcnet_hiddens": [8], **SEPARATE}

OTHERS = {
    "gru": FRAME | {"num_layers": 2},
    "lstm": FRAME | {"residual": True, "positions": "sine"},
    "gated_delta": SIZES | {"positions": "rotary", "output_gate": True},
    "min_gru": FRAME | {"state_dim": 6},
    "lru": FRAME | {"state_dim": 6},
    "ffm": FRAME | {"num_traces": 3, "num_rhythms": 2},
    "window": SIZES | {"window": WINDOW},
    "mixed": SIZES | {"layers": ["window", "lstm", "min_gru"], "window": WINDOW, "state_dim": 6},
}
OTHERS = {name: {**config, "memory": name} for name, config in OTHERS.items()}
QUICK = {
    "deep": (DeepLinearAttentionRLModule, SMALL, NESTED, BOX),
    "deep, SAC": (MemorySACRLModule, SMALL | SEPARATE, FLOATS, BOX),
    "linear": (LinearAttentionRLModule, MASKS | LINEAR | SUM | SEPARATE, MASKED, MULTI_DISCRETE),
    "GTrXL, Q": (MemoryQRLModule, GTRXL, DISCRETE, DISCRETE),
    "POPGym": (MemoryRLModule, POPGYM | IMAGES, IMAGE, DISCRETE),
    "POPGym, max": (MemoryRLModule, DEEP_POPGYM | MAX, FLOATS, TREE),
    "one-hot": (MemoryRLModule, SMALL | {"one_hot_max_values": 5}, GRID, DISCRETE),
    "RLlib's LSTM": (DefaultPPOTorchRLModule, LSTM, FLOATS, BOX),
    **{name: (MemoryRLModule, config, FLOATS, DISCRETE) for name, config in OTHERS.items()},
}
SLOW = {
    **{
        f"{kind.__name__}, {name}": (kind, config, FLOATS, DISCRETE if q else BOX)
        for name, config in (
            ("deep", SMALL),
            ("deep, separate", SMALL | SEPARATE),
            ("linear", LINEAR),
            ("POPGym", POPGYM),
            ("POPGym, max", POPGYM | MAX),
            ("deep POPGym", DEEP_POPGYM),
            ("window 1", {**GTRXL, "memory_inference": 1}),
            ("short training window", {**GTRXL, "memory_training": 0}),
            ("separate", GTRXL | SEPARATE),
            *OTHERS.items(),
            *((f"{name}, separate", config | SEPARATE) for name, config in OTHERS.items()),
        )
        for kind in OURS
        for q in [issubclass(kind, MemoryQRLModule)]
        if not (q and "separate" in name)
    },
    **{
        f"positions {name}": (LinearAttentionRLModule, LINEAR | {"positions": name}, FLOATS, BOX)
        for name in ("none", *POSITIONS)
    },
    **{
        f"POPGym's {name}": (MemoryRLModule, POPGYM | settings, FLOATS, BOX)
        for name, settings in {
            "cat": {"position_mode": "cat", "position_size": 3},
            "fixed scale": {"scale_positions": False},
            "max S": {"S_aggregator": "max"},
            "max z": {"z_aggregator": "max"},
        }.items()
    },
    "sum with decay": (LinearAttentionRLModule, LINEAR | SUM | {"decay": True}, FLOATS, BOX),
    "linear convolution": (
        LinearAttentionRLModule, LINEAR | {"short_conv_activation": "linear"}, FLOATS, BOX,
    ),
    "atoms": (
        MemoryQRLModule,
        SMALL | {"num_atoms": 5, "dueling": False}, FLOATS, DISCRETE,
    ),
    "free log std": (DeepLinearAttentionRLModule, SMALL | {"free_log_std": True}, FLOATS, TREE),
    "RLlib's LSTM, shared": (
        DefaultPPOTorchRLModule, LSTM | {"vf_share_layers": True}, FLOATS, MULTI_DISCRETE,
    ),
}  # fmt: skip


def build(module_class, config, observation_space, action_space):
    torch.manual_seed(0)
    catalog = {"catalog_class": PPOCatalog} if module_class is DefaultPPOTorchRLModule else {}
    module = RLModuleSpec(
        module_class=module_class,
        observation_space=observation_space,
        action_space=action_space,
        model_config=config,
        **catalog,
    ).build()
    with torch.no_grad():
        # Fresh heads hardly heed their inputs.
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    if hasattr(module, "make_target_networks"):
        module.make_target_networks()
    return module


class Exported:
    """A module, its checkpoint and its two files."""

    def __init__(self, case, folder):
        self.module = build(*case)
        self.checkpoint = self.module.save_to_path(str(folder / "checkpoint"))
        self.onnx, self.torch = folder / "policy.onnx", folder / "policy.pt2"
        export_onnx(self.module, self.onnx)
        export_torch(self.module, self.torch)
        self.program = torch.export.load(self.torch).module()
        self.session = session_of(self.onnx)


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    made = {}

    def make(name):
        if name not in made:
            case = {**QUICK, **SLOW}[name]
            made[name] = Exported(case, tmp_path_factory.mktemp("exported"))
        return made[name]

    return make


def session_of(path):
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(path, options)


def run_onnx(session, inputs):
    names = [output.name for output in session.get_outputs()]
    return dict(zip(names, session.run(None, inputs), strict=True))


def run_torch(program, inputs):
    outputs = program({name: torch.as_tensor(x) for name, x in inputs.items()})
    return {name: x.numpy() for name, x in outputs.items()}


def named(prefix, part):
    """The leaves of nested dicts and tuples under the names that files give them."""
    if isinstance(part, (dict, tuple)):
        children = part.items() if isinstance(part, dict) else enumerate(part)
        return {k: x for key, child in children for k, x in named(f"{prefix}.{key}", child).items()}
    return {prefix: np.asarray(part)}


def stack(items):
    return tree.map_structure(lambda *leaves: np.stack(leaves), *items)


def any_state(session, num_rows):
    """A state that no step may start from: clients need not know the initial one."""
    dtypes = {"tensor(float)": np.float32, "tensor(int64)": np.int64}
    return {
        x.name: np.full([num_rows, *x.shape[1:]], 7, dtypes[x.type])
        for x in session.get_inputs()
        if x.name.startswith("state_in.")
    }


def next_state(outputs):
    return {
        name.replace("state_out", "state_in"): x
        for name, x in outputs.items()
        if name.startswith("state_out.")
    }


class Reference:
    """The module with a time axis, states and initial states; actions from `MemoryPolicy`."""

    def __init__(self, files, num_rows):
        self.module = files.module
        self.policy = MemoryPolicy.from_checkpoint(files.checkpoint)
        self.initial = tree.map_structure(
            lambda x: x.expand(num_rows, *x.shape), self.module.get_initial_state()
        )
        self.state = self.initial

    def step(self, observations, reset):
        for row in np.flatnonzero(reset):
            self.policy.reset(row)
        actions = self.policy.act_batch(dict(enumerate(observations)))
        flags = torch.as_tensor(reset)
        self.state = tree.map_structure(
            lambda first, x: torch.where(flags.view(-1, *[1] * (x.dim() - 1)), first, x),
            self.initial,
            self.state,
        )
        obs = tree.map_structure(lambda x: torch.as_tensor(x).unsqueeze(1), stack(observations))
        outputs = self.module.forward_inference({Columns.OBS: obs, Columns.STATE_IN: self.state})
        self.state = state = outputs[Columns.STATE_OUT]
        if "critic" in state and isinstance(self.module, BaseMemoryRLModule):
            state = state["actor"]
        expected = named("action", stack([actions[row] for row in range(len(observations))]))
        if Columns.ACTION_DIST_INPUTS in outputs:
            expected["action_dist_inputs"] = outputs[Columns.ACTION_DIST_INPUTS][:, 0].numpy()
        return expected | named("state_out", state)


def assert_equal(actual, expected):
    assert actual.keys() == expected.keys()
    for name, x in expected.items():
        # RLlib's actions are int32 where their space is of int64.
        assert actual[name].dtype.kind == x.dtype.kind, name
        assert actual[name].shape == x.shape, name
        np.testing.assert_allclose(actual[name], x, rtol=1e-4, atol=2e-5, err_msg=name)


@pytest.mark.parametrize("num_rows", [3, 1, 7])
@pytest.mark.parametrize(
    "name", [*QUICK, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]
)
def test_files_equal_the_module(exported, name, num_rows):
    files = exported(name)
    reference = Reference(files, num_rows)
    space = files.module.observation_space
    space.seed(0)
    onnx_state = torch_state = any_state(files.session, num_rows)
    for t in range(NUM_STEPS if num_rows == 3 else 2 * T):
        observations = [space.sample() for _ in range(num_rows)]
        reset = np.array([t % (T + 1 + 16 * row) == 0 for row in range(num_rows)])
        expected = reference.step(observations, reset)
        inputs = named("obs", stack(observations)) | {"reset": reset}
        outputs = run_onnx(files.session, inputs | onnx_state)
        assert_equal(outputs, expected)
        onnx_state = next_state(outputs)
        outputs = run_torch(files.program, inputs | torch_state)
        assert_equal(outputs, expected)
        torch_state = next_state(outputs)


def test_every_memory_is_exported():
    assert {config.get("memory") for _, config, *_ in QUICK.values()} >= CONFIGS.keys()


def test_the_critic_is_left_out(exported):
    weights = exported("deep, SAC").program.state_dict()
    assert sum("head_norm.weight" in name for name in weights) == 2
    assert {name.split(".")[1] for name in weights} == {"pi", "qf_encoder"}


def test_a_file_runs_with_torch_alone(exported, tmp_path):
    """In a process that can import neither Ray nor this package."""
    files = exported("deep")
    files.module.observation_space.seed(1)
    observations = [files.module.observation_space.sample() for _ in range(3)]
    inputs = named("obs", stack(observations)) | {"reset": np.ones(3, bool)}
    inputs |= any_state(files.session, 3)
    np.savez(tmp_path / "inputs.npz", **inputs)
    script = """
        import sys

        class Blocked:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] in {"ray", "rlmodules", "connectors", "gymnasium"}:
                    raise ImportError(name)

        sys.meta_path.insert(0, Blocked())
        import numpy as np
        import torch

        folder, path = sys.argv[1:]
        model = torch.export.load(path).module()
        inputs = np.load(f"{folder}/inputs.npz")
        outputs = model({name: torch.as_tensor(x) for name, x in inputs.items()})
        np.savez(f"{folder}/outputs.npz", **{name: x.numpy() for name, x in outputs.items()})
    """
    command = [sys.executable, "-c", textwrap.dedent(script), tmp_path, files.torch]
    subprocess.run(command, cwd=tmp_path, env={}, check=True)
    with np.load(tmp_path / "outputs.npz") as outputs:
        assert_equal(dict(outputs), run_onnx(files.session, inputs))


def test_metadata(exported):
    files = exported("linear")
    in_onnx = {p.key: json.loads(p.value) for p in onnx.load(files.onnx).metadata_props}
    in_torch = {"metadata.json": ""}
    torch.export.load(files.torch, extra_files=in_torch)
    assert json.loads(in_torch["metadata.json"]) == in_onnx
    state = {
        "S": {"shape": [1, 2, 4, 4], "dtype": "float32"},
        "z": {"shape": [1, 2, 4], "dtype": "float32"},
    }
    assert in_onnx == {
        "format_version": 1,
        "observation_space": str(MASKED),
        "action_space": str(MULTI_DISCRETE),
        "inputs": {
            "obs.action_mask": {"shape": [5], "dtype": "int8"},
            "obs.observations": {"shape": [3], "dtype": "float32"},
            "reset": {"shape": [], "dtype": "bool"},
            **{f"state_in.{name}": value for name, value in state.items()},
        },
        "outputs": {
            "action": {"shape": [2], "dtype": "int64"},
            "action_dist_inputs": {"shape": [5], "dtype": "float32"},
            **{f"state_out.{name}": value for name, value in state.items()},
        },
    }
    assert [x.name for x in files.session.get_inputs()] == list(in_onnx["inputs"])
    assert all(x.shape[0] == "batch" for x in files.session.get_inputs())


def test_nothing_of_this_machine_is_in_the_files(exported):
    files = exported("deep")
    for path in (files.onnx, files.torch):
        assert str(ROOT).encode() not in path.read_bytes()
        assert b"site-packages" not in path.read_bytes()


def test_exporting_changes_nothing_and_repeats(exported, tmp_path, monkeypatch):
    files = exported("linear")
    module = files.module
    module.train()
    before = {name: x.clone() for name, x in module.state_dict().items()}
    blocks = module.core.memory.compilable()
    monkeypatch.setattr(compilation, "_graphs", {})
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    compilation.compile_blocks(blocks, True, torch.device("cpu"))
    export_onnx(module, tmp_path / "again.onnx")
    export_torch(module, tmp_path / "policy.pt2")
    assert (tmp_path / "again.onnx").read_bytes() == files.onnx.read_bytes()
    assert (tmp_path / "policy.pt2").read_bytes() == files.torch.read_bytes()
    assert all(part.training for part in module.modules())
    assert all(parameter.requires_grad for parameter in module.core.parameters())
    assert all(compilation.is_compiled(block) for block in blocks)
    assert before.keys() == module.state_dict().keys()
    assert all(x.equal(before[name]) for name, x in module.state_dict().items())


class Branching(LinearAttentionRLModule):
    def _forward(self, batch, **kwargs):
        if batch[Columns.OBS].sum() > 0:
            return super()._forward(batch, **kwargs)
        raise ValueError("negative")


def test_what_cannot_be_exported_is_named(tmp_path):
    path = tmp_path / "policy.pt2"
    with pytest.raises(ValueError, match="`Branching` cannot be exported"):
        export_torch(build(Branching, LINEAR, FLOATS, DISCRETE), path)
    stateless = build(DefaultPPOTorchRLModule, {"fcnet_hiddens": [8]}, FLOATS, DISCRETE)
    with pytest.raises(ValueError, match="`module` is a DefaultPPOTorchRLModule without a state"):
        export_torch(stateless, path)
    with pytest.raises(TypeError, match="`module` is a list"):
        export_torch([stateless], path)
    nested = gym.spaces.Dict({"a.b": FLOATS, "a": gym.spaces.Dict({"b": FLOATS})})
    with pytest.raises(ValueError, match="The keys of `obs`"):
        export_torch(build(LinearAttentionRLModule, LINEAR, nested, DISCRETE), path)
    assert not path.exists()


def test_a_missing_extra_is_named(tmp_path, monkeypatch):
    module = build(LinearAttentionRLModule, LINEAR, FLOATS, DISCRETE)
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(ImportError, match=r"`export_onnx` needs the package 'onnxscript'.*export"):
        export_onnx(module, tmp_path / "policy.onnx")


def test_the_extra_is_optional():
    code = "import sys, rlmodules; assert not {'onnx', 'onnx_ir', 'onnxscript'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
