"""What single pages show of `benchmarks/results/*.json`, as Markdown tables."""

import importlib
import math
import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from result_files import RESULTS, Row, load, markdown, value_text

NAMES = {
    "deep": "deep linear attention, the default",
    "deep-sine": 'with sine positions, `"linear"` convolution, sum',
    "deep-unit": "with unit keys, write gate, no positions",
    "linear": "linear attention, one block",
    "popgym": "POPGym, one block",
    "popgym-deep": "POPGym, deep",
    "gated-delta": "gated delta rule",
    "delta": "delta rule, without decay",
    "gtrxl": "GTrXL, 64 past steps",
    "window": "window attention, 64 past steps",
    "mixed": "mixed: window of 64 steps, gated delta",
    "mixed-16": "mixed: window of 16 steps, gated delta",
    "gru": "GRU",
    "lstm": "LSTM",
    "min-gru": "minGRU",
    "lru": "LRU",
    "ffm": "FFM",
}
"""The memories of the benchmarks, as pages call them."""


def memories() -> str:
    """State, step and training passes of all memories at equal size."""
    records = load("memories")
    measured = {record["case"] for record in records}
    names = {key: name for key, name in NAMES.items() if key in measured}
    columns = (("", "bytes"), (" 16x1", "step"), (" 64x64", "train"), (" 4x1024", "train"))
    lines = []
    for key, name in names.items():
        cells = [_find(records, key + size, "lstm", metric) for size, metric in columns]
        lines.append([name, *(value_text(cell["ours"], None, cell["unit"]) for cell in cells)])
    # It was measured beside each of the others.
    lstm = ["torch's LSTM"]
    for size, metric in columns:
        cells = [_find(records, key + size, "lstm", metric) for key in names]
        median = statistics.median(cell["theirs"] for cell in cells)
        lstm.append(value_text(median, None, cells[0]["unit"]))
    headings = ("", "state", "step of 16 rows", "training, 64 rows of 64", "4 rows of 1,024")
    return markdown(headings, [*lines, lstm]) + _source("memories", records)


def lstm_iteration() -> str:
    """PPO with our default memory and with RLlib's LSTM, at equal parameter count."""
    records = load("connectors")
    cells = [_find(records, "lstm-256", "rllib-lstm", m) for m in ("update", "iteration")]
    return _compare(("PPO, 4,096 steps", "ours", "RLlib's LSTM"), cells) + _source(
        "connectors", records
    )


def learning() -> str:
    """Steps and seconds to a return."""
    records = load("learning")
    cells = [
        _find(records, "RepeatPreviousEasy", "rllib-lstm", metric)
        for metric in ("steps_to_0.9", "seconds_to_0.9")
    ]
    return _compare(("to 0.9", "ours", "RLlib's LSTM"), cells) + _source("learning", records)


def study() -> str:
    """What memories of equal size learned to hold, and what they cost."""
    records = load("study")
    passes = {r["case"]: r["ours"] for r in load("memories") if r["peer"] == "lstm"}
    # recall-4 before recall-16.
    tasks = sorted(
        {r["task"] for r in records}, key=lambda task: (task.split("-")[0], len(task), task)
    )
    cells = {(r["memory"], r["task"]): r for r in records}

    def cost(memory: str) -> str:
        seconds = passes.get(f"{memory} 64x64")
        return "" if seconds is None else f"{seconds / passes['deep 64x64']:.1f}x"

    lines = []
    for key, name in NAMES.items():
        row = [cells.get((key, task)) for task in tasks]
        known = [cell for cell in row if cell]
        if known:
            state = value_text(known[0]["state_bytes"], None, "bytes")
            lines.append([name, state, cost(key), *map(_learned, row)])
    headings = ("", "state", "training pass", *tasks)
    return markdown(headings, lines) + _rates(records) + _source("study", records)


def _rates(records: list[Row]) -> str:
    """How the learning rates of the study were found."""
    numbers = ", ".join(f"{rate:g}" for rate in sorted({r["rate"] for r in records}))
    if min(len(r["rates"]) for r in records) > 1:
        return f"\n\nEach memory has the best of its learning rates: {numbers}."
    return f"\n\nLearning rate: {numbers}; the others are not done for all memories."


def accuracies(task: str) -> str:
    """What memories answered right in a task of the study after some updates."""
    records = [r for r in load("study") if r["task"] == task]
    found = {r["memory"]: r["accuracies"] for r in records}
    lines = [
        [name, *(f"{accuracy:.2f}" for accuracy in found[key].values())]
        for key, name in NAMES.items()
        if key in found
    ]
    headings = (task, *(f"{number} updates" for number in records[0]["accuracies"]))
    return markdown(headings, lines) + _source("study", records)


def _learned(cell: Row | None) -> str:
    """Updates to the goal, or the accuracy where the goal was missed; then how many seeds."""
    if cell is None:
        return ""
    updates = cell["updates_to_goal"]
    text = f"{cell['ours']:.2f}" if updates is None else f"{updates:.0f} updates"
    return text + ("" if cell["runs"] == 5 else f" <sup>{cell['runs']}</sup>")


def popgym(path: Path = RESULTS / "popgym.jsonl") -> str:
    """Returns on POPGym's tasks, a line each task and memory that has runs."""
    records = _popgym_records(path)
    if not records:
        return "No run is committed yet: the table and the pictures appear here with the first one."
    text = _benchmarks("popgym_table")
    lines = []
    for r in records:
        published = "" if r["published"] is None else f"{r['published']:.3f}"
        seeds, steps = str(len(r["seeds"])), f"{r['max_steps']:,}"
        goal = "" if r["goal"] is None else f"{r['goal']:.3g}"
        found = (text.return_text(r), seeds, steps, published, goal, text.steps_text(r))
        lines.append([r["task"], f"`{r['memory']}`", *found])
    hours = sum(r["seconds"] for r in records) / 3600
    headings = (
        "", "memory", "return (95 % interval)", "seeds", "steps trained", "published", "goal",
        "steps to the goal",
    )  # fmt: skip
    return (
        markdown(headings, lines, num_names=2)
        + f"\n\n{sum(len(r['seeds']) for r in records)} runs, {hours:.1f} hours of training."
        + _source("popgym", records)
    )


def ceilings() -> str:
    """The most that can be earned, beside what our best memory and the published one earn."""
    records = load("ceilings")
    runs = _popgym_records(RESULTS / "popgym.jsonl")
    lines = []
    for record in records:
        task = record["task"]
        ours = max((r["return"] for r in runs if r["task"] == task), default=None)
        lines.append(
            [
                task,
                record["kind"],
                f"{record['ours']:.3f}",
                "" if ours is None else f"{ours:.3f}",
                f"{record['theirs']:.3f}",
            ]
        )
    headings = ("", "", "return", "our best memory", "published")
    return markdown(headings, lines, num_names=2) + "\n\n`python -m benchmarks ceilings`"


def popgym_pictures(directory: Path = RESULTS.parents[1] / "docs" / "images") -> str:
    """The pictures that there are: memories over all tasks, then a family each."""
    names = [path.name for path in sorted(directory.glob("popgym-*.png"))]
    names.sort(key=lambda name: name != "popgym-memories.png")
    titles = [name.removeprefix("popgym-").removesuffix(".png") for name in names]
    pairs = zip(titles, names, strict=True)
    return "\n\n".join(f"![{title}](images/{name})" for title, name in pairs)


def popgym_settings() -> str:
    """What the benchmark and the example set for each family of tasks."""
    tasks = _module("examples.popgym_tasks")
    lines = [
        [
            name,
            f"`{family.memory}`",
            family.why.strip(),
            f"{family.gamma:g}",
            f"{family.lambda_:g}",
            f"{family.entropy_coeff:g}",
            "" if family.kl_target is None else f"{family.kl_target:g}",
            "the episode's" if family.row_steps is None else str(family.row_steps),
        ]
        for name, family in tasks.FAMILIES.items()
    ]
    headings = ("", "memory", "why", "gamma", "lambda", "entropy", "KL", "steps a row")
    return markdown(headings, lines, num_names=3)


def against_lstm(path: Path = RESULTS / "popgym.jsonl") -> str:
    """Steps of our best memory to what RLlib's LSTM comes to, and of RLlib's LSTM itself."""
    tasks = _module("examples.popgym_tasks").tasks()
    records = _benchmarks("popgym_scores").steps_of_peer(_popgym_runs(path), tasks)
    if not records:
        return "No task has runs of RLlib's LSTM, the MLP and a memory yet."
    ratios = [math.inf if r["ours"] is None else r["ours"] / r["theirs"] for r in records]
    lines = [
        [
            r["task"],
            f"{r['goal']:.2f}",
            f"{r['theirs']:,.0f}",
            *(
                ("", "never", "")
                if r["ours"] is None
                else (f"`{r['memory']}`", f"{r['ours']:,.0f}", f"{ratio:.2f}")
            ),
        ]
        for r, ratio in zip(records, ratios, strict=True)
    ]
    median = statistics.median(ratios)
    lines.append(["median", "", "", "", "", f"{median:.2f}" if math.isfinite(median) else "never"])
    headings = ("", "return", "steps of RLlib's LSTM", "our best memory", "its steps", "ratio")
    return markdown(headings, lines)


def first_task(path: Path = RESULTS / "popgym.jsonl") -> str:
    """What each memory needs for the task that `make train` trains on, seed 0."""
    task = "RepeatPreviousEasy"
    runs = [r for r in _popgym_runs(path) if (r.trial.task, r.trial.seed) == (task, 0)]
    lines = []
    for run in sorted(runs, key=lambda run: (run.steps_to(0.9), -run.best)):
        steps = run.steps_to(0.9)
        text = f"{steps:,}" if math.isfinite(steps) else f"not in {run.steps[-1]:,}"
        lines.append([f"`{run.trial.memory}`", text, f"{run.best:.2f}"])
    headings = (task, "steps to 0.9", "best return")
    command = f"`python -m benchmarks popgym --tasks {task} --seeds 1 --steps 300000`"
    return markdown(headings, lines) + f"\n\n{command}"


def easy_tasks(path: Path = RESULTS / "popgym.jsonl") -> str:
    """The first 300,000 steps on all Easy tasks, of the memories that have runs on each."""
    steps = 300_000
    tasks = [f"{family}Easy" for family in _module("examples.popgym_tasks").FAMILIES]
    best: dict[str, dict[str, list[float]]] = {}
    for run in _popgym_runs(path):
        trial = run.trial
        if trial.task in tasks and (run.solved or run.steps[-1] >= steps):
            # An iteration ends where episodes do, so up to a twentieth later.
            curve = zip(run.steps, run.returns, strict=True)
            early = max(value for step, value in curve if step <= 1.05 * steps)
            best.setdefault(trial.memory, {}).setdefault(trial.task, []).append(early)
    memories = [memory for memory, scores in best.items() if set(scores) == set(tasks)]
    if not memories:
        return "No memory has runs on all Easy tasks yet."
    means = {m: [statistics.fmean(best[m][task]) for task in tasks] for m in memories}
    memories.sort(key=lambda memory: -sum(means[memory]))
    lines = [
        [task, *(f"{means[m][i]:.2f} ({len(best[m][task])})" for m in memories)]
        for i, task in enumerate(tasks)
    ]
    lines.append(["mean", *(f"{statistics.fmean(means[m]):.2f}" for m in memories)])
    headings = ("best return (seeds)", *(f"`{memory}`" for memory in memories))
    command = f"`python -m benchmarks popgym --levels Easy --steps {steps}`"
    return markdown(headings, lines) + f"\n\n{command}"


def _popgym_runs(path: Path) -> list[Any]:
    """Those with the settings and the learning rates that the tables have now."""
    runs, tasks = _benchmarks("popgym_runs"), _module("examples.popgym_tasks")

    def settings_of(trial: Any) -> dict:
        return tasks.settings(trial.task, trial.memory, lr=trial.lr)

    kept = runs.current(runs.load(path), settings_of)
    return [run for run in kept if run.trial.lr == tasks.MODELS[run.trial.memory].lr]


def _popgym_records(path: Path) -> list[Row]:
    tasks = _module("examples.popgym_tasks")
    scores = _benchmarks("popgym_scores")
    return scores.summary(_popgym_runs(path), tasks.tasks(), list(tasks.MODELS))


def _benchmarks(name: str) -> Any:
    return _module(f"benchmarks.{name}")


def _module(name: str) -> Any:
    """A module of this repository that is not installed."""
    root = str(RESULTS.parents[1])
    if root not in sys.path:
        sys.path.append(root)
    return importlib.import_module(name)


def snapshots() -> str:
    """What states stored once a row save against states stored once a step."""
    records = load("connectors")
    metrics = {
        "bytes": "pickled episodes",
        "sampling": "sampling",
        "learner_connector": "learner connectors",
        "iteration": "iteration, one epoch",
    }
    states = {"state-4x64x64": "66 KB", "state-240": "960 bytes"}
    lines = []
    for case, state in states.items():
        for metric, name in metrics.items():
            cell = _find(records, case, "rllib", metric)
            lines.append([state, name, *_both(cell)])
    headings = ("a state has", "", "with `connect`", "RLlib's connectors", "ratio")
    return markdown(headings, lines, num_names=2) + _source("connectors", records)


def compiling() -> str:
    """What compiling costs and gains."""
    records = load("compile")
    names = {"train-pass-64x64": "training pass, 64 rows of 64", "ppo": "PPO update, 4,096 steps"}
    times = {"train-pass-64x64": "time", "ppo": "update"}
    lines = []
    for case, name in names.items():
        cold, warm = (_find(records, case, "eager", f"compile_{m}") for m in ("cold", "warm"))
        costs = [value_text(cell["ours"], None, cell["unit"]) for cell in (cold, warm)]
        lines.append([name, *_both(_find(records, case, "eager", times[case])), *costs])
    pays = [_find(records, "ppo", "eager", f"iterations_to_pay_{m}") for m in ("cold", "warm")]
    text = (
        f"It has paid for itself after {pays[0]['ours']:.0f} PPO iterations with an empty cache, "
        f"{pays[1]['ours']:.0f} with a filled one."
    )
    headings = ("", "compiled", "uncompiled", "ratio", "first call, empty cache", "filled cache")
    return markdown(headings, lines) + f"\n\n{text}" + _source("compile", records)


def scaling() -> str:
    """Steps a second with EnvRunners and Learners in processes of their own."""
    records = load("scaling")

    def rate(runners: int, learners: int, metric: str) -> str:
        cell = _find(records, f"{runners}x{learners}", "0x0", metric)
        return f"{cell['ours']:,.0f}"

    numbers = range(3)
    lines = [
        [f"{r} EnvRunners", *(rate(r, n, "iteration") for n in numbers), rate(r, 0, "sampling")]
        for r in numbers
    ]
    lines.append(["updates alone", *(rate(0, n, "update") for n in numbers), ""])
    headings = ("steps a second", *(f"{n} Learners" for n in numbers), "sampling alone")
    return markdown(headings, lines) + _source("scaling", records)


def bytes_a_step() -> str:
    """What a step weighs on its way from an EnvRunner to a Learner."""
    records = load("scaling")
    to_driver = _find(records, "bytes", "arrays", "to_driver")
    to_learners = _find(records, "bytes", "arrays", "to_learners")
    lines = [
        ["arrays of an episode", f"{to_driver['theirs']:,.0f} bytes"],
        ["pickled, from the EnvRunner", f"{to_driver['ours']:,.0f} bytes"],
        ["pickled, to two Learners", f"{to_learners['ours']:,.0f} bytes"],
    ]
    return markdown(("a step weighs", ""), lines) + _source("scaling", records)


def footprint() -> str:
    """Memory of an update at its peak, over the length of rows."""
    records = load("footprint")
    cells = {(r["case"], r["peer"]): r for r in records}
    sizes = [case.split("x", 1) for case, peer in cells if peer == "rllib-lstm"]
    lengths = list(dict.fromkeys(length for length, _ in sizes))
    lines = []
    for name in dict.fromkeys(name for _, name in sizes):
        found = [cells[f"{length}x{name}", "rllib-lstm"] for length in lengths]
        values = [*(cell["ours"] for cell in found), found[-1]["theirs"]]
        lines.append([f"`{name}`", *(value_text(value, None, "bytes") for value in values)])
    headings = ["memory", *(f"rows of {int(length):,}" for length in lengths)]
    headings.append(f"RLlib's LSTM of its size, rows of {int(lengths[-1]):,}")
    return markdown(headings, lines) + _source("footprint", records)


def _find(records: Iterable[Row], case: str, peer: str, metric: str) -> Row:
    """The one record with these names."""
    names = (case, peer, metric)
    (found,) = (r for r in records if (r["case"], r["peer"], r["metric"]) == names)
    return found


def _both(cell: Row) -> list[str]:
    """Ours, theirs, and the ratio of the two."""
    sides = [value_text(cell[side], None, cell["unit"]) for side in ("ours", "theirs")]
    return [*sides, f"{cell['ratio']:.3g}x"]


def _compare(headings: Sequence[str], cells: Iterable[Row]) -> str:
    names = (cell["metric"].split("_")[0] for cell in cells)
    lines = [[name, *_both(cell)] for name, cell in zip(names, cells, strict=True)]
    return markdown((*headings, "ratio"), lines)


def _source(name: str, records: list[Row]) -> str:
    machine = records[0]["machine"]
    where = f"{machine['device']}, {machine['cpu']}, threads: {machine['threads']}"
    return f"\n\n`python -m benchmarks {name}` ({where})"
