"""Measurements against peers: `python -m benchmarks` lists them.

A benchmark is a module of this package with `run(args) -> list of records` and, where it has
options of its own, `add_arguments(parser)`.
"""

import os

# The profiler, which counts memory, prints to the terminal otherwise. Read when torch is imported.
os.environ.setdefault("KINETO_LOG_LEVEL", "99")
