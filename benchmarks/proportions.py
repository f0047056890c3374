"""What linear attention costs over length, rows and width, against proportion to its arithmetic."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import matplotlib
from matplotlib.figure import Figure

from benchmarks.harness import Record, alternate, machine_info, record, timed
from benchmarks.kernel_peers import Case, Inputs, chunk_size_of, multiply_adds, ours
from rlmodules.tools.drawing import EITHER_GROUND

PEER = "proportion"
BASE = Case(8, 4, 1024, 64)
AXES: dict[str, list[Case]] = {
    "length": [Case(8, 4, T, 64) for T in (64, 256, 1024, 4096, 8192)],
    "rows": [Case(B, 4, 1024, 64) for B in (1, 2, 4, 8, 16, 32)],
    "width": [Case(8, 4, 1024, K) for K in (16, 32, 64, 128)],
}
ALLOWED = 1.1
"""A case may take so many times what its arithmetic's share of the base case's time is."""


def compare(
    axis: str,
    cases: Sequence[Case],
    device: str = "cpu",
    *,
    base: Case = BASE,
    target: float | None = 1 / ALLOWED,
    min_runs: int = 5,
    seconds: float = 8.0,
) -> list[Record]:
    """Measures cases in turns, each against its arithmetic's share of what the base case takes.

    Args:
        axis: What the cases differ in, one of `AXES`.
        cases: What to measure; the base case comes with them.
        device: Where to run.
        base: The case that the others are compared with.
        target: The ratio to reach.
        min_runs: Rounds at least.
        seconds: Time for the rounds beyond those.
    """
    times = alternate(
        {str(case): timed(ours(Inputs(case, device)), device) for case in {*cases, base}},
        min_runs=min_runs,
        seconds=seconds,
    )
    return [
        record(
            benchmark="kernels",
            case=str(case),
            peer=PEER,
            metric="time",
            ours=times[str(case)],
            theirs=[
                seconds * multiply_adds(case) / multiply_adds(base) for seconds in times[str(base)]
            ],
            unit="s",
            target=target,
            machine=machine_info(device),
            chunk_size=chunk_size_of(case.K),
            axis=axis,
        )
        for case in cases
        if case != base
    ]


@matplotlib.rc_context(EITHER_GROUND)
def draw(records: Sequence[Mapping], path: Path) -> None:
    """Draws measured and proportional times, a panel an axis, both scales logarithmic."""
    figure = Figure(figsize=(11, 3.6), layout="constrained")
    panels = figure.subplots(1, len(AXES), sharey=True)
    for axes, axis in zip(panels, AXES, strict=True):
        found = [r for r in records if r["peer"] == PEER and r["axis"] == axis]
        sizes = [_size(axis, Case.parse(r["case"])) for r in found]
        axes.loglog(sizes, [1e3 * r["theirs"] for r in found], "--", color="grey")
        axes.loglog(sizes, [1e3 * r["ours"] for r in found], "o-", color="tab:blue")
        axes.set(xlabel=axis, xticks=sizes, xticklabels=[f"{size:,}" for size in sizes])
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("forward and backward, ms")
    panels[0].legend(["proportional to the arithmetic", "measured"], frameon=False)
    figure.savefig(path, dpi=150)


def _size(axis: str, case: Case) -> int:
    return {"length": case.T, "rows": case.B, "width": case.K}[axis]
