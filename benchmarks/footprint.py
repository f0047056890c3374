"""Memory that an update of PPO takes at its peak, over the length of rows.

    python -m benchmarks footprint [--json FILE] [--only gtrxl gru]

Every memory of the package at its default size, 4,096 steps of episodes that never end in a single
minibatch, in rows of T. Cases are named `TxMEMORY`. Peers: `rllib-lstm`, RLlib's LSTM with as many
parameters on its own connectors; `64-rows`, ourselves in rows of 64, which says how memory grows
with a row's length at equal steps. Counted is what torch allocates, not numpy.
"""

import argparse

from benchmarks.harness import Record, machine_info, record
from benchmarks.iteration_cases import (
    COMPILED,
    LSTM,
    MEMORIES,
    Case,
    Stream,
    memory_config,
    peer_configs,
)
from benchmarks.memory import peak_memory
from benchmarks.rigs import Recorded, Rig

NUM_STEPS = 4096
LENGTHS = (64, 1024, 4096)
SHORT = "64-rows"
# At equal steps, rows of any length may take half as much again as rows of 64.
GROWTH = 1 / 1.5
NAMES = [name for name in MEMORIES if not name.endswith(COMPILED)]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument(
        "--only", metavar="MEMORY", nargs="+", choices=NAMES, default=NAMES, help="some memories"
    )


def run(args: argparse.Namespace) -> list[Record]:
    """Measures the memories, each in turns with an LSTM of its size."""
    return [r for name in args.only for r in measure(name, LENGTHS, NUM_STEPS)]


def measure(memory: str, lengths: tuple[int, ...], num_steps: int) -> list[Record]:
    """Measures one memory in rows of several lengths.

    Args:
        memory: One of `NAMES`.
        lengths: Lengths of rows. The first one is what the others are held against.
        num_steps: Steps of the update, a multiple of each length.
    """
    records = []
    shortest = 0
    for T in lengths:
        case = Case(
            num_envs=num_steps // T,
            fragment=T - 1,
            max_seq_len=T,
            minibatch_size=None,
            num_epochs=1,
            env=Stream,
        )
        ours, parameters = _update_memory(Rig(memory_config(case, memory)))
        theirs, their_parameters = _update_memory(Rig(peer_configs(case, parameters)[LSTM]))
        shortest = shortest or ours
        peers = {LSTM: theirs} | ({SHORT: shortest} if lengths[0] < T else {})
        records += [
            record(
                benchmark="footprint",
                case=f"{T}x{memory}",
                peer=peer,
                metric="update_memory",
                ours=[ours],
                theirs=[value],
                unit="bytes",
                target=GROWTH if peer == SHORT else None,
                machine=machine_info(),
                steps=num_steps,
                parameters={
                    "ours": parameters,
                    "theirs": parameters if peer == SHORT else their_parameters,
                },
            )
            for peer, value in peers.items()
        ]
    return records


def _update_memory(rig: Rig) -> tuple[int, int]:
    """Peak of an update in bytes, the first one's lasting allocations aside; parameters."""
    recorded = Recorded(rig.sample())
    rig.update(recorded.episodes())  # the optimizer's moments come into being
    episodes = recorded.episodes()
    peak = peak_memory(lambda: rig.update(episodes))
    rig.stop()
    return peak, rig.num_parameters
