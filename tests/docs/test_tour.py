"""Every file and name in the tour of the code exists, and stands where the tour says."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOUR = (ROOT / "docs" / "tour.md").read_text()
# `path.py`, `Name`: a name in that file. Lines may break between the two.
PLACES = re.findall(r"`([\w/]+\.py)`,\s+`(\w+)`", TOUR)
PATHS = sorted(set(re.findall(r"`((?:\w+/)+(?:\w+\.py)?)`", TOUR)))


def names_in(path: Path) -> set[str]:
    """Classes, functions and methods."""
    kinds = (ast.ClassDef, ast.FunctionDef)
    return {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, kinds)}


def test_it_is_a_tour():
    assert len(TOUR.splitlines()) < 150
    assert len(PLACES) > 25


@pytest.mark.parametrize("path", PATHS)
def test_paths_exist(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(("path", "name"), PLACES)
def test_names_exist(path, name):
    assert name in names_in(ROOT / path)


def test_methods_exist():
    """Those that stand without a file, behind the class that has them."""
    methods = {"begin", "end", "settle"} & set(re.findall(r"`(\w+)`", TOUR))
    assert methods == {"begin", "end", "settle"}
    assert methods <= names_in(ROOT / "connectors" / "rollout" / "states.py")
    assert "RowMinibatches" in names_in(ROOT / "connectors" / "learners" / "minibatches.py")


def test_all_folders_are_named():
    packages = (ROOT / "rlmodules", ROOT / "connectors")
    folders = {p.name for package in packages for p in package.iterdir() if p.is_dir()}
    unnamed = {f for f in folders if f"/{f}/" not in TOUR} - {"__pycache__"}
    # They stand beside the way.
    assert unnamed <= {"monitoring", "old_stack", "tools"}
