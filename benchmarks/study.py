"""Which variant of linear attention is the default: an ablation of its parts.

1. Recall: name the symbol seen `lag` steps ago, supervised, at three lags. Shows what a variant can
   learn from gradients alone, and how fast.
2. PPO on two POPGym tasks, for the most promising variants: what counts in the end.

`ours` is the default of `DeepLinearAttentionConfig`, each other variant a peer.
"""

import argparse
import multiprocessing
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.harness import Record, check, machine_info, record
from rlmodules import DeepLinearAttentionConfig

T = 64
NUM_SYMBOLS = 8
LAGS = (4, 16, 32)
ROWS = 32
UPDATES = (100, 200, 400)
RL_ENVS = ("RepeatPreviousEasy", "RepeatFirstEasy")
GOAL = 0.9

PLAIN = {"positions": "none", "short_conv_size": 0, "decay": False, "normalizer": "sum"}
CONV = {"short_conv_size": 4, "short_conv_activation": "silu"}
IDENTITY_CONV = {"short_conv_size": 4, "short_conv_activation": "linear"}
# Changes to `DeepLinearAttentionConfig`. Two blocks unless said.
VARIANTS: dict[str, dict[str, Any]] = {
    "plain, 1 block": {**PLAIN, "num_layers": 1},
    "plain": PLAIN,
    "sine": {**PLAIN, "positions": "sine"},
    "decay": {**PLAIN, "decay": True},
    "conv": {**PLAIN, **CONV},
    "decay, conv": {**PLAIN, **CONV, "decay": True},
    "decay, conv, sine": {**PLAIN, **CONV, "decay": True, "positions": "sine"},
    "decay, identity conv": {**PLAIN, **IDENTITY_CONV, "decay": True},
    "decay, identity conv, sine": {
        **PLAIN, **IDENTITY_CONV, "decay": True, "positions": "sine"
    },
    "decay, conv, rms": {**PLAIN, **CONV, "decay": True, "normalizer": "rms"},
    "decay, conv, rms, rotary": {
        **PLAIN, **CONV, "decay": True, "normalizer": "rms", "positions": "rotary"
    },
    "decay, identity conv, rms, rotary": {
        **PLAIN, **IDENTITY_CONV, "decay": True, "normalizer": "rms", "positions": "rotary"
    },
}  # fmt: skip
RL_VARIANTS = (
    "decay, conv",
    "decay, conv, sine",
    "decay, conv, rms",
    "decay, conv, rms, rotary",
    "decay, identity conv, sine",
    "decay, identity conv, rms, rotary",
)
RECURRENT = {"LSTM 128": nn.LSTM, "GRU 128": nn.GRU}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--part", choices=("recall", "rl", "both"), default="both")
    parser.add_argument("--seeds", type=int, default=2, help="seeds a variant (default: 2)")
    parser.add_argument("--max-steps", type=int, default=100_000, help="environment steps a run")
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, help="only these, in both parts")


def run(args: argparse.Namespace) -> list[Record]:
    """Runs both parts, `--threads` trainings at a time with one thread each.

    Args:
        args: The options.

    Returns:
        Records of every variant beside the default.
    """
    seeds = range(args.runs or args.seeds)
    default = default_variant()
    chosen = tuple(dict.fromkeys((default, *(args.variants or VARIANTS))))
    records: list[Record] = []
    machine = machine_info()
    if args.part in ("recall", "both"):
        names = chosen if args.variants else (*chosen, *RECURRENT)
        tasks = [(name, lag, seed) for lag in LAGS for name in names for seed in seeds]
        results = _run_all(recall_accuracies, tasks, args.threads)
        for lag in LAGS:
            for i, updates in enumerate(UPDATES):
                values = {name: [results[name, lag, seed][i] for seed in seeds] for name in names}
                metric = f"accuracy_after_{updates}"
                records += _records(values, default, f"recall-{lag}", metric, machine, True)
    if args.part in ("rl", "both"):
        names = tuple(dict.fromkeys((default, *(args.variants or RL_VARIANTS))))
        tasks = [
            (name, env, seed, args.max_steps) for env in RL_ENVS for name in names for seed in seeds
        ]
        results = _run_all(rl_result, tasks, args.threads)
        for env in RL_ENVS:
            runs = {
                name: [results[name, env, seed, args.max_steps] for seed in seeds] for name in names
            }
            for metric in ("steps_to_0.9", "final_return"):
                values = {name: [r[metric] for r in runs[name]] for name in names}
                higher = metric == "final_return"
                records += _records(values, default, env, metric, machine, higher)
    return records


def default_variant() -> str:
    """The variant that equals the config's default; it is added if there is none."""
    default = DeepLinearAttentionConfig(max_seq_len=T)
    for name, changes in VARIANTS.items():
        if asdict(DeepLinearAttentionConfig(max_seq_len=T, **changes)) == asdict(default):
            return name
    VARIANTS["default"] = {}
    return "default"


class Recurrent(nn.Module):
    """Torch's LSTM or GRU with the interface of a memory, as far as this study needs it."""

    output_dim = 128

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU]):
        super().__init__()
        self.rnn = kind(NUM_SYMBOLS, self.output_dim, batch_first=True)

    def initial_state(self) -> dict:
        """None is needed."""
        return {}

    def forward(self, x: Tensor, state: dict) -> tuple[Tensor, dict]:
        """Outputs `(B, T, 128)`."""
        return self.rnn(x)[0], state


def recall_accuracies(name: str, lag: int, seed: int) -> list[float]:
    """Trains a variant on recall.

    Args:
        name: The variant.
        lag: How many steps back the symbol is.
        seed: Seed of weights and data.

    Returns:
        Accuracy on fresh sequences after each number of updates in `UPDATES`.
    """
    torch.manual_seed(seed)
    if name in RECURRENT:
        memory: Any = Recurrent(RECURRENT[name])
    else:
        config = DeepLinearAttentionConfig(max_seq_len=T, **VARIANTS[name])
        memory = config.build_memory(NUM_SYMBOLS)
    readout = nn.Linear(memory.output_dim, NUM_SYMBOLS)
    optimizer = torch.optim.Adam([*memory.parameters(), *readout.parameters()], lr=1e-3)
    accuracies = []
    for update in range(1, max(UPDATES) + 1):
        logits, targets = _recall(memory, readout, lag, ROWS)
        optimizer.zero_grad()
        F.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        if update in UPDATES:
            with torch.no_grad():
                logits, targets = _recall(memory, readout, lag, 8 * ROWS)
            accuracies.append(round(float((logits.argmax(-1) == targets).float().mean()), 4))
    return accuracies


def _recall(memory: Any, readout: nn.Module, lag: int, rows: int) -> tuple[Tensor, Tensor]:
    """Logits and the symbols they should name, for the steps that have one."""
    symbols = torch.randint(NUM_SYMBOLS, (rows, T))
    state = {key: value.expand(rows, *value.shape) for key, value in memory.initial_state().items()}
    features, _ = memory(F.one_hot(symbols, NUM_SYMBOLS).float(), state)
    return readout(features[:, lag:]), symbols[:, :-lag]


def rl_result(name: str, env: str, seed: int, max_steps: int) -> dict[str, float]:
    """Trains a variant with PPO and the example's hyperparameters, always for all steps.

    Args:
        name: The variant.
        env: Name of a POPGym environment.
        seed: Seed of the run.
        max_steps: Environment steps.

    Returns:
        Steps to the goal (all steps if it was not reached) and the mean return of the last fifth.
    """
    # Ray's import takes seconds that the first part does not need.
    from benchmarks.curves import train_curve
    from examples.popgym_setup import build_config, start_ray

    start_ray(num_cpus=1)
    config = build_config(env, "deep", seed=seed, model={**VARIANTS[name], "compile": False})
    curve = train_curve(config, goal=GOAL, max_steps=max_steps, stop_at_goal=False)
    check(bool(curve.returns), "No episode ended")
    return {"steps_to_0.9": curve.cost()[0], "final_return": curve.final_return()}


def _run_all(function: Callable, tasks: Iterable[tuple], workers: int) -> dict[tuple, Any]:
    """Calls a function with each task, in processes of one thread."""
    context = multiprocessing.get_context("spawn")
    default_variant()
    with ProcessPoolExecutor(workers, mp_context=context, initializer=_init_worker) as pool:
        futures = {task: pool.submit(function, *task) for task in tasks}
        results = {}
        for task, future in futures.items():
            results[task] = future.result()
            print(*task[:3], results[task], sep=" | ", flush=True)
    return results


def _init_worker() -> None:
    torch.set_num_threads(1)
    default_variant()


def _records(
    values: dict[str, list[float]],
    default: str,
    case: str,
    metric: str,
    machine: dict[str, Any],
    higher_is_better: bool,
) -> list[Record]:
    records = [
        record(
            benchmark="study",
            case=case,
            peer=name,
            metric=metric,
            ours=values[default],
            theirs=peer_values,
            unit="steps" if metric.startswith("steps") else "",
            machine=machine,
            higher_is_better=higher_is_better,
            default=default,
            theirs_values=peer_values,
        )
        for name, peer_values in values.items()
    ]
    if metric == "final_return":
        # Returns may be negative: their ratio says nothing.
        for entry in records:
            entry["ratio"] = None
    return records
