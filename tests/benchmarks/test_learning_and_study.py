"""The training benchmarks' bookkeeping, without training."""

import pytest

from benchmarks import learning, study
from benchmarks.curves import Curve
from rlmodules import DeepLinearAttentionConfig


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


def test_every_variant_is_a_valid_config():
    for changes in study.VARIANTS.values():
        DeepLinearAttentionConfig(max_seq_len=study.T, **changes)
    assert set(study.RL_VARIANTS) <= study.VARIANTS.keys()
    default = study.VARIANTS[study.default_variant()]
    config = DeepLinearAttentionConfig(max_seq_len=study.T)
    assert DeepLinearAttentionConfig(max_seq_len=study.T, **default) == config


def test_recall_reports_one_accuracy_a_checkpoint(monkeypatch):
    monkeypatch.setattr(study, "UPDATES", (1, 2))
    for name in ("decay, conv", "GRU 128"):
        accuracies = study.recall_accuracies(name, lag=4, seed=0)
        assert len(accuracies) == 2
        assert all(0 <= accuracy <= 1 for accuracy in accuracies)


def test_negative_returns_have_no_ratio():
    values = {"a": [-0.5], "b": [-0.4]}
    assert [r["ratio"] for r in study._records(values, "a", "env", "final_return", {}, True)] == [
        None,
        None,
    ]
    records = study._records(values | {"a": [10.0]}, "a", "env", "steps_to_0.9", {}, False)
    assert records[0]["ratio"] == 1.0
