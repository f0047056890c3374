"""What a run shows: lines and a progress bar on the terminal, a picture at the end."""

import math
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from ray.rllib.core import ALL_MODULES, DEFAULT_MODULE_ID
from ray.rllib.utils.metrics import (
    ENV_RUNNER_RESULTS,
    EPISODE_RETURN_MAX,
    EPISODE_RETURN_MEAN,
    EPISODE_RETURN_MIN,
    EVALUATION_RESULTS,
    LEARNER_RESULTS,
    NUM_ENV_STEPS_SAMPLED_LIFETIME,
    NUM_EPISODES_LIFETIME,
)
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

LEARNER_METRICS = ("policy_loss", "vf_loss", "vf_explained_var", "entropy")


def metrics_row(result: dict[str, Any], last: dict[str, Any], seconds: float) -> dict[str, Any]:
    """One row of `metrics.csv` from a result of `Algorithm.train`.

    Args:
        result: The result.
        last: The row before; of it, `env_steps` and `seconds` are needed.
        seconds: Training time so far.
    """
    runners = result[ENV_RUNNER_RESULTS]
    learner = result.get(LEARNER_RESULTS, {}).get(DEFAULT_MODULE_ID, {})
    norms = runners.get(DEFAULT_MODULE_ID, {}).get("memory", {}).get("state_norm_mean", {})
    everywhere = result.get(LEARNER_RESULTS, {}).get(ALL_MODULES, {}).get("memory", {})
    evaluation = result.get(EVALUATION_RESULTS, {}).get(ENV_RUNNER_RESULTS, {})
    env_steps = int(result[NUM_ENV_STEPS_SAMPLED_LIFETIME])
    nan = float("nan")
    return {
        "iteration": int(result["training_iteration"]),
        "env_steps": env_steps,
        "seconds": round(seconds, 2),
        "episodes": int(runners.get(NUM_EPISODES_LIFETIME, 0)),
        "return_mean": float(runners.get(EPISODE_RETURN_MEAN, nan)),
        "return_min": float(runners.get(EPISODE_RETURN_MIN, nan)),
        "return_max": float(runners.get(EPISODE_RETURN_MAX, nan)),
        "evaluation_return_mean": float(evaluation.get(EPISODE_RETURN_MEAN, nan)),
        "steps_per_second": round((env_steps - last["env_steps"]) / (seconds - last["seconds"]), 1),
        "padding_share": round(float(learner.get("memory", {}).get("padding_share", nan)), 4),
        "state_norm_mean": float(max(norms.values(), default=nan)),  # of the largest leaf
        "largest_gradient": float(everywhere.get("largest_gradient", nan)),
        **{name: float(learner.get(name, nan)) for name in LEARNER_METRICS},
    }


class Display:
    """One line an iteration, and a bar below them where the output is a terminal.

    A context manager.

    Args:
        title: Name of what is being trained.
        console: Where to write.
        stop_timesteps: Environment steps at which the bar is full.
    """

    def __init__(self, title: str, console: Console, stop_timesteps: int):
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:,} of at most {task.total:,} steps"),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._console = console
        self._task = self._progress.add_task(title, total=stop_timesteps)

    def __enter__(self) -> "Display":
        self._progress.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._progress.stop()

    def show(self, row: dict[str, Any]) -> None:
        """Shows a row of metrics."""
        self._progress.update(self._task, completed=row["env_steps"])
        share = row["padding_share"]
        # Measured of this package's modules only.
        padding = "" if math.isnan(share) else f"   padding {share:>4.0%}"
        self._console.print(
            f"iteration {row['iteration']:>4}  {row['env_steps']:>9,} steps"
            f"   return [bold]{row['return_mean']:>6.2f}[/]"
            f"   {row['steps_per_second']:>7,.0f} steps/s"
            f"{padding}   {row['seconds']:>6.0f} s",
            highlight=False,
            soft_wrap=True,
        )


def draw_curves(
    curves: dict[str, list[dict[str, float]]], path: Path, *, title: str, goal: float
) -> None:
    """Draws mean returns over environment steps.

    Args:
        curves: Rows of metrics by label.
        path: The PNG file to write.
        title: Title of the picture.
        goal: Return at which a dashed line is drawn.
    """
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot()
    for label, rows in curves.items():
        points = [row for row in rows if not math.isnan(row["return_mean"])]
        steps = [row["env_steps"] for row in points]
        axes.plot(steps, [row["return_mean"] for row in points], label=label, linewidth=2)
    axes.axhline(goal, color="grey", linestyle="--", linewidth=1)
    axes.set(title=title, xlabel="environment steps", ylabel="mean return of an iteration")
    axes.xaxis.set_major_locator(MaxNLocator(6))
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(alpha=0.3)
    if curves:
        axes.legend(frameon=False)
    unfinished = path.with_suffix(".unfinished.png")
    figure.savefig(unfinished, dpi=130)
    unfinished.replace(path)
