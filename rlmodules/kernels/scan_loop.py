"""The scan's loop in C++, compiled when it is first needed: a CPU reads and writes memory once.

Torch's operations, which are what the scan is made of everywhere else, go over it some five times.
"""

import ctypes
import functools
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import torch
from torch import Tensor

SOURCE = Path(__file__).with_name("scan_loop.cpp")
# Without `-march`: memory is the limit, and nothing depends on the processor.
FLAGS = ("-O3", "-shared", "-fPIC")
FUNCTIONS = {
    torch.float32: "recur_float",
    torch.float64: "recur_double",
    torch.complex64: "recur_float",
    torch.complex128: "recur_double",
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled loop; None where there is no C++ compiler, or it fails.

    Half a second, once a process. The compiler is `$CXX`, else what the machine has.
    """
    names = [os.environ.get("CXX"), "c++", "g++", "clang++"]
    compiler = next((name for name in names if name and shutil.which(name)), None)
    if compiler is None or not SOURCE.exists():
        return None
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scan_loop.so"
        try:
            subprocess.run(
                [compiler, *FLAGS, str(SOURCE), "-o", str(path)], check=True, capture_output=True
            )
            return ctypes.CDLL(str(path))
        except (OSError, subprocess.CalledProcessError):
            return None


def can_run(out: Tensor) -> bool:
    """Whether the loop is there for results like these."""
    return out.device.type == "cpu" and out.dtype in FUNCTIONS and library() is not None


def recur_(out: Tensor, a: Tensor, b: Tensor, h: Tensor, *, reverse: bool) -> Tensor:
    """Writes the states that follow h `(B, D)` into `out (B, T, D)`; returns the last one computed.

    `O(B T D)` in one thread. `out` is dense in its last axis; the others need not be. Of tensors
    `a` and `b (B, T, D)` those that were expanded along rows or steps are not copied.
    """
    # A lazy conjugate of `a` is worked out in the loop, all else here.
    a, b, h = a.resolve_neg(), b.resolve_conj().resolve_neg(), h.resolve_conj().contiguous()
    a, b = (x if x.stride(-1) == 1 else x.contiguous() for x in (a, b))
    numbers = 2 if out.is_complex() else 1
    B, T, D = out.shape
    strides = [numbers * step for x in (out, a, b) for step in x.stride()[:2]]
    getattr(library(), FUNCTIONS[out.dtype])(
        *(ctypes.c_void_p(x.data_ptr()) for x in (out, a, b, h)),
        (ctypes.c_int64 * 3)(B, T, numbers * D),
        (ctypes.c_int64 * 6)(*strides),
        *(ctypes.c_bool(flag) for flag in (out.is_complex(), a.is_conj(), reverse)),
    )
    return out[:, 0 if reverse else -1]
