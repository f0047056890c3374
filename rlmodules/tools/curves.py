"""Learning curves of runs: read from what training wrote, put together by seeds, drawn."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from scipy import stats

from rlmodules.tools.runs import default_metric, files_of, read

_SEED = re.compile(r"[-_]seed\d+$")
_NUM_POINTS = 200


@dataclass
class Curve:
    """A metric over environment steps, of one run or of several with other seeds.

    Attributes:
        steps: Environment steps, those that all runs cover.
        mean: Of the runs at each of them.
        half_width: Of the 95 % confidence interval of that mean; None of a single run.
        num_runs: How many there are.
    """

    steps: np.ndarray
    mean: np.ndarray
    half_width: np.ndarray | None
    num_runs: int


def read_curves(folders: Sequence[Path], metric: str | None = None) -> dict[str, Curve]:
    """Reads runs; those whose folders' names differ in `-seed<n>` alone are one curve.

    Args:
        folders: Each a run, or a folder with several, such as an experiment of Tune's: its trials
            are one curve.
        metric: A column; None: mean returns.

    Returns:
        Curves by name.

    Raises:
        ValueError: If there is no run in a folder, no such column, or nothing in it yet.
    """
    runs: dict[str, list[pd.Series]] = {}
    for folder in folders:
        name = _SEED.sub("", folder.expanduser().absolute().name)
        runs.setdefault(name, []).extend(_measured(file, metric) for file in files_of(folder))
    return {name: _together(each) for name, each in runs.items()}


def draw_curves(curves: dict[str, Curve], path: Path, *, label: str) -> None:
    """Draws curves, with the confidence intervals of those that have several runs."""
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for name, curve in curves.items():
        runs = f" ({curve.num_runs} runs)" if curve.num_runs > 1 else ""
        (line,) = axes.plot(curve.steps, curve.mean, label=name + runs, linewidth=2)
        if curve.half_width is not None:
            low, high = curve.mean - curve.half_width, curve.mean + curve.half_width
            axes.fill_between(curve.steps, low, high, color=line.get_color(), alpha=0.2)
    axes.set(xlabel="environment steps", ylabel=label)
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)
    axes.legend(frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def _measured(file: Path, metric: str | None) -> pd.Series:
    """The metric by environment steps, without the iterations in which nothing was measured."""
    metric = metric or default_metric(file)
    table = read(file)
    if metric not in table:
        raise ValueError(
            f"`--metric` is {metric!r}, but {str(file)!r} has the columns {list(table)}. Give one "
            "of these."
        )
    measured = table[metric].dropna()
    if measured.empty:
        raise ValueError(
            f"`--metric` is {metric!r}, of which {str(file)!r} has no value yet. Wait until an "
            "episode has ended, or give another one."
        )
    return measured


def _together(runs: Sequence[pd.Series]) -> Curve:
    if len(runs) == 1:
        (run,) = runs
        return Curve(run.index.to_numpy(), run.to_numpy(), None, 1)
    first, last = max(run.index[0] for run in runs), min(run.index[-1] for run in runs)
    steps = np.linspace(first, last, _NUM_POINTS)
    values = np.stack([np.interp(steps, run.index, run) for run in runs])
    standard_error = values.std(0, ddof=1) / np.sqrt(len(runs))
    half_width = stats.t.ppf(0.975, len(runs) - 1) * standard_error
    return Curve(steps, values.mean(0), half_width, len(runs))
