"""Checkpoints of earlier commits load, and compute what they did.

A failure here says that checkpoints which users have would no longer mean the same. If that is
meant, raise `CHECKPOINT_VERSION`, say so in the changelog and run `python -m tests.golden.write`.
"""

import copy
import dataclasses
import json
import pickle
import shutil

import numpy as np
import pytest
import torch
from ray.rllib.core.rl_module.rl_module import RLModule

from connectors import MemoryPolicy
from rlmodules import DeepLinearAttentionRLModule
from rlmodules.modules.checkpoint_version import CHECKPOINT_VERSION, VERSION_KEY
from tests.golden.write import CASES, EXPECTED_FILE, FOLDER, SETTINGS_FILE, build, outputs

# Settings that came after the checkpoints, with what was done before them.
LATER = {"one_hot_max_values": 0}


@pytest.fixture(params=CASES)
def name(request):
    return request.param


def settings_of(config):
    # As JSON has them.
    return json.loads(json.dumps(dataclasses.asdict(config)))


def test_settings_mean_the_same(name):
    """Names, presets and defaults."""
    saved = LATER | json.loads((FOLDER / name / SETTINGS_FILE).read_text())
    assert settings_of(CASES[name].config()) == saved
    module = RLModule.from_checkpoint(FOLDER / name)
    assert type(module) is CASES[name].module_class
    assert settings_of(module.memory_config) == saved


def test_weights_have_their_names(name):
    """In order, too: an optimizer's state goes by it."""
    saved = pickle.loads((FOLDER / name / "module_state.pkl").read_bytes())
    module = build(CASES[name])
    assert list(module.state_dict()) == list(saved)


def test_outputs_and_states_are_the_same(name):
    with np.load(FOLDER / name / EXPECTED_FILE) as file:
        saved = dict(file)
    expected = {k.removeprefix("out/"): v for k, v in saved.items() if k.startswith("out/")}
    inputs = {k: v for k, v in saved.items() if not k.startswith("out/")}
    # Built from today's defaults, with the target networks of a Learner.
    module = build(CASES[name])
    module.restore_from_path(FOLDER / name)
    actual = outputs(module, inputs)
    assert actual.keys() == expected.keys()
    for key, value in expected.items():
        np.testing.assert_allclose(actual[key], value, rtol=1e-5, atol=1e-6, err_msg=key)


def copy_of_another_version(path, version):
    """As a later release would write it, with a setting that is unknown here."""
    shutil.copytree(FOLDER / "deep", path)
    file = path / "metadata.json"
    metadata = json.loads(file.read_text())
    assert metadata[VERSION_KEY] == CHECKPOINT_VERSION
    file.write_text(json.dumps({**metadata, VERSION_KEY: version}))
    file = path / "class_and_ctor_args.pkl"
    info = pickle.loads(file.read_bytes())
    info["ctor_args_and_kwargs"][1]["model_config"].update({VERSION_KEY: version, "warp": 9})
    file.write_bytes(pickle.dumps(info))
    return path


@pytest.mark.parametrize("version", [CHECKPOINT_VERSION + 1, None])
def test_other_versions_are_refused(tmp_path, version):
    path = copy_of_another_version(tmp_path / "checkpoint", version)
    message = f"has version {version}, but this rllib-memory reads version {CHECKPOINT_VERSION}"
    for load in (
        RLModule.from_checkpoint,
        DeepLinearAttentionRLModule.from_checkpoint,
        MemoryPolicy.from_checkpoint,
    ):
        with pytest.raises(ValueError, match=message):
            load(path)
    # One that was built already, as by an Algorithm. Also by a URI, as on cloud storage.
    module = build(CASES["deep"])
    before = copy.deepcopy(module.state_dict())
    for location in (path, str(path), path.as_uri()):
        with pytest.raises(ValueError, match=message):
            module.restore_from_path(location)
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())


def test_a_restored_module_can_be_saved_again(tmp_path):
    module = RLModule.from_checkpoint(FOLDER / "deep")
    module.save_to_path(tmp_path)
    again = RLModule.from_checkpoint(tmp_path)
    assert again.memory_config == module.memory_config
