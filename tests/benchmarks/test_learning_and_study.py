"""The training benchmarks' bookkeeping, without training."""

import argparse
import multiprocessing.dummy
from types import SimpleNamespace

import pytest
import torch
from torch.nn import functional as F

from benchmarks import learning, memory_peers, probes, study
from benchmarks.curves import Curve
from benchmarks.memory_peers import count, of_equal_size
from rlmodules import GRUConfig


def curve(returns, goal_at=None):
    count = range(1, len(returns) + 1)
    return Curve([10 * i for i in count], [0.5 * i for i in count], returns, goal_at)


def test_cost_is_that_of_the_goal_or_of_the_whole_run():
    assert curve([0.0, 0.9, 0.1], goal_at=1).cost() == (20, 1.0)
    assert curve([0.0, 0.1, 0.2]).cost() == (30, 1.5)


def test_final_return_is_a_mean_over_the_last_part():
    assert curve([0.0] * 8 + [0.5, 1.0]).final_return() == pytest.approx(0.75)
    assert curve([0.3]).final_return() == pytest.approx(0.3)


def test_the_peer_gets_its_better_learning_rate():
    fast, slow, never, worst = (
        curve([0.5, 0.9], 1),
        curve([0.1, 0.2, 0.9], 2),
        curve([0.5, 0.6]),
        curve([0.5, 0.4]),
    )
    assert sorted([worst, never, slow, fast], key=learning._badness) == [fast, slow, never, worst]


def test_curves_of_unequal_length_are_drawn(tmp_path):
    runs = {"ours": [curve([0.1, 0.9], 1), curve([0.2, 0.5, 0.9], 2)], "theirs": [curve([0.1])]}
    learning.draw(runs, tmp_path / "images" / "curves.png", "env")
    assert (tmp_path / "images" / "curves.png").read_bytes().startswith(b"\x89PNG")


TINY = {"rate": 1e-3, "seed": 0, "updates": 2, "every": 1}


def asked_for(name, rows=3):
    """Inputs as numbers (None for a blank), and what is asked for at each step (None: nothing)."""
    inputs, targets = probes.PROBES[name].sample(rows, torch.Generator().manual_seed(0))
    parts = inputs.unflatten(-1, (-1, probes.NUM_SYMBOLS))
    symbols = torch.where(parts.any(-1), parts.argmax(-1), -1).squeeze(-1)
    assert targets.shape == (rows, probes.T)
    for row, target in zip(symbols.tolist(), targets.tolist(), strict=True):
        yield row, [None if t == probes.UNASKED else t for t in target]


@pytest.mark.parametrize("lag", [4, 16, 32])
def test_recall_asks_for_an_earlier_symbol(lag):
    for symbols, targets in asked_for(f"recall-{lag}"):
        assert targets == [None] * lag + symbols[:-lag]


def test_overwrite_asks_for_the_last_value_of_a_key():
    for steps, targets in asked_for("overwrite"):
        held = {}
        for (key, value), target in zip(steps, targets, strict=True):
            assert target == (held.get(key) if value < 0 else None)
            if value >= 0:
                held[key] = value
        assert len(held) > probes.NUM_SYMBOLS / 2


def test_count_asks_for_how_often_the_first_symbol_was_seen():
    for symbols, targets in asked_for("count"):
        counts = [symbols[: t + 1].count(0) for t in range(probes.T)]
        assert targets == [min(n, probes.MAX_COUNT) for n in counts]
        assert counts[-1] > 3


def test_reverse_asks_for_symbols_from_the_last_to_the_first():
    for symbols, targets in asked_for("reverse"):
        assert len(symbols) == probes.T
        for start in range(0, probes.T, 16):
            part = symbols[start : start + 8]
            assert -1 not in part
            assert symbols[start + 8 : start + 16] == [-1] * 8
            assert targets[start : start + 16] == [None] * 8 + part[::-1]


def test_only_what_is_asked_for_counts():
    logits = F.one_hot(torch.tensor([[0, 1, 2]]), 4).float()
    targets = torch.tensor([[probes.UNASKED, 1, 3]])
    assert probes.accuracy(torch.nn.Identity(), logits, targets) == 0.5


def test_training_ends_at_the_goal_and_is_the_same_again():
    probe = probes.PROBES["recall-4"]

    def accuracies(goal):
        torch.manual_seed(0)
        memory = GRUConfig(max_seq_len=64, d_model=4).build_memory(64)
        return probes.train(probes.Model(memory, probe), probe, goal=goal, **TINY)

    first = accuracies(goal=1.0)
    assert len(first) == 2
    assert accuracies(goal=1.0) == first
    assert accuracies(goal=0.0) == first[:1]


def outcome(*accuracies):
    return study.Outcome(list(accuracies), parameters=72_000, state_bytes=512, seconds=1.0)


SLOW = outcome(*[0.1] * 8)
MIDDLE = outcome(*[0.1] * 4, *[0.9] * 4)
FAST = outcome(0.2, 0.96)


def test_a_trial_that_ended_early_keeps_its_last_accuracy():
    assert [FAST.after(n) for n in study.UPDATES] == [0.96] * 3
    assert [MIDDLE.after(n) for n in study.UPDATES] == [0.1, 0.1, 0.9]
    assert FAST.updates_to_goal == 100
    assert MIDDLE.updates_to_goal == float("inf")


def rated(memory, outcomes):
    """Trials that choose a memory's learning rate."""
    return {
        study.Trial(task, memory, rate, 0): outcome
        for rate, outcome in zip(study.RATES, outcomes, strict=True)
        for task in study.RATE_TASKS
    }


def test_a_memory_gets_its_best_learning_rate():
    done = rated("gru", [SLOW, FAST, MIDDLE])
    assert study.best_rate(done, "gru", study.RATES) == study.RATES[1]
    assert study.best_rate(done, "lru", study.RATES) == study.RATES[0]


def test_learning_rates_come_first_then_seeds():
    def missing(done):
        return study.missing_trials(done, ["overwrite", "count"], ["gru"], range(2), study.RATES)

    done = rated("gru", [SLOW, MIDDLE, FAST])
    assert missing({}) == list(done)
    last = list(done)[-1]
    assert missing({t: o for t, o in done.items() if t != last}) == [last]
    best = study.RATES[2]
    expected = [
        study.Trial("count", "gru", best, 0),
        study.Trial("overwrite", "gru", best, 1),
        study.Trial("count", "gru", best, 1),
    ]
    assert missing(done) == expected
    assert missing(done | dict.fromkeys(expected, SLOW)) == []
    (only,) = study.missing_trials({}, ["count"], ["gru"], range(1), [best])
    assert only == study.Trial("count", "gru", best, 0)


def test_a_study_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    trials = tmp_path / "results" / "study.jsonl"
    trained = []

    def fails_at_the_last_rate(trial):
        if trial.rate == study.RATES[2]:
            raise RuntimeError("stopped")
        return trial, FAST

    def carry_out(trial):
        trained.append(trial)
        return trial, FAST

    def run(*options):
        parser = argparse.ArgumentParser()
        study.add_arguments(parser)
        parser.set_defaults(threads=1)
        options = ["--memories", "deep", "--seeds", "2", "--trials", str(trials), *options]
        return study.run(parser.parse_args(options))

    # Threads, as processes would not see the other `carry_out`.
    in_threads = SimpleNamespace(get_context=lambda _: multiprocessing.dummy)
    monkeypatch.setattr(study, "multiprocessing", in_threads)
    monkeypatch.setattr(study, "carry_out", fails_at_the_last_rate)
    with pytest.raises(RuntimeError, match="stopped"):
        run()
    # Two tasks at two rates.
    before = list(study.load(trials))
    assert len(before) == 4
    assert [r["runs"] for r in run("--summary")] == [1, 1]
    monkeypatch.setattr(study, "carry_out", carry_out)
    run()
    records = run()
    # The third rate, the four other tasks, and all six with another seed.
    assert len(trained) == 2 + 4 + 6
    assert list(study.load(trials)) == before + trained
    assert [r["runs"] for r in records] == [2] * 6


def test_a_summary_marks_what_was_never_reached():
    first, second = (study.Trial("overwrite", "gru", study.RATES[0], seed) for seed in range(2))
    other_rate = study.Trial("overwrite", "gru", study.RATES[1], 0)
    default = study.Trial("overwrite", "deep", study.RATES[0], 0)
    done = {first: FAST, second: MIDDLE, other_rate: SLOW, default: SLOW}
    (r,) = study.summary(done, ["overwrite", "count"], ["gru"], study.RATES)
    assert (r["case"], r["peer"], r["rate"]) == ("overwrite gru", "deep", study.RATES[0])
    assert r["ours"] == pytest.approx(0.93)
    assert r["ratio"] == pytest.approx(9.3)
    assert (r["censored"], r["runs"], r["updates_to_goal"]) == (1, 2, None)
    (r,) = study.summary({first: FAST}, ["overwrite"], ["gru"], study.RATES)
    assert (r["censored"], r["updates_to_goal"], r["ratio"]) == (0, 100, None)


@pytest.mark.parametrize("name", study.MEMORIES)
def test_memories_of_equal_size(name):
    memory = of_equal_size(study.MEMORIES[name], study.NUM_PARAMETERS)
    assert count(memory) == pytest.approx(study.NUM_PARAMETERS, rel=0.1)


def test_a_trial_is_the_same_again(monkeypatch):
    monkeypatch.setattr(study, "UPDATES", (1,))
    monkeypatch.setattr(study, "EVERY", 1)
    trial = study.Trial("count", "gru", 1e-3, 0)
    # The first call looks for the width, the second knows it.
    memory_peers._best_width.cache_clear()
    (same, first), (_, second) = study.carry_out(trial), study.carry_out(trial)
    assert same == trial
    assert first.accuracies == second.accuracies
    assert first.state_bytes == 4 * 126
