"""Rows are packed for memories that resets reach."""

from __future__ import annotations

from typing import Any

from rlmodules.contract.memory import check_resets
from rlmodules.modules.base import BaseMemoryRLModule, MemoryCore

# Classes whose resets this package's tests check.
_KNOWN = ("rlmodules.", "torch.")


def check_packed_memory(module: Any, module_id: str) -> None:
    """Refuses a memory of a user's that would take what one episode left into the next.

    Takes milliseconds, on a copy of the memory.

    Args:
        module: Any module that is trained, unwrapped.
        module_id: Its ID.

    Raises:
        ValueError: if its memory does not keep the promise of resets.
    """
    if not isinstance(module, BaseMemoryRLModule):
        return
    memory = next(core.memory for core in module.children() if isinstance(core, MemoryCore))
    if all(type(part).__module__.startswith(_KNOWN) for part in memory.modules()):
        return
    try:
        check_resets(memory)
    except Exception as error:
        raise ValueError(
            "`pack_rows` is True, so that training rows may hold several episodes, but the memory "
            f"of module `{module_id}` failed the check of resets: {error} Have `resets` reach all "
            "of the state, or leave rows padded: `connect(config, pack_rows=False)`."
        ) from error
