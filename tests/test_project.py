"""The files around the packages: make, workflows, templates and citation agree with each other."""

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MAKEFILE = (ROOT / "Makefile").read_text()
TARGETS = set(re.search(r"^\.PHONY: (.*)$", MAKEFILE, re.MULTILINE).group(1).split())
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"
FOLDER = ROOT / ".github"


def jobs() -> list:
    return [
        pytest.param(job, id=f"{path.stem}-{name}")
        for path in sorted((FOLDER / "workflows").glob("*.yml"))
        for name, job in yaml.safe_load(path.read_text())["jobs"].items()
    ]


def dry_run(*arguments: str) -> str:
    """What make would run, whatever it was called with itself."""
    given = ("MAKEFLAGS", "MAKEOVERRIDES", "MAKELEVEL", "PYTHON", "RAY", "TORCH", "ARGS")
    environ = {name: value for name, value in os.environ.items() if name not in given}
    command = ["make", "--dry-run", "--always-make", *arguments]
    return subprocess.run(
        command, cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    ).stdout


def test_help_lists_every_target() -> None:
    listed = set(re.findall(r"make ([a-z-]+)", dry_run("help")))
    assert listed == TARGETS - {"help"}


@pytest.mark.parametrize(
    ("versions", "folder"),
    [
        ([], ".venv"),
        (["RAY=2.58.1"], ".venv-ray2.58.1"),
        (["TORCH=2.14.1"], ".venv-torch2.14.1"),
        ([f"PYTHON={sys.executable}"], f".venv-py{PYTHON}"),
        ([f"PYTHON={sys.executable}", "RAY=2.58.1"], f".venv-py{PYTHON}-ray2.58.1"),
    ],
)
def test_each_version_has_its_own_environment(versions: list[str], folder: str) -> None:
    *_, test = dry_run("test-ray", *versions).splitlines()
    assert test.startswith(f"{folder}/bin/python -m pytest")


@pytest.mark.parametrize("version", ["RAY=2.58.1", "TORCH=2.14.1"])
def test_another_version_is_all_that_differs_from_the_tested_ones(version: str) -> None:
    (command,) = (line for line in dry_run("test", version).splitlines() if "sed" in line)
    constraints = subprocess.run(
        command.partition(">")[0], cwd=ROOT, shell=True, capture_output=True, text=True, check=True
    ).stdout
    tested = (ROOT / "constraints.txt").read_text().splitlines()
    differ = [
        pair for pair in zip(tested, constraints.splitlines(), strict=True) if len({*pair}) > 1
    ]
    name, number = version.lower().split("=")
    assert [(before.split("==")[0], after) for before, after in differ] == [
        (name, f"{name}=={number}")
    ]


@pytest.mark.parametrize("job", jobs())
def test_workflows_run_what_there_is(job: dict) -> None:
    matrix = job.get("strategy", {}).get("matrix", {})
    variants = matrix.get("include", []) + [{"run": run} for run in matrix.get("run", [])]
    commands = [step["run"] for step in job["steps"] if "run" in step]
    for variant in variants or [{}]:
        for command in commands:
            words = command.replace("${{ matrix.run }}", variant.get("run", "")).split()
            assert words == [".ci/run"] or (words[0] == "make" and words[1] in TARGETS)
        if "python" in variant:
            served = f"Programming Language :: Python :: {variant['python']}"
            assert served in PROJECT["classifiers"]
    uses = [step["uses"] for step in job["steps"] if "uses" in step]
    assert all(re.fullmatch(r"actions/(checkout|setup-python)@v\d+", used) for used in uses)


@pytest.mark.parametrize("name", ["fault.yml", "wish.yml"])
def test_issue_templates_ask_for_the_model(name: str) -> None:
    template = yaml.safe_load((FOLDER / "ISSUE_TEMPLATE" / name).read_text())
    assert template["name"]
    assert template["description"]
    asked = [field["attributes"] for field in template["body"] if field["type"] == "textarea"]
    assert all(field["label"] for field in asked)
    assert any("python -m rlmodules describe" in field["description"] for field in asked)


def test_citation_is_of_this_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert citation["version"] == PROJECT["version"]
    assert citation["license"] == PROJECT["license"]
