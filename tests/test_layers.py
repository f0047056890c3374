"""Which folder may import which, and that no two import each other."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
GROUND = {"agents", "snapshots", "trials", "validation"}

# What stands in a folder may import what stands in these ones, and its own.
ALLOWED = {
    "rlmodules": {
        "kernels": set(),
        "memories": {"kernels"},
        "networks": set(),
        "modules": {"memories", "networks"},
        "contract": {"memories"},
        "export": {"modules"},
        "old_stack": {"modules"},
        "tools": {"memories", "modules", "networks"},
    },
    "connectors": {
        "agents": set(),
        "collectives": set(),
        "validation": set(),
        "snapshots": {"validation"},
        "trials": set(),
        "monitoring": GROUND,
        "rollout": GROUND,
        "rows": GROUND | {"collectives", "monitoring"},
        "replay": GROUND | {"rows"},
        "offline": GROUND | {"rollout"},
        "learners": GROUND | {"collectives", "monitoring", "offline", "replay", "rows"},
        "acting": GROUND | {"rollout"},
        "serving": {"acting"},
        "setup": GROUND | {"acting", "learners", "offline", "replay", "rollout", "rows"},
    },
}
# The command line describes checkpoints, which `connectors` reads; imported inside its functions.
MAY_IMPORT_CONNECTORS = {"rlmodules/tools"}


def imports_of(path: Path) -> set[str]:
    """All modules of the two packages that a file imports, inside functions too."""
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and node.level == 0:
            names |= {node.module, *(f"{node.module}.{alias.name}" for alias in node.names)}
        elif isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
    return {name for name in names if name.split(".")[0] in ALLOWED}


def places(package: str) -> list[Path]:
    return sorted(path for path in (ROOT / package).rglob("*.py") if not path.name.startswith("__"))


@pytest.mark.parametrize("package", ALLOWED)
def test_every_folder_is_listed(package):
    found = {
        path.relative_to(ROOT / package).parts[0].removesuffix(".py") for path in places(package)
    }
    assert found == ALLOWED[package].keys()


@pytest.mark.parametrize("package", ALLOWED)
def test_imports_go_down(package):
    wrong = []
    for path in places(package):
        home = path.relative_to(ROOT / package).parts[0].removesuffix(".py")
        for name in imports_of(path):
            target, *rest = name.split(".")
            if target != package:
                allowed = target == "rlmodules" or f"{package}/{home}" in MAY_IMPORT_CONNECTORS
            else:
                # `import package.folder`; names of the package itself are for those outside.
                allowed = not rest or rest[0] in {home, *ALLOWED[package][home]}
            if not allowed:
                wrong.append(f"{path.relative_to(ROOT)} imports {name}")
    assert not wrong


@pytest.mark.parametrize("package", ALLOWED)
def test_no_import_circle(package):
    rest = dict(ALLOWED[package])
    while rest:
        free = {name for name, needs in rest.items() if not needs & rest.keys()}
        assert free, f"these import each other: {sorted(rest)}"
        rest = {name: needs for name, needs in rest.items() if name not in free}


def test_docstrings_of_folders():
    for package, folders in ALLOWED.items():
        for folder in folders:
            init = ROOT / package / folder / "__init__.py"
            if init.exists():
                assert ast.get_docstring(ast.parse(init.read_text())), init
