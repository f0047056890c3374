"""The command line of `examples.train_popgym`."""

import argparse
from collections.abc import Sequence
from pathlib import Path

from examples import popgym_tasks
from examples.popgym_setup import ENVS, MEMORIES, OURS
from examples.run_dir import RunDir
from examples.runner import add_standard_arguments

ENV = "RepeatPreviousEasy"
MEMORY = "deep"
MAX_SEQ_LEN = 64


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
        default=ENV,
        choices=sorted(ENVS),
        metavar="NAME",
        help="a POPGym environment, for example RepeatFirstEasy or CountRecallEasy. Any but the "
        "default one gets its settings from examples/popgym_tasks.py",
    )
    add(
        "--memory",
        choices=MEMORIES,
        help="; ".join(f"{name}: {text}" for name, text in MEMORIES.items())
        + ". None: the one that is recommended for the environment",
    )
    add(
        "--max-seq-len",
        type=int,
        help=f"steps a training row holds. None: the environment's, {MAX_SEQ_LEN} for {ENV}",
    )
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
    memory = args.memory or recommended(args.env)
    default = f"runs/{args.env}-{memory}-seed{args.seed}"
    run = RunDir(Path(args.resume or args.run_dir or default))
    if args.resume is None:
        args.memory = memory
        return args, run
    try:
        settings = run.settings()
    except FileNotFoundError:
        parser.error(f"`--resume`: no run in {run.path}. Start one without `--resume`.")
    # What stands on the command line wins.
    parser.set_defaults(**{key: value for key, value in settings.items() if key != "resume"})
    return parser.parse_args(argv), run


def has_own_settings(env: str) -> bool:
    """Whether an environment is trained with its own row of the table.

    The default one keeps the settings that its published results were measured with.
    """
    return env != ENV and popgym_tasks.is_known(env)


def recommended(env: str) -> str:
    """The memory to take for an environment."""
    return popgym_tasks.family_of(env).memory if has_own_settings(env) else MEMORY


def common_settings(args: argparse.Namespace) -> dict:
    """What agent and baseline share."""
    evaluation = {
        "evaluation_interval": args.evaluation_interval or None,
        "evaluation_duration": args.evaluation_duration,
        "evaluation_num_env_runners": args.evaluation_num_env_runners,
    }
    settings = {
        "seed": args.seed,
        "max_seq_len": args.max_seq_len or MAX_SEQ_LEN,
        "num_env_runners": args.num_env_runners,
        "num_envs_per_env_runner": args.num_envs_per_env_runner,
        "num_learners": args.num_learners,
        "num_gpus_per_learner": args.num_gpus_per_learner,
        "evaluation": evaluation,
    }
    if not has_own_settings(args.env):
        return settings
    own = _own_settings(args)
    settings["hyperparameters"] = own["hyperparameters"]
    if args.max_seq_len is None:
        settings |= {"max_seq_len": own["max_seq_len"], "fragment": own["fragment"]}
    return settings


def model_settings(args: argparse.Namespace) -> dict:
    """Settings of the agent's module."""
    model = dict(_own_settings(args)["model"]) if has_own_settings(args.env) else {}
    if args.memory in OURS:
        model["compile"] = {"on": True, "off": False}.get(args.compile, args.compile)
    return model


def settings_text(args: argparse.Namespace) -> str:
    """What the table says of an environment, and which memory it recommends."""
    family, training = popgym_tasks.family_of(args.env), _own_settings(args)["hyperparameters"]
    return (
        f"Settings of {args.env}: gamma {family.gamma:g}, lambda {family.lambda_:g}, entropy "
        f"{family.entropy_coeff:g}, rows of {common_settings(args)['max_seq_len']} steps, "
        f"minibatches of {training['minibatch_size']}, lr {training['lr'][0][1]:g}. {family.why}\n"
        f"Recommended memory: {family.memory}; this run has {args.memory}."
    )


def _own_settings(args: argparse.Namespace) -> dict:
    num_envs = max(1, args.num_env_runners) * args.num_envs_per_env_runner
    return popgym_tasks.settings(args.env, args.memory, num_envs=num_envs)
