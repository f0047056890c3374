"""Every option of a config is checked against its annotation, here and nowhere else."""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import functools
import math
import types
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints


@dataclass(frozen=True)
class Range:
    """Bounds of a number, for `Annotated[int, Range(1)]`.

    Args:
        low: The lowest value that is allowed.
        high: The highest.
        above: Whether `low` itself is out of the range.
    """

    low: float = -math.inf
    high: float = math.inf
    above: bool = False

    def holds(self, value: float) -> bool:
        """Whether a value lies in the range; NaN does not."""
        return self.low <= value <= self.high and not (self.above and value == self.low)

    def __str__(self) -> str:
        if self.high < math.inf:
            return f" from {self.low:g} to {self.high:g}"
        return f" above {self.low:g}" if self.above else f" of at least {self.low:g}"


Count = Annotated[int, Range(1)]
"""How many there are of something that a model needs."""


def check_options(config: Any) -> None:
    """Checks all fields of a dataclass.

    Knows `bool`, `int`, `float`, `str`, None, `Literal`, `list[...]`, unions, and `Annotated` with
    a `Range`; annotations of other kinds hold whatever the value. An `int` serves as a `float`, a
    `bool` as neither.

    Raises:
        ValueError: If a value doesn't fit. The message names the setting, the value and the rule.
    """
    hints = _hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_search_space(value):
            raise ValueError(
                f"`{field.name}` is a search space, {value!r}, but Tune looks for them in an "
                "algorithm's settings only. Put it into a dict there, `config.rl_module("
                f"model_config={{'memory': ..., {field.name!r}: ...}})`, or search over specs: "
                "`config.rl_module(rl_module_spec=tune.grid_search([...]))` after `connect`."
            )
        hint = hints.get(field.name, Any)
        if not _fits(value, hint):
            raise ValueError(
                f"`{field.name}` is {value!r}, but must be {_words(hint)}."
                f"{_suggestion(value, hint)}"
            )


def rules(config_class: type) -> dict[str, str]:
    """What each setting of a dataclass may be, in words."""
    return {name: _words(hint) for name, hint in _hints(config_class).items()}


def is_search_space(value: Any) -> bool:
    """Whether Tune would draw from a value; told by names, which need no Ray."""
    if isinstance(value, dict):
        return "grid_search" in value
    return any(kind.__module__ == "ray.tune.search.sample" for kind in type(value).__mro__)


@functools.cache
def _hints(config_class: type) -> dict[str, Any]:
    """Annotations of all fields, without those that name what only a type checker imports."""
    hints: dict[str, Any] = {}
    for kind in reversed(config_class.__mro__):
        with contextlib.suppress(NameError):
            hints |= get_type_hints(kind, include_extras=True)
    return hints


def _fits(value: Any, hint: Any) -> bool:
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        ranges = [part for part in arguments[1:] if isinstance(part, Range)]
        return _fits(value, arguments[0]) and all(part.holds(value) for part in ranges)
    if kind is Literal:
        return any(type(value) is type(choice) and value == choice for choice in arguments)
    if kind in (Union, types.UnionType):
        return any(_fits(value, part) for part in arguments)
    if kind is list:
        return isinstance(value, list | tuple) and all(_fits(x, arguments[0]) for x in value)
    if hint in (int, float):
        allowed = int if hint is int else int | float
        return isinstance(value, allowed) and not isinstance(value, bool)
    if hint is types.NoneType:
        return value is None
    if hint in (bool, str, list):
        return isinstance(value, list | tuple if hint is list else hint)
    return True


def _words(hint: Any) -> str:
    kind, arguments = get_origin(hint), get_args(hint)
    if kind is Annotated:
        return _words(arguments[0]) + "".join(str(x) for x in arguments[1:] if isinstance(x, Range))
    if kind is Literal:
        return " or ".join(map(repr, arguments))
    if kind in (Union, types.UnionType):
        return " or ".join(map(_words, arguments))
    if kind is list:
        return f"a list, each entry {_words(arguments[0])}"
    names = {int: "an integer", float: "a number", bool: "True or False", str: "a string"}
    return names.get(hint, "None" if hint is types.NoneType else "a list")


def _suggestion(value: Any, hint: Any) -> str:
    """The choice that a misspelt word is closest to."""
    choices = [part for part in _choices(hint) if isinstance(part, str)]
    if not isinstance(value, str):
        return ""
    close = difflib.get_close_matches(value.lower(), choices, n=1)
    return f" Did you mean {close[0]!r}?" if close else ""


def _choices(hint: Any) -> list[Any]:
    if get_origin(hint) is Literal:
        return list(get_args(hint))
    return [choice for part in get_args(hint) for choice in _choices(part)]
