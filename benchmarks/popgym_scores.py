"""What the runs of `python -m benchmarks popgym` come to: means, intervals, steps to a return."""

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence

import numpy as np
from scipy import stats

from benchmarks.harness import Record
from benchmarks.popgym_runs import Run, Trial
from examples.popgym_tasks import family_of

PEER = "rllib-lstm"
NO_MEMORY = "mlp"
LEARNS = 0.05
"""Return by which the peer has to be above the MLP, so that it has learned what memory is for."""

CONFIDENCE = 0.95
HIGH_RETURN = 0.9

# Best of 13 models after 15,000,000 steps: POPGym, Morad et al. 2023, table 3. CountRecall has
# other actions since.
PUBLISHED = {
    "RepeatPreviousEasy": 1.0, "RepeatPreviousMedium": 0.789, "RepeatPreviousHard": 0.191,
    "RepeatFirstEasy": 1.0, "RepeatFirstMedium": 1.0, "RepeatFirstHard": 0.969,
    "CountRecallEasy": 0.509, "CountRecallMedium": -0.519, "CountRecallHard": -0.470,
    "AutoencodeEasy": -0.283, "AutoencodeMedium": -0.420, "AutoencodeHard": -0.448,
    "HigherLowerEasy": 0.529, "HigherLowerMedium": 0.513, "HigherLowerHard": 0.509,
    "MultiarmedBanditEasy": 0.631, "MultiarmedBanditMedium": 0.598, "MultiarmedBanditHard": 0.574,
    "PositionOnlyCartPoleEasy": 1.0, "PositionOnlyCartPoleMedium": 1.0,
    "PositionOnlyCartPoleHard": 1.0,
    "NoisyPositionOnlyCartPoleEasy": 0.995, "NoisyPositionOnlyCartPoleMedium": 0.659,
    "NoisyPositionOnlyCartPoleHard": 0.404,
}  # fmt: skip


def cells(runs: Iterable[Run]) -> dict[tuple[str, str, float], list[Run]]:
    """The runs of each task, memory and learning rate, over seeds."""
    found: dict[tuple[str, str, float], list[Run]] = defaultdict(list)
    for run in sorted(runs, key=lambda run: run.trial.seed):
        trial: Trial = run.trial
        found[trial.task, trial.memory, trial.lr].append(run)
    return dict(found)


def interval(values: Sequence[float]) -> list[float] | None:
    """95 % interval of a mean over seeds, by Student's t; None for a single seed."""
    if len(values) < 2:
        return None
    error = stats.sem(values)
    if error == 0:
        return [values[0], values[0]]
    low, high = stats.t.interval(CONFIDENCE, len(values) - 1, np.mean(values), error)
    return [float(low), float(high)]


def goal_of(task: str, peers: Sequence[Run]) -> float | None:
    """The return that steps are counted to.

    The best published one, or 0.9 where that is less. Where none is published, the mean of the
    best returns of RLlib's LSTM; None where that has not run either.
    """
    if task in PUBLISHED:
        return min(HIGH_RETURN, PUBLISHED[task])
    return statistics.fmean(run.best for run in peers) if peers else None


def summary(runs: Sequence[Run], tasks: Sequence[str], memories: Sequence[str]) -> list[Record]:
    """One record a task, memory and learning rate, in the order of tasks and memories."""
    found = cells(runs)
    records = []
    for task, memory, lr in sorted(
        (key for key in found if key[0] in tasks and key[1] in memories),
        key=lambda key: (tasks.index(key[0]), memories.index(key[1]), key[2]),
    ):
        ours = found[task, memory, lr]
        peers = [run for (t, m, _), some in found.items() if (t, m) == (task, PEER) for run in some]
        best = [run.best for run in ours]
        goal = goal_of(task, peers)
        steps = [math.inf if goal is None else run.steps_to(goal) for run in ours]
        median = statistics.median(steps)
        records.append(
            {
                "benchmark": "popgym",
                "case": f"{task} {memory}",
                "task": task,
                "memory": memory,
                "lr": lr,
                "return": statistics.fmean(best),
                "interval": interval(best),
                "seeds": [run.trial.seed for run in ours],
                "published": PUBLISHED.get(task),
                "goal": goal,
                "steps_to_goal": None if math.isinf(median) else int(median),
                "censored": sum(map(math.isinf, steps)),
                "solved": sum(run.solved for run in ours),
                "max_steps": max(run.steps[-1] for run in ours),
                "area": statistics.fmean(map(area, ours)),
                "parameters": ours[0].parameters,
                "seconds": sum(run.seconds for run in ours),
                "machine": ours[0].machine,
            }
        )
    return records


def steps_of_peer(runs: Sequence[Run], tasks: Sequence[str]) -> list[Record]:
    """How many steps memories need to what RLlib's LSTM comes to, where it learns.

    Args:
        runs: All runs, with one learning rate a memory.
        tasks: Those to look at.

    Returns:
        One record a task on which RLlib's LSTM is `LEARNS` above the MLP: `goal`, the mean of its
        best returns, or that at which a run ends as solved if it is less; `theirs`, the median of
        its runs' steps to their own best ones; `memory`, ours with the fewest median steps to the
        goal, and `ours`, these steps (both None: none gets there).
    """
    found = {(task, memory): some for (task, memory, _), some in cells(runs).items()}
    records = []
    for task in tasks:
        peers, others = found.get((task, PEER), []), found.get((task, NO_MEMORY), [])
        if not peers or not others:
            continue
        best = statistics.fmean(run.best for run in peers)
        if best - statistics.fmean(run.best for run in others) < LEARNS:
            continue
        goal = min(best, family_of(task).solved)
        steps = {
            memory: statistics.median(run.steps_to(goal) for run in some)
            for (t, memory), some in found.items()
            if t == task and memory not in (PEER, NO_MEMORY)
        }
        reached = {memory: count for memory, count in steps.items() if math.isfinite(count)}
        memory = min(reached, key=reached.__getitem__, default=None)
        records.append(
            {
                "task": task,
                "goal": goal,
                "theirs": statistics.median(run.steps_to(run.best) for run in peers),
                "memory": memory,
                "ours": None if memory is None else reached[memory],
            }
        )
    return records


def area(run: Run) -> float:
    """Mean return over all steps that a run was allowed; one that was solved stays as it was."""
    steps = [0, *run.steps, max(run.max_steps, run.steps[-1])]
    returns = [run.returns[0], *run.returns, run.returns[-1]]
    return float(np.trapezoid(returns, steps) / steps[-1])


def aggregate(
    runs: Iterable[Run], memories: Sequence[str]
) -> tuple[list[str], dict[str, tuple[float, float, float]]]:
    """Mean best return of memories over the tasks that all of them have runs of.

    Returns:
        These tasks, and for each memory the mean over them, and the ends of its 95 % interval: a
        bootstrap over the seeds of each task, stratified by tasks.
    """
    best: dict[str, dict[str, list[float]]] = {memory: defaultdict(list) for memory in memories}
    for run in runs:
        if run.trial.memory in best:
            best[run.trial.memory][run.trial.task].append(run.best)
    known = {memory: scores for memory, scores in best.items() if scores}
    if not known:
        return [], {}
    common = sorted(set.intersection(*(set(scores) for scores in known.values())))
    if not common:
        return [], {}
    return common, {
        memory: _mean_of_tasks([scores[task] for task in common])
        for memory, scores in known.items()
    }


def _mean_of_tasks(scores: Sequence[Sequence[float]]) -> tuple[float, float, float]:
    # A single seed is its own resample; scipy asks for two.
    strata = [np.repeat(values, 2) if len(values) == 1 else np.array(values) for values in scores]

    def mean(*samples: np.ndarray, axis: int = -1) -> np.ndarray:
        return np.mean([sample.mean(axis) for sample in samples], axis=0)

    found = stats.bootstrap(
        strata,
        mean,
        n_resamples=2000,
        confidence_level=CONFIDENCE,
        method="percentile",
        rng=np.random.default_rng(0),
    )
    low, high = found.confidence_interval
    return float(mean(*strata)), float(low), float(high)
