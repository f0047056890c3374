"""The picture of wrong settings: what each run differs in, and that no run is made twice."""

import argparse
import ast
from typing import Any

import pytest

from benchmarks import popgym, wrong_settings
from benchmarks.popgym_runs import Run, append


def flat(settings: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value
        for key, content in settings.items()
        for name, value in (content.items() if isinstance(content, dict) else [(key, content)])
    }


def run_of(case, max_steps=20_000):
    return Run(
        trial=popgym.plan([wrong_settings.TASK], [wrong_settings.MEMORY], 1)[0],
        settings=wrong_settings.settings_of(case),
        max_steps=max_steps,
        steps=[10_000, 20_000],
        returns=[-0.5, 0.5],
        solved=False,
        seconds=1.0,
        parameters=72_000,
        machine={},
    )


@pytest.mark.parametrize("case", [case for case in wrong_settings.CASES if case != "right"])
def test_a_case_differs_from_the_table_in_what_its_name_says(case):
    right = flat(popgym.settings_of(run_of("right").trial))
    wrong = flat(wrong_settings.settings_of(case))
    changed = {name: wrong[name] for name in wrong if wrong[name] != right.get(name)}
    pairs = [pair.split("=") for pair in case.split(", ")]
    assert changed == {name: ast.literal_eval(value) for name, value in pairs}


def test_runs_are_trained_with_the_settings_of_their_case(monkeypatch, tmp_path):
    trained = []

    def train(trial, steps, settings):
        trained.append(settings)
        yield popgym.Progressed(steps, 0.5, run_of("lr=1e-2", steps))

    monkeypatch.setattr(popgym, "train", train)
    results, picture = tmp_path / "runs.jsonl", tmp_path / "picture.png"
    args = argparse.Namespace(only=["right", "lr=1e-2"], results=results, picture=picture, steps=9)
    append(results, run_of("right"))
    for _ in range(2):
        assert wrong_settings.run(args) == []
        assert trained == [wrong_settings.settings_of("lr=1e-2")]
        assert list(wrong_settings.finished(results, 9)) == ["right", "lr=1e-2"]
    assert picture.stat().st_size > 10_000
    args.steps = 30_000
    assert wrong_settings.finished(results, args.steps) == {}
