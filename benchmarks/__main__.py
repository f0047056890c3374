"""`python -m benchmarks <name>`: runs one benchmark, prints its table, writes its records."""

import argparse
import importlib
import sys
from collections.abc import Sequence

import torch

from benchmarks.harness import CorrectnessError
from benchmarks.report import print_records, write_records

# Imported only when asked for: each needs packages that the others do without.
BENCHMARKS = {
    "kernels": ("benchmarks.kernels", "linear attention against popgym, LSTM, SDPA and a matmul"),
    "memories": ("benchmarks.memories", "every memory against the old GTrXL and an LSTM"),
    "connectors": ("benchmarks.connectors", "our connectors against RLlib's own, and its LSTM"),
    "iteration": ("benchmarks.iteration", "an iteration of PPO against RLlib's MLP and LSTM"),
    "footprint": ("benchmarks.footprint", "memory of an update, over the length of rows"),
    "compile": ("benchmarks.compilation", "what torch.compile costs, and when it pays"),
    "learning": ("benchmarks.learning", "steps and seconds to a return, against RLlib's LSTM"),
    "scaling": ("benchmarks.scaling", "EnvRunners and Learners in processes of their own"),
    "popgym": ("benchmarks.popgym", "what each memory learns on all of POPGym's tasks"),
    "wrong_settings": ("benchmarks.wrong_settings", "curves with one setting that is wrong"),
    "ceilings": ("benchmarks.ceilings", "the most that can be earned where chances are known"),
    "study": ("benchmarks.study", "what each memory learns to hold, in supervised probes"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line.

    Args:
        argv: Arguments; None for those of the process.

    Returns:
        The exit status: 0, 1 if the correctness check failed, 2 on wrong usage.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] not in BENCHMARKS:
        parser = _overview()
        parser.parse_args(argv[:1] if argv and argv[0] not in ("-h", "--help") else [])
        parser.print_help()
        return 0
    module = importlib.import_module(BENCHMARKS[argv[0]][0])
    parser = _parser(argv[0])
    if hasattr(module, "add_arguments"):
        module.add_arguments(parser)
    args = parser.parse_args(argv[1:])
    if args.device == "cuda" and not torch.cuda.is_available():
        parser.error("`--device cuda`, but torch finds no CUDA device. Use `--device cpu`.")
    torch.set_num_threads(args.threads)
    try:
        records = module.run(args)
    except CorrectnessError as error:
        print(f"Not measured, the results are wrong: {error}", file=sys.stderr)
        return 1
    if records:
        getattr(module, "print_table", print_records)(records)
    if args.json:
        write_records(records, args.json)
    return 0


def _overview() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description="Measurements against peers. `python -m benchmarks NAME --help` has options.",
    )
    names = parser.add_subparsers(title="benchmarks", metavar="NAME", dest="name")
    for name, (_, summary) in BENCHMARKS.items():
        names.add_parser(name, help=summary)
    return parser


def _parser(name: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m benchmarks {name}", description=BENCHMARKS[name][1]
    )
    parser.add_argument("--json", metavar="FILE", help="write the records to this file")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--threads", type=int, default=2, help="CPU threads of torch (default: %(default)s)"
    )
    parser.add_argument("--runs", type=int, help="rounds at least (default: set by the benchmark)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
