"""A long run stays as large as it was: nothing holds on to episodes, states or graphs."""

import gc
import resource
from pathlib import Path

import pytest
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect
from rlmodules import DeepLinearAttentionConfig, MemoryRLModule
from tests.envs import RandomObservations

ITERATIONS = 300
WARM_UP = 100
# Of an iteration. RLlib grows by some 20 kB by itself, with its MLP too. States and batch of an
# iteration take half a megabyte: a tenth of them that stays shows.
ALLOWED = 50_000


STATM = Path("/proc/self/statm")


def resident_bytes():
    return int(STATM.read_text().split()[1]) * resource.getpagesize()


@pytest.mark.ray
@pytest.mark.slow
@pytest.mark.skipif(not STATM.exists(), reason="Linux tells a process its size in /proc")
@pytest.mark.usefixtures("_ray_session")
def test_process_does_not_grow_over_300_iterations():
    config = (
        PPOConfig()
        .environment(RandomObservations)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=16, rollout_fragment_length=16)
        .training(train_batch_size_per_learner=256, minibatch_size=128, num_epochs=1)
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=MemoryRLModule,
                model_config=DeepLinearAttentionConfig(max_seq_len=8, compile=False),
            )
        )
        .debugging(log_sys_usage=False)
    )
    algo = connect(config).build_algo()
    sizes = []
    for iteration in range(ITERATIONS + 1):
        algo.train()
        if iteration in (WARM_UP, ITERATIONS):
            gc.collect()
            sizes.append(resident_bytes())
    algo.stop()
    growth = (sizes[1] - sizes[0]) / (ITERATIONS - WARM_UP)
    assert growth < ALLOWED, f"{growth:,.0f} bytes an iteration"
