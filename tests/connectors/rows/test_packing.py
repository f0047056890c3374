"""Packed rows: every step once, episodes apart, and nothing else than the padded rows hold."""

import math

import numpy as np
import pytest
import torch
import tree
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import BuildTrainBatch
from connectors.rows.layout import RowLayout
from connectors.rows.packing import PackedLayout, minibatches_an_epoch, pack
from connectors.rows.vtrace import NEUTRAL_LOGP, VTraceLayout
from rlmodules import DeepLinearAttentionConfig, GRUConfig, MemoryRLModule
from rlmodules.modules.batches import RESETS
from tests.connectors.helpers import (
    BOX,
    DISCRETE,
    counting_module,
    lstm_module,
    make_episodes,
    run_pipeline,
    with_snapshots,
)

T = 8
CHUNKS = [
    (3, 0, "terminated"),
    (12, 0, "truncated"),
    (2, 0, "truncated"),
    (8, 0, "cut"),
    (1, 0, "terminated"),
    (4, 5, "cut"),
    (3, 9, "terminated"),
    (2, 0, "cut"),
    (6, 0, "terminated"),
]


@given(
    st.lists(st.integers(1, 30), min_size=1, max_size=20),
    st.integers(1, 12),
    st.sampled_from([RowLayout, VTraceLayout]),
    st.randoms(use_true_random=False),
)
def test_layout(lengths, max_seq_len, layout_class, random):
    rows = layout_class(lengths, max_seq_len)
    initial = np.array([random.random() < 0.7 for _ in range(rows.num_rows)])
    packed = PackedLayout(rows, initial)
    steps = np.arange(1, sum(lengths) + 1)
    slots = packed.pad(steps)

    # What stands in the pieces is what stands in the padded rows, real or not.
    assert np.array_equal(packed.unpad(slots), steps)
    found = []
    for content, resets, head in zip(slots, packed.resets, packed.heads, strict=True):
        starts = [0, *np.flatnonzero(resets)]
        ends = [*starts[1:], np.count_nonzero(content)]
        pieces = [tuple(content[a:b]) for a, b in zip(starts, ends, strict=True)]
        padded = [
            tuple(row[:length]) for row, length in zip(rows.pad(steps), rows.seq_lens, strict=True)
        ]
        numbers = [padded.index(piece) for piece in pieces]
        assert numbers[0] == head
        assert initial[numbers[1:]].all()
        assert numbers[1:] == sorted(numbers[1:])
        found += numbers
    assert sorted(found) == list(range(rows.num_rows))
    assert np.array_equal(packed.valid, slots > 0)
    if layout_class is VTraceLayout:
        assert sorted(slots[packed.real]) == sorted(rows.pad(steps)[rows.real])

    # Rows keep their order, and at most one that holds initial pieces alone is half empty.
    earliest = np.minimum.reduceat(
        np.array(found), np.cumsum([0, *(packed.resets.sum(1) + 1)[:-1]])
    )
    assert np.array_equal(earliest, np.sort(earliest))
    alone = packed.seq_lens[initial[packed.heads]]
    assert (alone <= packed.width / 2).sum() <= 1


def test_padding_of_short_episodes_is_packed_away():
    lengths = np.random.default_rng(0).geometric(0.1, 400) + 1
    rows = RowLayout(lengths, 64)
    initial = np.zeros(rows.num_rows, dtype=bool)
    initial[rows.first_rows] = True
    packed = pack(rows, initial)
    assert packed.num_rows == math.ceil(lengths.sum() / 64)
    assert rows.num_rows > 5 * packed.num_rows


@pytest.mark.parametrize(
    ("lengths", "initial"),
    [
        ([4, 8, 4], [False, False, False, False]),
        ([8, 8, 3], [True, True, True]),
        ([5, 5], [True, True]),
        ([], []),
    ],
)
def test_rows_stay_where_none_is_saved(lengths, initial):
    rows = RowLayout(lengths, 8)
    assert pack(rows, np.array(initial, dtype=bool)[: rows.num_rows]) is rows


def test_a_row_is_left_for_each_minibatch():
    rows = RowLayout([2] * 8, 8)
    initial = np.ones(8, dtype=bool)
    assert pack(rows, initial, 2).num_rows == 2
    assert pack(rows, initial, 3) is rows
    assert [minibatches_an_epoch(100, size) for size in (None, 40, 30, 1000)] == [1, 2, 3, 1]


def memory_module(config):
    torch.manual_seed(0)
    spec = RLModuleSpec(
        module_class=MemoryRLModule,
        observation_space=BOX,
        action_space=DISCRETE,
        model_config=config,
    )
    return spec.build().as_multi_rl_module()


def small(**settings):
    return DeepLinearAttentionConfig(
        max_seq_len=T, d_model=8, num_heads=2, head_dim=4, compile=False, **settings
    )


@pytest.mark.parametrize("bootstrap_slot", [False, True])
@pytest.mark.parametrize("kind", ["snapshots", "states", "nothing"])
def test_batch(kind, bootstrap_slot):
    """Each row of the padded batch stands in the packed one, under its state or a reset."""
    module = memory_module(small())
    chunks = CHUNKS if kind != "nothing" else [(n, 0, end) for n, _, end in CHUNKS]
    episodes = make_episodes(module["default_policy"], chunks)
    if kind == "snapshots":
        episodes = with_snapshots(module["default_policy"], episodes, T)
    elif kind == "nothing":
        for episode in episodes:
            del episode.extra_model_outputs[Columns.STATE_OUT]

    def batch(pack_rows):
        piece = BuildTrainBatch(bootstrap_slot=bootstrap_slot, pack_rows=pack_rows)
        return run_pipeline(lambda *_: piece, module, episodes)

    packed, padded = batch(True), batch(False)
    assert packed.keys() - padded.keys() == {RESETS}
    assert len(packed[RESETS]) < len(padded[Columns.SEQ_LENS])

    pieces = []
    for row, (resets, length) in enumerate(
        zip(packed[RESETS], packed[Columns.SEQ_LENS].tolist(), strict=True)
    ):
        starts = [0, *resets.nonzero()[:, 0].tolist()]
        pieces += [(row, a, b) for a, b in zip(starts, [*starts[1:], length], strict=True)]
    assert len(pieces) == len(padded[Columns.SEQ_LENS])
    initial = module["default_policy"].get_initial_state()
    for index, length in enumerate(padded[Columns.SEQ_LENS].tolist()):
        obs = padded[Columns.OBS][index, :length]
        (found,) = [
            (row, a, b)
            for row, a, b in pieces
            if b - a == length and torch.equal(packed[Columns.OBS][row, a:b], obs)
        ]
        row, a, b = found
        for column in padded.keys() - {Columns.STATE_IN, Columns.SEQ_LENS}:
            assert torch.equal(packed[column][row, a:b], padded[column][index, :length]), column
        state = tree.map_structure(lambda x, row=row: x[row], packed[Columns.STATE_IN])
        expected = tree.map_structure(lambda x, i=index: x[i], padded[Columns.STATE_IN])
        tree.map_structure(
            lambda x, y: torch.testing.assert_close(x, y, rtol=0, atol=1e-6),
            initial if a else state,
            expected,
        )
    assert (
        sum(int(mask.sum()) for mask in packed[Columns.LOSS_MASK])
        == padded[Columns.LOSS_MASK].sum()
    )
    if bootstrap_slot:
        mask = packed[Columns.LOSS_MASK]
        behind = torch.cat([packed[RESETS][:, 1:], torch.zeros(len(mask), 1, dtype=bool)], 1)
        assert not mask[behind].any()
        assert (packed[Columns.ACTION_LOGP][~mask] == NEUTRAL_LOGP).all()


@pytest.mark.parametrize("make", [lstm_module, counting_module])
def test_modules_of_others_stay_padded(make):
    module = make(T)
    episodes = make_episodes(module["default_policy"], CHUNKS)
    batch = run_pipeline(lambda *_: [BuildTrainBatch()], module, episodes)
    assert RESETS not in batch
    assert len(batch[Columns.SEQ_LENS]) == sum(-(-(length + 1) // T) for length, _, _ in CHUNKS)


def test_a_batch_that_saves_nothing_is_as_ever():
    module = memory_module(GRUConfig(max_seq_len=T, d_model=8))
    episodes = make_episodes(module["default_policy"], [(7, 0, "terminated"), (15, 0, "cut")])
    assert RESETS not in run_pipeline(lambda *_: [BuildTrainBatch()], module, episodes)
