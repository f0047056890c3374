"""`docs/errors.md` has an entry for each error the packages raise, and no other.

The heading of an entry is the beginning of the message, with `…` for whatever is filled in. So it
is what a user finds when searching for the message, and one entry may serve several messages.
"""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("rlmodules", "connectors")
USER_ERRORS = {"ValueError", "TypeError", "RuntimeError", "KeyError", "NotImplementedError"}
USER_ERRORS |= {"NoWeightsError"}


def _template(node: ast.expr) -> str | None:
    """The text of a message, `…` for whatever is filled in; None where it is no literal."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_template(part) or "…" for part in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return (_template(node.left) or "…") + (_template(node.right) or "…")
    return None


def _messages() -> list[tuple[str, str | None]]:
    """Where and what: all messages of errors raised in the packages."""
    found = []
    for path in sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(), filename=str(path))):
            if not (isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call)):
                continue
            error = node.exc
            if isinstance(error.func, ast.Name) and error.func.id in USER_ERRORS:
                message = _template(error.args[0]) if error.args else None
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", message))
    return found


def _headings() -> list[str]:
    lines = (ROOT / "docs" / "errors.md").read_text().splitlines()
    headings = [line.removeprefix("### ") for line in lines if line.startswith("### ")]
    return [re.sub(r"\s*\{#[\w-]+\}$", "", heading) for heading in headings]


@pytest.mark.parametrize(("where", "message"), _messages())
def test_each_error_has_one_entry(where: str, message: str | None) -> None:
    assert message is not None, f"{where}: put the message's text into the `raise` statement"
    entries = [heading for heading in _headings() if message.startswith(heading)]
    assert len(entries) == 1, f"{where}: {message!r} has these entries in docs/errors.md: {entries}"


@pytest.mark.parametrize("heading", _headings())
def test_each_entry_has_an_error(heading: str) -> None:
    messages = [message or "" for _, message in _messages()]
    assert any(message.startswith(heading) for message in messages), f"nothing raises {heading!r}"
