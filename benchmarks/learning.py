"""Steps and seconds until PPO solves a memory task: our default policy against RLlib's LSTM.

Both get the same environment, batch, seeds and hyperparameters but for the learning rate. RLlib's
LSTM (256 cells) runs on RLlib's default connectors and gets the better of two constant learning
rates, chosen on the first seed; ours keeps the example's falling one. A run ends at the goal. A run
that does not reach it counts with all its steps and seconds, which flatters it.
"""

import argparse
import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from benchmarks.curves import Curve, train_curve
from benchmarks.harness import Record, check, machine_info, record
from examples.popgym_setup import HYPERPARAMETERS, build_config, start_ray
from rlmodules.tools.drawing import EITHER_GROUND

ENV = "RepeatPreviousEasy"
PEER = "rllib-lstm"
GOAL = 0.9
PEER_LEARNING_RATES = (1e-3, 3e-4)
# Less than half of the peer's steps and seconds.
TARGET = 2.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--env", default=ENV, help=f"POPGym environment (default: {ENV})")
    parser.add_argument("--seeds", type=int, default=3, help="seeds each (default: 3)")
    parser.add_argument("--max-steps", type=int, default=500_000, help="steps a run at most")
    parser.add_argument("--picture", metavar="FILE", help="draw the curves, for example as PNG")


def run(args: argparse.Namespace) -> list[Record]:
    """Trains all runs, ours and the peer's in turn.

    Args:
        args: The options.

    Returns:
        One record of steps and one of seconds, with the curves of all runs.
    """
    start_ray()
    seeds = range(args.runs or args.seeds)
    train = partial(_train, env=args.env, max_steps=args.max_steps)
    ours, theirs = [train("deep", seed=0)], []
    candidates = {lr: train(PEER, seed=0, lr=lr) for lr in PEER_LEARNING_RATES}
    peer_lr = min(candidates, key=lambda lr: _badness(candidates[lr]))
    theirs.append(candidates[peer_lr])
    for seed in seeds[1:]:
        ours.append(train("deep", seed=seed))
        theirs.append(train(PEER, seed=seed, lr=peer_lr))
    if args.picture:
        draw({"ours": ours, "RLlib's LSTM": theirs}, Path(args.picture), args.env)

    costs = [[curve.cost() for curve in curves] for curves in (ours, theirs)]
    settings = {
        "goal": GOAL,
        "max_steps": args.max_steps,
        "ours_reached": sum(curve.goal_at is not None for curve in ours),
        "theirs_reached": sum(curve.goal_at is not None for curve in theirs),
        "ours_lr": HYPERPARAMETERS["lr"],
        "theirs_lr": peer_lr,
        "theirs_first_seed_by_lr": {
            str(lr): {"steps": curve.cost()[0], "last_return": curve.returns[-1]}
            for lr, curve in candidates.items()
        },
    }
    machine = machine_info()
    records = [
        record(
            benchmark="learning",
            case=args.env,
            peer=PEER,
            metric=f"{name}_to_{GOAL:g}",
            ours=[cost[i] for cost in costs[0]],
            theirs=[cost[i] for cost in costs[1]],
            unit=unit,
            target=TARGET,
            machine=machine,
            **settings,
        )
        for i, (name, unit) in enumerate((("steps", "steps"), ("seconds", "s")))
    ]
    records[0]["curves"] = {
        name: [dataclasses.asdict(curve) for curve in curves]
        for name, curves in (("ours", ours), (PEER, theirs))
    }
    return records


@matplotlib.rc_context(EITHER_GROUND)
def draw(curves: dict[str, list[Curve]], path: Path, title: str) -> None:
    """Draws mean returns over steps and over seconds: a line a seed, a band between the seeds.

    Args:
        curves: The runs of each contestant.
        path: The file to write.
        title: Title of the picture.
    """
    figure = Figure(figsize=(9, 3.6), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for axes, axis, label in zip(
        panels, ("steps", "seconds"), ("environment steps", "seconds of training"), strict=True
    ):
        for color, (name, runs) in zip(("tab:blue", "tab:orange"), curves.items(), strict=False):
            for i, curve in enumerate(runs):
                x: list[Any] = getattr(curve, axis)
                axes.plot(x, curve.returns, color=color, linewidth=1, alpha=0.8)
                axes.plot(
                    x[-1], curve.returns[-1], "o", color=color, label=name if i == 0 else None
                )
            grid, low, high = _band(runs, axis)
            axes.fill_between(grid, low, high, color=color, alpha=0.2, linewidth=0)
        axes.axhline(GOAL, color="grey", linestyle="--", linewidth=1)
        axes.set_xlabel(label)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("mean return of an iteration")
    panels[0].legend(frameon=False)
    figure.suptitle(f"{title}, {len(next(iter(curves.values())))} seeds each, until {GOAL:g}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130, transparent=True)


def _band(runs: list[Curve], axis: str) -> tuple[list[float], list[float], list[float]]:
    """Lowest and highest return of the seeds, as far as all of them ran."""
    points = [(getattr(curve, axis), curve.returns) for curve in runs]
    start, end = max(x[0] for x, _ in points), min(x[-1] for x, _ in points)
    grid = np.linspace(start, max(start, end), 200)
    returns = np.array([np.interp(grid, x, y) for x, y in points])
    return grid.tolist(), returns.min(0).tolist(), returns.max(0).tolist()


def _train(memory: str, *, env: str, max_steps: int, seed: int, lr: float | None = None) -> Curve:
    # As in the example, where a run ends before "auto" compiles; here one process has many runs.
    model = {"compile": False} if memory == "deep" else {}
    changes = {} if lr is None else {"lr": lr}
    config = build_config(env, memory, seed=seed, hyperparameters=changes, model=model)
    check(
        config.env_config["name"] == env and config.seed == seed,
        "The contestants do not train on the same environment and seed",
    )
    curve = train_curve(config, goal=GOAL, max_steps=max_steps)
    check(bool(curve.returns), "No episode ended")
    print(
        f"{memory} seed {seed}{'' if lr is None else f' lr {lr:g}'}: return "
        f"{curve.returns[-1]:.2f} after {curve.steps[-1]:,} steps and {curve.seconds[-1]:.0f} s",
        flush=True,
    )
    return curve


def _badness(curve: Curve) -> tuple[float, float]:
    """Orders runs: first by steps to the goal, then by the return at the end."""
    return curve.cost()[0] if curve.goal_at is not None else float("inf"), -curve.returns[-1]
