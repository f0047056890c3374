"""Sequences that ask for one thing each that a memory may hold, and the training on them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Generator, Tensor, nn
from torch.nn import functional as F

from benchmarks.memory_peers import INPUT_DIM

T = 64
ROWS = 32
EVAL_ROWS = 256
NUM_SYMBOLS = 8
MAX_COUNT = 15
REVERSED = 8
UNASKED = -100
"""The target of steps that ask nothing; `cross_entropy` leaves them out."""

Sampler = Callable[[int, Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Probe:
    """A task: what stands at a step, and what is asked for."""

    num_features: int
    num_classes: int
    sample: Sampler
    """Rows -> inputs `(B, T, num_features)` and targets `(B, T)`, int64, `UNASKED` where none."""


def recall(lag: int) -> Probe:
    """Name the symbol of `lag` steps ago."""

    def sample(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
        symbols = _symbols(rows, T, generator)
        return _one_hot(symbols, NUM_SYMBOLS), F.pad(symbols[:, :-lag], (lag, 0), value=UNASKED)

    return Probe(NUM_SYMBOLS, NUM_SYMBOLS, sample)


def _overwrite(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    keys, values = _symbols(rows, T, generator), _symbols(rows, T, generator)
    asks = torch.rand(rows, T, generator=generator) < 0.5
    held = torch.full((rows, NUM_SYMBOLS), UNASKED)
    targets = torch.full((rows, T), UNASKED)
    for t in range(T):
        key, ask = keys[:, t : t + 1], asks[:, t : t + 1]
        last = held.gather(1, key)
        targets[:, t : t + 1] = torch.where(ask, last, UNASKED)
        held.scatter_(1, key, torch.where(ask, last, values[:, t : t + 1]))
    written = _one_hot(values, NUM_SYMBOLS) * ~asks[..., None]
    return torch.cat([_one_hot(keys, NUM_SYMBOLS), written], -1), targets


def _count(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    symbols = _symbols(rows, T, generator)
    return _one_hot(symbols, NUM_SYMBOLS), (symbols == 0).cumsum(1).clamp(max=MAX_COUNT)


def _reverse(rows: int, generator: Generator) -> tuple[Tensor, Tensor]:
    # Parts of as many symbols as blanks, `(rows, parts, 2 * REVERSED)`.
    symbols = _symbols(rows, T // 2, generator).unflatten(1, (-1, REVERSED))
    inputs = F.pad(_one_hot(symbols, NUM_SYMBOLS), (0, 0, 0, REVERSED))
    targets = torch.cat([torch.full_like(symbols, UNASKED), symbols.flip(2)], 2)
    return inputs.flatten(1, 2), targets.flatten(1)


PROBES: dict[str, Probe] = {
    "overwrite": Probe(2 * NUM_SYMBOLS, NUM_SYMBOLS, _overwrite),
    "recall-16": recall(16),
    "reverse": Probe(NUM_SYMBOLS, NUM_SYMBOLS, _reverse),
    "count": Probe(NUM_SYMBOLS, MAX_COUNT + 1, _count),
    "recall-4": recall(4),
    "recall-32": recall(32),
}
"""Those that tell memories apart best come first, as a study may be stopped."""


class Model(nn.Module):
    """A memory between a linear layer for the inputs and one for the answers."""

    def __init__(self, memory: Any, probe: Probe):
        super().__init__()
        self.encoder = nn.Linear(probe.num_features, INPUT_DIM)
        self.memory = memory
        self.readout = nn.Linear(memory.output_dim, probe.num_classes)

    def forward(self, inputs: Tensor) -> Tensor:
        """Logits `(B, T, num_classes)`, from an episode's first step on."""
        initial = self.memory.initial_state()
        state = {key: x.expand(len(inputs), *x.shape) for key, x in initial.items()}
        return self.readout(self.memory(self.encoder(inputs), state)[0])


def train(
    model: Model, probe: Probe, *, rate: float, seed: int, updates: int, every: int, goal: float
) -> list[float]:
    """Trains until the goal or the last update. Every model sees the same sequences of a seed.

    Returns:
        The accuracy on fresh sequences after every so many updates.
    """
    generator = Generator().manual_seed(seed)
    fresh = probe.sample(EVAL_ROWS, Generator().manual_seed(seed + 1_000_000))
    optimizer = torch.optim.Adam(model.parameters(), lr=rate)
    accuracies: list[float] = []
    for update in range(1, updates + 1):
        inputs, targets = probe.sample(ROWS, generator)
        loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten(), ignore_index=UNASKED)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if update % every == 0:
            accuracies.append(accuracy(model, *fresh))
            if accuracies[-1] >= goal:
                break
    return accuracies


@torch.no_grad()
def accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Share of what is asked for that is answered correctly."""
    asked = targets != UNASKED
    return (model(inputs).argmax(-1) == targets)[asked].float().mean().item()


def _symbols(rows: int, steps: int, generator: Generator) -> Tensor:
    return torch.randint(NUM_SYMBOLS, (rows, steps), generator=generator)


def _one_hot(symbols: Tensor, num_classes: int) -> Tensor:
    return F.one_hot(symbols, num_classes).float()
