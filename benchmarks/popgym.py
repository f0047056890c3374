"""What each memory learns on POPGym, with PPO, the settings of a task and 72,000 parameters.

    python -m benchmarks popgym --tasks RepeatPreviousMedium --memories gtrxl --seeds 1
    python -m benchmarks popgym --levels Easy --seeds 1 --steps 300000 --workers 2
    python -m benchmarks popgym --tasks RepeatPreviousEasy --rates 5e-4 1e-3 2e-3 --seeds 1
    python -m benchmarks popgym --summary

Settings are those of `examples/popgym_tasks.py`, the same for all memories of a task but for the
learning rate. The peers have as many parameters: RLlib's LSTM and MLP on RLlib's connectors.

A run is one process with one thread. It ends after `--steps`, or before if its task is solved over
200 episodes. It is appended to `--results` when it ends, and never made again: start the command
again, here or on another machine with a copy of the file, and it goes on. A run is made again where
the settings of its task have changed, and where it was neither solved nor as long as `--steps`.
"""

import argparse
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import torch
from ray.exceptions import RayError
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MEAN,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
)
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from benchmarks import popgym_pictures
from benchmarks.harness import Record, machine_info
from benchmarks.popgym_runs import EPISODES, RESULTS, Run, Trial, append, current, load
from benchmarks.popgym_scores import summary
from benchmarks.popgym_table import print_table
from examples import popgym_tasks
from examples.popgym_setup import build_config, count_parameters, start_ray
from examples.runner import RecentMeans

__all__ = ["add_arguments", "print_table", "run"]

IMAGES = Path(__file__).parents[1] / "docs" / "images"
MAX_STEPS = 1_500_000
POINT_STEPS = 10_000
"""Steps between two points of a curve, or more."""


@dataclass(frozen=True)
class Progressed:
    """How far a run is after an iteration, and what it has come to when it ends."""

    steps: int
    mean_return: float
    run: Run | None = None


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    add, models = parser.add_argument, popgym_tasks.MODELS
    add("--tasks", nargs="+", choices=popgym_tasks.tasks(), metavar="TASK", help="(default: all)")
    add("--levels", nargs="+", choices=popgym_tasks.LEVELS, default=popgym_tasks.LEVELS)
    add("--memories", nargs="+", choices=models, default=list(models))
    add("--seeds", type=int, default=3, help="0, 1, ... (default: 3)")
    add("--steps", type=int, default=MAX_STEPS, help="a run at most (default: %(default)s)")
    add("--workers", type=int, default=1, help="runs at a time (default: 1)")
    add("--rates", nargs="+", type=float, help="learning rates (default: the memory's)")
    add("--results", type=Path, default=RESULTS, metavar="FILE", help="a line each run")
    add("--pictures", type=Path, default=IMAGES, metavar="DIR", help="(default: %(default)s)")
    add("--summary", action="store_true", help="train nothing, read the file only")


def run(args: argparse.Namespace) -> list[Record]:
    """Makes the runs that are missing, then tables and pictures of all.

    Args:
        args: The options.

    Returns:
        A record for each task, memory and learning rate that has runs.
    """
    tasks = args.tasks or [t for t in popgym_tasks.tasks() if t.endswith(tuple(args.levels))]
    if not args.summary:
        planned = plan(tasks, args.memories, args.seeds, args.rates)
        # Ray's processes yield to all others unless told otherwise.
        os.environ.setdefault("RAY_worker_niceness", "0")
        start_ray(args.workers)
        carry_out(planned, args.steps, args.workers, args.results)
    runs = current(load(args.results), settings_of)
    popgym_pictures.draw(_at_usual_rates(runs), args.pictures)
    shown = runs if args.rates else _at_usual_rates(runs)
    return summary(shown, tasks, args.memories)


def plan(
    tasks: Sequence[str], memories: Sequence[str], seeds: int, rates: Sequence[float] | None = None
) -> list[Trial]:
    """All trials, those that answer most first: all tasks and memories with a seed, then others."""
    return [
        Trial(task, memory, seed, lr)
        for seed in range(seeds)
        for task in tasks
        for memory in memories
        for lr in rates or [popgym_tasks.MODELS[memory].lr]
    ]


def settings_of(trial: Trial) -> dict[str, Any]:
    """The settings that a trial is trained with."""
    return popgym_tasks.settings(trial.task, trial.memory, lr=trial.lr)


def missing(trials: Sequence[Trial], runs: Sequence[Run], max_steps: int) -> list[Trial]:
    """The trials that have no run which is enough."""
    done = {run.trial for run in runs if run.is_enough(settings_of(run.trial), max_steps)}
    return [trial for trial in trials if trial not in done]


def train(
    trial: Trial, max_steps: int, settings: dict[str, Any] | None = None
) -> Iterator[Progressed]:
    """Trains until the task is solved, or the last step.

    Args:
        trial: What to train.
        max_steps: Environment steps at most.
        settings: What to train it with; None: what the table says.

    Yields:
        How far it is after each iteration, at last with the whole run.
    """
    torch.set_num_threads(1)
    start_ray()
    settings = settings_of(trial) if settings is None else settings
    changes = {**settings, "model": dict(settings["model"])}
    if trial.memory not in ("rllib-lstm", "mlp"):
        # Whether it pays depends on how long a run takes, which differs from machine to machine.
        changes["model"]["compile"] = False
    algo = build_config(
        trial.task, popgym_tasks.MODELS[trial.memory].name, seed=trial.seed, **changes
    ).build_algo()
    solved_at = popgym_tasks.family_of(trial.task).solved
    recent = RecentMeans((EPISODE_RETURN_MEAN,), EPISODES)
    points: list[tuple[int, float]] = []
    steps, spent, solved = 0, 0.0, False
    while steps < max_steps and not solved:
        start = time.perf_counter()
        result = algo.train()
        spent += time.perf_counter() - start
        recent.add(result[ENV_RUNNER_RESULTS])
        steps = int(result[NUM_ENV_STEPS_SAMPLED_LIFETIME])
        mean = recent.means()[EPISODE_RETURN_MEAN]
        enough = recent.num_episodes >= EPISODES
        solved = enough and mean >= solved_at
        if solved or steps >= max_steps or (enough and _is_due(points, steps)):
            points.append((steps, round(mean, 4)))
        yield Progressed(steps, mean)
    parameters = count_parameters(algo)
    algo.stop()
    yield Progressed(
        steps,
        points[-1][1],
        Run(
            trial=trial,
            settings=settings,
            max_steps=max_steps,
            steps=[point[0] for point in points],
            returns=[point[1] for point in points],
            solved=solved,
            seconds=round(spent, 1),
            parameters=parameters,
            machine=machine_info(),
        ),
    )


def carry_out(
    trials: Sequence[Trial],
    max_steps: int,
    workers: int,
    path: Path,
    train: Callable[[Trial, int], Iterator[Progressed]] = train,
) -> list[Trial]:
    """Makes the runs that a file lacks, some at a time, and appends each when it ends.

    Ray runs them, each in a process of its own. A run that fails leaves the others alone.

    Args:
        trials: What to train, in this order.
        max_steps: Environment steps a run at most.
        workers: Runs at a time.
        path: The file.
        train: Makes a run.

    Returns:
        Those that failed.
    """
    console = Console(soft_wrap=True)
    waiting = missing(trials, load(path), max_steps)
    console.print(f"{len(waiting)} of {len(trials)} runs are missing in {path}.")
    # A process for each run: it frees what Ray and torch hold, and is as good as a fresh start.
    remote: Any = ray.remote(num_cpus=1, max_calls=1, max_retries=0, num_returns="streaming")(train)
    running: dict[Any, Trial] = {}
    failed = []
    with RunsProgress(console, len(waiting) * max_steps) as display:
        while waiting or running:
            while waiting and len(running) < workers:
                trial = waiting.pop(0)
                running[remote.remote(trial, max_steps)] = trial
            # Its annotation knows no generators.
            ready: Any = ray.wait(list(running), num_returns=1)[0][0]
            trial = running[ready]
            try:
                progressed: Any = ray.get(next(ready))
            except StopIteration:
                del running[ready]
                continue
            except RayError as error:
                del running[ready]
                failed.append(trial)
                display.end(trial, max_steps, f"[red]failed[/]: {error}")
                continue
            display.show(trial, progressed)
            if progressed.run is not None:
                append(path, progressed.run)
                display.end(trial, max_steps, _outcome(progressed.run))
    if failed:
        console.print(f"[red]{len(failed)} runs failed.[/] The same command makes them again.")
    return failed


class RunsProgress:
    """A bar over the steps of all runs, with the time that is left, and a line for each that ended.

    A context manager.

    Args:
        console: Where to write.
        total: Steps of all runs.
    """

    def __init__(self, console: Console, total: int):
        self._console = console
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,} of at most {task.total:,} steps"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(elapsed_when_finished=True),
            console=console,
            speed_estimate_period=600,
        )
        self._task = self._progress.add_task("all runs", total=total)
        self._total = total
        self._steps: dict[Trial, int] = {}

    def __enter__(self) -> "RunsProgress":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, trial: Trial, progressed: Progressed) -> None:
        """Notes how far a run is."""
        self._progress.advance(self._task, progressed.steps - self._steps.get(trial, 0))
        self._steps[trial] = progressed.steps
        self._progress.update(
            self._task,
            description=f"{trial.task} {trial.memory} seed {trial.seed}: "
            f"{progressed.mean_return:.2f}",
        )

    def end(self, trial: Trial, max_steps: int, outcome: str) -> None:
        """Prints what became of a run; the steps that it did not need are off the bar."""
        self._total -= max(0, max_steps - self._steps.get(trial, 0))
        self._progress.update(self._task, total=self._total)
        self._console.print(
            f"{trial.task} {trial.memory} seed {trial.seed} lr {trial.lr:g}: {outcome}",
            highlight=False,
        )


def _outcome(run: Run) -> str:
    solved = "solved, " if run.solved else ""
    speed = run.steps[-1] / run.seconds
    return (
        f"{solved}best [bold]{run.best:.2f}[/], last {run.returns[-1]:.2f} after "
        f"{run.steps[-1]:,} steps and {run.seconds:.0f} s ({speed:,.0f} steps/s)"
    )


def _is_due(points: Sequence[tuple[int, float]], steps: int) -> bool:
    return not points or steps - points[-1][0] >= POINT_STEPS


def _at_usual_rates(runs: Sequence[Run]) -> list[Run]:
    """Runs with the learning rates of the table."""
    models = popgym_tasks.MODELS
    return [run for run in runs if run.trial.lr == models[run.trial.memory].lr]
