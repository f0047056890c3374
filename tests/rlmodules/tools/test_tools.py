"""`python -m rlmodules`: its numbers against those of real algorithms, its drawings, its errors."""

import json
import re
import runpy
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.rllib.examples.envs.classes.multi_agent import MultiAgentCartPole
from ray.rllib.examples.rl_modules.classes.random_rlm import RandomRLModule
from ray.tune.registry import register_env
from typer.testing import CliRunner

from connectors import connect
from connectors.learners import minibatches
from rlmodules import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    GTrXLConfig,
    GTrXLRLModule,
    MemoryQRLModule,
    MemoryRLModule,
    MemorySACRLModule,
    MixedConfig,
    POPGymLinearAttentionConfig,
)
from rlmodules.tools import costs, drawing, loading, sequences
from rlmodules.tools.cli import app
from rlmodules.tools.describe import describe
from rlmodules.tools.memory_map import Layer, MemoryMap, look_back

pytestmark = pytest.mark.ray

ROOT = Path(__file__).parents[3]
T = 8
SMALL = {"max_seq_len": T, "d_model": 8, "num_heads": 2, "head_dim": 4, "fcnet_hiddens": [6]}
SMALL |= {"feedforward_dim": 10, "compile": False}
MODULE = "learner_group/learner/rl_module/default_policy"


class Endless(gym.Env):
    """Random observations, and rewards that count the steps."""

    def __init__(self, config=None):
        self.observation_space = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
        self.action_space = (config or {}).get("action_space", gym.spaces.Discrete(2))

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        return self._observation(), {}

    def step(self, action):
        self.t += 1
        return self._observation(), float(self.t), False, False, {}

    def _observation(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


def base(config_class, module_class, model_config, env_config=None):
    return (
        config_class()
        .environment(Endless, env_config=env_config or {})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2, rollout_fragment_length=24)
        .rl_module(rl_module_spec=RLModuleSpec(module_class, model_config=model_config))
        .debugging(seed=0, log_sys_usage=False)
    )


def ppo(module_class=DeepLinearAttentionRLModule, model_config=None):
    model_config = model_config or DeepLinearAttentionConfig(**SMALL)
    return base(PPOConfig, module_class, model_config).training(
        train_batch_size_per_learner=90, minibatch_size=40, num_epochs=1
    )


def connected():
    return connect(ppo())


def gtrxl():
    register_env("endless", Endless)
    return connect(
        ppo(GTrXLRLModule, GTrXLConfig(memory_inference=6, **SMALL)).environment("endless")
    )


def popgym_max():
    model_config = POPGymLinearAttentionConfig(max_seq_len=T, S_aggregator="max")
    return connect(ppo(MemoryRLModule, model_config))


def mixed():
    """One of its layers has attention weights."""
    model_config = MixedConfig(layers=["window", "gru"], window=4, **SMALL)
    return connect(ppo(MemoryRLModule, model_config))


def apart():
    return connect(ppo(model_config=DeepLinearAttentionConfig(vf_share_layers=False, **SMALL)))


def appo():
    config = base(APPOConfig, DeepLinearAttentionRLModule, DeepLinearAttentionConfig(**SMALL))
    return connect(config.training(train_batch_size_per_learner=96).learners(num_learners=0))


def dqn():
    config = base(DQNConfig, MemoryQRLModule, DeepLinearAttentionConfig(**SMALL))
    return connect(config.training(train_batch_size_per_learner=70, n_step=1))


def sac():
    box = {"action_space": gym.spaces.Box(-1.0, 1.0, (2,), np.float32)}
    module = (MemorySACRLModule, DeepLinearAttentionConfig(**SMALL))
    return connect(base(SACConfig, *module, env_config=box))


def lstm():
    model_config = DefaultModelConfig(
        use_lstm=True, max_seq_len=T, lstm_cell_size=5, fcnet_hiddens=[6], vf_share_layers=True
    )
    return ppo(DefaultPPOTorchRLModule, model_config)


def agents():
    specs = {
        "memory": RLModuleSpec(
            DeepLinearAttentionRLModule, model_config=DeepLinearAttentionConfig(**SMALL)
        ),
        "plain": RLModuleSpec(DefaultPPOTorchRLModule),
    }
    config = (
        PPOConfig()
        .environment(MultiAgentCartPole, env_config={"num_agents": 2})
        .env_runners(num_env_runners=0, rollout_fragment_length=20)
        .training(train_batch_size_per_learner=20, minibatch_size=20, num_epochs=1)
        .multi_agent(
            policies={"memory", "plain"},
            policy_mapping_fn=lambda agent, episode, **kwargs: ["memory", "plain"][agent],
        )
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
        .debugging(log_sys_usage=False)
    )
    return connect(config)


NOT_A_CONFIG = 3


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    """Builder of a config -> path of a checkpoint, and the parameters of the Learner's modules."""
    made = {}

    def make(build):
        if build not in made:
            algorithm = build().build_algo()
            path = algorithm.save_to_path(str(tmp_path_factory.mktemp(build.__name__)))
            modules = algorithm.learner_group._learner.module
            made[build] = (
                path,
                {
                    module_id: {name: leaf.numel() for name, leaf in module.named_parameters()}
                    for module_id, module in modules.items()
                },
            )
            algorithm.stop()
        return made[build]

    return make


def run(*args):
    return CliRunner().invoke(app, [str(arg) for arg in args], catch_exceptions=False)


def described(target):
    result = run("describe", target, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def place(build):
    return f"{__name__}:{build.__name__}"


# Numbers.


@pytest.mark.parametrize("build", [connected, gtrxl, agents, dqn])
def test_parameters_are_those_of_the_learner(checkpoints, build):
    path, parameters = checkpoints(build)
    facts = described(path)
    assert facts["algorithm"]["connected"]
    assert facts["modules"].keys() == parameters.keys()
    for module_id, module in facts["modules"].items():
        own = {k: v for k, v in parameters[module_id].items() if not k.startswith("target_")}
        numbers = module["parameters"]
        assert numbers["total"] == sum(numbers["parts"].values()) == sum(own.values())
        for part, number in numbers["parts"].items():
            assert number == sum(v for k, v in own.items() if k.startswith(f"{part}."))


def test_parts_of_a_module():
    facts = described(place(connected))["modules"]["default_policy"]
    parts = facts["parameters"]["parts"]
    assert parts["core.encoder"] == 3 * 6 + 6
    assert parts["core.memory"] == sum(
        parameter.numel()
        for parameter in DeepLinearAttentionConfig(**SMALL).build_memory(6).parameters()
    )
    assert (parts["policy_head"], parts["value_head"]) == (8 * 2 + 2, 8 + 1)
    assert facts["parameters"]["total"] - facts["parameters"]["inference_only"] == 8 + 1
    assert facts["memory"] == "deep_linear_attention"


def test_states():
    facts = described(place(connected))["modules"]["default_policy"]
    leaves = {leaf["name"]: leaf for leaf in facts["state"]["leaves"]}
    assert leaves["S"] == {
        "name": "S", "shape": [2, 2, 4, 4], "dtype": "float32", "numbers": 64, "bytes": 256
    }  # fmt: skip
    assert facts["state"]["bytes"] == 4 * (2 * 2 * 4 * 4 + 2 * 3 * 3 * 2 * 4) + 8


def test_what_is_stored_and_trained_on(monkeypatch):
    """Fragments of 24 steps at T = 8: three full rows, and one with the bootstrap step alone."""
    facts = described(place(connected))
    module = facts["modules"]["default_policy"]
    sizes = []

    class Recorded(minibatches.RowMinibatches):
        def __iter__(self):
            for minibatch in super().__iter__():
                sizes.append(len(minibatch["default_policy"][Columns.SEQ_LENS]))
                yield minibatch

    monkeypatch.setattr(minibatches, "RowMinibatches", Recorded)
    algorithm = connected().build_algo()
    algorithm.train()  # what follows starts inside the episodes
    samples = [algorithm.env_runner.sample() for _ in range(2)]
    episodes = [episode for sample in samples for episode in sample]
    steps = sum(len(episode) for episode in episodes)
    num_bytes = 0
    for sample in samples:
        recorded = [episode.get_extra_model_outputs(Columns.STATE_OUT) for episode in sample]
        snapshots = set(np.concatenate(recorded))
        states = [state for each in snapshots for state in (each.state, each.end_state)]
        # Neighbouring rows share an array, which is pickled once.
        arrays = {id(leaf): leaf.nbytes for state in states for leaf in state.values()}
        num_bytes += sum(arrays.values())
    learner = algorithm.learner_group._learner
    batch = learner._learner_connector(
        rl_module=learner.module, batch={}, episodes=episodes, shared_data={}
    )["default_policy"]
    algorithm.stop()

    rows, stored = module["rows"], module["stored_states"]["per_train_batch"]
    assert rows["rows_per_batch"] == 16
    assert rows["padding"] == 1 - (steps + len(episodes)) / (16 * T)
    assert stored["rllib"] == steps * module["state"]["bytes"]
    assert stored["connect"] == num_bytes
    assert sizes == [rows["rows_per_minibatch"]] * 2
    # Rows with a bootstrap step alone are gone by now.
    assert len(batch[Columns.SEQ_LENS]) == sum(sizes) == 12


@pytest.mark.parametrize(
    ("build", "expected"),
    [
        (ppo, {"slots_per_row": 8, "rows_per_fragment": 4, "rows_per_batch": 16}),
        (appo, {"slots_per_row": 9, "rows_per_fragment": 3, "rows_per_batch": 12, "padding": 0}),
        (dqn, {"rows_per_fragment": None, "rows_per_batch": 10, "rows_per_minibatch": None}),
        (sac, {"rows_per_batch": 37}),
        (agents, {"rows_per_fragment": 3, "rows_per_batch": None, "rows_per_minibatch": None}),
    ],
)
def test_rows(build, expected):
    facts = sequences.rows(build(), T, connected=build is not ppo)
    assert {key: facts[key] for key in expected} == expected


def test_rows_of_recorded_episodes_depend_on_them():
    config = BCConfig().offline_data(input_=["nowhere"])
    facts = sequences.rows(config, T, connected=True)
    assert facts["rows_per_batch"] is None
    assert "rollout_fragment_length" not in sequences.algorithm_settings(config, connected=True)


def test_arithmetic_of_linear_attention():
    """Each weight of a matrix is one multiply-add a step, and so is each number of S."""
    (module,) = loading.build_modules(connected()).values()
    matrices = [p.numel() for n, p in module.named_parameters() if p.dim() == 2 and "conv" not in n]
    state = 2 * 2 * 4 * 4
    value_head = 8
    counted = costs.flops(module, T)
    assert counted["rollout"] == 2 * (sum(matrices) - value_head + state)
    # Forward, then gradients of weights and of inputs; the encoder's input needs none.
    least = 2 * (3 * sum(matrices) - 3 * 6)
    assert least < counted["training"] < 1.5 * least
    assert all(parameter.grad is None for parameter in module.parameters())


def test_arithmetic_of_rllibs_lstm():
    (module,) = loading.build_modules(lstm()).values()
    head, gates = 6 * 3 + 5 * 2 + 5 * 1, 4 * 5 * (6 + 5)
    assert costs.flops(module, T)["rollout"] == 2 * (head - 5 + gates)


def test_settings_that_differ():
    settings = described(place(gtrxl))["modules"]["default_policy"]["settings"]
    settings = {setting.pop("name"): setting for setting in settings}
    assert settings["memory_inference"] == {"value": 6, "default": 64}
    assert settings["gate_bias"] == {"value": 2.0, "default": 2.0}
    assert settings["max_seq_len"] == {"value": T}


def test_of_rllibs_modules_only_what_differs_is_told():
    settings = described(place(lstm))["modules"]["default_policy"]["settings"]
    assert {setting["name"]: setting["value"] for setting in settings} == {
        "use_lstm": True, "max_seq_len": T, "lstm_cell_size": 5, "fcnet_hiddens": [6]
    }  # fmt: skip


def test_a_module_alone(checkpoints):
    path, _ = checkpoints(dqn)
    alone, whole = described(f"{path}/{MODULE}"), described(path)
    assert alone["algorithm"] is None
    module, same = alone["modules"]["default_policy"], whole["modules"]["default_policy"]
    assert "rows" not in module
    assert {**module, "rows": same["rows"]} == same


@pytest.mark.parametrize("build", [connected, lstm, agents, sac])
def test_printed(build):
    result = run("describe", place(build))
    assert result.exit_code == 0
    facts = described(place(build))
    for module_id, module in facts["modules"].items():
        assert f"Module {module_id}" in result.stdout
        assert f"{module['parameters']['total']:,}" in result.stdout
        for leaf in module["state"]["leaves"]:
            assert re.search(rf"^{leaf['name']} .*{leaf['bytes']:,}", result.stdout, re.MULTILINE)


def test_config_in_a_file(tmp_path):
    (tmp_path / "beside.py").write_text("T = 12\n")
    (tmp_path / "setup.py").write_text(
        "from beside import T\n"
        "from rlmodules import DeepLinearAttentionConfig\n"
        f"from {__name__} import ppo\n"
        "config = ppo(model_config=DeepLinearAttentionConfig(max_seq_len=T))\n"
    )
    facts = described(f"{tmp_path}/setup.py:config")
    assert facts["modules"]["default_policy"]["rows"]["max_seq_len"] == 12
    assert not facts["algorithm"]["connected"]


def test_the_example_of_the_docs():
    facts = described(ROOT / "docs" / "inspecting.py:config")
    parts = facts["modules"]["default_policy"]["parameters"]["parts"]
    assert parts["core.memory"] == parts["critic_core.memory"]


class NeedsMore(DefaultPPOTorchRLModule):
    """A module that reads a column of its own, and has a parameter of its own."""

    def setup(self):
        super().setup()
        self.scale = torch.nn.Parameter(torch.ones(7))

    def _forward(self, batch, **kwargs):
        return super()._forward({**batch, "obs": batch["more"]}, **kwargs)


def test_modules_of_other_kinds(caplog):
    plain = DefaultModelConfig(fcnet_hiddens=[6])
    (module,) = loading.build_modules(ppo(NeedsMore, plain)).values()
    (reference,) = loading.build_modules(ppo(DefaultPPOTorchRLModule, plain)).values()
    facts = describe(None, {"a": module, "b": reference, "c": random_module()})["modules"]
    assert facts["a"]["flops_per_step"] is None
    assert "No arithmetic counted" in caplog.text
    assert facts["a"]["parameters"]["parts"]["scale"] == 7
    assert facts["a"]["parameters"]["total"] == facts["b"]["parameters"]["total"] + 7
    assert facts["b"]["flops_per_step"]["rollout"] == 2 * (3 * 6 + 6 * 2)
    assert (facts["c"]["memory"], facts["c"]["parameters"]["total"]) == (None, 0)


def random_module():
    env = Endless()
    return RandomRLModule(observation_space=env.observation_space, action_space=env.action_space)


# Memory maps.


@pytest.mark.parametrize(
    ("build", "target", "layers"),
    [
        (connected, "", ["core, layer 0", "core, layer 1"]),
        (gtrxl, "", ["core, layer 0", "core, layer 1"]),
        (dqn, MODULE, ["core, layer 0", "core, layer 1"]),
        (apart, "", [f"{core}, layer {i}" for core in ("core", "critic_core") for i in range(2)]),
    ],
)
def test_memory_map(checkpoints, tmp_path, build, target, layers):
    path, _ = checkpoints(build)
    options = ["--env", f"{__file__}:Endless"] if target else []
    result = run("memory-map", f"{path}/{target}", *options, "--steps", 11, "--out", tmp_path / "a")
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("Endless, seed 0: 11 steps, return 66.00\n")
    assert result.stdout.splitlines()[1].startswith("weights  ")
    for layer in layers:
        assert len(re.findall(rf"^{layer} +\d+ ", result.stdout, re.MULTILINE)) == 2
    image = (tmp_path / "a" / "memory_map.png").read_bytes()
    assert image.startswith(b"\x89PNG\r\n\x1a\n")
    page = (tmp_path / "a" / "memory_map.html").read_text()
    assert not re.search(r"https?:|//\w|\bsrc\b|\bimport\b|url\(", page)
    data = json.loads(re.search(r"const data = (.*);", page).group(1))
    assert [layer["name"] for layer in data["layers"]] == layers
    assert data["rewards"] == list(range(1, 12))
    assert {*data["actions"]} <= {"0", "1"}
    weights = data["layers"][0]["heads"][1]
    assert [len(row) for row in weights] == list(range(1, 12))
    if build is gtrxl:
        assert np.allclose([sum(row) for row in weights], 1, atol=0.01)


def test_the_map_is_of_what_the_agent_saw(checkpoints, tmp_path):
    path, _ = checkpoints(gtrxl)
    run("memory-map", path, "--steps", 9, "--seed", 3, "--out", tmp_path)
    page = (tmp_path / "memory_map.html").read_text()
    data = json.loads(re.search(r"const data = (.*);", page).group(1))
    module = RLModule.from_checkpoint(f"{path}/{MODULE}")
    env = Endless()
    observations = [env.reset(seed=3)[0]] + [env.step(0)[0] for _ in range(8)]
    state = {key: leaf[None] for key, leaf in module.core.memory.initial_state().items()}
    x = module.core.encoder(torch.as_tensor(np.array(observations))[None])
    expected = module.core.memory.attention_weights(x, state)[0]
    for layer, heads in zip(data["layers"], expected, strict=True):
        for rows, matrix in zip(layer["heads"], heads, strict=True):
            for t, row in enumerate(rows):
                np.testing.assert_allclose(row, matrix[t, : t + 1], atol=1e-3)


@pytest.mark.parametrize("build", [popgym_max, mixed])
def test_a_map_by_gradient(checkpoints, tmp_path, build):
    path, _ = checkpoints(build)
    result = run("memory-map", path, "--steps", 7, "--out", tmp_path)
    assert result.exit_code == 0, result.output
    assert re.search(r"^gradient +head .*\ncore +all +\d", result.stdout, re.MULTILINE)
    page = (tmp_path / "memory_map.html").read_text()
    (layer,) = json.loads(re.search(r"const data = (.*);", page).group(1))["layers"]
    assert (layer["name"], layer["kind"], layer["labels"]) == ("core", "gradient", ["gradient"])
    module = RLModule.from_checkpoint(f"{path}/{MODULE}")
    env = Endless()
    observations = [env.reset(seed=0)[0]] + [env.step(0)[0] for _ in range(6)]
    state = {key: leaf[None] for key, leaf in module.core.memory.initial_state().items()}
    x = module.core.encoder(torch.as_tensor(np.array(observations))[None])
    expected = module.core.memory.gradient_map(x, state)[0]
    for t, (row, norms) in enumerate(zip(layer["heads"][0], expected, strict=True)):
        np.testing.assert_allclose(row, (norms / norms.sum())[: t + 1], atol=1e-3)


def test_look_back():
    weights = np.zeros((2, 20, 20))
    weights[0] = np.eye(20, k=-2)
    weights[1, 19, 0], weights[1, 19, 18] = -1.0, 3.0
    first, second = look_back([Layer("layer", weights)])
    assert first == {
        "layer": "layer", "head": 0, "kind": "weights", "mean_look_back": 2.0,
        "share_within_1": 0.0, "share_within_4": 1.0, "share_within_16": 1.0,
    }  # fmt: skip
    assert second["mean_look_back"] == (19 + 3 * 1) / 4
    assert second["share_within_1"] == second["share_within_16"] == 0.75


def test_no_text_ends_the_script(tmp_path):
    played = MemoryMap([Layer("a", np.ones((1, 1, 1)))], [0], [0.0])
    drawing.draw_html(played, tmp_path / "a.html", title="</script>")
    assert (tmp_path / "a.html").read_text().count("</script>") == 1


# Errors.


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["describe", "nothing"], "neither a checkpoint's folder nor the place of an object"),
        (["describe", "no_such_package.x:config"], "There is no module `no_such_package.x`"),
        (["describe", "nowhere.py:config"], "There is no file `nowhere.py`"),
        (["describe", f"{__name__}:config"], "has no `config`"),
        (["describe", f"{__name__}:NOT_A_CONFIG"], "is or returns a int"),
        (["describe", "."], "no checkpoint of an Algorithm"),
        (["memory-map", "nothing"], "no checkpoint of an Algorithm"),
        (["memory-map", "nothing", "--steps", "0"], "greater than or equal to 1"),
        (["describe"], "Missing argument"),
    ],
)
def test_bad_arguments(args, message):
    result = run(*args)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not result.stdout


@pytest.mark.parametrize(
    ("build", "target", "options", "message"),
    [
        (connected, MODULE, [], "names no environment to play in"),
        (connected, "", ["--env", "NoSuch-v0"], "which gymnasium does not know"),
        (lstm, "", [], "`DefaultPPOTorchRLModule` has no memory of this package"),
        (agents, "", [], "but a map is of one module"),
    ],
)
def test_maps_that_cannot_be(checkpoints, tmp_path, build, target, options, message):
    path, _ = checkpoints(build)
    result = run("memory-map", f"{path}/{target}", *options, "--out", tmp_path / "a")
    assert result.exit_code == 2
    assert message in result.stderr
    assert not (tmp_path / "a").exists()


def test_a_checkpoint_of_what_cannot_be_imported(checkpoints, monkeypatch):
    path, _ = checkpoints(connected)
    monkeypatch.setitem(sys.modules, __name__, None)
    for command in ("describe", "memory-map"):
        result = run(command, path)
        assert result.exit_code == 2
        assert "needs what cannot be imported here" in result.stderr


def test_no_row_length():
    (module,) = loading.build_modules(lstm()).values()
    del module.model_config["max_seq_len"]
    with pytest.raises(ValueError, match="`max_seq_len` is missing in the model config of Default"):
        describe(None, {"a": module})


def test_a_package_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "typer", None)
    monkeypatch.delitem(sys.modules, "rlmodules.tools.cli")
    with pytest.raises(SystemExit, match=r"`typer`.*rllib-memory\[tools\]"):
        runpy.run_module("rlmodules")
