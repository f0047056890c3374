"""The version of a module's checkpoints, and the refusal of others."""

import json
from pathlib import Path
from typing import Any

from pyarrow.fs import FileSystem
from ray.rllib.utils.checkpoints import Checkpointable

# One higher whenever the same checkpoint would mean something else: other names of weights, other
# or more settings, another computation with them. `tests/golden` notices.
CHECKPOINT_VERSION = 2
VERSION_KEY = "rllib_memory_checkpoint_version"


def read_version(path: str | Path, filesystem: Any = None) -> Any:
    """The version that a module's checkpoint names; None if it names none."""
    path = str(path)
    if filesystem is None:
        filesystem, path = FileSystem.from_uri(path)
    file = Path(path, Checkpointable.METADATA_FILE_NAME).as_posix()
    with filesystem.open_input_stream(file) as stream:
        return json.loads(stream.read()).get(VERSION_KEY)


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
