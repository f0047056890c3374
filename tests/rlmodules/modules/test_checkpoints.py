"""Modules of checkpoints: found by any path, from scripts too, and what a misfit says."""

import json
import subprocess
import sys
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import torch

from rlmodules import GRUConfig, MemoryRLModule, export_torch
from rlmodules.modules.checkpoints import load_module, load_modules

ROOT = Path(__file__).parents[3]
SPACES = {
    "observation_space": gym.spaces.Box(-1.0, 1.0, (3,), np.float32),
    "action_space": gym.spaces.Discrete(2),
}
SMALL = {"memory": "gru", "max_seq_len": 4, "d_model": 8, "fcnet_hiddens": [6], "compile": False}

# A config and a module class that only the script has, as in a first training script.
SCRIPT = """
from __future__ import annotations

import sys
from dataclasses import dataclass, field

import gymnasium as gym

from rlmodules import GRUConfig, MemoryRLModule
from rlmodules.memories.options import Count


@dataclass(kw_only=True)
class ScriptConfig(GRUConfig):
    d_model: Count = 8
    notes: list[str] = field(default_factory=list)


class ScriptModule(MemoryRLModule):
    config_class = ScriptConfig


ScriptModule(
    observation_space=gym.spaces.Discrete(3),
    action_space=gym.spaces.Discrete(2),
    model_config=dict(max_seq_len=4, num_layers=2),
).save_to_path(sys.argv[1])
"""


def build(**settings):
    return MemoryRLModule(**SPACES, model_config={**SMALL, **settings})


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    module = build()
    return module, Path(module.save_to_path(tmp_path_factory.mktemp("saved") / "module"))


@pytest.mark.parametrize("absolute", [False, True])
def test_any_path(saved, monkeypatch, tmp_path, absolute):
    module, path = saved
    monkeypatch.chdir(path.parent)
    given = path if absolute else Path(path.name)
    for loaded in (load_module(given), load_module(str(given))):
        for key, value in module.state_dict().items():
            torch.testing.assert_close(loaded.state_dict()[key], value, rtol=0, atol=0)
    export_torch(given, tmp_path / "policy.pt2")
    files = {"metadata.json": ""}
    torch.export.load(tmp_path / "policy.pt2", extra_files=files)
    assert json.loads(files["metadata.json"])["inputs"]["state_in.h"]["shape"] == [1, 8]


def test_no_checkpoint(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for load in (load_module, load_modules):
        with pytest.raises(ValueError, match=f"`path` is '{tmp_path}/nowhere', where there is no"):
            load("nowhere")
    with pytest.raises(ValueError, match=r"nowhere', where there is no"):
        export_torch("nowhere", tmp_path / "policy.pt2")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"d_model": 12}, "fit: `d_model` is 8 in the checkpoint and 12 here. Nothing"),
        ({"memory": "lstm"}, "`memory` is 'gru' in the checkpoint and 'lstm' here"),
        ({"max_seq_len": 6, "num_layers": 2, "residual": True}, "`num_layers` is None in"),
    ],
)
def test_a_misfit_names_the_settings(saved, settings, message):
    _, path = saved
    other = build(**settings)
    before = {key: value.clone() for key, value in other.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        other.restore_from_path(path)
    for key, value in other.state_dict().items():
        assert torch.equal(value, before[key])


def test_settings_that_do_not_matter_may_differ(saved):
    module, path = saved
    longer = build(max_seq_len=9)
    longer.restore_from_path(path)
    for key, value in module.state_dict().items():
        assert torch.equal(longer.state_dict()[key], value)


@pytest.mark.slow
def test_classes_of_a_script(tmp_path):
    """They stand in the checkpoint itself, which any process loads and describes."""
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    run = {"cwd": tmp_path, "check": True, "env": {"PYTHONPATH": str(ROOT)}}
    subprocess.run([sys.executable, script, tmp_path / "saved"], **run)
    assert issubclass(type(load_module(tmp_path / "saved").memory_config), GRUConfig)
    command = [sys.executable, "-m", "rlmodules", "describe", "saved", "--json"]
    described = subprocess.run(command, **run, capture_output=True, text=True)
    (module,) = json.loads(described.stdout)["modules"].values()
    settings = {setting.pop("name"): setting for setting in module["settings"]}
    assert settings["max_seq_len"] == {"value": 4}
    assert settings["num_layers"] == {"value": 2, "default": 1}
    assert settings["notes"] == {"value": [], "default": []}
    assert settings["d_model"] == {"value": 8, "default": 8}
