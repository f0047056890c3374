"""An iteration of PPO with memory, against RLlib's MLP and LSTM: what memory costs.

    python -m benchmarks iteration [--json FILE] [--only cards-16-gru ...] [--profile]
    python -m benchmarks iteration --device cuda [--bf16]

Every memory of the package at its default size, on our connectors, in every case; the default one
compiled, too. Cases are named after task and memory: `cards-16` and `cards-64`, RepeatPreviousEasy
in so many environments; `short-episodes`, ten steps on average in rows of 64; `images` of 84x84x4;
`long-rows`, rows of 1,024 steps. Peers, on RLlib's connectors: `rllib-mlp` and `rllib-lstm` with as
many parameters, `rllib-lstm-256` with RLlib's default layers. `short-episodes-default-packed` is
the default memory against itself, `padded`: what several episodes a row save.

Metrics: `sampling`, one `EnvRunner.sample()`; `learner_connector`, the learner connector pipeline,
value pass and advantages included; `update`, the Learner's part of an iteration, that pipeline
included; `iteration`, one `Algorithm.train()`. One thread, if not told otherwise. All of it takes
hours, one case minutes. `--profile` shows where our time goes and measures nothing. On a GPU, where
the Learners run then, names end in `-bf16` if what runs there does so under autocast.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.harness import (
    Record,
    add_seconds,
    alternate,
    check,
    machine_info,
    record,
    timed,
)
from benchmarks.iteration_cases import (
    CASES,
    DEFAULT,
    LSTM,
    LSTM_256,
    MEMORIES,
    MLP,
    PADDED,
    memory_config,
    peer_configs,
)
from benchmarks.profiles import print_profile
from benchmarks.rigs import Recorded, Rig

PACKED = "short-episodes-default-packed"
NAMES = {f"{case}-{memory}": (case, memory) for case in CASES for memory in MEMORIES}
NAMES[PACKED] = ("short-episodes", DEFAULT)
# Method of `Rig`, and whether it takes recorded episodes.
METRICS = {
    "sampling": ("sample", False),
    "learner_connector": ("train_batch", True),
    "update": ("update", True),
    "iteration": ("iterate", False),
}
TARGETS = {
    ("cards-16-default", MLP, "sampling"): 1 / 1.25,
    ("cards-16-default", MLP, "iteration"): 1 / 1.7,
    ("cards-16-default-compiled", MLP, "update"): 1 / 1.8,
    ("cards-16-default-compiled", MLP, "iteration"): 1 / 1.4,
    ("cards-16-gru", LSTM, "iteration"): 2.0,
    ("images-default", MLP, "iteration"): 1 / 1.2,
    ("long-rows-default", LSTM, "update"): 2.0,
    (PACKED, PADDED, "update"): 1 / 0.45,
}
ALLOWED_DIFFERENCE = 0.05
"""In the number of parameters."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--only",
        nargs="+",
        metavar="CASE",
        choices=[*CASES, *NAMES],
        help="single cases: a task with all memories, `cards-16`, or with one, `cards-16-gru`",
    )
    parser.add_argument(
        "--profile", action="store_true", help="print where our time goes, without measuring"
    )
    parser.add_argument(
        "--bf16", action="store_true", help="autocast what runs on the device; no targets"
    )
    add_seconds(parser, default=10.0)
    parser.set_defaults(threads=1)


def run(args: argparse.Namespace) -> list[Record]:
    """Checks each memory and its peers, then measures them.

    Raises:
        CorrectnessError: If a model does not reproduce its recorded log-probabilities, a sample is
            not the same task's, or a size is off.
    """
    records = []
    for name, (case, _) in NAMES.items():
        if args.only and not {case, name} & {*args.only}:
            continue
        if args.profile:
            print_profiles(name, device=args.device)
        else:
            records += compare(
                name,
                device=args.device,
                bf16=args.bf16,
                min_runs=args.runs or 5,
                seconds=args.seconds,
            )
    return records


def compare(
    name: str,
    *,
    device: str = "cpu",
    bf16: bool = False,
    min_runs: int = 5,
    seconds: float = 10.0,
) -> list[Record]:
    """Measures one memory in one case, in turns with its peers.

    Args:
        name: One of `NAMES`.
        device: Where the Learners run.
        bf16: Whether both sides run under autocast there.
        min_runs: Rounds at least.
        seconds: Time for the rounds beyond those, for each metric.

    Raises:
        CorrectnessError: If a model does not reproduce its recorded log-probabilities, a sample is
            not the same task's, or a size is off.
    """
    task, memory = NAMES[name]
    case = CASES[task]
    ours = Rig(memory_config(case, memory, device))
    metrics = dict(METRICS)
    if name == PACKED:
        # Rows are made behind the sampling.
        del metrics["sampling"]
        configs = {PADDED: memory_config(case, memory, device, pack_rows=False)}
    else:
        configs = peer_configs(case, ours.num_parameters, device)
    rigs = {name: ours} | {peer: Rig(config) for peer, config in configs.items()}
    check_sizes({side: rig.num_parameters for side, rig in rigs.items() if side != LSTM_256})
    recorded = record_and_check(rigs)
    autocast = torch.autocast(device, torch.bfloat16, enabled=bf16)
    aims = TARGETS if device == "cpu" and not bf16 else {}
    records = []
    for metric, (method, takes_episodes) in metrics.items():
        values = alternate(
            {
                side: _timed(
                    autocast(getattr(rig, method)),
                    recorded[side] if takes_episodes else None,
                    device,
                )
                for side, rig in rigs.items()
            },
            min_runs=min_runs,
            seconds=seconds,
        )
        records += [
            record(
                benchmark="iteration",
                case=name + ("-bf16" if bf16 else ""),
                peer=peer,
                metric=metric,
                ours=values[name],
                theirs=values[peer],
                unit="s",
                target=aims.get((name, peer, metric)),
                machine=machine_info(device),
                num_envs=case.num_envs,
                fragment=case.fragment,
                max_seq_len=case.max_seq_len,
                num_epochs=case.num_epochs,
                minibatch_size=case.minibatch_size,
                parameters={"ours": ours.num_parameters, "theirs": rigs[peer].num_parameters},
            )
            for peer in configs
        ]
    for rig in rigs.values():
        rig.stop()
    return records


def check_sizes(sizes: dict[str, int]) -> None:
    """Compares numbers of parameters with the first one.

    Raises:
        CorrectnessError: If one differs by more than 5 %.
    """
    ours = next(iter(sizes.values()))
    for side, size in sizes.items():
        difference = abs(size / ours - 1)
        check(
            difference <= ALLOWED_DIFFERENCE, f"{side} has {size:,} parameters instead of {ours:,}"
        )


def record_and_check(rigs: dict[str, Rig]) -> dict[str, Recorded]:
    """Samples with each rig, and compares the Learner's log-probabilities with those recorded.

    Returns:
        The episodes of each rig.

    Raises:
        CorrectnessError: If they differ, or episodes are cut elsewhere than the first rig's.
    """
    recorded = {side: rig.record_sample() for side, rig in rigs.items()}
    lengths = {side: list(map(len, episodes.episodes())) for side, episodes in recorded.items()}
    expected = next(iter(lengths.values()))
    for side, rig in rigs.items():
        check(lengths[side] == expected, f"{side} sampled other pieces of episodes")
        rig.check_log_probs(rig.train_batch(recorded[side].episodes()))
    return recorded


def print_profiles(name: str, *, device: str = "cpu") -> None:
    """Prints where the time of one memory in one case goes, metric by metric.

    Raises:
        CorrectnessError: If the model does not reproduce its recorded log-probabilities.
    """
    task, memory = NAMES[name]
    rig = Rig(memory_config(CASES[task], memory, device))
    recorded = record_and_check({name: rig})[name]
    for metric, (method, takes_episodes) in METRICS.items():
        function = getattr(rig, method)
        arguments = (lambda: (recorded.episodes(),)) if takes_episodes else tuple
        function(*arguments())  # what only the first call does
        print_profile(f"{name}, {metric}", function, arguments, device)
    rig.stop()


def _timed(
    function: Callable[..., Any], recorded: Recorded | None, device: str
) -> Callable[[], float]:
    return timed(function, device) if recorded is None else recorded.timed(function, device)
