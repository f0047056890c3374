"""Pictures of `python -m benchmarks popgym`: learning curves, and memories over all tasks."""

from collections.abc import Sequence
from pathlib import Path

import matplotlib
import numpy as np
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.popgym_runs import Run
from benchmarks.popgym_scores import PUBLISHED, aggregate
from examples import popgym_tasks
from rlmodules.tools.drawing import EITHER_GROUND

CURVES = "popgym-{family}.png"
MEMORIES = "popgym-memories.png"


@matplotlib.rc_context(EITHER_GROUND)
def draw(runs: Sequence[Run], directory: Path) -> None:
    """Draws a picture for each family that has runs, and one of all memories.

    Args:
        runs: The runs, of each trial one.
        directory: Where to write.
    """
    directory.mkdir(parents=True, exist_ok=True)
    for family in popgym_tasks.FAMILIES:
        own = [run for run in runs if popgym_tasks.split(run.trial.task)[0] == family]
        if own:
            save(_curves(own, family), directory / CURVES.format(family=family))
    common, means = aggregate(runs, list(popgym_tasks.MODELS))
    if len(means) > 1:
        save(_memories(common, means), directory / MEMORIES)


def _curves(runs: Sequence[Run], family: str) -> Figure:
    """A panel a level that has runs, a line a seed."""
    ran = {run.trial.task for run in runs}
    tasks = [task for level in popgym_tasks.LEVELS if (task := family + level) in ran]
    figure = Figure(figsize=(1 + 3.4 * len(tasks), 3.6), layout="constrained")
    panels = figure.subplots(1, len(tasks), squeeze=False)[0]
    shown: dict[str, Artist] = {}
    for axes, task in zip(panels, tasks, strict=True):
        for run in runs:
            if run.trial.task == task:
                (line,) = axes.plot(
                    run.steps, run.returns, color=color(run.trial.memory), linewidth=1.5
                )
                axes.plot(run.steps[-1], run.returns[-1], "o", color=line.get_color(), ms=3)
                shown.setdefault(run.trial.memory, line)
        _decorate(axes, task)
    panels[0].set_ylabel("mean return over 200 episodes")
    figure.legend(
        list(shown.values()), list(shown), loc="outside lower center", ncols=4, frameon=False
    )
    return figure


def _decorate(axes: Axes, task: str) -> None:
    if task in PUBLISHED:
        axes.axhline(PUBLISHED[task], color="grey", linestyle="--", linewidth=1)
    axes.set(title=task, xlabel="environment steps")
    axes.xaxis.set_major_locator(MaxNLocator(4))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)


def _memories(common: Sequence[str], means: dict[str, tuple[float, float, float]]) -> Figure:
    """A bar a memory, the best on top."""
    figure = Figure(figsize=(7, 0.35 * len(means) + 1.2), layout="constrained")
    axes = figure.add_subplot()
    ordered = sorted(means, key=lambda memory: means[memory][0])
    for i, memory in enumerate(ordered):
        mean, low, high = means[memory]
        axes.plot([low, high], [i, i], color=color(memory), linewidth=6, alpha=0.4)
        axes.plot(mean, i, "|", color=color(memory), markersize=12, markeredgewidth=2)
    axes.set_yticks(np.arange(len(ordered)), ordered)
    number = f"{len(common)} tasks" if len(common) > 1 else common[0]
    axes.set(xlabel=f"mean of the best returns on {number}, 95 % intervals")
    axes.grid(alpha=0.3, axis="x")
    return figure


def color(memory: str) -> tuple:
    """A memory has the same colour in all pictures."""
    names = list(popgym_tasks.MODELS)
    return matplotlib.colormaps["tab20"](names.index(memory) % 20)


def save(figure: Figure, path: Path) -> None:
    """Writes a picture, whole or not at all, for light and dark pages."""
    unfinished = path.with_suffix(".unfinished.png")
    figure.savefig(unfinished, dpi=110, transparent=True)
    unfinished.replace(path)
