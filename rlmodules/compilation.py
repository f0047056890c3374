"""`torch.compile` for memories: in place, one graph for all equal blocks and batch sizes."""

import importlib.util
import logging
import os
import shutil
from typing import Literal
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

logger = logging.getLogger("rllib_memory")

Compile = Literal["auto"] | bool

# The compiled blocks, and whether each may fall back to running uncompiled. Not an attribute of
# the blocks: their copies and pickles are not compiled.
_may_fall_back: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()


def compile_blocks(blocks: list[nn.Module], mode: Compile, device: torch.device) -> bool:
    """Compiles modules in place, so that parameter names and checkpoints stay as they are.

    Compilation itself happens at the first call. Copies and pickles of a compiled module are not
    compiled.

    Args:
        blocks: What to compile. Modules of one class with tensors of one shape share a graph.
        mode: True, False, or "auto": compile where a toolchain for the device exists.
        device: Where the modules run.

    Returns:
        Whether the modules are compiled now.
    """
    if not mode or not blocks:
        return False
    if mode == "auto" and not _has_toolchain(device):
        logger.warning(
            '`compile` = "auto": no %s found, the memory runs uncompiled. Install one, or set '
            "`compile=False` to silence this.",
            "Triton" if device.type == "cuda" else "C++ compiler",
        )
        return False
    for block in blocks:
        if block not in _may_fall_back:
            block.compile(fullgraph=True)
            _may_fall_back[block] = mode == "auto"
    return True


def call_block(block: nn.Module, *args):
    """Calls a block, compiled if it has been compiled and the batch has more than one row.

    A batch of one row would get a graph of its own: PyTorch specialises on sizes 0 and 1.
    """
    if block not in _may_fall_back:
        return block(*args)
    if args[0].shape[0] == 1:
        return block.forward(*args)
    _mark_batch_dynamic(args)
    try:
        return block(*args)
    except Exception as error:
        if not _may_fall_back[block] or not _is_compile_error(error):
            raise
        logger.warning("The memory could not be compiled and runs uncompiled: %s", error)
        block.compile(disable=True)
        del _may_fall_back[block]
        return block.forward(*args)


def _mark_batch_dynamic(args):
    for arg in args:
        if isinstance(arg, Tensor):
            torch._dynamo.maybe_mark_dynamic(arg, 0)
        elif isinstance(arg, dict):
            _mark_batch_dynamic(arg.values())


def _is_compile_error(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


def _has_toolchain(device: torch.device) -> bool:
    if device.type == "cuda":
        return importlib.util.find_spec("triton") is not None
    return any(shutil.which(c) for c in (os.environ.get("CXX", "c++"), "g++", "clang++"))
