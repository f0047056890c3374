"""Turns the fields of a config into a table: setting, default, what it is and what it may be."""

import ast
import dataclasses
import inspect
import itertools
import textwrap

import rlmodules
from rlmodules.memories.options import rules

MISSING = dataclasses.MISSING
SHARED = ("MemoryConfig", "StackConfig")


def table(name: str) -> str:
    """Markdown of the settings that a config has beside, or other than, those all configs share."""
    config = getattr(rlmodules, name)
    shared = [getattr(rlmodules, other) for other in SHARED]
    known = {} if name == SHARED[0] else _defaults(shared[0])
    if name not in SHARED and issubclass(config, shared[1]):
        known |= _defaults(shared[1])
    texts, allowed = _docstrings(config), rules(config)
    lines = ["| setting | default | |", "|---|---|---|"]
    for field, default in _defaults(config).items():
        if field == "memory" or known.get(field, MISSING) == default:
            continue
        text = " ".join(texts[field].split())
        lines.append(f"| `{field}` | {default} | {text} <small>({allowed[field]})</small> |")
    return "\n".join(lines)


def _defaults(config: type) -> dict[str, str]:
    """The default of each setting, as a cell shows it."""
    defaults = {}
    for field in dataclasses.fields(config):
        default = field.default
        if field.default_factory is not MISSING:
            default = field.default_factory()
        text = repr(default).replace("'", '"')
        defaults[field.name] = "must be set" if default is MISSING else f"`{text}`"
    return defaults


def _docstrings(config: type) -> dict[str, str]:
    """What stands below each field, that of the class nearest to the config."""
    texts = {}
    for kind in reversed(config.__mro__[:-1]):
        try:
            (node,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
        except (OSError, TypeError):
            continue
        body = getattr(node, "body", [])
        for field, below in itertools.pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(below, ast.Expr):
                texts[field.target.id] = below.value.value
    return texts
