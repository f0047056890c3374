"""The runs of `python -m benchmarks popgym`, and the file that keeps them, a line each."""

import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks import journal

RESULTS = Path(__file__).parent / "results" / "popgym.jsonl"
EPISODES = 200
"""Episodes that a mean return is over, or more."""


@dataclass(frozen=True)
class Trial:
    """What a run is about."""

    task: str
    memory: str
    seed: int
    lr: float
    """Learning rate."""


@dataclass(frozen=True, kw_only=True)
class Run:
    """A run that has ended."""

    trial: Trial
    settings: dict[str, Any]
    """What it was trained with, of `examples.popgym_tasks.settings`."""

    max_steps: int
    """Environment steps that it was allowed."""

    steps: list[int]
    """Environment steps at each point of the curve."""

    returns: list[float]
    """Mean returns there, each over `EPISODES` episodes or more, or over all where there are fewer.
    """

    solved: bool
    """Whether the last one is the return at which a task is solved, so that it ended early."""

    seconds: float
    """Time of the training, without building the algorithm."""

    parameters: int
    """Those that were trained, encoder and heads included."""

    machine: dict[str, Any]

    @property
    def best(self) -> float:
        """The highest mean return, which is what POPGym's paper lists too."""
        return max(self.returns)

    def steps_to(self, goal: float) -> float:
        """Environment steps until a mean return; infinite if it was never reached."""
        reached = zip(self.steps, self.returns, strict=True)
        return next((steps for steps, value in reached if value >= goal), math.inf)

    def is_enough(self, settings: dict[str, Any], max_steps: int) -> bool:
        """Whether it needs no repetition: with these settings, and as long, or solved before."""
        long_enough = self.solved or self.max_steps >= max_steps
        return self.settings == _as_read(settings) and long_enough


def load(path: Path = RESULTS) -> list[Run]:
    """The runs of a file; none if there is no file."""
    return [Run(**{**entry, "trial": Trial(**entry["trial"])}) for entry in journal.read(path)]


def append(path: Path, run: Run) -> None:
    """Adds a run to a file."""
    journal.append(path, asdict(run))


def current(runs: Iterable[Run], settings_of: Any) -> list[Run]:
    """Of each trial its longest run, if its settings are still what the table says.

    Args:
        runs: All runs.
        settings_of: Makes the settings of a trial.
    """
    kept: dict[Trial, Run] = {}
    for run in runs:
        other = kept.get(run.trial)
        longer = other is None or run.steps[-1] > other.steps[-1]
        if longer and run.is_enough(settings_of(run.trial), 0):
            kept[run.trial] = run
    return list(kept.values())


def _as_read(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings as they come back from a file."""
    return json.loads(json.dumps(settings))
