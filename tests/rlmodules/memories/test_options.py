"""Every option of every config is checked against its annotation, in one place."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal, get_args, get_origin, get_type_hints

import pytest

from rlmodules.memories.options import Count, Range, check_options
from rlmodules.modules.catalogue import CONFIGS

if TYPE_CHECKING:
    from collections import Counter


@dataclasses.dataclass
class Options:
    flag: bool = True
    count: Count = 1
    share: Annotated[float, Range(0, 1)] = 0.5
    rate: Annotated[float, Range(0, above=True)] = 1.0
    mode: Literal["add", "cat"] = "add"
    name: str = ""
    sizes: list[Count] = dataclasses.field(default_factory=list)
    anything: list | None = None
    either: Literal["auto"] | bool | int = "auto"
    unchecked: Any = None

    def __post_init__(self):
        check_options(self)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("flag", False), ("count", 7), ("share", 0), ("share", 1.0), ("rate", float("inf")),
        ("mode", "cat"), ("sizes", [1, 2]), ("sizes", ()), ("anything", [[1, "x"]]),
        ("either", 3), ("either", True), ("unchecked", object()),
    ],
)  # fmt: skip
def test_what_fits(name, value):
    assert getattr(Options(**{name: value}), name) == value


@pytest.mark.parametrize(
    ("name", "value", "rule"),
    [
        ("flag", 1, "must be True or False."),
        ("flag", "yes", "must be True or False."),
        ("count", 0, "must be an integer of at least 1."),
        ("count", True, "must be an integer of at least 1."),
        ("count", 2.0, "must be an integer of at least 1."),
        ("count", "3", "must be an integer of at least 1."),
        ("count", None, "must be an integer of at least 1."),
        ("share", 1.5, "must be a number from 0 to 1."),
        ("share", float("nan"), "must be a number from 0 to 1."),
        ("rate", 0, "must be a number above 0."),
        ("rate", False, "must be a number above 0."),
        ("mode", "Add", "must be 'add' or 'cat'. Did you mean 'add'?"),
        ("mode", "sum", "must be 'add' or 'cat'."),
        ("name", 3, "must be a string."),
        ("sizes", 64, "must be a list, each entry an integer of at least 1."),
        ("sizes", [64, 0], "must be a list, each entry an integer of at least 1."),
        ("anything", 3, "must be a list or None."),
        ("either", "off", "must be 'auto' or True or False or an integer."),
    ],
)
def test_what_does_not(name, value, rule):
    with pytest.raises(ValueError) as error:
        Options(**{name: value})
    assert str(error.value) == f"`{name}` is {value!r}, but {rule}"


def test_annotations_that_only_a_type_checker_sees_are_left_alone():
    @dataclasses.dataclass
    class Later:
        counter: "Counter" = None

    check_options(Later(counter=3))


def fields_with(kind):
    """Config class and field of every option whose annotation is of a kind."""
    return [
        pytest.param(config_class, field.name, id=f"{name}.{field.name}")
        for name, config_class in CONFIGS.items()
        for hints in [get_type_hints(config_class, include_extras=True)]
        for field in dataclasses.fields(config_class)
        if get_origin(hints[field.name]) is kind
    ]


@pytest.mark.parametrize(("config_class", "name"), fields_with(Literal))
def test_every_choice_refuses_another_word(config_class, name):
    choices = get_args(get_type_hints(config_class)[name])
    assert len(choices) > (name != "memory")
    with pytest.raises(ValueError, match=f"`{name}` is 'Max', but must be"):
        config_class(max_seq_len=8, **{name: "Max"})


@pytest.mark.parametrize(("config_class", "name"), fields_with(Annotated))
def test_every_number_has_a_lower_bound(config_class, name):
    settings = {"max_seq_len": 8, name: -1}
    with pytest.raises(ValueError, match=f"`{name}` is -1, but must be"):
        config_class(**settings)


@pytest.mark.parametrize("config_class", CONFIGS.values())
def test_no_number_is_without_a_range(config_class):
    """But those that may be anything."""
    hints = get_type_hints(config_class, include_extras=True)
    free = {name for name, hint in hints.items() if hint in (int, float)}
    assert free <= {"gate_bias"}
