"""Several agents against a single one, on our connectors and with as many steps of agents.

Part of `python -m benchmarks connectors`. Four agents share a module in 4 environments; the peer
has 16 environments of one agent. Both take the same number of agents' steps, so times compare.
"""

from benchmarks.harness import Record, alternate, machine_info, record, timed
from benchmarks.rigs import MAX_SEQ_LEN, NUM_ENVS, POPGYM, Rig, memory_config
from rlmodules import MemoryRLModule

CASE = "4-agents"
NUM_AGENTS = 4
# At most 1.3 times as long an agent's step.
TARGETS = {"sampling": 0.77, "learner_connector": 0.77}


def compare(
    *, device: str = "cpu", fragment: int = 256, min_runs: int = 7, seconds: float = 10.0
) -> list[Record]:
    """Measures sampling and the learner connectors.

    Raises:
        CorrectnessError: If a side does not reproduce its recorded log-probabilities.
    """
    rigs = {
        side: Rig(
            memory_config(
                MemoryRLModule,
                POPGYM,
                connected=True,
                fragment=fragment,
                device=device,
                num_agents=num_agents,
            )
        )
        for side, num_agents in (("ours", NUM_AGENTS), ("theirs", 1))
    }
    rigs["ours"].copy_weights(rigs["theirs"])
    recorded = {side: rig.record_sample() for side, rig in rigs.items()}
    for side, rig in rigs.items():
        rig.check_log_probs(rig.train_batch(recorded[side].episodes()))
    runs = {
        "sampling": {side: timed(rig.sample, device) for side, rig in rigs.items()},
        "learner_connector": {
            side: recorded[side].timed(rig.train_batch, device) for side, rig in rigs.items()
        },
    }
    records = []
    for metric, contestants in runs.items():
        values = alternate(contestants, min_runs=min_runs, seconds=seconds)
        records.append(
            record(
                benchmark="connectors",
                case=CASE,
                peer="single-agent",
                metric=metric,
                ours=values["ours"],
                theirs=values["theirs"],
                unit="s",
                target=TARGETS[metric],
                machine=machine_info(device),
                num_envs=NUM_ENVS // NUM_AGENTS,
                num_agents=NUM_AGENTS,
                fragment=fragment,
                max_seq_len=MAX_SEQ_LEN,
            )
        )
    for rig in rigs.values():
        rig.stop()
    return records
