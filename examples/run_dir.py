"""A run's directory: settings, metrics and checkpoints that survive interruptions."""

import csv
import json
import os
import shutil
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm

from connectors import save_checkpoint

# Checkpoints to keep: one more than needed, should the newest turn out to be damaged.
NUM_CHECKPOINTS = 2
PROGRESS_FILE = "progress.json"


class RunDir:
    """`run.json` (settings), `metrics.csv`, `checkpoints/<iteration>` and pictures of one run.

    Every file appears under its name only when it is complete. A crash leaves the last complete
    checkpoint, and metrics that are cut back to it when the run is resumed.

    Args:
        path: The directory.
    """

    def __init__(self, path: Path):
        self.path = path.absolute()
        self.checkpoints = self.path / "checkpoints"

    def create(self, settings: dict[str, Any]) -> Path | None:
        """Makes an empty directory. One that exists already is moved aside.

        Returns:
            Where the old directory is now, or None.
        """
        moved = None
        if self.path.exists():
            moved = self.path.with_name(f"{self.path.name}.{time.strftime('%Y%m%d-%H%M%S')}")
            self.path.rename(moved)
        self.checkpoints.mkdir(parents=True)
        self._write("run.json", json.dumps(settings, indent=2) + "\n")
        return moved

    def settings(self) -> dict[str, Any]:
        """The settings of an earlier `create`.

        Raises:
            FileNotFoundError: If there is no run in this directory.
        """
        return json.loads((self.path / "run.json").read_text())

    def save(self, algo: Algorithm, progress: dict[str, Any]) -> Path:
        """Writes a checkpoint, then removes those that are not needed any more."""
        target = self.checkpoints / f"{progress['iteration']:06d}"
        save_checkpoint(algo, target, files={PROGRESS_FILE: json.dumps(progress)})
        for old in self._complete()[:-NUM_CHECKPOINTS]:
            shutil.rmtree(old)
        return target

    def repair(self) -> None:
        """Removes what a crash left behind: unfinished checkpoints, metrics beyond the last one."""
        for unfinished in self.checkpoints.glob("*.unfinished"):
            shutil.rmtree(unfinished)
        self.cut_rows(int(self.progress()["iteration"]))

    def last_checkpoint(self) -> Path | None:
        """The newest complete checkpoint."""
        complete = self._complete()
        return complete[-1] if complete else None

    def progress(self) -> dict[str, Any]:
        """What `save` was given for the newest checkpoint; zeros without one."""
        checkpoint = self.last_checkpoint()
        if checkpoint is None:
            return {"iteration": 0, "env_steps": 0, "seconds": 0.0}
        return json.loads((checkpoint / PROGRESS_FILE).read_text())

    def append_row(self, row: dict[str, Any], name: str = "metrics.csv") -> None:
        """Appends a row of metrics."""
        path = self.path / name
        is_new = not path.exists()
        with path.open("a", newline="") as file:
            writer = csv.DictWriter(file, row)
            if is_new:
                writer.writeheader()
            writer.writerow(row)

    def read_rows(self, name: str = "metrics.csv") -> list[dict[str, float]]:
        """The complete rows of a metrics file."""
        path = self.path / name
        if not path.exists():
            return []
        with path.open(newline="") as file:
            rows = list(csv.DictReader(file))
        # A crash may have cut the last line short: its last values are then None.
        return [
            {key: float(value) if value else float("nan") for key, value in row.items()}
            for row in rows
            if None not in row.values()
        ]

    def cut_rows(self, iteration: int, name: str = "metrics.csv") -> None:
        """Drops the rows after an iteration."""
        rows = [row for row in self.read_rows(name) if row["iteration"] <= iteration]
        (self.path / name).unlink(missing_ok=True)
        for row in rows:
            self.append_row({k: int(v) if v.is_integer() else v for k, v in row.items()}, name)

    def _complete(self) -> list[Path]:
        return sorted(path for path in self.checkpoints.glob("*") if path.name.isdigit())

    def _write(self, name: str, text: str) -> None:
        unfinished = self.path / f"{name}.unfinished"
        unfinished.write_text(text)
        os.replace(unfinished, self.path / name)


def newest_checkpoint(runs: Iterable[Path]) -> Path | None:
    """The checkpoint that was written last, of all these runs' directories."""
    found = (RunDir(run).last_checkpoint() for run in runs)
    return max(
        (path for path in found if path), key=lambda path: path.stat().st_mtime, default=None
    )
