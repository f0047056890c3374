"""Our connectors against RLlib's default ones, with the same module and the same environments.

    python -m benchmarks connectors [--json FILE] [--only state-240]

PPO on POPGym's RepeatPreviousEasy, 16 environments in one process, compilation off. Metrics:
`sampling`, one `EnvRunner.sample()`; `learner_connector`, the learner connector pipeline, value
pass and advantages included; `iteration`, one `Algorithm.train()`; `bytes`, the pickled episodes
of a sample. A second part compares with RLlib's own LSTM, see `benchmarks.rllib_lstm`, a third
several agents with a single one, see `benchmarks.several_agents`.
"""

import argparse
from collections.abc import Callable

import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.evaluation.postprocessing import Postprocessing

from benchmarks import rllib_lstm, several_agents
from benchmarks.harness import (
    Record,
    alternate,
    check,
    check_close,
    machine_info,
    record,
    timed,
)
from benchmarks.rigs import MAX_SEQ_LEN, NUM_ENVS, POPGYM, Recorded, Rig, memory_config
from rlmodules import LinearAttentionConfig, MemoryConfig, MemoryRLModule

CASES: dict[str, MemoryConfig] = {
    "state-4x64x64": LinearAttentionConfig(
        max_seq_len=MAX_SEQ_LEN, num_heads=4, head_dim=64, short_conv_size=0, compile=False
    ),
    "state-240": POPGYM,
}
TARGETS = {
    ("state-4x64x64", "sampling"): 1.7,
    ("state-4x64x64", "learner_connector"): 3.5,
    ("state-4x64x64", "iteration"): 1.5,
    ("state-4x64x64", "bytes"): 50.0,
    ("state-240", "sampling"): 1.25,
    ("state-240", "learner_connector"): 1.8,
    ("state-240", "iteration"): 1.2,
    ("state-240", "bytes"): 3.0,
}
# One pass over the data shows the connectors. The second entry is what training uses.
ITERATION_EPOCHS = {"": 1, "-8-epochs": 8}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--only", metavar="CASE", help="a single case; `lstm-256` and `4-agents`, too"
    )
    parser.add_argument(
        "--fragment", type=int, default=256, help="steps an environment and sample (default: 256)"
    )


def run(args: argparse.Namespace) -> list[Record]:
    """Checks that both paths give the same batch, then measures them.

    Raises:
        CorrectnessError: If they do not.
    """
    options = {"device": args.device, "fragment": args.fragment, "min_runs": args.runs or 7}
    records = []
    for case in CASES:
        if args.only in (None, case):
            records += compare(case, **options)
    if args.only in (None, rllib_lstm.CASE):
        records += rllib_lstm.compare(**options)
    if args.only in (None, several_agents.CASE):
        records += several_agents.compare(**options)
    return records


def compare(
    case: str,
    *,
    device: str = "cpu",
    fragment: int = 256,
    min_runs: int = 7,
    seconds: float = 10.0,
) -> list[Record]:
    """Measures one case.

    Raises:
        CorrectnessError: If the two paths differ.
    """
    rigs = {
        side: Rig(
            memory_config(
                MemoryRLModule,
                CASES[case],
                connected=side == "ours",
                fragment=fragment,
                device=device,
            )
        )
        for side in ("ours", "theirs")
    }
    recorded = check_same(rigs)
    facts = {
        "benchmark": "connectors",
        "peer": "rllib",
        "machine": machine_info(device),
        "num_envs": NUM_ENVS,
        "fragment": fragment,
        "max_seq_len": MAX_SEQ_LEN,
    }

    def measure(metric: str, run: Callable[[str], Callable[[], float]], suffix: str = "") -> Record:
        values = alternate({side: run(side) for side in rigs}, min_runs=min_runs, seconds=seconds)
        return record(
            case=case + suffix,
            metric=metric,
            ours=values["ours"],
            theirs=values["theirs"],
            unit="s",
            target=None if suffix else TARGETS[case, metric],
            num_epochs=rigs["ours"].algo.config.num_epochs if metric == "iteration" else None,
            **facts,
        )

    records = [
        measure("sampling", lambda side: timed(rigs[side].sample, device)),
        measure(
            "learner_connector",
            lambda side: recorded[side].timed(rigs[side].train_batch, device),
        ),
    ]
    for suffix, num_epochs in ITERATION_EPOCHS.items():
        for rig in rigs.values():
            rig.set_epochs(num_epochs)
        records.append(measure("iteration", lambda side: timed(rigs[side].iterate, device), suffix))
    records.append(
        record(
            case=case,
            metric="bytes",
            ours=[recorded["ours"].num_bytes],
            theirs=[recorded["theirs"].num_bytes],
            unit="bytes",
            target=TARGETS[case, "bytes"],
            **facts,
        )
    )
    for rig in rigs.values():
        rig.stop()
    return records


def check_same(rigs: dict[str, Rig]) -> dict[str, Recorded]:
    """Samples the same episodes on both sides and compares what the Learners get.

    Returns:
        The episodes of each side.

    Raises:
        CorrectnessError: If a column differs, or log-probabilities are not those recorded.
    """
    rigs["ours"].copy_weights(rigs["theirs"])
    recorded = {side: rig.record_sample() for side, rig in rigs.items()}
    batches = {side: rigs[side].train_batch(recorded[side].episodes()) for side in rigs}
    ours, theirs = batches["ours"], batches["theirs"]
    # Ours keeps the values for the Learner's metrics.
    columns = ours.keys() - {Columns.VF_PREDS}
    check(columns == theirs.keys(), f"columns {sorted(columns)} instead of {sorted(theirs)}")
    valid = ours[Columns.LOSS_MASK]
    for column in columns:
        if column == Postprocessing.ADVANTAGES:
            # Differ on purpose: RLlib's standardisation includes its appended steps.
            continue
        leaves = zip(tree.flatten(ours[column]), tree.flatten(theirs[column]), strict=True)
        for our_leaf, their_leaf in leaves:
            if column == Postprocessing.VALUE_TARGETS:
                check_close(our_leaf[valid], their_leaf[valid], 1e-5, column)
            else:
                same = torch.equal(our_leaf, their_leaf)
                check(same, f"column `{column}` is not RLlib's")
    for side, rig in rigs.items():
        rig.check_log_probs(batches[side])
    return recorded
