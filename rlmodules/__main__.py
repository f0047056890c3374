"""`python -m rlmodules`: describes models, maps memories, compares and watches runs."""

import sys

try:
    from rlmodules.tools.cli import app
except ModuleNotFoundError as error:
    if error.name not in ("typer", "rich", "matplotlib", "pandas", "scipy"):
        raise
    sys.exit(
        f"The command line needs the package `{error.name}`, which is not installed. Install the "
        "extra `tools`: pip install 'rllib-memory[tools]'"
    )

if __name__ == "__main__":
    app(prog_name="python -m rlmodules")
