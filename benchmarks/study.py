"""What each memory learns to hold: supervised probes, at equal size and a learning rate of its own.

    python -m benchmarks study --threads 2 [--tasks overwrite] [--memories gru deep] [--seeds 2]

`recall-4`, `-16`, `-32`: name the symbol of so many steps ago. `overwrite`: write one of 8 values
to one of 8 keys, or ask for a key's last value. `count`: how often the marked symbol was seen.
`reverse`: 8 symbols, then the same in reverse, and again. Rows of 64 steps, 32 a batch, 400 updates
of Adam.

A memory's learning rate is the best of three on seed 0 of `overwrite` and `recall-16`: the one with
the highest mean accuracy after 100, 200 and 400 updates. A trial ends once its accuracy is 0.95; if
it never is, it counts as censored. Each finished trial is a line of `--trials` and never trained
again: a study that was stopped goes on.
"""

import argparse
import json
import math
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks import journal, memory_peers
from benchmarks.harness import Record, machine_info, record
from benchmarks.memory_peers import attention, count, frame, of_equal_size
from benchmarks.probes import PROBES, Model, train
from rlmodules.memories import GatedDeltaConfig, Memory, MixedConfig

NUM_PARAMETERS = 72_000
RATES = (3e-3, 1e-3, 1e-2)
RATE_TASKS = ("overwrite", "recall-16")
NUM_SEEDS = 5
UPDATES = (100, 200, 400)
EVERY = 50
GOAL = 0.95
TRIALS = Path(__file__).parent / "results" / "study.jsonl"
DEFAULT = "deep"

# Each takes a width that its parameters grow with.
MEMORIES: dict[str, Callable[[int], Memory]] = {
    "deep-sine": lambda width: attention(
        width, positions="sine", short_conv_activation="linear", normalizer="sum"
    ),
    "deep-unit": lambda width: attention(
        width, positions="none", feature_map="unit", write_gate=True
    ),
    "delta": frame(GatedDeltaConfig, decay=False),
    "mixed-16": frame(MixedConfig, window=16),
    **{
        name: memory_peers.MEMORIES[name]
        for name in (
            DEFAULT, "linear", "popgym", "gtrxl", "window", "gru", "lstm", "gated-delta", "min-gru",
            "lru", "ffm",
        )
    },
}  # fmt: skip


@dataclass(frozen=True)
class Trial:
    """One training."""

    task: str
    memory: str
    rate: float
    seed: int


@dataclass(frozen=True)
class Outcome:
    """What came of it."""

    accuracies: list[float]
    """On fresh sequences, after every `EVERY` updates; once it is `GOAL`, a trial ends."""

    parameters: int
    """Those of the memory."""

    state_bytes: int
    """Bytes of its state."""

    seconds: float
    """What it took."""

    @property
    def updates_to_goal(self) -> float:
        """Updates until the accuracy was `GOAL`; infinite if it never was."""
        return EVERY * len(self.accuracies) if self.accuracies[-1] >= GOAL else math.inf

    def after(self, updates: int) -> float:
        """Accuracy after so many updates; that of its end where a trial ended before."""
        return self.accuracies[: updates // EVERY][-1]


Outcomes = dict[Trial, Outcome]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--tasks", nargs="+", choices=PROBES, default=list(PROBES))
    parser.add_argument("--memories", nargs="+", choices=MEMORIES, default=list(MEMORIES))
    parser.add_argument("--seeds", type=int, default=NUM_SEEDS, help="0, 1, ... (default: 5)")
    parser.add_argument(
        "--rates", nargs="+", type=float, default=list(RATES), help="to choose from"
    )
    parser.add_argument("--trials", type=Path, default=TRIALS, metavar="FILE", help="a line each")
    parser.add_argument("--summary", action="store_true", help="train nothing, read the file only")


def run(args: argparse.Namespace) -> list[Record]:
    """Trains what is missing, `--threads` at a time with one thread each.

    Args:
        args: The options.

    Returns:
        A record for each task and memory that has trials, beside the default memory.
    """
    done = load(args.trials)
    context = multiprocessing.get_context("spawn")
    while not args.summary and (
        missing := missing_trials(done, args.tasks, args.memories, range(args.seeds), args.rates)
    ):
        with context.Pool(args.threads, torch.set_num_threads, (1,)) as pool:
            for trial, outcome in pool.imap_unordered(carry_out, missing):
                append(args.trials, trial, outcome)
                done[trial] = outcome
    return summary(done, args.tasks, args.memories, args.rates)


def missing_trials(
    done: Outcomes,
    tasks: Sequence[str],
    memories: Sequence[str],
    seeds: Sequence[int],
    rates: Sequence[float],
) -> list[Trial]:
    """The next trials, those that answer most first.

    First what learning rates are chosen by, where there are several; then seed 0, then the others.
    """
    by_rate = [
        Trial(task, memory, rate, 0)
        for rate in rates
        for task in RATE_TASKS
        for memory in memories
        if len(rates) > 1
    ]
    rest = [
        Trial(task, memory, best_rate(done, memory, rates), seed)
        for some in (seeds[:1], seeds[1:])
        for task in tasks
        for seed in some
        for memory in memories
    ]
    missing = [trial for trial in by_rate if trial not in done]
    return missing or [trial for trial in rest if trial not in done]


def best_rate(done: Outcomes, memory: str, rates: Sequence[float]) -> float:
    """A memory's learning rate, of those whose trials are done; before that, the first."""

    def score(rate: float) -> float:
        trials = [Trial(task, memory, rate, 0) for task in RATE_TASKS]
        return sum(done[trial].after(updates) for trial in trials for updates in UPDATES)

    return max(tried_rates(done, memory, rates), key=score, default=rates[0])


def tried_rates(done: Outcomes, memory: str, rates: Sequence[float]) -> list[float]:
    """The learning rates that a memory's trials can be compared for."""
    return [
        rate for rate in rates if all(Trial(task, memory, rate, 0) in done for task in RATE_TASKS)
    ]


def carry_out(trial: Trial) -> tuple[Trial, Outcome]:
    """Trains a memory of `NUM_PARAMETERS` parameters."""
    start = time.perf_counter()
    torch.manual_seed(trial.seed)
    probe = PROBES[trial.task]
    memory: Any = of_equal_size(MEMORIES[trial.memory], NUM_PARAMETERS)
    accuracies = train(
        Model(memory, probe),
        probe,
        rate=trial.rate,
        seed=trial.seed,
        updates=max(UPDATES),
        every=EVERY,
        goal=GOAL,
    )
    seconds = round(time.perf_counter() - start, 1)
    state_bytes = sum(x.nbytes for x in memory.initial_state().values())
    return trial, Outcome([round(a, 4) for a in accuracies], count(memory), state_bytes, seconds)


def load(path: Path) -> Outcomes:
    """The trials of a file, a line each; none if there is no file."""
    entries = journal.read(path)
    return {Trial(**entry["trial"]): Outcome(**entry["outcome"]) for entry in entries}


def append(path: Path, trial: Trial, outcome: Outcome) -> None:
    """Writes a trial at the end of a file, and on the terminal."""
    entry = {"trial": asdict(trial), "outcome": asdict(outcome)}
    journal.append(path, entry)
    print(json.dumps(entry), flush=True)


def summary(
    done: Outcomes, tasks: Sequence[str], memories: Sequence[str], rates: Sequence[float]
) -> list[Record]:
    """Each memory's trials at its learning rate, one record a task; `ours` is the memory."""
    machine = machine_info()

    def outcomes(task: str, memory: str) -> list[Outcome]:
        which = (task, memory, best_rate(done, memory, rates))
        return [o for t, o in done.items() if (t.task, t.memory, t.rate) == which]

    return [
        record(
            benchmark="study",
            case=f"{task} {memory}",
            peer=DEFAULT,
            metric=f"accuracy_after_{max(UPDATES)}",
            ours=[outcome.after(max(UPDATES)) for outcome in ours],
            theirs=[outcome.after(max(UPDATES)) for outcome in outcomes(task, DEFAULT)],
            unit="",
            machine=machine,
            higher_is_better=True,
            task=task,
            memory=memory,
            rate=best_rate(done, memory, rates),
            rates=tried_rates(done, memory, rates),
            parameters=ours[0].parameters,
            state_bytes=ours[0].state_bytes,
            accuracies={n: statistics.median(o.after(n) for o in ours) for n in UPDATES},
            updates_to_goal=_median_updates(ours),
            censored=sum(math.isinf(outcome.updates_to_goal) for outcome in ours),
        )
        for task in tasks
        for memory in memories
        if (ours := outcomes(task, memory))
    ]


def _median_updates(outcomes: Sequence[Outcome]) -> float | None:
    """The median of what the trials needed, None where that is more than all updates."""
    median = statistics.median(outcome.updates_to_goal for outcome in outcomes)
    return None if math.isinf(median) else median
