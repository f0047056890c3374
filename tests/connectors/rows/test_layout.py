"""Rows, padding and their inverse, against a plain loop."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.utils.postprocessing.zero_padding import create_mask_and_seq_lens

from connectors.rows.layout import RowLayout

LENGTHS = st.lists(st.integers(1, 200), min_size=1, max_size=12)


@settings(derandomize=True, max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 70))
def test_equals_rllib(lengths, max_seq_len):
    layout = RowLayout(lengths, max_seq_len)
    masks, seq_lens = [], []
    for length in lengths:
        mask, lens = create_mask_and_seq_lens(length, max_seq_len)
        masks += mask
        seq_lens += lens
    assert layout.num_rows == len(seq_lens)
    assert layout.num_steps == sum(lengths)
    assert layout.seq_lens.tolist() == seq_lens
    assert np.array_equal(layout.valid, np.stack(masks))


@settings(derandomize=True, max_examples=60, deadline=None)
@given(LENGTHS, st.integers(1, 70), st.sampled_from([(), (3,), (2, 2)]))
def test_pad_and_unpad(lengths, max_seq_len, shape):
    layout = RowLayout(lengths, max_seq_len)
    size = int(np.prod((sum(lengths), *shape)))
    steps = np.arange(1, size + 1, dtype=np.float32).reshape(sum(lengths), *shape)
    parts = np.split(steps, np.cumsum(lengths)[:-1])
    rows = layout.pad(steps)
    assert rows.shape == (layout.num_rows, max_seq_len, *shape)
    assert np.array_equal(layout.pad_parts(parts), rows)
    assert np.array_equal(layout.unpad(rows), steps)
    assert not rows[~layout.valid].any()

    expected = []
    for part in parts:
        for start in range(0, len(part), max_seq_len):
            row = np.zeros((max_seq_len, *shape), np.float32)
            row[: len(part[start : start + max_seq_len])] = part[start : start + max_seq_len]
            expected.append(row)
    assert np.array_equal(rows, np.stack(expected))


@pytest.mark.parametrize("length", [4, 500])
def test_parts_of_different_dtypes_are_promoted(length):
    layout = RowLayout([length, length], 8)
    parts = [np.ones(length, np.float32), np.ones(length, np.float64)]
    assert layout.pad_parts(parts).dtype == np.float64


def test_an_episode_without_steps_has_no_row():
    layout = RowLayout([0, 3, 0], 2)
    assert layout.seq_lens.tolist() == [2, 1]
    assert np.array_equal(layout.pad(np.array([1, 2, 3])), [[1, 2], [3, 0]])


def test_no_episodes():
    assert RowLayout([], 4).num_rows == 0
