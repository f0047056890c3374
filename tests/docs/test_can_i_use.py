"""The "Can I use?" tables: each answer has a test that runs, and the README gives the same ones."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
_spec = importlib.util.spec_from_file_location(
    "can_i_use_tables", ROOT / "docs" / "can_i_use_tables.py"
)
tables = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(tables)


class Collected:
    """A pytest plugin that keeps what is collected."""

    def pytest_collection_finish(self, session):
        self.tests = {item.nodeid: item for item in session.items}


@pytest.fixture(scope="module")
def collected():
    """All tests of the files that the tables name, those marked `slow` included."""
    files = {test.split("::")[0] for test in tables.all_tests(tables.load())}
    plugin = Collected()
    arguments = [
        "--collect-only",
        "-qq",
        "-m",
        "",
        "-p",
        "no:faulthandler",
        "-p",
        "no:cacheprovider",
    ]
    pytest.main([*arguments, *(str(ROOT / file) for file in sorted(files))], plugins=[plugin])
    return plugin.tests


def test_each_answer_has_a_test_that_runs(collected):
    named = set(tables.all_tests(tables.load()))
    assert len(named) > 100
    assert not named - collected.keys()
    for test in named:
        marks = {mark.name for mark in collected[test].iter_markers()}
        assert not marks & {"skip", "skipif", "xfail", "gpu"}, test


def test_answers():
    row = {"test": "a[{}]", "yes": {"B": "b"}, "no": {"C": "c"}, "none": ["D"]}
    assert tables.cell(row, "A") == ("yes", "a[A]")
    assert tables.cell(row, "B") == ("yes", "b")
    assert tables.cell(row, "C") == ("no", "c")
    assert tables.cell(row, "D").test is None


def test_a_table_and_its_tests():
    rows = [
        {"name": "x", "test": "t[{}]", "no": {"B": "n"}, "note": {"B": "Why."}},
        {"name": "y", "yes": {"A": "t[A]", "B": "t[A]"}},
    ]
    data = {
        "algorithms": ["A", "B"],
        "table": [{"name": "one", "row": rows}],
        "refused": {"C": "r"},
    }
    table = "|  | A | B |\n| --- | :-: | :-: |\n| x | ✓ | ✗ <sup>1</sup> |\n| y | ✓ | ✓ |"
    assert tables.table(data, "one") == f"{table}\n\n1. Why."
    section = tables.section(data, "one")
    assert "    - x\n\n        - A: `t[*]`\n        - B: `n`\n" in section
    assert section.endswith("    - y\n\n        - A, B: `t[A]`")
    assert tables.all_tests(data) == ["t[A]", "n", "t[A]", "t[A]", "r"]


def test_the_data_says_nothing_twice():
    """A cell has one answer, and names stand for algorithms of the tables."""
    data = tables.load()
    for row in (row for table in data["table"] for row in table["row"]):
        answers = [*row.get("yes", {}), *row.get("no", {}), *row.get("none", [])]
        assert len(set(answers)) == len(answers)
        assert {*answers, *row.get("note", {})} <= set(data["algorithms"])
        assert row.keys() <= {"name", "test", "yes", "no", "none", "note"}


def test_the_readme_has_the_same_answers():
    assert tables.table(tables.load(), "modules", "setups") in (ROOT / "README.md").read_text()
