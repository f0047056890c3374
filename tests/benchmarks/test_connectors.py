"""The connector and the compile benchmark on short fragments, one run each."""

import pytest
import torch

from benchmarks import compilation, connectors, rllib_lstm, several_agents
from benchmarks.harness import CorrectnessError, check

SHORT = {"fragment": 64, "min_runs": 1, "seconds": 0.0}


@pytest.mark.ray
@pytest.mark.parametrize("case", connectors.CASES)
def test_connectors(case):
    records = connectors.compare(case, **SHORT)
    by_metric = {(r["case"], r["metric"]): r for r in records}
    assert by_metric.keys() == {
        (case, "sampling"), (case, "learner_connector"), (case, "iteration"), (case, "bytes"),
        (f"{case}-8-epochs", "iteration"),
    }  # fmt: skip
    assert all(r["benchmark"] == "connectors" and r["peer"] == "rllib" for r in records)
    assert by_metric[case, "bytes"]["ratio"] > 3
    assert by_metric[case, "iteration"]["num_epochs"] == 1
    assert by_metric[f"{case}-8-epochs", "iteration"]["num_epochs"] == 8


@pytest.mark.ray
def test_lstm():
    records = rllib_lstm.compare(**SHORT, cells=32)
    assert {r["metric"] for r in records} == {"update", "iteration"}
    for r in records:
        assert (r["case"], r["peer"]) == ("lstm-256", "rllib-lstm")
        sizes = r["parameters"]
        assert sizes["ours"] == pytest.approx(sizes["theirs"], rel=0.05)


@pytest.mark.ray
def test_several_agents():
    records = several_agents.compare(**SHORT)
    assert [r["metric"] for r in records] == ["sampling", "learner_connector"]
    assert all((r["case"], r["peer"]) == ("4-agents", "single-agent") for r in records)


@pytest.mark.ray
def test_different_batches_are_refused(monkeypatch):
    real = connectors.Rig.train_batch

    def train_batch(self, episodes):
        batch = real(self, episodes)
        batch["rewards"] = batch["rewards"] + torch.rand(())
        return batch

    monkeypatch.setattr(connectors.Rig, "train_batch", train_batch)
    with pytest.raises(CorrectnessError, match="rewards"):
        connectors.compare("state-240", **SHORT)


@pytest.mark.ray
def test_compile_measures_both_sides(monkeypatch):
    # Without compiling: this is about the measuring.
    monkeypatch.setattr("rlmodules.modules.base.compile_blocks", lambda *_: False)
    results = compilation.measure("cpu", compare=True, fragment=64, min_runs=1, seconds=0.0)
    assert results.keys() == {compilation.PASS, compilation.UPDATE}
    for values in results.values():
        assert values["first"] > 0
        assert len(values["ours"]) == len(values["theirs"]) == 1


def test_compile_records():
    warm = {
        compilation.PASS: {"first": 5.0, "ours": [1.0], "theirs": [2.0]},
        compilation.UPDATE: {"first": 3.0, "ours": [1.0], "theirs": [1.5]},
    }
    cold = {compilation.PASS: {"first": 11.0}, compilation.UPDATE: {"first": 21.0}}
    records = compilation.make_records(cold, warm, "cpu")
    values = {(r["case"], r["metric"]): r["ours"] for r in records}
    assert values == {
        (compilation.PASS, "compile_cold"): 10,
        (compilation.PASS, "compile_warm"): 4,
        (compilation.PASS, "time"): 1,
        (compilation.UPDATE, "compile_cold"): 20,
        (compilation.UPDATE, "compile_warm"): 2,
        (compilation.UPDATE, "update"): 1,
        (compilation.UPDATE, "iterations_to_pay_cold"): 60,
        (compilation.UPDATE, "iterations_to_pay_warm"): 12,
    }
    check(records[2]["ratio"] == 2, "faster means above 1")
    warm[compilation.UPDATE]["theirs"] = [0.5]
    never = compilation.make_records(cold, warm, "cpu")[-1]
    assert never["ours"] is None
