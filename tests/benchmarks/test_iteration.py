"""The iteration benchmark on short fragments, one run each."""

import argparse
import dataclasses

import pytest
import torch

from benchmarks import iteration
from benchmarks.harness import CorrectnessError, check
from benchmarks.iteration_cases import (
    CASES,
    CONV_FILTERS,
    LSTM,
    LSTM_256,
    MEMORIES,
    MLP,
    PADDED,
    Stream,
    memory_config,
    peer_configs,
)
from benchmarks.profiles import python_functions, torch_operators
from benchmarks.rigs import Rig
from rlmodules.modules.catalogue import CONFIGS


@pytest.fixture
def short(monkeypatch):
    """All cases in two environments, with one full row of each, and one epoch."""
    for name, case in list(CASES.items()):
        length = 8 if case.images else 16
        settings = {
            "num_envs": 2,
            "max_seq_len": length,
            "fragment": length - 1,
            "minibatch_size": length,
            "num_epochs": 1,
        }
        monkeypatch.setitem(CASES, name, dataclasses.replace(case, **settings))


@pytest.mark.ray
@pytest.mark.parametrize(
    "name",
    [
        "cards-16-gru",
        pytest.param("cards-64-default", marks=pytest.mark.slow),
        pytest.param("short-episodes-default", marks=pytest.mark.slow),
        pytest.param("images-default", marks=pytest.mark.slow),
        pytest.param("long-rows-default", marks=pytest.mark.slow),
    ],
)
def test_records(short, name):
    records = iteration.compare(name, min_runs=1, seconds=0.0)
    assert {(r["peer"], r["metric"]) for r in records} == {
        (peer, metric) for peer in (MLP, LSTM, LSTM_256) for metric in iteration.METRICS
    }
    for r in records:
        assert (r["benchmark"], r["case"], r["unit"]) == ("iteration", name, "s")
        assert r["ratio"] == pytest.approx(r["theirs"] / r["ours"])
        if r["peer"] != LSTM_256:
            sizes = r["parameters"]
            assert sizes["ours"] == pytest.approx(sizes["theirs"], rel=0.05)


@pytest.mark.ray
def test_packed_rows_are_compared_with_padded_ones(monkeypatch):
    small = {"num_envs": 2, "max_seq_len": 32, "fragment": 63, "minibatch_size": 64}
    case = dataclasses.replace(CASES["short-episodes"], **small, num_epochs=1)
    monkeypatch.setitem(CASES, "short-episodes", case)
    records = iteration.compare(iteration.PACKED, min_runs=1, seconds=0.0)
    assert {(r["peer"], r["metric"]) for r in records} == {
        (PADDED, metric) for metric in ("learner_connector", "update", "iteration")
    }
    num_rows = []
    for pack_rows in (True, False):
        rig = Rig(memory_config(case, "default", pack_rows=pack_rows))
        num_rows.append(len(rig.train_batch(rig.record_sample().episodes())["seq_lens"]))
        rig.stop()
    assert num_rows[0] < num_rows[1]


def test_cases():
    assert {name.removesuffix("-compiled") for name in MEMORIES} - {"default"} < set(CONFIGS)
    assert set(MEMORIES.values()) == set(CONFIGS.values())
    for name, _, metric in iteration.TARGETS:
        assert name in iteration.NAMES
        assert metric in iteration.METRICS
    for case in CASES.values():
        # With the step that RLlib appends, rows are full.
        assert (case.fragment + 1) % case.max_seq_len == 0


def test_compiled_memories_are_compiled():
    for memory in ("default", "default-compiled"):
        config = memory_config(CASES["cards-16"], memory)
        assert config.rl_module_spec.model_config.compile is (memory == "default-compiled")


def test_images_meet_the_same_convolutions():
    case = CASES["images"]
    assert memory_config(case, "gru").rl_module_spec.model_config.conv_filters == CONV_FILTERS
    for peer in peer_configs(case, 200_000).values():
        assert peer.model_config["conv_filters"] == CONV_FILTERS


def test_unequal_sizes_are_refused():
    iteration.check_sizes({"ours": 100, MLP: 104})
    with pytest.raises(CorrectnessError, match="rllib-mlp has 106 parameters instead of 100"):
        iteration.check_sizes({"ours": 100, MLP: 106})


@pytest.mark.ray
def test_only_and_profile(short, capsys):
    arguments = argparse.Namespace(only=["cards-16-gru"], profile=True, device="cpu", runs=1)
    assert iteration.run(arguments) == []
    printed = capsys.readouterr().out
    for metric in iteration.METRICS:
        for what in ("Python functions", "torch operators"):
            assert f"cards-16-gru, {metric}: {what}" in printed


class Sampler:
    """A rig that has sampled pieces of these lengths."""

    def __init__(self, *lengths, error=0.0):
        self.lengths = lengths
        self.error = error

    def record_sample(self):
        return self

    def episodes(self):
        return [range(length) for length in self.lengths]

    def train_batch(self, episodes):
        return episodes

    def check_log_probs(self, batch):
        assert list(map(len, batch)) == list(self.lengths)
        check(self.error == 0, "log-probabilities differ")


def test_other_samples_are_refused():
    ours = Sampler(3, 4)
    assert iteration.record_and_check({"ours": ours, MLP: Sampler(3, 4)}).keys() == {"ours", MLP}
    with pytest.raises(CorrectnessError, match="rllib-mlp sampled other"):
        iteration.record_and_check({"ours": ours, MLP: Sampler(4, 3)})
    with pytest.raises(CorrectnessError, match="log-probabilities"):
        iteration.record_and_check({"ours": ours, MLP: Sampler(3, 4, error=1.0)})


def test_streams():
    env = Stream({"mean_length": 10})
    env.reset(seed=0)
    ends = sum(env.step(0)[2] for _ in range(5000))
    assert ends == pytest.approx(500, rel=0.15)
    endless = Stream({"images": True})
    observation, _ = endless.reset(seed=0)
    assert observation in endless.observation_space
    assert not any(endless.step(0)[2] for _ in range(1000))
    card = endless.card
    assert endless.step(card)[1] == 1
    card = endless.card
    assert endless.step((card + 1) % 4)[1] == 0


def test_profiles_count_calls():
    def twice(x):
        for _ in range(2):
            torch.mm(x, x)

    x = torch.ones(4, 4)
    names = {name.split(" ")[0]: calls for name, calls, _ in python_functions(twice, (x,), "cpu")}
    assert names["test_profiles_count_calls.<locals>.twice"] == 1
    operators = {name: (calls, s) for name, calls, s in torch_operators(twice, (x,), "cpu")}
    assert operators["aten::mm"][0] == 2
    assert 0 < operators["aten::mm"][1] < 1
