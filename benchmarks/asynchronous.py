"""APPO and IMPALA with EnvRunners in processes of their own, beside PPO: steps a second.

Both sample and learn at once, and pass over each step a single time; so does the PPO that they are
held against here. Cases are named `appo-RxL`. A measurement counts the steps that were trained
while `Algorithm.train()` ran, as the Learners report them.
"""

import time
from typing import Any

from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.core import ALL_MODULES
from ray.rllib.utils.metrics import LEARNER_RESULTS, NUM_ENV_STEPS_TRAINED_LIFETIME

from benchmarks.harness import Record, alternate, check, machine_info, record
from benchmarks.rigs import (
    HYPERPARAMETERS,
    MAX_SEQ_LEN,
    NUM_ENVS,
    ppo_config,
    start_ray,
    use_memory,
)
from connectors import connect
from rlmodules import DeepLinearAttentionConfig, MemoryRLModule

ALGORITHMS = {"appo": APPOConfig, "impala": IMPALAConfig}
SIZES = {"1x1": (1, 1), "2x1": (2, 1)}
CASES = {f"{name}-{size}": (name, size) for name in ALGORITHMS for size in SIZES}
SECONDS = 5.0
"""Of one call of `Algorithm.train()`, APPO's and IMPALA's."""
MAX_CALLS = 10


def compare(case: str, *, steps: int, min_runs: int = 3, seconds: float = SECONDS) -> Record:
    """Measures one algorithm in turns with PPO of one epoch, on as many processes.

    Args:
        case: One of `CASES`.
        steps: Of a train batch.
        min_runs: Rounds.
        seconds: Of an iteration of `case`.

    Raises:
        CorrectnessError: If an iteration trains nothing.
    """
    name, size = CASES[case]
    start_ray(num_cpus=8)
    peer = f"ppo-{size}"
    algorithms = {
        case: _asynchronous(name, size, steps, seconds),
        peer: _synchronous(size, steps),
    }
    values = alternate(
        {side: lambda algo=algo: trained_a_second(algo) for side, algo in algorithms.items()},
        min_runs=min_runs,
        max_runs=min_runs,
    )
    for algo in algorithms.values():
        algo.stop()
    return record(
        benchmark="scaling",
        case=case,
        peer=peer,
        metric="iteration",
        ours=values[case],
        theirs=values[peer],
        unit="steps/s",
        machine=machine_info(),
        higher_is_better=True,
        steps=steps,
        num_envs=NUM_ENVS,
        max_seq_len=MAX_SEQ_LEN,
        num_epochs=1,
    )


def trained_a_second(algo: Any) -> float:
    """Environment steps trained in a `train()`, by its seconds; in several until there are some.

    Raises:
        CorrectnessError: If there are none in `MAX_CALLS` of them.
    """
    key = (LEARNER_RESULTS, ALL_MODULES, NUM_ENV_STEPS_TRAINED_LIFETIME)
    before, start = algo.metrics.peek(key, default=0), time.perf_counter()
    steps = 0
    for _ in range(MAX_CALLS):
        algo.train()
        steps = algo.metrics.peek(key, default=0) - before
        if steps > 0:
            break
    check(steps > 0, f"{algo.config.algo_class.__name__} trained no step")
    return steps / (time.perf_counter() - start)


def _synchronous(size: str, steps: int) -> Any:
    num_env_runners, num_learners = SIZES[size]
    config = ppo_config(
        fragment=steps // NUM_ENVS // num_env_runners, num_epochs=1, minibatch_size=steps
    )
    config.training(train_batch_size_per_learner=steps // num_learners)
    return _build(config, size)


def _asynchronous(name: str, size: str, steps: int, seconds: float) -> Any:
    config = ALGORITHMS[name]()
    config.environment("RepeatPreviousEasy")
    config.env_runners(num_envs_per_env_runner=NUM_ENVS, rollout_fragment_length=MAX_SEQ_LEN)
    config.training(
        train_batch_size_per_learner=steps,
        lr=HYPERPARAMETERS["lr"],
        grad_clip=HYPERPARAMETERS["grad_clip"],
    )
    config.reporting(min_time_s_per_iteration=seconds)
    config.debugging(seed=0, log_level="ERROR")
    return _build(config, size)


def _build(config: Any, size: str) -> Any:
    num_env_runners, num_learners = SIZES[size]
    config.env_runners(num_env_runners=num_env_runners)
    config.learners(num_learners=num_learners)
    model = DeepLinearAttentionConfig(max_seq_len=MAX_SEQ_LEN, compile=False)
    return connect(use_memory(config, MemoryRLModule, model)).build_algo()
