"""The footprint benchmark on few steps."""

import pytest

from benchmarks import footprint
from benchmarks.iteration_cases import LSTM


@pytest.mark.ray
def test_memory_does_not_grow_with_rows():
    records = footprint.measure("gru", (16, 64), 256)
    assert [(r["case"], r["peer"]) for r in records] == [
        ("16xgru", LSTM),
        ("64xgru", LSTM),
        ("64xgru", footprint.SHORT),
    ]
    for r in records:
        # An output of each of 256 steps, at least, is kept for the backward pass.
        assert r["ours"] > 256 * 64 * 4
        assert r["ratio"] == pytest.approx(r["theirs"] / r["ours"])
    assert records[-1]["ratio"] > footprint.GROWTH
