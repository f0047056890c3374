"""Every Python block of the README, the docs and the docstrings is linted, runs, and prints what
stands below its `print` as `#> ...`."""

import contextlib
import io
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import jupytext
import pytest
import torch

ROOT = Path(__file__).parents[2]
# markdown-exec's blocks carry options behind `python`; they run when the site is built.
FENCE = re.compile(r"^( *)```(?:py|python)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
# Tutorials train until a return is reached, for at most so many iterations.
ITERATIONS = re.compile(r"^iterations = \d+$", re.MULTILINE)
TUTORIALS = [path for path in (ROOT / "docs" / "tutorials").glob("*.md") if path.stem != "index"]
PRINTED = re.compile(r"^ *#> ?(.*)$", re.MULTILINE)


def _scripts(path: Path) -> list[tuple[str, str]]:
    """Name and code: one script a page, as later blocks build on earlier ones; in source files one
    a block. Lines keep their numbers, so that tracebacks and lint point into the file."""
    text = path.read_text()
    blocks = []
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start()) + 1
        blocks.append((line, textwrap.dedent(match.group(2))))
    name = str(path.relative_to(ROOT))
    if path.suffix == ".py":
        return [(f"{name}:{line}", "\n" * line + code) for line, code in blocks]
    script = ""
    for line, code in blocks:
        script += "\n" * (line - script.count("\n")) + code
    return [(name, script)] if blocks else []


def _marks(code: str) -> list:
    """Serving and export take longer than the rest of the pages together."""
    marks = {"build_algo": pytest.mark.ray, "\nserve.run": pytest.mark.slow}
    return [mark for text, mark in marks.items() if text in code]


def _parameters() -> list:
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
    paths += sorted(
        path for name in ("rlmodules", "connectors") for path in (ROOT / name).rglob("*.py")
    )
    return [
        pytest.param(name, ITERATIONS.sub("iterations = 1", code), id=name, marks=_marks(code))
        for path in paths
        for name, code in _scripts(path)
    ]


@pytest.mark.parametrize(("name", "code"), _parameters())
def test_snippet(name: str, code: str, tmp_path, monkeypatch) -> None:
    lint = [sys.executable, "-m", "ruff", "check", "--quiet", "--output-format=concise"]
    # Scripts: docstrings and printing are theirs to decide; imports stand where they are needed.
    lint += ["--ignore=D,T20,E402,I001", "--stdin-filename", "snippet.py", "-"]
    found = subprocess.run(lint, cwd=ROOT, input=code, capture_output=True, text=True)
    assert found.returncode == 0, f"{name}:\n{found.stdout}{found.stderr}"

    monkeypatch.chdir(tmp_path)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        _run(name, code)
    if not ITERATIONS.search(code):
        assert printed.getvalue().splitlines() == PRINTED.findall(code)


def _run(name: str, code: str) -> dict:
    """What the code leaves. Compilation has its own tests, and takes longer than all snippets."""
    left = {"__name__": "__main__"}
    with torch.compiler.set_stance("force_eager"):
        exec(compile(code, name.split(":")[0], "exec"), left)
    return left


@pytest.mark.ray
@pytest.mark.learning
@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_reach_their_return(path: Path, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    ((name, code),) = _scripts(path)
    left = _run(name, code)
    assert left["mean_return"] >= left["goal"]
    assert left.get("same_actions", True)


@pytest.mark.parametrize("path", TUTORIALS, ids=lambda path: path.stem)
def test_tutorials_are_notebooks(path: Path) -> None:
    notebook = jupytext.read(path)
    assert notebook.metadata["kernelspec"]["language"] == "python"
    code = "".join(cell.source for cell in notebook.cells if cell.cell_type == "code")
    assert len(ITERATIONS.findall(code)) == 1


@pytest.mark.slow
def test_site_builds(tmp_path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        text = page.read_text()
        for outside in ('src="http', 'rel="stylesheet" href="http', "fonts.googleapis"):
            assert outside not in text, f"{page.name} loads something from an outside host"
