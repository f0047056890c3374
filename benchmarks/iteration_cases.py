"""What `benchmarks.iteration` compares: tasks, memories, and RLlib's models in equal size.

The tasks are POPGym's RepeatPreviousEasy and `Stream`, whose episodes and observations have the
length and the shape that a case is about. Models see the same steps in all of them.
"""

import bisect
import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces import Box, Discrete
from gymnasium.spaces.utils import flatten_space
from popgym.envs.repeat_previous import RepeatPreviousEasy
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig

from benchmarks.rigs import MAX_SEQ_LEN, ppo_config, use_memory, use_rllib_model
from connectors import connect
from rlmodules import DeepLinearAttentionConfig, MemoryConfig, MemoryRLModule
from rlmodules.modules.catalogue import CONFIGS

MLP = "rllib-mlp"
LSTM = "rllib-lstm"
LSTM_256 = "rllib-lstm-256"
DEFAULT = "default"
COMPILED = "-compiled"
PADDED = "padded"
# Names in the catalogue, the default memory aside; compiled, the default alone.
MEMORIES: dict[str, type[MemoryConfig]] = {
    DEFAULT: DeepLinearAttentionConfig,
    DEFAULT + COMPILED: DeepLinearAttentionConfig,
    **{name: kind for name, kind in CONFIGS.items() if kind is not DeepLinearAttentionConfig},
}
NUM_FRAMES = 32
IMAGE_SHAPE = (84, 84, 4)
# RLlib's own for this shape leave 30,976 features, which a single layer makes millions of weights.
CONV_FILTERS = [[16, 8, 4], [32, 4, 2], [32, 3, 2]]


class Cards(RepeatPreviousEasy):
    """POPGym's task, made as RLlib makes environments."""

    def __init__(self, config: dict[str, Any]):
        super().__init__()


class Stream(gym.Env):
    """Random cards or images, and a reward for naming the card.

    The setting `mean_length` is that of the episodes, which end with equal chance at each step;
    without it they never end. With `images` each card has a few fixed images of noise.
    """

    action_space = Discrete(4)

    def __init__(self, config: dict[str, Any]):
        super().__init__()
        self.chance = 1 / config["mean_length"] if "mean_length" in config else 0.0
        self.frames = None
        self.observation_space: gym.Space = Discrete(4)
        if config.get("images"):
            self.observation_space = Box(0, 1, IMAGE_SHAPE, np.float32)
            rng = np.random.default_rng(0)
            self.frames = rng.random((NUM_FRAMES, *IMAGE_SHAPE), np.float32)

    def reset(self, *, seed: int | None = None, options: dict | None = None) -> tuple:
        """Shows a card."""
        super().reset(seed=seed)
        return self._draw(), {}

    def step(self, action: Any) -> tuple:
        """Shows the next one."""
        reward = float(action == self.card)
        over = bool(self.np_random.random() < self.chance)
        return self._draw(), reward, over, False, {}

    def _draw(self) -> Any:
        number = int(self.np_random.integers(NUM_FRAMES))
        self.card = number % 4
        return self.card if self.frames is None else self.frames[number]


@dataclass(frozen=True, kw_only=True)
class Case:
    """A task, and how PPO goes about it."""

    fragment: int
    """Steps an environment and sample: with the one that RLlib appends, full training rows."""

    num_envs: int = 16
    max_seq_len: int = MAX_SEQ_LEN
    minibatch_size: int | None = 1024
    """In steps; None: an epoch is one minibatch."""

    num_epochs: int = 8
    env: Callable[[dict[str, Any]], gym.Env] = Cards
    env_config: dict[str, Any] = field(default_factory=dict)

    @property
    def images(self) -> bool:
        """Whether observations are images."""
        return bool(self.env_config.get("images"))


CASES = {
    "cards-16": Case(fragment=255),
    "cards-64": Case(num_envs=64, fragment=63),
    "short-episodes": Case(fragment=255, env=Stream, env_config={"mean_length": 10}),
    "images": Case(
        fragment=63,
        minibatch_size=256,
        num_epochs=4,
        env=Stream,
        env_config={"images": True, "mean_length": 200},
    ),
    "long-rows": Case(num_envs=4, fragment=1023, max_seq_len=1024, minibatch_size=2048, env=Stream),
}


def memory_config(
    case: Case, memory: str, device: str = "cpu", *, pack_rows: bool = True
) -> PPOConfig:
    """PPO with one of `MEMORIES` at its default size, on our connectors."""
    model_config = MEMORIES[memory](
        max_seq_len=case.max_seq_len, compile=memory.endswith(COMPILED), **_convolutions(case)
    )
    config = use_memory(_config(case, device), MemoryRLModule, model_config)
    connect(config, pack_rows=pack_rows)
    return config


def peer_configs(case: Case, num_parameters: int, device: str = "cpu") -> dict[str, PPOConfig]:
    """PPO with RLlib's own models, on RLlib's connectors.

    Args:
        case: The task.
        num_parameters: Size of the MLP and of one of the LSTMs.
        device: Where the Learner runs.
    """
    models = {
        MLP: _of_size(case, mlp_settings, num_parameters),
        LSTM: _of_size(case, lstm_settings, num_parameters),
        LSTM_256: {"use_lstm": True, "lstm_cell_size": 256},
    }
    return {
        peer: use_rllib_model(
            _config(case, device),
            images=case.images,
            max_seq_len=case.max_seq_len,
            **_convolutions(case),
            **settings,
        )
        for peer, settings in models.items()
    }


def mlp_settings(case: Case, width: int) -> dict[str, Any]:
    """Two equal layers: behind convolutions these are the heads', elsewhere shared."""
    if case.images:
        return {"head_fcnet_hiddens": [width, width]}
    return {"fcnet_hiddens": [width, width], "fcnet_activation": "relu"}


def lstm_settings(case: Case, width: int) -> dict[str, Any]:
    """An LSTM behind one layer, as our memories are, or behind convolutions."""
    settings = {"use_lstm": True, "lstm_cell_size": width}
    return settings if case.images else {**settings, "fcnet_hiddens": [width]}


def _config(case: Case, device: str) -> PPOConfig:
    return ppo_config(
        env=case.env,
        env_config=case.env_config,
        num_envs=case.num_envs,
        fragment=case.fragment,
        device=device,
        minibatch_size=case.minibatch_size,
        num_epochs=case.num_epochs,
    )


def _convolutions(case: Case) -> dict[str, Any]:
    return {"conv_filters": CONV_FILTERS} if case.images else {}


def _of_size(
    case: Case, settings: Callable[[Case, int], dict[str, Any]], num_parameters: int
) -> dict[str, Any]:
    """Settings with the width that comes closest to a number of parameters."""

    def difference(width: int) -> int:
        return _num_parameters(case, settings(case, width)) - num_parameters

    widths = range(4, 1025)
    index = bisect.bisect_left(widths, 0, key=difference)
    width = min(widths[max(index - 1, 0) : index + 1], key=lambda width: abs(difference(width)))
    return settings(case, width)


def _num_parameters(case: Case, settings: dict[str, Any]) -> int:
    """Parameters of RLlib's PPO module with these settings."""
    env = case.env(case.env_config)
    space = env.observation_space
    module = DefaultPPOTorchRLModule(
        observation_space=space if case.images else flatten_space(space),
        action_space=env.action_space,
        model_config=dataclasses.asdict(DefaultModelConfig(**_convolutions(case), **settings)),
    )
    return sum(p.numel() for p in module.parameters())
