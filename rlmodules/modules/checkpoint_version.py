"""The version and the settings of a module's checkpoints, and the refusal of others."""

import json
import pickle
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSystem
from ray.rllib.utils.checkpoints import Checkpointable

# One higher whenever the same checkpoint would mean something else: other names of weights, other
# settings or ones whose default is not what was done before, another computation with them.
# `tests/golden` notices.
CHECKPOINT_VERSION = 2
VERSION_KEY = "rllib_memory_checkpoint_version"


def read_version(path: str | Path, filesystem: Any = None) -> Any:
    """The version that a module's checkpoint names; None if it names none."""
    metadata = _read(path, filesystem, Checkpointable.METADATA_FILE_NAME)
    return json.loads(metadata).get(VERSION_KEY)


def read_settings(path: str | Path, filesystem: Any = None) -> dict[str, Any]:
    """The constructor's keyword arguments that a module's checkpoint names."""
    saved = _read(path, filesystem, Checkpointable.CLASS_AND_CTOR_ARGS_FILE_NAME)
    _, settings = pickle.loads(saved)["ctor_args_and_kwargs"]
    return settings


def differing_settings(saved: Mapping[str, Any], own: Mapping[str, Any]) -> str:
    """In words, what differs of the constructor's arguments of two modules; "" if nothing does.

    Args:
        saved: A checkpoint's.
        own: Those of a module that it was to be loaded into.
    """
    spaces = ("observation_space", "action_space")
    there, here = (
        {name: arguments[name] for name in spaces} | arguments["model_config"]
        for arguments in (saved, own)
    )
    return ", ".join(
        f"`{name}` is {there.get(name)!r} in the checkpoint and {here.get(name)!r} here"
        for name in {**there, **here}
        if there.get(name) != here.get(name)
    )


def _read(path: str | Path, filesystem: Any, name: str) -> bytes:
    path = str(path)
    if filesystem is None:
        filesystem, path = FileSystem.from_uri(path)
    with filesystem.open_input_stream(Path(path, name).as_posix()) as stream:
        return stream.read()


def check_version(version: Any, name: str) -> None:
    """Refuses checkpoints of other versions.

    Args:
        version: What the checkpoint names.
        name: The module's class.

    Raises:
        ValueError: if it is not the present one.
    """
    if version != CHECKPOINT_VERSION:
        raise ValueError(
            f"The checkpoint of this {name} has version {version!r}, but this rllib-memory reads "
            f"version {CHECKPOINT_VERSION}. Nothing was loaded. Load it with the release of "
            "rllib-memory that wrote it."
        )
