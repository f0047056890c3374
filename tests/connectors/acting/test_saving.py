"""A checkpoint is whole or not there, whatever is killed while it is saved."""

import json
import os
import pickle
import shutil
import signal
import sys
from pathlib import Path

import numpy as np
import pytest
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.utils import checkpoints as rllib_checkpoints

from connectors import MemoryPPOTorchLearner, connect, save_checkpoint
from connectors.acting import saving
from rlmodules import LinearAttentionConfig, LinearAttentionRLModule
from rlmodules.modules.checkpoint_version import CHECKPOINT_VERSION, VERSION_KEY
from tests.envs import RandomObservations

pytestmark = pytest.mark.ray

MODULE = Path("learner_group", "learner", "rl_module", "default_policy")
SAVING_CODE = {saving.__file__, rllib_checkpoints.__file__}
NUM_KILLS = 30


def build(num_learners=0, learner_class=None):
    config = (
        PPOConfig()
        .environment(RandomObservations)
        .env_runners(num_env_runners=0)
        .learners(num_learners=num_learners)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=LinearAttentionRLModule,
                model_config=LinearAttentionConfig(max_seq_len=8, compile=False),
            )
        )
        .debugging(log_sys_usage=False)
    )
    if learner_class is not None:
        config.learners(learner_class=learner_class)
    return connect(config).build_algo()


@pytest.fixture(scope="module")
def algo(_ray_session):
    algo = build()
    yield algo
    algo.stop()


def contents(folder):
    return {
        path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()
    }


def trace_lines(on_line):
    """Calls `on_line` before each line of RLlib's code of checkpoints, and of ours."""

    def trace(frame, event, arg):
        if frame.f_code.co_filename not in SAVING_CODE:
            return None
        if event == "line":
            on_line()
        return trace

    sys.settrace(trace)


def save_and_die(algo, path, line):
    """Saves in a process that is killed before a line is run."""
    child = os.fork()
    if child == 0:
        lines = iter(range(line))
        trace_lines(lambda: next(lines, None) is None and os.kill(os.getpid(), signal.SIGKILL))
        save_checkpoint(algo, path)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.WTERMSIG(status)


def test_a_killed_save_leaves_the_last_checkpoint(algo, tmp_path):
    last, new = tmp_path / "1", tmp_path / "2"
    num_lines = 0

    def count():
        nonlocal num_lines
        num_lines += 1

    trace_lines(count)
    save_checkpoint(algo, last, files={"notes.txt": "1"})
    sys.settrace(None)
    before = contents(last)
    assert before[Path("notes.txt")] == b"1"

    numbers_of_files = set()
    for kill in range(NUM_KILLS):
        signal_ = save_and_die(algo, new, line=kill * num_lines // NUM_KILLS)
        assert signal_ == signal.SIGKILL
        unfinished = tmp_path / "2.unfinished"
        numbers_of_files.add(len(contents(unfinished)) if unfinished.exists() else 0)
        assert contents(last) == before
        assert not new.exists()
    # It died before the first file, before the last one, and at many places between.
    assert {0, len(before) - 1} <= numbers_of_files
    assert len(numbers_of_files) > 8

    # What was left is no obstacle.
    assert save_checkpoint(algo, new) == str(new)
    assert contents(new).keys() == before.keys() - {Path("notes.txt")}
    assert not unfinished.exists()
    restored = Algorithm.from_checkpoint(str(last))
    restored.stop()


def test_the_name_is_given_last(algo, tmp_path, monkeypatch):
    """All is on the disk before the checkpoint has its name, and its name after that."""
    calls = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(
        os, "fsync", lambda fd: (calls.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd))
    )
    monkeypatch.setattr(os, "rename", lambda *a: (calls.append("rename"), rename(*a)))
    path = Path(save_checkpoint(algo, tmp_path / "1.5"))
    at = calls.index("rename")
    synced = {Path(call.replace(".unfinished", "")) for call in calls[:at]}
    assert synced == {path, *path.rglob("*")}
    assert calls[at + 1 :] == [str(tmp_path)]


def test_an_existing_path_stays(algo, tmp_path):
    (tmp_path / "1").mkdir()
    with pytest.raises(ValueError, match="which exists, but no folder can be replaced"):
        save_checkpoint(algo, tmp_path / "1")
    assert list(tmp_path.rglob("*")) == [tmp_path / "1"]


@pytest.mark.parametrize("change", ["version", "weights"])
def test_an_algorithm_refuses_what_does_not_fit(algo, tmp_path, change):
    path = Path(algo.save_to_path(str(tmp_path)))
    folder = path / MODULE
    weights = pickle.loads((folder / "module_state.pkl").read_bytes())
    changed = {name: value + 1 for name, value in weights.items()}
    if change == "version":
        file, message = folder / "metadata.json", "but this rllib-memory reads version"
        file.write_text(
            json.dumps({**json.loads(file.read_text()), VERSION_KEY: CHECKPOINT_VERSION + 1})
        )
    else:
        message = "The state does not fit this"
        del changed[next(iter(changed))]
    (folder / "module_state.pkl").write_bytes(pickle.dumps(changed))
    with pytest.raises(ValueError, match=message):
        algo.restore_from_path(str(path))
    for name, value in algo.learner_group.get_weights()["default_policy"].items():
        np.testing.assert_array_equal(value, weights[name])


def test_tune_does_not_resume_without_a_learner(algo, tmp_path):
    path = Path(algo.save_to_path(str(tmp_path)))
    # The two calls that Tune makes.
    algo.load_checkpoint(str(path))
    shutil.rmtree(path / "learner_group" / "learner")
    with pytest.raises(RuntimeError, match="The checkpoint holds no weights"):
        algo.load_checkpoint(str(path))


class FullDisk(MemoryPPOTorchLearner):
    def save_to_path(self, path, **kwargs):
        super().save_to_path(path, **kwargs)
        # What a full disk leaves of the last file.
        state = Path(path, "state.pkl")
        state.write_bytes(state.read_bytes()[:-1])


@pytest.mark.slow
def test_learners_in_other_processes(tmp_path):
    algo = build(num_learners=1, learner_class=FullDisk)
    try:
        with pytest.raises(RuntimeError, match="a Learner wrote no readable state"):
            save_checkpoint(algo, tmp_path / "1")
        assert not (tmp_path / "1").exists()
        # RLlib by itself notices nothing.
        path = Path(algo.save_to_path(str(tmp_path / "2")))
    finally:
        algo.stop()
    with pytest.raises(pickle.UnpicklingError):
        Algorithm.from_checkpoint(str(path))
