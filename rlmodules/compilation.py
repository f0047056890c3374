"""`torch.compile` for memories: one graph for all equal blocks and batch sizes."""

import functools
import importlib.util
import itertools
import logging
import os
import shutil
import time
import types
from collections.abc import Callable, Iterable
from typing import Any, Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

logger = logging.getLogger("rllib_memory")

Compile = Literal["auto"] | bool

# Seconds of training on a CPU after which "auto" compiles. Compiling takes half a minute to two
# there, which a run that soon ends would never get back; a long run loses little by the wait.
CPU_DELAY = 300.0


class _Kind:
    """What all modules of one class with tensors of one shape share: a compiled `forward`."""

    def __init__(self, module: nn.Module):
        forward = type(module).forward
        # PyTorch keeps at most eight graphs per code object, and makes sizes dynamic that differ
        # between them. With a code object for each kind, a process may train any number of models.
        copied = types.FunctionType(
            forward.__code__.replace(),
            forward.__globals__,
            forward.__name__,
            forward.__defaults__,
            forward.__closure__,
        )
        self.forward: Callable[..., Any] = torch.compile(copied, fullgraph=True, dynamic=False)
        self.failed = False


_kinds: dict[tuple, _Kind] = {}
# What each compiled block runs, and whether it may fall back to running uncompiled. Not attributes
# of the blocks: their copies and pickles are not compiled.
_compiled: WeakKeyDictionary[nn.Module, tuple[_Kind, bool]] = WeakKeyDictionary()


def compile_blocks(blocks: list[nn.Module], mode: Compile, device: torch.device) -> bool:
    """Has `call_block` run modules compiled. Their parameters' names and checkpoints stay.

    Compilation itself happens at the first call. Copies and pickles of a compiled module are not
    compiled.

    Args:
        blocks: What to compile. Modules of one class with tensors of one shape share a graph.
        mode: True, False, or "auto": compile where a toolchain for the device exists; on CPUs once
            this process has called for `CPU_DELAY` seconds, so that short runs do not pay for it.
        device: Where the modules run.

    Returns:
        Whether the modules are compiled now.
    """
    if not mode or not blocks:
        return False
    if mode == "auto" and not (has_toolchain(device.type) and _runs_long(device.type)):
        return False
    for block in blocks:
        if block not in _compiled:
            tensors = itertools.chain(block.named_parameters(), block.named_buffers())
            shapes = ((name, tuple(x.shape)) for name, x in tensors)
            key = (type(block), *shapes)
            if key not in _kinds:
                _kinds[key] = _Kind(block)
            _compiled[block] = (_kinds[key], mode == "auto")
    return True


def call_block(block: nn.Module, *args: Any) -> Any:
    """Calls a block, compiled if it has been compiled and the batch has more than one row.

    A batch of one row would get a graph of its own: PyTorch specialises on sizes 0 and 1.
    """
    kind, may_fall_back = _compiled.get(block, (None, False))
    if kind is None or kind.failed or args[0].shape[0] == 1:
        return block(*args)
    _mark_batch_dynamic(args)
    try:
        return kind.forward(block, *args)
    except Exception as error:
        if not may_fall_back or not _is_compile_error(error):
            raise
        logger.warning("The memory could not be compiled and runs uncompiled: %s", error)
        kind.failed = True
        return block(*args)


def _mark_batch_dynamic(args: Iterable[Any]) -> None:
    for arg in args:
        if isinstance(arg, Tensor):
            torch._dynamo.maybe_mark_dynamic(arg, 0)
        elif isinstance(arg, dict):
            _mark_batch_dynamic(arg.values())


def _is_compile_error(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _runs_long(device_type: str) -> bool:
    return device_type != "cpu" or time.monotonic() - _first_call() >= CPU_DELAY


@functools.cache
def _first_call() -> float:
    return time.monotonic()


@functools.cache
def has_toolchain(device_type: str) -> bool:
    """Whether the device's compiler exists. Says so once if it does not."""
    if device_type == "cuda":
        compiler, found = "Triton", importlib.util.find_spec("triton") is not None
    else:
        candidates = (os.environ.get("CXX", "c++"), "g++", "clang++")
        compiler, found = "C++ compiler", any(shutil.which(c) for c in candidates)
    if not found:
        logger.warning(
            '`compile` = "auto": no %s found, the memory runs uncompiled. Install one, or set '
            "`compile=False` to silence this.",
            compiler,
        )
    return found
