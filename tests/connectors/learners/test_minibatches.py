"""Every row of every module comes up once an epoch."""

from collections import Counter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch

from connectors.learners.minibatches import RowMinibatches

T = 4


def rows(num_rows):
    """A module's batch: row i holds i, and is full but for the last."""
    seq_lens = np.full(num_rows, T)
    seq_lens[-1:] = 1
    batch = SampleBatch(
        {
            "row": torch.arange(num_rows)[:, None].repeat(1, T),
            SampleBatch.SEQ_LENS: torch.from_numpy(seq_lens),
        },
        _zero_padded=True,
    )
    batch._slice_seq_lens_in_B = True
    return batch


def steps(num_steps):
    return SampleBatch({"row": torch.arange(num_steps)})


def iterate(modules, **settings):
    defaults = {"num_minibatches": 4, "num_epochs": 3, "shuffle": True, "together": False}
    settings = {**defaults, **settings}
    batch = MultiAgentBatch(modules, 10)
    minibatches = list(RowMinibatches(batch, **settings))
    seen = {name: Counter() for name in modules}
    for minibatch in minibatches:
        for name, part in minibatch.policy_batches.items():
            column = part["row"]
            seen[name].update((column[:, 0] if column.ndim == 2 else column).tolist())
    return minibatches, seen


@given(
    num_rows=st.lists(st.integers(1, 30), min_size=1, max_size=3),
    num_minibatches=st.integers(1, 20),
    shuffle=st.booleans(),
)
def test_each_row_once_an_epoch(num_rows, num_minibatches, shuffle):
    modules = {str(i): rows(n) for i, n in enumerate(num_rows)} | {"steps": steps(7)}
    _, seen = iterate(modules, num_minibatches=num_minibatches, shuffle=shuffle)
    for counts, number in zip(seen.values(), [*num_rows, 7], strict=True):
        assert counts == dict.fromkeys(range(number), 3)


def test_minibatches_have_about_equally_many_rows():
    minibatches, _ = iterate({"a": rows(21)}, num_epochs=1)
    sizes = [len(m.policy_batches["a"]) for m in minibatches]  # 81 steps
    assert len(sizes) == 4
    assert max(sizes) <= 6 * T
    whole, _ = iterate({"a": rows(21)}, num_minibatches=1, num_epochs=2)
    assert [len(m.policy_batches["a"]) for m in whole] == [81, 81]


def test_order_changes_only_if_asked():
    (first, *_), _ = iterate({"a": rows(9)}, shuffle=False)
    assert first.policy_batches["a"]["row"][:, 0].tolist() == list(range(2))
    (first, *_), _ = iterate({"a": rows(9)})
    assert first.policy_batches["a"]["row"][:, 0].tolist() != list(range(2))


@pytest.mark.parametrize("num_rows", [[5, 9], [9, 5], [7, 2]])
def test_learners_take_equally_many(num_rows):
    """Two Learners with other numbers of rows; the last module has too few of them."""
    results = [iterate({"a": rows(n), "b": rows(2)}, together=True) for n in num_rows]
    assert [len(minibatches) for minibatches, _ in results] == [12, 12]
    for (minibatches, seen), number in zip(results, num_rows, strict=True):
        assert all(m.policy_batches.keys() == {"a", "b"} for m in minibatches)
        if number >= 4:
            assert seen["a"] == dict.fromkeys(range(number), 3)
        assert seen["b"] == {0: 6, 1: 6}


def test_an_empty_batch_is_one_minibatch():
    minibatches, _ = iterate({})
    assert [m.policy_batches for m in minibatches] == [{}]
