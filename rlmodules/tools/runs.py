"""What runs have written so far: their files, and the metrics in these by environment steps."""

from __future__ import annotations

import contextlib
import io
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd


@dataclass(frozen=True)
class _Names:
    """Columns that each kind of file has under a name of its own."""

    steps: str
    seconds: str
    returns: str


# Of `examples.train_popgym` and of Tune, whose `progress.csv` has the columns of the first result
# only.
_FILES = {
    "metrics.csv": _Names("env_steps", "seconds", "return_mean"),
    "result.json": _Names(
        "num_env_steps_sampled_lifetime", "time_total_s", "env_runners/episode_return_mean"
    ),
}
STEPS_PER_SECOND = "steps_per_second"


def files_of(folder: Path) -> list[Path]:
    """The files of results in a folder, or else those in the folders below it.

    Raises:
        ValueError: If there is none.
    """
    folder = folder.expanduser()
    for places in (folder.glob, folder.rglob):
        for name in _FILES:
            if found := sorted(places(name)):
                return found
    raise ValueError(
        f"`RUN` is {str(folder)!r}, where no run has written {' or '.join(_FILES)}. Give the "
        "folder of a run, or one with runs in it: an experiment of Tune's, for example. A run "
        "that has just begun writes after its first iteration."
    )


def read(file: Path) -> pd.DataFrame:
    """All complete results of a run, by environment steps.

    A run that was resumed has the steps behind its checkpoint twice, of which the later ones count.

    Returns:
        A column a metric, and `STEPS_PER_SECOND`; nested keys are joined by slashes. Without
        columns if nothing is written yet.
    """
    names = _FILES[file.name]
    text = file.read_text()
    text = text[: text.rfind("\n") + 1]  # what follows is being written
    table = _read_csv(text) if file.suffix == ".csv" else _read_json(text)
    if names.steps not in table:
        return pd.DataFrame()
    steps = table[names.steps].astype(float)
    smallest_later = steps[::-1].cummin()[::-1].shift(-1, fill_value=np.inf)
    table = table[steps < smallest_later]
    spent = table.reindex(columns=[names.steps, names.seconds])
    spent = spent.diff().fillna(spent)
    rates = (spent[names.steps] / spent[names.seconds]).rename(STEPS_PER_SECOND)
    others = table.drop(columns=STEPS_PER_SECOND, errors="ignore")
    return pd.concat([others, rates], axis=1).set_index(names.steps)


def default_metric(file: Path) -> str:
    """The column of mean returns."""
    return _FILES[file.name].returns


def _read_csv(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text)) if text else pd.DataFrame()


def _read_json(text: str) -> pd.DataFrame:
    results = []
    for line in text.splitlines():
        # One that was cut off when the process died has the next one in its line.
        with contextlib.suppress(json.JSONDecodeError):
            result = json.loads(line)
            result.pop("config", None)  # no metrics, and most of the line
            results.append(result)
    return pd.json_normalize(results, sep="/")
