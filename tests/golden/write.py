"""Writes the golden checkpoints: `python -m tests.golden.write`.

Do so only together with a new `CHECKPOINT_VERSION`: checkpoints that users have stay as they are.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium as gym
import numpy as np
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import QNetAPI, ValueFunctionAPI

from rlmodules import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    GTrXLConfig,
    GTrXLRLModule,
    LinearAttentionConfig,
    LinearAttentionRLModule,
    MemoryQRLModule,
    MemoryRLModule,
    MemorySACRLModule,
    POPGymLinearAttentionConfig,
)

FOLDER = Path(__file__).parent
EXPECTED_FILE = "expected.npz"
SETTINGS_FILE = "settings.json"

B, T = 1, 20
OBS = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(3)
BOX = gym.spaces.Box(-1.0, 1.0, (2,), np.float32)
SMALL = {"max_seq_len": 8, "fcnet_hiddens": [6], "compile": False}
NARROW = {**SMALL, "d_model": 4, "num_heads": 2, "head_dim": 4, "feedforward_dim": 4}
ONE_LAYER = {**NARROW, "num_layers": 1}
POPGYM = {**SMALL, "hidden_size": 9, "head_fcnet_hiddens": [4]}


class Case(NamedTuple):
    """What stands in the folder of its name."""

    module_class: Any
    config: Callable[[], Any]
    action_space: gym.Space = DISCRETE


# All that is not set here is a default, so that a change of a default shows.
CASES = {
    "linear": Case(LinearAttentionRLModule, lambda: LinearAttentionConfig(**NARROW)),
    "popgym": Case(MemoryRLModule, lambda: POPGymLinearAttentionConfig(**POPGYM)),
    "deep": Case(DeepLinearAttentionRLModule, lambda: DeepLinearAttentionConfig(**NARROW)),
    "popgym_deep": Case(
        MemoryRLModule,
        lambda: POPGymLinearAttentionConfig.deep(**{**POPGYM, "num_layers": 2}),
    ),
    "gtrxl": Case(GTrXLRLModule, lambda: GTrXLConfig(memory_inference=6, **ONE_LAYER)),
    "dqn": Case(MemoryQRLModule, lambda: DeepLinearAttentionConfig(**ONE_LAYER)),
    "sac": Case(
        MemorySACRLModule,
        lambda: DeepLinearAttentionConfig(**ONE_LAYER),
        BOX,
    ),
}


def build(case: Case) -> Any:
    """The module with its target networks, as a Learner has it."""
    module = case.module_class(
        observation_space=OBS,
        action_space=case.action_space,
        model_config=dataclasses.asdict(case.config()),
    )
    module.make_target_networks()
    return module


def inputs(case: Case) -> dict[str, np.ndarray]:
    """Observations, and actions for Q-functions that need them."""
    rng = np.random.default_rng(0)
    arrays = {Columns.OBS: rng.uniform(-1, 1, (B, T, 3)).astype(np.float32)}
    if case.action_space is BOX:
        arrays[Columns.ACTIONS] = rng.uniform(-1, 1, (B, T, 2)).astype(np.float32)
    return arrays


def outputs(module: Any, arrays: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """All that a module computes from an episode's first steps, by path."""
    state = tree.map_structure(lambda x: x.expand(B, *x.shape), module.get_initial_state())
    tensors: dict[str, Any] = {name: torch.from_numpy(array) for name, array in arrays.items()}
    batch = {**tensors, Columns.STATE_IN: state}
    computed: dict[str, Any] = {"inference": module.forward_inference(batch)}
    with torch.no_grad():
        if isinstance(module, ValueFunctionAPI):
            computed["values"] = module.compute_values(batch)
        if isinstance(module, QNetAPI):
            computed["q_values"] = module.compute_q_values(batch)
        computed["target"] = module.forward_target(batch)
    return {
        "/".join(map(str, path)): leaf.numpy() for path, leaf in tree.flatten_with_path(computed)
    }


def write(name: str, case: Case) -> None:
    """Writes a folder anew."""
    folder = FOLDER / name
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(0)
    module = build(case)
    with torch.no_grad():
        # Zeros and ones would hide much.
        for parameter in module.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    module.save_to_path(folder)
    arrays = inputs(case)
    expected = {f"out/{key}": value for key, value in outputs(module, arrays).items()}
    np.savez_compressed(folder / EXPECTED_FILE, **arrays, **expected)
    settings = json.dumps(dataclasses.asdict(case.config()), indent=2)
    (folder / SETTINGS_FILE).write_text(settings + "\n")


if __name__ == "__main__":
    for name, case in CASES.items():
        write(name, case)
