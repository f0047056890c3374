"""The kernel benchmark on tiny sizes."""

import argparse
import math

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from benchmarks import kernel_peers, kernels, proportions, recurrences
from benchmarks.harness import CorrectnessError
from benchmarks.kernel_peers import PEERS, Case, Inputs, multiply_adds, ours
from benchmarks.memory import peak_memory
from rlmodules.kernels import scan_reference

TINY = Case(2, 2, 130, 8)


@pytest.mark.parametrize("name", ["8x4x1024x64", "8x4x1024x64-decay"])
def test_case_names(name):
    case = Case.parse(name)
    assert str(case) == name
    assert (case.B, case.H, case.T, case.K) == (8, 4, 1024, 64)


def test_all_comparisons_name_known_peers():
    for case, peer, metric, _ in kernels.COMPARISONS:
        assert str(Case.parse(case)) == case
        assert peer in (*PEERS, "matmul")
        assert metric in ("time", "memory")


def test_the_kernel_passes_its_check():
    kernels.check_kernel("cpu")


@pytest.mark.parametrize("peer", ["popgym", "lstm", "sdpa", "matmul"])
def test_times(peer):
    r = kernels.compare(TINY, peer, "time", min_runs=1, seconds=0)
    assert (r["benchmark"], r["case"], r["peer"], r["metric"]) == (
        "kernels", "2x2x130x8", peer, "time",
    )  # fmt: skip
    assert r["ratio"] == pytest.approx(r["theirs"] / r["ours"])


def test_popgym_needs_more_memory():
    r = kernels.compare(Case(2, 2, 256, 32), "popgym", "memory")
    # S at every step: popgym holds at least two such tensors at once.
    assert r["theirs"] > 2 * 4 * (2 * 2 * 256 * 32 * 32)
    assert r["ratio"] > 3


def test_proportions(tmp_path):
    base = Case(1, 1, 64, 8)
    records = []
    for axis, case, share in (
        ("length", Case(1, 1, 256, 8), 4),
        ("rows", Case(3, 1, 64, 8), 3),
        # Products of chunks grow with the width, those with the state with its square.
        ("width", Case(1, 1, 64, 16), 2 * (32 + 16) / (32 + 8)),
    ):
        (r,) = proportions.compare(axis, [base, case], base=base, min_runs=1, seconds=0)
        assert (r["case"], r["peer"], r["axis"]) == (str(case), "proportion", axis)
        records.append(r)
        assert multiply_adds(case) / multiply_adds(base) == pytest.approx(share)
    proportions.draw(records, tmp_path / "cost.png")
    assert (tmp_path / "cost.png").stat().st_size > 5_000


def test_a_wrong_peer_is_refused(monkeypatch):
    def wrong(inputs):
        run = ours(inputs)
        return lambda: [1.1 * x for x in run()]

    monkeypatch.setitem(kernel_peers.PEERS, "popgym", wrong)
    with pytest.raises(CorrectnessError, match="popgym"):
        kernels.compare(TINY, "popgym", "time", min_runs=1, seconds=0)


def test_a_wrong_kernel_is_refused(monkeypatch):
    def wrong(q, k, v, state, **options):
        out, state = kernels.linear_attention_reference(q, k, v, state, **options)
        return out + 1e-3, state

    monkeypatch.setattr(kernels, "linear_attention", wrong)
    with pytest.raises(CorrectnessError, match="reference"):
        kernels.check_kernel("cpu")


def test_counted_arithmetic_is_done_at_least():
    case = Case(2, 2, 256, 16)
    run = ours(Inputs(case))

    def in_place_product(_, a, b, **kwargs):
        return 2 * math.prod(a) * b[-1]

    # torch counts such products only when told how.
    mapping = {torch.ops.aten.baddbmm_: in_place_product}
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run()
    counted = counter.get_total_flops() / 2
    # What the normaliser multiplies comes on top.
    assert multiply_adds(case) <= counted <= 1.2 * multiply_adds(case)


def test_counted_arithmetic_is_the_formula():
    # One chunk of 4 steps: q k^T and A v 4*4*2 each, k^T v and q S 4*2*2 each; times 3.
    assert multiply_adds(Case(1, 1, 4, 2), chunk_size=4) == 3 * (2 * 32 + 2 * 16)


def test_peak_memory_counts_what_lives_at_once():
    x = torch.zeros(1000)

    def function():
        y = x + 1  # 4 kB
        z = y + 1  # 8 kB
        del y
        return z + 1  # 8 kB

    # Scalars count, too.
    assert 8000 <= peak_memory(function) <= 8100


def test_only_selects(monkeypatch):
    monkeypatch.setattr(kernels, "COMPARISONS", [("1x1x64x4", "sdpa", "time", None)])
    args = argparse.Namespace(device="cpu", runs=1, seconds=0.0, only="sdpa", picture=None)
    assert [r["peer"] for r in kernels.run(args)] == ["sdpa"]


@pytest.mark.parametrize(
    ("case", "peer"),
    [("scan-2x70x4", "loop"), ("scan-2x70x4", "copy"), ("delta-2x2x70x4", "linear")],
)
def test_recurrences(case, peer):
    r = recurrences.compare(case, peer, min_runs=1, seconds=0)
    assert (r["benchmark"], r["case"], r["peer"]) == ("kernels", case, peer)
    assert r["ratio"] == pytest.approx(r["theirs"] / r["ours"])


def test_a_wrong_recurrence_is_refused(monkeypatch):
    def wrong(*args):
        h, last = scan_reference(*args)
        return h + 1e-3, last

    monkeypatch.setattr(recurrences, "scan", wrong)
    with pytest.raises(CorrectnessError, match="scan"):
        recurrences.check_recurrences("cpu")
