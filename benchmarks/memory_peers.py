"""The memories of this package, RLlib's old GTrXL and torch's LSTM, in equal size."""

import dataclasses
import functools
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import gymnasium as gym
import numpy as np
import torch
from torch import Tensor, nn

from rlmodules.memories import (
    DeepLinearAttentionConfig,
    FFMConfig,
    GatedDeltaConfig,
    GRUConfig,
    GTrXLConfig,
    LRUConfig,
    LSTMConfig,
    Memory,
    MinGRUConfig,
    MixedConfig,
    POPGymLinearAttentionConfig,
    WindowAttentionConfig,
)
from rlmodules.memories.compilation import compile_blocks

INPUT_DIM = 64
NUM_HEADS = 4
NUM_PARAMETERS = 100_000
LEGACY_LAYERS = 2
COMPILED = "-compiled"
WINDOW = 64
"""Steps that GTrXL's memory holds, unless a case says otherwise."""


def _sizes(width: int) -> dict[str, Any]:
    return {
        "max_seq_len": 64,
        "d_model": width * NUM_HEADS,
        "num_heads": NUM_HEADS,
        "head_dim": width,
        "feedforward_dim": 2 * width * NUM_HEADS,
    }


def attention(width: int, **options: Any) -> Memory:
    """Deep linear attention of four heads of a width."""
    return DeepLinearAttentionConfig(**_sizes(width), **options).build_memory(INPUT_DIM)


def frame(config_class: Any, **options: Any) -> Callable[[int], Memory]:
    """Two residual blocks whose width grows in steps of four."""

    def build(width: int) -> Memory:
        sizes = _sizes(width)
        fields = {field.name for field in dataclasses.fields(config_class)}
        known = {name: value for name, value in sizes.items() if name in fields}
        return config_class(**known, **options).build_memory(INPUT_DIM)

    return build


def _gtrxl(width: int, window: int = WINDOW) -> Memory:
    return GTrXLConfig(**_sizes(width), memory_inference=window).build_memory(INPUT_DIM)


def _popgym(width: int, **options: Any) -> Memory:
    size = options.get("num_layers", 1) * (width + 1) ** 2
    config = POPGymLinearAttentionConfig(max_seq_len=64, hidden_size=size, **options)
    return config.build_memory(INPUT_DIM)


def _legacy(width: int, window: int = WINDOW) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # RLlib warns that its old stack is old
        from ray.rllib.models.torch.attention_net import GTrXLNet

        return GTrXLNet(
            gym.spaces.Box(-1.0, 1.0, (INPUT_DIM,), np.float32),
            gym.spaces.Discrete(2),
            None,
            {"max_seq_len": 1},
            "legacy",
            num_transformer_units=LEGACY_LAYERS,
            attention_dim=width * NUM_HEADS,
            num_heads=NUM_HEADS,
            head_dim=width,
            position_wise_mlp_dim=2 * width * NUM_HEADS,
            memory_inference=window,
            memory_training=window,
        )


# Each takes a width that its parameters grow with.
MEMORIES: dict[str, Callable[[int], Memory]] = {
    "linear": lambda width: attention(width, num_layers=1),
    "deep": attention,
    "deep-compiled": attention,
    "popgym": _popgym,
    "popgym-deep": lambda width: _popgym(width, num_layers=4, positions="none"),
    "gated-delta": frame(GatedDeltaConfig),
    "gated-delta-compiled": frame(GatedDeltaConfig),
    "window": frame(WindowAttentionConfig, window=WINDOW),
    "min-gru": frame(MinGRUConfig),
    "lru": frame(LRUConfig),
    "ffm": frame(FFMConfig),
    "mixed": frame(MixedConfig, layers=["window", "gated_delta"], window=WINDOW),
    "gru": lambda width: GRUConfig(max_seq_len=64, d_model=width).build_memory(INPUT_DIM),
    "lstm": lambda width: LSTMConfig(max_seq_len=64, d_model=width).build_memory(INPUT_DIM),
    "gtrxl": _gtrxl,
    "gtrxl-128": lambda width: _gtrxl(width, 128),
}
PEERS: dict[str, Callable[[int], nn.Module]] = {
    "legacy": _legacy,
    "legacy-128": lambda width: _legacy(width, 128),
    "lstm": lambda width: nn.LSTM(INPUT_DIM, width, batch_first=True),
    "gru": lambda width: nn.GRU(INPUT_DIM, width, batch_first=True),
}


def of_equal_size(
    build: Callable[[int], nn.Module], num_parameters: int = NUM_PARAMETERS
) -> nn.Module:
    """The module whose number of parameters is closest to a number."""
    return build(_best_width(build, num_parameters))


@functools.cache
def _best_width(build: Callable[[int], nn.Module], num_parameters: int) -> int:
    width = 2
    # A module's weights depend on the seed, not on whether its width was looked for before.
    with torch.random.fork_rng():
        while count(build(width)) < num_parameters:
            width *= 2
        # The size grows with the width: the best one lies between the last two.
        candidates = range(width // 2, width + 1, 2)
        return min(candidates, key=lambda w: abs(math.log(count(build(w)) / num_parameters)))


def count(module: nn.Module) -> int:
    """Number of parameters."""
    return sum(p.numel() for p in module.parameters())


@dataclass(frozen=True)
class Contestant:
    """A memory with a state that something has been written to."""

    step: Callable[[Tensor], Tensor]
    """A step of the rollout: inputs `(B, 1, D)` -> outputs `(B, 1, ...)`, without gradient."""

    train: Callable[[Tensor], Tensor]
    """A training pass, forward and backward: inputs `(B, T, D)` -> outputs `(B, T, ...)`."""

    state_bytes: int
    """Bytes of the state that a training row starts from."""

    num_parameters: int


def contestant(name: str, num_rows: int, device: str = "cpu") -> Contestant:
    """Builds one of `MEMORIES`, with states for that many rows."""
    torch.manual_seed(0)
    memory: Any = of_equal_size(MEMORIES[name]).to(device)
    initial = memory.initial_state()
    before = {key: x.expand(num_rows, *x.shape).clone() for key, x in initial.items()}
    with torch.no_grad():
        _, state = memory(torch.randn(num_rows, 2 * WINDOW, INPUT_DIM, device=device), before)
    if name.endswith(COMPILED):
        compile_blocks(memory.compilable(), True, torch.device(device))

    def train(x: Tensor) -> Tensor:
        # A Learner always has a mask.
        y, _ = memory(x, state, valid=torch.ones(x.shape[:2], dtype=torch.bool, device=device))
        return _backward(memory, y)

    return Contestant(
        step=torch.no_grad()(lambda x: memory(x, state)[0]),
        train=train,
        state_bytes=sum(x.nbytes for x in initial.values()),
        num_parameters=count(memory),
    )


def peer(name: str, num_rows: int, device: str = "cpu") -> Contestant:
    """Builds one of `PEERS`, with states for that many rows."""
    torch.manual_seed(0)
    module = of_equal_size(PEERS[name]).to(device)
    return _cell(module, num_rows) if name in ("lstm", "gru") else _old_gtrxl(module, num_rows)


def _cell(net: Any, num_rows: int) -> Contestant:
    keys = "hc" if isinstance(net, nn.LSTM) else "h"
    device = next(net.parameters()).device
    states = [torch.randn(1, num_rows, net.hidden_size, device=device) for _ in keys]
    state: Any = tuple(states) if len(states) > 1 else states[0]
    return Contestant(
        step=torch.no_grad()(lambda x: net(x, state)[0]),
        train=lambda x: _backward(net, net(x, state)[0]),
        state_bytes=sum(x[:, 0].nbytes for x in states),
        num_parameters=count(net),
    )


def _old_gtrxl(net: Any, num_rows: int) -> Contestant:
    windows = [
        torch.randn(num_rows, net.memory_inference, net.attention_dim)
        for _ in range(net.num_transformer_units)
    ]

    def forward(x: Tensor) -> Tensor:
        seq_lens = torch.full((x.shape[0],), x.shape[1])
        y, _ = net({"obs": x.flatten(0, 1)}, windows, seq_lens)
        return y.unflatten(0, x.shape[:2])

    return Contestant(
        step=torch.no_grad()(forward),
        train=lambda x: _backward(net, forward(x)),
        # What its view requirements put in front of every chunk.
        state_bytes=sum(x[0].nbytes for x in windows),
        num_parameters=count(net),
    )


def _backward(module: nn.Module, y: Tensor) -> Tensor:
    for parameter in module.parameters():
        parameter.grad = None
    y.square().sum().backward()
    return y.detach()
