"""What `make dist` builds, as people get it: in an empty environment, used from an empty folder."""

import os
import re
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow  # it builds and installs, with the package index at hand

ROOT = Path(__file__).parents[1]
BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def run(*command: str | Path, cwd: Path) -> str:
    environ = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    ran = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True)
    assert ran.returncode == 0, f"{command}:\n{ran.stdout}{ran.stderr}"
    return ran.stdout


def sources(*folders: str) -> set[str]:
    files = [path for name in folders for path in (ROOT / name).rglob("*") if path.is_file()]
    return {path.relative_to(ROOT).as_posix() for path in files if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--outdir", folder, cwd=ROOT)
    return folder


def test_wheel_holds_the_two_packages_and_nothing_else(dist: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        names = set(files.namelist())
    packaged = {name for name in names if ".dist-info/" not in name}
    assert packaged == sources("rlmodules", "connectors")
    assert {"rlmodules/py.typed", "connectors/py.typed"} <= packaged


def test_source_distribution_holds_what_make_needs(dist: Path) -> None:
    (archive,) = dist.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        names = {name.partition("/")[2] for name in files.getnames()}
    assert sources("rlmodules", "connectors", "tests", "examples", "benchmarks", "docs") <= names
    assert {"Makefile", "pyproject.toml", "constraints.txt", "mkdocs.yml", "README.md"} <= names


def test_readme_runs_where_nothing_but_the_wheel_is(dist: Path, tmp_path: Path) -> None:
    (wheel,) = dist.glob("*.whl")
    environment, empty = tmp_path / "environment", tmp_path / "empty"
    empty.mkdir()
    venv.create(environment, with_pip=True)
    python = environment / "bin" / "python"
    install = ["-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt"]
    run(python, *install, f"{wheel}[examples]", cwd=empty)

    code = "".join(BLOCK.findall((ROOT / "README.md").read_text()))
    code += "import connectors\nprint(action, connectors.__file__)\n"
    action, path = run(python, "-c", code, cwd=empty).splitlines()[-1].split(maxsplit=1)
    assert int(action) in range(4)  # a suit
    assert Path(path).is_relative_to(environment)
