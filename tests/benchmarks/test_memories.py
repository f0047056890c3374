"""The benchmark of the memories on tiny sizes."""

import dataclasses

import pytest
import torch
from torch._dynamo.utils import counters

from benchmarks import memories
from benchmarks.harness import CorrectnessError
from benchmarks.memory_peers import (
    COMPILED,
    MEMORIES,
    NUM_PARAMETERS,
    PEERS,
    contestant,
    peer,
)


@pytest.mark.parametrize(
    ("build", "name"),
    [(contestant, name) for name in MEMORIES if not name.endswith(COMPILED)]
    + [(peer, name) for name in PEERS],
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


@pytest.mark.parametrize("bf16", [False, True])
def test_half_precision(monkeypatch, bf16):
    seen = []

    def watched(build):
        def build_watched(*args):
            runner = build(*args)

            def train(x):
                seen.append(torch.is_autocast_enabled("cpu"))
                return runner.train(x)

            return dataclasses.replace(runner, train=train)

        return build_watched

    for name in ("contestant", "peer"):
        monkeypatch.setattr(memories, name, watched(getattr(memories, name)))
    # Torch's LSTM knows bfloat16 on CPUs with AVX-512 only.
    r = memories.compare("gru", "gru", "train", 2, 3, bf16=bf16, min_runs=1, seconds=0)
    assert r["case"] == ("gru-bf16 2x3" if bf16 else "gru 2x3")
    assert set(seen) == {bf16}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler raises warnings of its own.
@pytest.mark.parametrize("name", [name for name in MEMORIES if name.endswith(COMPILED)])
def test_compiled_passes_are_compiled(name):
    counters.clear()
    contestant(name, 2).train(torch.randn(2, 3, 64))
    assert counters["stats"]["unique_graphs"] > 0


def test_state_bytes():
    r = memories.compare("gtrxl-128", "legacy-128", "bytes", 2, 1)
    # Two layers' inputs at 128 steps; ours also counts steps.
    assert r["ours"] % (2 * 128 * 4) == 8
    assert r["theirs"] % (2 * 128 * 4) == 0


def test_unequal_sizes_are_refused(monkeypatch):
    monkeypatch.setattr(memories, "NUM_PARAMETERS", 2 * NUM_PARAMETERS)
    with pytest.raises(CorrectnessError, match="parameters"):
        memories.compare("deep", "lstm", "bytes", 2, 1)
