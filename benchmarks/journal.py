"""Results that grow by a line each, so that a campaign that was killed goes on where it was."""

import json
import os
from pathlib import Path
from typing import Any


def read(path: Path) -> list[dict[str, Any]]:
    """The entries of a file; none if there is no file.

    What follows its last line break was being written when a campaign was killed, and is left out.
    """
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().split("\n")[:-1]]


def append(path: Path, entry: dict[str, Any]) -> None:
    """Adds an entry, on the disk when this returns; cuts off a line without an end."""
    line = json.dumps(entry, allow_nan=False) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        file.seek(0)
        file.truncate(file.read().rfind(b"\n") + 1)
        file.write(line.encode())
        file.flush()
        os.fsync(file.fileno())
