"""The benchmark of the memories on tiny sizes."""

import pytest
import torch

from benchmarks import memories
from benchmarks.harness import CorrectnessError
from benchmarks.memory_peers import MEMORIES, NUM_PARAMETERS, PEERS, contestant, peer


@pytest.mark.parametrize(
    ("build", "name"), [(contestant, name) for name in MEMORIES] + [(peer, name) for name in PEERS]
)
def test_equal_size_and_a_gradient_for_every_step(build, name):
    runner = build(name, num_rows=2)
    assert runner.num_parameters == pytest.approx(NUM_PARAMETERS, rel=0.1)
    x = torch.randn(2, 5, 64, requires_grad=True)
    assert runner.train(x).shape[:2] == (2, 5)
    assert (x.grad != 0).any(-1).all()
    step = runner.step(x[:, :1])
    assert step.shape[:2] == (2, 1)
    assert not step.requires_grad


def test_bare_cells_are_as_wide():
    for name in ("gru", "lstm"):
        assert contestant(name, 2).num_parameters == peer(name, 2).num_parameters
        assert contestant(name, 2).state_bytes == peer(name, 2).state_bytes


@pytest.mark.parametrize("name", ["deep", "gtrxl"])
def test_memories_pass_their_check(name):
    memories.check_memory(name)


@pytest.mark.parametrize("metric", ["step", "train", "bytes"])
def test_records(metric):
    r = memories.compare("gtrxl", "legacy", metric, 2, 1, min_runs=1, seconds=0)
    assert (r["benchmark"], r["peer"], r["metric"]) == ("memories", "legacy", metric)
    assert r["ratio"] == pytest.approx(r["theirs"] / r["ours"])


def test_state_bytes():
    r = memories.compare("gtrxl-128", "legacy-128", "bytes", 2, 1)
    # Two layers' inputs at 128 steps; ours also counts steps.
    assert r["ours"] % (2 * 128 * 4) == 8
    assert r["theirs"] % (2 * 128 * 4) == 0


def test_unequal_sizes_are_refused(monkeypatch):
    monkeypatch.setattr(memories, "NUM_PARAMETERS", 2 * NUM_PARAMETERS)
    with pytest.raises(CorrectnessError, match="parameters"):
        memories.compare("deep", "lstm", "bytes", 2, 1)
