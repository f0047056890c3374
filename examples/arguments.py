"""The command line of `examples.train_popgym`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples.popgym_setup import ENVS, MEMORIES
from examples.run_dir import RunDir
from examples.runner import add_standard_arguments


def make_parser() -> argparse.ArgumentParser:
    """The command line: RLlib's standard example arguments where they apply."""
    parser = argparse.ArgumentParser(
        prog="python -m examples.train_popgym",
        description="Trains PPO with memory on a POPGym environment.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add_standard_arguments(parser)
    add = parser.add_argument
    add(
        "--env",
        default="RepeatPreviousEasy",
        choices=sorted(ENVS),
        metavar="NAME",
        help="a POPGym environment, for example RepeatFirstEasy or CountRecallEasy",
    )
    add(
        "--memory",
        default="deep",
        choices=MEMORIES,
        help="; ".join(f"{name}: {text}" for name, text in MEMORIES.items()),
    )
    add("--max-seq-len", type=int, default=64, help="steps a training row holds")
    add(
        "--compile",
        default="auto",
        choices=("off", "on", "auto"),
        help="torch.compile for the memory; auto: on CPUs once a run has taken five minutes",
    )
    add("--as-test", action="store_true", help="exit code 1 if `--stop-reward` is not reached")
    add(
        "--evaluation-interval",
        type=int,
        default=0,
        help="iterations between evaluations during the training; 0: only at its end",
    )
    add("--evaluation-duration", type=int, default=100, help="episodes an evaluation")
    add("--evaluation-num-env-runners", type=int, default=0)
    add("--checkpoint-freq", type=int, default=5, help="iterations between checkpoints")
    add("--no-baseline", action="store_true", help="leave the memoryless baseline out")
    add("--run-dir", help="directory of the run (default: runs/<env>-<memory>-seed<seed>)")
    add(
        "--resume",
        nargs="?",
        const="",
        metavar="DIR",
        help="continue the run in DIR, or in the run directory of the other arguments. Stop "
        "criteria may be changed, other arguments are those the run was started with",
    )
    return parser


def parse(argv: Sequence[str] | None = None) -> tuple[argparse.Namespace, RunDir]:
    """Arguments and run directory; a resumed run keeps the arguments it was started with."""
    parser = make_parser()
    args = parser.parse_args(argv)
    default = f"runs/{args.env}-{args.memory}-seed{args.seed}"
    run = RunDir(Path(args.resume or args.run_dir or default))
    if args.resume is None:
        return args, run
    try:
        settings = run.settings()
    except FileNotFoundError:
        parser.error(f"`--resume`: no run in {run.path}. Start one without `--resume`.")
    # What stands on the command line wins.
    parser.set_defaults(**{key: value for key, value in settings.items() if key != "resume"})
    return parser.parse_args(argv), run


def common_settings(args: argparse.Namespace) -> dict:
    """What agent and baseline share."""
    evaluation = {
        "evaluation_interval": args.evaluation_interval or None,
        "evaluation_duration": args.evaluation_duration,
        "evaluation_num_env_runners": args.evaluation_num_env_runners,
    }
    return {
        "seed": args.seed,
        "max_seq_len": args.max_seq_len,
        "num_env_runners": args.num_env_runners,
        "num_envs_per_env_runner": args.num_envs_per_env_runner,
        "num_learners": args.num_learners,
        "num_gpus_per_learner": args.num_gpus_per_learner,
        "evaluation": evaluation,
    }
