"""The config that `docs/how-to/inspecting.md` describes, and what the command prints about it."""

import os
import subprocess
import sys

from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule

config = (
    PPOConfig()
    .environment("popgym:popgym-RepeatPreviousEasy-v0")
    .env_runners(num_env_runners=2, num_envs_per_env_runner=8, rollout_fragment_length=255)
    .training(train_batch_size_per_learner=4080, minibatch_size=1024, num_epochs=8)
    .rl_module(
        rl_module_spec=RLModuleSpec(
            module_class=DeepLinearAttentionRLModule,
            model_config=DeepLinearAttentionConfig(max_seq_len=64, vf_share_layers=False),
        )
    )
)
connect(config)


def described() -> str:
    """The output of `python -m rlmodules describe docs/inspecting.py:config`, as a block."""
    command = [sys.executable, "-m", "rlmodules", "describe", "docs/inspecting.py:config"]
    ran = subprocess.run(
        command, capture_output=True, text=True, check=True, env={**os.environ, "COLUMNS": "96"}
    )
    lines = (line.rstrip() for line in ran.stdout.splitlines())
    return "\n".join(["```text", *lines, "```"])
