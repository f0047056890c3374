"""Examples, run from the repository's root: `python -m examples.train_popgym --help`."""

import os

# Ray reads these when it is imported or started, so they are set before everything else.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
