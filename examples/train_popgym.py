"""Trains a policy with memory on a POPGym environment, with RLlib's PPO.

What it shows
-------------
- A module with memory (`MemoryRLModule`) plugged into PPO through `RLModuleSpec` and
  `connect`; see `examples/popgym_setup.py`.
- Checkpoints that survive an interruption at any point, and `--resume`.
- A memoryless MLP of equal size beside it, which cannot solve the task.
- A restored agent, evaluated with an EnvRunner of its own.

How to run it
-------------
    python -m examples.train_popgym
    python -m examples.train_popgym --env RepeatPreviousHard    # its settings, a fitting memory
    python -m examples.train_popgym --env RepeatFirstEasy --memory linear --seed 1
    python -m examples.train_popgym --resume                    # continues that run
    python -m examples.train_popgym --resume runs/RepeatPreviousEasy-deep-seed0

Ctrl-C (or SIGTERM) ends the run after the current iteration with a checkpoint, and exit code 130
(143); a second Ctrl-C ends it at once. Files are in `runs/<env>-<memory>-seed<seed>/`: `run.json`,
`metrics.csv`, `baseline.csv`, `learning_curve.png`, `evaluation.json` and `checkpoints/`.

Results to expect
-----------------
The default run reaches a mean return of 0.9 with each of the seeds 0 to 4, after 48,960 to 61,200
environment steps: 20 to 30 seconds of training on a CPU core. The restored agent scores 0.98 to
1.00 without exploration, the MLP stays at -0.5. The whole command takes three quarters of a minute.
`make test-learning` runs the five seeds.
"""

import argparse
import json
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import cast

import ray
import torch
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.core import COMPONENT_RL_MODULE
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from rich.console import Console

from examples.arguments import (
    common_settings,
    has_own_settings,
    model_settings,
    parse,
    settings_text,
)
from examples.popgym_setup import (
    MEMORIES,
    build_config,
    count_parameters,
    mlp_of_size,
    start_ray,
)
from examples.reporting import Display, draw_curves, metrics_row
from examples.run_dir import RunDir

# RLlib's means are over an iteration's episodes; those of the first ones may be luck.
MIN_EPISODES = 100


class StopRequest:
    """Turns the first SIGINT or SIGTERM into a flag; the second one acts as if there was none."""

    def __init__(self, console: Console):
        self.signal: int | None = None
        self._console = console

    def install(self) -> None:
        """Sets the handlers. `ray.init` sets its own for SIGTERM, so call it again behind that."""
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.signal = number
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._console.print("[yellow]Stopping after this iteration. Once more to stop at once.[/]")


def train(
    args: argparse.Namespace, algo: Algorithm, run: RunDir, stop: StopRequest, display: Display
) -> bool:
    """Trains until a stop criterion holds or a signal arrives; writes metrics and checkpoints.

    Returns:
        Whether the mean return was reached.
    """
    row = run.progress()
    saved = row["iteration"]
    while not (is_done := stopped_by(row, args)) and stop.signal is None:
        start = time.perf_counter()
        result = algo.train()
        row = metrics_row(result, row, row["seconds"] + time.perf_counter() - start)
        run.append_row(row)
        display.show(row)
        if row["iteration"] % args.checkpoint_freq == 0:
            run.save(algo, row)
            saved = row["iteration"]
    if row["iteration"] > saved or run.last_checkpoint() is None:
        run.save(algo, row)
    return is_done == "reward"


def stopped_by(row: dict, args: argparse.Namespace) -> str | None:
    """Which stop criterion holds."""
    if row.get("episodes", 0) >= MIN_EPISODES and row["return_mean"] >= args.stop_reward:
        return "reward"
    if row["env_steps"] >= args.stop_timesteps:
        return "timesteps"
    return "iterations" if row["iteration"] >= args.stop_iters else None


def train_baseline(
    args: argparse.Namespace, num_parameters: int, env_steps: int, run: RunDir,
    stop: StopRequest, display: Display,
) -> None:  # fmt: skip
    """Trains an MLP of equal size for equally many steps, with the same hyperparameters."""
    run.cut_rows(0, "baseline.csv")
    settings = common_settings(args)
    algo = build_config(args.env, "mlp", **settings, model=mlp_of_size(num_parameters, args.env))
    algo = algo.build_algo()
    row = {"iteration": 0, "env_steps": 0, "seconds": 0.0}
    while row["env_steps"] < env_steps and stop.signal is None:
        start = time.perf_counter()
        row = metrics_row(algo.train(), row, row["seconds"] + time.perf_counter() - start)
        run.append_row(row, "baseline.csv")
        display.show(row)
    algo.stop()


def evaluate(run: RunDir, num_episodes: int) -> dict[str, float]:
    """Restores the agent and runs episodes with an EnvRunner of its own, without exploration."""
    algo = Algorithm.from_checkpoint(str(run.last_checkpoint()))
    weights = algo.get_weights()
    runner = SingleAgentEnvRunner(config=cast(AlgorithmConfig, algo.config))
    runner.set_state({COMPONENT_RL_MODULE: weights})
    returns = [
        episode.get_return() for episode in runner.sample(num_episodes=num_episodes, explore=False)
    ]
    runner.stop()
    algo.stop()
    mean = sum(returns) / len(returns)
    return {
        "episodes": len(returns),
        "return_mean": mean,
        "return_std": (sum((value - mean) ** 2 for value in returns) / len(returns)) ** 0.5,
        "return_min": min(returns),
        "return_max": max(returns),
    }


def start_or_resume(args: argparse.Namespace, run: RunDir, console: Console) -> Algorithm:
    """Builds the algorithm, from the last checkpoint if a run is resumed and has one."""
    if args.resume is None:
        moved = run.create(vars(args))
        if moved is not None:
            console.print(f"The earlier run is now in {_short(moved)}.")
    run.repair()
    checkpoint = run.last_checkpoint()
    if args.resume is not None and checkpoint is not None:
        console.print(f"Resuming {_short(checkpoint)}.")
        return Algorithm.from_checkpoint(str(checkpoint))
    config = build_config(
        args.env, args.memory, **common_settings(args), model=model_settings(args)
    )
    return config.build_algo()


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 with `--as-test` if the return was not reached; 130 or 143 after SIGINT or SIGTERM.
    """
    args, run = parse(argv)
    console = Console(soft_wrap=True)
    torch.set_num_threads(args.num_threads)
    stop = StopRequest(console)
    stop.install()
    start_ray(args.num_cpus)
    stop.install()
    try:
        return _run(args, run, stop, console)
    finally:
        ray.shutdown()


def _run(args: argparse.Namespace, run: RunDir, stop: StopRequest, console: Console) -> int:
    start = time.perf_counter()
    if has_own_settings(args.env):
        console.print(settings_text(args))
    algo = start_or_resume(args, run, console)
    num_parameters = count_parameters(algo)
    console.print(
        f"[bold]{args.env}[/], {MEMORIES[args.memory]}: {num_parameters:,} parameters, "
        f"to a mean return of {args.stop_reward:g}"
    )
    console.print(f"Curves while it trains: [bold]python -m rlmodules watch {_short(run.path)}[/]")
    with Display(args.memory, console, args.stop_timesteps) as display:
        reached = train(args, algo, run, stop, display)
    algo.stop()
    progress = run.progress()

    if stop.signal is None and not args.no_baseline and not _has_baseline(run, progress):
        console.print(f"[bold]Baseline[/]: {MEMORIES['mlp']} of equal size, for as many steps")
        with Display("baseline", console, progress["env_steps"]) as display:
            train_baseline(args, num_parameters, progress["env_steps"], run, stop, display)

    curves = {
        args.memory: run.read_rows(),
        "mlp of equal size, no memory": run.read_rows("baseline.csv"),
    }
    draw_curves(
        {label: rows for label, rows in curves.items() if rows},
        run.path / "learning_curve.png",
        title=args.env,
        goal=args.stop_reward,
    )
    if stop.signal is not None:
        console.print(
            "Stopped. Continue with: "
            f"[bold]python -m examples.train_popgym --resume {_short(run.path)}[/]",
        )
        return 128 + stop.signal

    evaluation = evaluate(run, args.evaluation_duration)
    (run.path / "evaluation.json").write_text(json.dumps(evaluation, indent=2) + "\n")
    summarize(args, run, evaluation, reached, time.perf_counter() - start, console)
    return 1 if args.as_test and not reached else 0


def _has_baseline(run: RunDir, progress: dict) -> bool:
    rows = run.read_rows("baseline.csv")
    return bool(rows) and rows[-1]["env_steps"] >= progress["env_steps"]


def summarize(
    args: argparse.Namespace, run: RunDir, evaluation: dict, reached: bool, seconds: float,
    console: Console,
) -> None:  # fmt: skip
    """Prints what came out and where it is."""
    progress, baseline = run.progress(), run.read_rows("baseline.csv")
    outcome = "reached" if reached else "[red]did not reach[/]"
    console.print(
        f"\n{args.memory} {outcome} a mean return of {args.stop_reward:g}: "
        f"[bold]{progress['return_mean']:.2f}[/] after {progress['env_steps']:,} steps and "
        f"{progress['seconds']:.0f} s of training"
    )
    if baseline:
        console.print(f"without memory: {baseline[-1]['return_mean']:.2f} after as many steps")
    console.print(
        f"restored and evaluated without exploration: {evaluation['return_mean']:.2f} "
        f"± {evaluation['return_std']:.2f} over {evaluation['episodes']} episodes"
    )
    console.print(f"files in {_short(run.path)}/, {seconds:.0f} s in all")


def _short(path: Path) -> Path:
    """Relative to the working directory if it is below it."""
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


if __name__ == "__main__":
    sys.exit(main())
