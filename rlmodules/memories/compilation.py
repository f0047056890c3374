"""`torch.compile` for memories: equal blocks share a graph for each kind of call."""

import functools
import importlib.util
import itertools
import logging
import os
import shutil
import time
import types
import weakref
from collections.abc import Callable, Iterator
from typing import Any, Literal

import torch
from torch import Tensor, nn

logger = logging.getLogger("rllib_memory")

Compile = Literal["auto"] | bool

# Seconds of training on a CPU after which "auto" compiles. Compiling takes half a minute to two
# there, which a run that soon ends would never get back; a long run loses little by the wait.
CPU_DELAY = 300.0


def compile_blocks(blocks: list[nn.Module], mode: Compile, device: torch.device) -> bool:
    """Has plain calls of modules run compiled. Their parameters' names and checkpoints stay.

    Compilation itself happens at the first call of a kind: of row length and other shapes, dtypes,
    what is None, with gradient or without. The number of rows, the first axis of the first tensor,
    may change; tensors may lie in dicts, lists and tuples. Hooks of the module run uncompiled,
    around it. Copies and pickles of a compiled module are not compiled.

    Args:
        blocks: What to compile. Modules of one class with equal settings and shapes share graphs.
        mode: True, False, or "auto": compile where a toolchain for the device exists; on CPUs once
            they have been trained for `CPU_DELAY` seconds, so that short runs do not pay for it.
        device: Where the modules run.

    Returns:
        Whether the modules are compiled now.
    """
    if not mode or not blocks:
        return False
    if mode == "auto" and not (has_toolchain(device.type) and _runs_long(blocks[0], device.type)):
        return False
    for block in blocks:
        if not is_compiled(block):
            block.forward = _CompiledForward(block, may_fall_back=mode == "auto")
    return True


def is_compiled(block: nn.Module) -> bool:
    """Whether `compile_blocks` has compiled this module."""
    return isinstance(block.forward, _CompiledForward)


# By what blocks have in common, then by kind of call.
_graphs: dict[tuple, dict[tuple, Callable[..., Any]]] = {}


class _CompiledForward:
    """Takes the place of a block's `forward`.

    A batch of one row or none would get a graph of its own: PyTorch specialises on 0 and 1.
    """

    def __init__(self, block: nn.Module, *, may_fall_back: bool):
        self.uncompiled = block.forward
        self.may_fall_back = may_fall_back
        self.parameters = list(block.parameters())
        self.graphs = _graphs.setdefault((may_fall_back, *_description(block)), {})

    def __reduce__(self) -> tuple[Callable[..., Any], tuple]:
        # What copies and pickles of the block get instead: the method, bound to the copy.
        return _identity, (self.uncompiled,)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves = list(_leaves((args, kwargs)))
        first = next((x for x in leaves if isinstance(x, Tensor) and x.dim()), None)
        if first is None or len(first) < 2 or torch.compiler.is_compiling():
            return self.uncompiled(*args, **kwargs)
        key = self._key(leaves, first)
        if key not in self.graphs:
            self.graphs[key] = _new_graph()
        try:
            return self.graphs[key](self.uncompiled, *args, **kwargs)
        except Exception as error:
            if not self.may_fall_back or not _is_compile_error(error):
                raise
            # Raises if the mistake is the block's own.
            outputs = self.uncompiled(*args, **kwargs)
            logger.warning(
                "A block of the memory could not be compiled for calls of one kind, which run "
                "uncompiled: %s",
                error,
            )
            self.graphs[key] = _run
            return outputs

    def _key(self, leaves: list[Any], first: Tensor) -> tuple:
        """What makes a call one of its kind."""
        device = first.device.type
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device),
            *((p.dtype, p.requires_grad) for p in self.parameters),
            *(_facts(leaf, len(first)) for leaf in leaves),
        )


def _run(forward: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    return forward(*args, **kwargs)


def _new_graph() -> Callable[..., Any]:
    # PyTorch keeps at most eight graphs per code object. With a code object for each kind of call,
    # a process may train any number of models.
    copied = types.FunctionType(_run.__code__.replace(), globals())
    return torch.compile(copied, fullgraph=True, dynamic=False)


def _description(block: nn.Module) -> tuple:
    """What equal blocks have in common: classes, settings, shapes of parameters and buffers."""
    parts: list[tuple] = []
    for name, module in block.named_modules():
        settings = vars(module).items()
        plain = [x for x in settings if isinstance(x[1], int | float | str) and x[0] != "training"]
        parts.append((name, type(module), *plain))
    tensors = itertools.chain(block.named_parameters(), block.named_buffers())
    return (*parts, *((name, tuple(x.shape)) for name, x in tensors))


def _leaves(x: Any) -> Iterator[Any]:
    """Keys and values of nested dicts, lists and tuples."""
    if isinstance(x, dict):
        x = x.items()
    elif not isinstance(x, list | tuple):
        yield x
        return
    for part in x:
        yield from _leaves(part)


def _facts(x: Any, num_rows: int) -> Any:
    """What of an argument makes the kind of a call. Marks the number of rows as dynamic."""
    if isinstance(x, Tensor):
        shape = x.shape
        if shape and shape[0] == num_rows:
            torch._dynamo.maybe_mark_dynamic(x, 0)
            shape = (None, *shape[1:])
        return shape, x.dtype, x.device, x.requires_grad
    # Not the values of numbers: a step's number would have each call compiled.
    return x if x is None or isinstance(x, bool | str) else type(x)


def _identity(x: Any) -> Any:
    return x


def _is_compile_error(error: Exception) -> bool:
    return type(error).__module__.startswith(("torch._dynamo", "torch._inductor"))


# By a memory's first block. Not the process's time: it may train another agent after this one.
_first_calls: weakref.WeakKeyDictionary[nn.Module, float] = weakref.WeakKeyDictionary()


def _runs_long(block: nn.Module, device_type: str) -> bool:
    now = time.monotonic()
    return device_type != "cpu" or now - _first_calls.setdefault(block, now) >= CPU_DELAY


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
