"""What a learning curve looks like when one setting is wrong.

    python -m benchmarks wrong_settings
    python -m benchmarks wrong_settings --only right "num_epochs=1"

GTrXL on POPGym's RepeatPreviousMedium, one seed, with the settings of `examples/popgym_tasks.py`
and then with one of them changed. A run is appended to the results when it ends and never made
again, unless the settings have changed. The picture is drawn of all that there are.
"""

import argparse
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks import popgym
from benchmarks.harness import Record
from benchmarks.popgym_pictures import save
from benchmarks.popgym_runs import Run, append, load
from examples import popgym_tasks
from rlmodules.tools.drawing import EITHER_GROUND

TASK, MEMORY = "RepeatPreviousMedium", "gtrxl"
STEPS = 120_000
RESULTS = Path(__file__).parent / "results" / "wrong-settings.jsonl"
PICTURE = popgym.IMAGES / "wrong-settings.png"
COLUMNS = 3
RIGHT = "right"
CASES: dict[str, dict[str, Any]] = {
    RIGHT: {},
    "gamma=0.99, lambda_=1.0": {"hyperparameters": {"gamma": 0.99, "lambda_": 1.0}},
    "max_seq_len=16": {"max_seq_len": 16},
    "memory_inference=16": {"model": {"memory_inference": 16}},
    "minibatch_size=128": {"hyperparameters": {"minibatch_size": 128}},
    "num_epochs=1": {"hyperparameters": {"num_epochs": 1}},
    "lr=5e-5": {"hyperparameters": {"lr": 5e-5}},
    "lr=1e-2": {"hyperparameters": {"lr": 1e-2}},
    "lr=5e-2": {"hyperparameters": {"lr": 5e-2}},
    "entropy_coeff=0.1": {"hyperparameters": {"entropy_coeff": 0.1}},
    "entropy_coeff=1.0": {"hyperparameters": {"entropy_coeff": 1.0}},
}
"""What differs from the task's settings, a lag of 32 steps in episodes of 103."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="FILE")
    parser.add_argument("--picture", type=Path, default=PICTURE, metavar="FILE")
    parser.add_argument("--steps", type=int, default=STEPS, help="a run (default: %(default)s)")


def run(args: argparse.Namespace) -> list[Record]:
    """Makes the runs that are missing, one after the other, and draws all.

    Returns:
        No records: what comes of it is curves.
    """
    for case in args.only:
        if case not in finished(args.results, args.steps):
            for progressed in train(case, args.steps):
                if progressed.run is not None:
                    append(args.results, progressed.run)
                    print(f"{case}: {progressed.run.returns[-1]:.2f}", flush=True)
    draw(finished(args.results, 0), args.picture)
    return []


def settings_of(case: str) -> dict[str, Any]:
    """The task's settings with one of them changed."""
    settings = popgym_tasks.settings(TASK, MEMORY)
    for name, change in CASES[case].items():
        settings[name] = {**settings[name], **change} if isinstance(change, dict) else change
    return settings


def finished(path: Path, steps: int) -> dict[str, Run]:
    """The runs of a file by their cases, those with other settings or fewer steps left out."""
    runs = load(path)
    return {
        case: found[-1]
        for case in CASES
        if (found := [run for run in runs if run.is_enough(settings_of(case), steps)])
    }


def train(case: str, steps: int) -> Iterator[popgym.Progressed]:
    """Trains with a case's settings."""
    (trial,) = popgym.plan([TASK], [MEMORY], 1)
    return popgym.train(trial, steps, settings_of(case))


@matplotlib.rc_context(EITHER_GROUND)
def draw(runs: dict[str, Run], path: Path) -> None:
    """Draws a panel for each case, the right settings' curve in all.

    Args:
        runs: The runs by their cases.
        path: Where to write.
    """
    num_rows = math.ceil(len(runs) / COLUMNS)
    figure = Figure(figsize=(9, 2.5 * num_rows), layout="constrained")
    panels = figure.subplots(num_rows, COLUMNS, squeeze=False).flatten()
    for axes, (case, shown) in zip(panels, runs.items(), strict=False):
        if RIGHT in runs:
            axes.plot(runs[RIGHT].steps, runs[RIGHT].returns, color="grey", linewidth=1)
        axes.plot(shown.steps, shown.returns, color="tab:red" if case != RIGHT else "tab:green")
        axes.set(title=case, ylim=(-0.7, 1.05))
        axes.xaxis.set_major_locator(MaxNLocator(3))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value / 1000:,.0f}k")
        axes.grid(alpha=0.3)
    for axes in panels[len(runs) :]:
        axes.set_axis_off()
    save(figure, path)
