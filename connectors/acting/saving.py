"""Checkpoints that are whole or not there."""

from __future__ import annotations

import os
import pickle
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.core import COMPONENT_LEARNER, COMPONENT_LEARNER_GROUP, COMPONENT_RL_MODULE


def save_checkpoint(
    algo: Algorithm, path: str | Path, *, files: Mapping[str, str] | None = None
) -> str:
    """Saves an Algorithm, so that `path` exists only if the whole checkpoint does.

    RLlib writes one file after the other to where it is told to, and does not look at whether
    Learners in other processes could write theirs. This writes to `<path>.unfinished`, checks that
    all is there, waits for the disk, and renames. Whatever is killed meanwhile, machine included,
    leaves no `path`, and other checkpoints as they are.

    Args:
        algo: The Algorithm.
        path: A new folder on a local disk, by iteration for example.
        files: Text of further files that belong to the checkpoint, by name.

    Returns:
        The absolute path, for `Algorithm.from_checkpoint`.

    Raises:
        ValueError: if there is something at `path`.
        RuntimeError: if a part could not be saved.
    """
    target = Path(path).expanduser().absolute()
    if target.exists():
        raise ValueError(
            f"`path` is {str(target)!r}, which exists, but no folder can be replaced in one step. "
            "Give each checkpoint a name of its own, by iteration for example, and remove old ones "
            "after it."
        )
    unfinished = target.with_name(f"{target.name}.unfinished")
    # Of an attempt that was killed.
    shutil.rmtree(unfinished, ignore_errors=True)
    algo.save_to_path(str(unfinished))
    for name, text in (files or {}).items():
        (unfinished / name).write_text(text)
    _check_learner(unfinished / COMPONENT_LEARNER_GROUP / COMPONENT_LEARNER)
    for folder, _, names in os.walk(unfinished):
        for name in names:
            _sync(Path(folder, name))
        _sync(Path(folder))
    unfinished.rename(target)
    _sync(target.parent)
    return str(target)


def require_learners(*, algorithm: Algorithm, **kwargs: Any) -> None:
    """A callback that refuses checkpoints without a Learner; `connect` sets it.

    RLlib 2.60 goes on with untrained weights where a Learner in another process died while Tune
    saved it.

    Raises:
        RuntimeError: if the checkpoint that was just loaded is such a one.
    """
    learner_group: Any = algorithm.learner_group
    if not all(result.get() for result in learner_group.foreach_learner(_was_restored)):
        raise RuntimeError(
            "The checkpoint holds no weights: a Learner died while it was saved. Resume from an "
            "earlier checkpoint."
        )


def _was_restored(learner: Any) -> bool:
    restored, learner.restored = learner.restored, False
    return restored


def _check_learner(folder: Path) -> None:
    """Reads back what a Learner wrote: RLlib 2.60 ignores errors of Learners in other processes."""
    modules = folder / COMPONENT_RL_MODULE
    for part in [folder, modules, *(path for path in modules.rglob("*") if path.is_dir())]:
        try:
            (state,) = part.glob("*state.pkl")
            pickle.loads(state.read_bytes())
        except (ValueError, EOFError, pickle.UnpicklingError) as error:
            raise RuntimeError(
                f"The checkpoint is not whole: a Learner wrote no readable state to {str(part)!r}. "
                "It died, or could not write there. Earlier checkpoints are intact."
            ) from error


def _sync(path: Path) -> None:
    """Waits until a file, or the entries of a folder, are on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
