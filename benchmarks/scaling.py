"""PPO with EnvRunners and Learners in processes of their own, against all in one process.

    python -m benchmarks scaling [--json FILE] [--only 2x1]

Cases are named `RxL`: R EnvRunners, L Learners; the peer `0x0` is one process. POPGym's
RepeatPreviousEasy, 16 environments an EnvRunner, 2,048 steps an iteration in four epochs whatever
the case, our default memory, compilation off. Metrics, in steps a second: `sampling` (cases
`Rx0`), `update` (cases `0xL`, learner connectors, value pass and the way to the Learners included),
`iteration`. Two more count bytes a step: `to_driver`, the pickled episodes of a sample, against the
arrays in them; `to_learners`, the same episodes, cut for two Learners. APPO and IMPALA beside PPO:
`benchmarks.asynchronous`.
"""

import argparse
from collections.abc import Callable
from typing import Any

import tree
from ray.rllib.core.columns import Columns
from ray.rllib.execution.rollout_ops import synchronous_parallel_sample
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.rllib.utils.minibatch_utils import ShardEpisodesIterator

from benchmarks import asynchronous
from benchmarks.harness import Record, alternate, check, machine_info, record, timed
from benchmarks.rigs import MAX_SEQ_LEN, NUM_ENVS, Recorded, memory_config, start_ray
from connectors import connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule

ALONE = "0x0"
CASES = {f"{r}x{n}": (r, n) for r in range(3) for n in range(3)}
STEPS = 2048
NUM_EPOCHS = 4
MINIBATCH_SIZE = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds this benchmark's options."""
    parser.add_argument("--only", metavar="CASE", help="a single case: `2x1`, `appo-2x1`, `bytes`")
    parser.add_argument(
        "--steps",
        type=int,
        default=STEPS,
        help=f"environment steps an iteration (default: {STEPS})",
    )


def run(args: argparse.Namespace) -> list[Record]:
    """Measures the cases, each in turns with a single process.

    Raises:
        CorrectnessError: If Learners have come apart, or steps are missing.
    """
    alone = Trainer(ALONE, args.steps)
    records = []
    try:
        for case in CASES:
            if args.only in (None, case):
                records += compare(case, alone, min_runs=args.runs or 3)
        if args.only in (None, "bytes"):
            records += bytes_a_step(alone)
    finally:
        alone.stop()
    records += [
        asynchronous.compare(case, steps=args.steps, min_runs=args.runs or 3)
        for case in asynchronous.CASES
        if args.only in (None, case)
    ]
    return records


class Trainer:
    """An algorithm whose sampling, updates and iterations can be run one by one."""

    def __init__(self, case: str, steps: int):
        # As many CPUs as it takes: Ray shares them out by name only.
        start_ray(num_cpus=8)
        self.num_env_runners, self.num_learners = CASES[case]
        share = max(1, self.num_learners)
        config = memory_config(
            DeepLinearAttentionRLModule,
            DeepLinearAttentionConfig(max_seq_len=MAX_SEQ_LEN, compile=False),
            connected=False,
            fragment=steps // NUM_ENVS // max(1, self.num_env_runners),
            num_epochs=NUM_EPOCHS,
            minibatch_size=min(MINIBATCH_SIZE, steps) // share,
        )
        config.env_runners(num_env_runners=self.num_env_runners)
        config.learners(num_learners=self.num_learners)
        config.training(train_batch_size_per_learner=steps // share)
        self.algo: Any = connect(config).build_algo()
        self.config = self.algo.config
        self.steps = steps

    def sample(self) -> list[Any]:
        """An iteration's episodes."""
        result: Any = synchronous_parallel_sample(
            worker_set=self.algo.env_runner_group,
            max_env_steps=self.steps,
            _uses_new_env_runners=True,
            _return_metrics=True,
        )
        return result[0]

    def update(self, episodes: list[Any]) -> None:
        """The Learners' part of an iteration."""
        self.algo.learner_group.update(
            episodes=episodes,
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: 0},
            num_epochs=self.config.num_epochs,
            minibatch_size=self.config.minibatch_size,
            shuffle_batch_per_epoch=self.config.shuffle_batch_per_epoch,
        )

    def iterate(self) -> None:
        """A whole iteration."""
        self.algo.train()

    def check_learners(self) -> None:
        """Raises a CorrectnessError if the Learners' weights differ."""
        sums = [result.get() for result in self.algo.learner_group.foreach_learner(_sum_of_weights)]
        check(len(set(sums)) == 1, f"the Learners' weights differ: {sums}")

    def stop(self) -> None:
        """Frees the algorithm."""
        self.algo.stop()


def compare(case: str, alone: Trainer, *, min_runs: int = 3, seconds: float = 5.0) -> list[Record]:
    """Measures one case, in turns with a single process.

    Raises:
        CorrectnessError: If the Learners' weights differ, or a sample lacks steps.
    """
    trainers = {"ours": alone if case == ALONE else Trainer(case, alone.steps), "theirs": alone}
    if case == ALONE:
        del trainers["theirs"]
    ours = trainers["ours"]
    recorded = {side: Recorded(trainer.sample()) for side, trainer in trainers.items()}
    num_steps = sum(map(len, recorded["ours"].episodes()))
    check(num_steps == ours.steps, f"{num_steps} steps in place of {ours.steps}")

    runs: dict[str, Callable[[str], Callable[[], float]]] = {
        "iteration": lambda side: timed(trainers[side].iterate)
    }
    if ours.num_learners == 0:
        runs["sampling"] = lambda side: timed(trainers[side].sample)
    if ours.num_env_runners == 0:
        runs["update"] = lambda side: recorded[side].timed(trainers[side].update)
    records = []
    for metric, make in runs.items():
        values = alternate(
            {side: make(side) for side in trainers},
            min_runs=min_runs,
            max_runs=max(min_runs, 7),
            seconds=seconds,
        )
        rates = {side: [ours.steps / taken for taken in values[side]] for side in values}
        records.append(_record(case, metric, rates, unit="steps/s", steps=ours.steps))
    ours.check_learners()
    if ours is not alone:
        ours.stop()
    return records


def bytes_a_step(alone: Trainer) -> list[Record]:
    """Bytes of an iteration's episodes on both of their ways."""
    alone.sample()  # the first episodes begin together, at a row's start
    recorded = Recorded(alone.sample())
    # What `connect` sets for several Learners.
    shards: Any = ShardEpisodesIterator(
        recorded.episodes(), num_shards=2, len_lookback_buffer=MAX_SEQ_LEN
    )
    episodes = recorded.episodes()
    num_bytes = {
        "to_driver": {"ours": recorded.num_bytes, "theirs": bytes_of_arrays(episodes)},
        "to_learners": {"ours": sum(Recorded(shard).num_bytes for shard in shards)},
    }
    return [
        _record(
            "bytes",
            metric,
            {side: [value / alone.steps] for side, value in values.items()},
            unit="bytes",
            peer="arrays",
            steps=alone.steps,
        )
        for metric, values in num_bytes.items()
    ]


def bytes_of_arrays(episodes: list[Any]) -> int:
    """Bytes of what the episodes hold, each snapshot's arrays once."""
    arrays = {}
    for episode in episodes:
        outputs = dict(episode.extra_model_outputs)
        snapshots = outputs.pop(Columns.STATE_OUT).data
        data = [episode.observations.data, episode.actions.data, episode.rewards.data]
        data += [buffer.data for buffer in outputs.values()]
        data += [s.state for s in snapshots] + [s.end_state for s in snapshots]
        arrays |= {id(leaf): leaf.nbytes for leaf in tree.flatten(data) if leaf is not None}
    return sum(arrays.values())


def _record(
    case: str,
    metric: str,
    values: dict[str, list[float]],
    *,
    unit: str,
    steps: int,
    peer: str = ALONE,
) -> Record:
    return record(
        benchmark="scaling",
        case=case,
        peer=peer,
        metric=metric,
        ours=values["ours"],
        theirs=values.get("theirs"),
        unit=unit,
        machine=machine_info(),
        higher_is_better=unit == "steps/s",
        steps=steps,
        num_envs=NUM_ENVS,
        max_seq_len=MAX_SEQ_LEN,
        num_epochs=NUM_EPOCHS,
    )


def _sum_of_weights(learner: Any) -> float:
    parameters = (p for module in learner.module.values() for p in module.parameters())
    return sum(float(p.detach().double().sum()) for p in parameters)
