"""A memory of your own in 60 lines, checked and trained with RLlib's PPO.

What it shows
-------------
- A memory in plain torch, a mixer in the residual frame, with its config and its RLModule: 60 lines
  at most, docstrings included.
- `check_memory`, which says whether the memory keeps the promises that connectors and Learners
  build on, and what is wrong where it doesn't.
- A task that only memory solves: RLlib's RepeatInitialObsEnv shows 0 or 1 once and pays 1 for each
  of 50 actions that repeat it, and -1 for each that doesn't.

How to run it
-------------
    python -m examples.own_memory
    python -m examples.own_memory --seed 1 --num-env-runners 2

Results to expect
-----------------
The mean return is at most 1 without memory and 50 with one. It reaches 45
after 24,000, 28,000 and 30,000 environment steps with seeds 0 to 2: five to seven seconds of
training on a free CPU core. The exit code is 1 if it doesn't. See `docs/how-to/own-memory.md`.
"""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.examples.envs.classes.repeat_initial_obs_env import RepeatInitialObsEnv
from torch import Tensor, nn

from connectors import connect
from examples.runner import apply_arguments, make_parser, run
from rlmodules import MemoryRLModule, StackConfig, check_memory
from rlmodules.memories import Mixer, State


class MinimalGRU(Mixer):
    """`h_t = (1 - z_t) h_{t-1} + z_t c_t`, where gate z and candidate c see the input alone.

    References:
        Feng et al. 2024, https://arxiv.org/abs/2410.01201. Differs: a tanh around the candidate.
    """

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.gate = nn.Linear(width, width)
        self.candidate = nn.Linear(width, width)
        # From two steps to hundreds, at first.
        nn.init.uniform_(self.gate.bias, -6.0, 0.0)

    def initial_state(self) -> State:
        """Zeros."""
        return {"h": torch.zeros(self.width)}

    def forward(
        self,
        h: Tensor,
        state: State,
        turn: Tensor | None,
        valid: Tensor | None,
        resets: Tensor | None,
    ) -> tuple[Tensor, State]:
        """Mixes, see `Mixer.forward`."""
        z = self.gate(h).sigmoid()
        kept, added = 1 - z, z * self.candidate(h).tanh()
        if resets is not None:
            kept = torch.where(resets[..., None], 0.0, kept)
        if valid is not None:
            kept = torch.where(valid[..., None], kept, 1.0)
            added = torch.where(valid[..., None], added, 0.0)
        running, outputs = state["h"], []
        for t in range(h.shape[1]):
            running = kept[:, t] * running + added[:, t]
            outputs.append(running)
        return torch.stack(outputs, 1), {"h": running}


@dataclass(kw_only=True)
class MinimalGRUConfig(StackConfig):
    """Settings of `MinimalGRURLModule`: those of every stack, with one block."""

    num_layers: int = 1
    """Blocks."""

    def build_mixer(self, layer: int) -> Mixer:
        """Builds the mixer of a block."""
        return MinimalGRU(self.d_model)


class MinimalGRURLModule(MemoryRLModule):
    """A policy and a value function on a `MinimalGRU`."""

    config_class = MinimalGRUConfig


class RepeatFirstObservation(RepeatInitialObsEnv):
    """RLlib's environment with episodes of 50 steps."""

    def __init__(self, config: dict | None = None):
        super().__init__(episode_len=50)


def build_config(args: argparse.Namespace) -> PPOConfig:
    """PPO with the module."""
    # A row is an episode and the step that RLlib's Learner appends to it.
    model_config: Any = MinimalGRUConfig(max_seq_len=51)
    config = (
        PPOConfig()
        .environment(RepeatFirstObservation)
        .training(
            train_batch_size_per_learner=2000,
            minibatch_size=512,
            num_epochs=6,
            lr=3e-3,
            grad_clip=0.5,
            # Returns lie in [-50, 50]: their loss is large and must not drown that of the policy.
            vf_loss_coeff=0.01,
            vf_clip_param=1e6,
            use_kl_loss=False,
            clip_param=0.2,
        )
        .rl_module(
            rl_module_spec=RLModuleSpec(module_class=MinimalGRURLModule, model_config=model_config)
        )
    )
    connect(apply_arguments(config, args))
    return config


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0; 1 if the return was not reached.
    """
    defaults = {"stop_reward": 45.0, "stop_timesteps": 200_000}
    args = make_parser(__doc__, **defaults).parse_args(argv)
    check_memory(MinimalGRUConfig(max_seq_len=51).build_memory)
    print("MinimalGRU keeps all promises of a memory")
    return run(build_config(args), args)


if __name__ == "__main__":
    sys.exit(main())
