"""A page that shows what runs have written, and goes on while they do."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from rlmodules.tools.runs import STEPS_PER_SECOND, files_of, read

# What is drawn where a run has it: columns as regular expressions, those of `metrics.csv` and, with
# where they stand in a result, those of Tune.
_CHARTS = {
    "mean return": r"return_mean|env_runners/episode_return_mean",
    "mean return in evaluation": (
        r"evaluation_return_mean|evaluation/env_runners/episode_return_mean"
    ),
    "environment steps a second": STEPS_PER_SECOND,
    "norm of states": r"(env_runners/.+/memory/)?state_norm_mean(/.+)?",
    "padding share": r"(learners/.+/memory/)?padding_share",
    "largest gradient": r"(learners/__all_modules__/memory/)?largest_gradient",
    "entropy": r"(learners/.+/)?entropy",
    "explained variance of values": r"(learners/.+/)?vf_explained_var",
    "loss of the value function": r"(learners/.+/)?vf_loss",
    "loss of the policy": r"(learners/.+/)?policy_loss",
    "loss of action values": r"(learners/.+/)?qf_loss",
    "mean action value": r"(learners/.+/)?qf_mean",
}
_NUM_POINTS = 500  # of a line, or up to twice as many
_PAGE = Path(__file__).with_name("watch.html")


class Watched:
    """Runs that go on: a file is read again once something new is in it.

    Args:
        folders: Each a run, or a folder with several. Runs that begin there later appear too.
    """

    def __init__(self, folders: Sequence[Path]):
        self._folders = folders
        self._read: dict[Path, tuple[tuple[int, int], dict[str, list[dict]]]] = {}

    def charts(self) -> dict[str, Any]:
        """What the page shows.

        Returns:
            `runs`: their names. `charts`: dicts with `title` and `lines`, each a dict with the
            number of its `run`, its `column` and its points, `steps` and `values`.

        Raises:
            ValueError: If there is no run in a folder.
        """
        found = [file.absolute() for folder in self._folders for file in files_of(folder)]
        files = list(dict.fromkeys(found))
        charts = []
        for title in _CHARTS:
            lines = [
                {"run": run, **line}
                for run, file in enumerate(files)
                for line in self._lines_of(file)[title]
            ]
            if lines:
                charts.append({"title": title, "lines": lines})
        return {"runs": _names(files), "charts": charts}

    def _lines_of(self, file: Path) -> dict[str, list[dict]]:
        facts = file.stat()
        version = (facts.st_mtime_ns, facts.st_size)
        if file not in self._read or self._read[file][0] != version:
            self._read[file] = version, _lines(read(file))
        return self._read[file][1]


class WatchServer(ThreadingHTTPServer):
    """Serves the page under `/` and what it shows, as JSON, under `/data`, on this machine alone.

    Args:
        folders: Each a run, or a folder with several.
        port: Where to listen; 0: any port that is free.

    Raises:
        ValueError: If there is no run in a folder, or the port is taken.
    """

    def __init__(self, folders: Sequence[Path], port: int):
        self.watched = Watched(folders)
        self.watched.charts()
        try:
            super().__init__(("127.0.0.1", port), _Handler)
        except OSError as error:
            raise ValueError(
                f"`--port` is {port}, where no server can listen: {error.strerror}. Give another "
                "one, or 0 for any that is free."
            ) from error


class _Handler(BaseHTTPRequestHandler):
    server: WatchServer

    def do_GET(self) -> None:
        """Answers with the page or its data."""
        if self.path == "/":
            self._answer("text/html; charset=utf-8", _PAGE.read_text(encoding="utf-8"))
        elif self.path == "/data":
            self._answer("application/json", json.dumps(self._data(), allow_nan=False))
        else:
            self.send_error(404)

    def log_message(self, *args: Any) -> None:
        """Writes no line for each request."""

    def _data(self) -> dict[str, Any]:
        try:
            return self.server.watched.charts()
        except (OSError, ValueError) as error:  # a folder that was moved, a file as it is replaced
            return {"error": str(error)}

    def _answer(self, kind: str, text: str) -> None:
        body = text.encode()
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("Cache-Control", "no-store")
        self.end_headers()
        self.wfile.write(body)


def _lines(table: pd.DataFrame) -> dict[str, list[dict]]:
    """The lines of each chart, those that have a point."""
    lines = {
        title: [
            {"column": column, **_points(table[column])}
            for column in table
            if re.fullmatch(pattern, str(column))
        ]
        for title, pattern in _CHARTS.items()
    }
    return {title: [line for line in each if line["steps"]] for title, each in lines.items()}


def _points(column: pd.Series) -> dict[str, list[float]]:
    """Steps and values where there is one, thinned out, with the last one."""
    numbers = pd.to_numeric(column, errors="coerce").replace([np.inf, -np.inf], np.nan).dropna()
    kept = numbers.iloc[:: -max(1, len(numbers) // _NUM_POINTS)][::-1]
    return {"steps": kept.index.tolist(), "values": kept.tolist()}


def _names(files: Sequence[Path]) -> list[str]:
    """The runs' folders, from the one that all are in."""
    above = os.path.commonpath([file.parent.parent for file in files])
    return [str(file.parent.relative_to(above)) for file in files]
