"""Forward and backward passes of our kernel and of those it is compared with, on the same data."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from rlmodules.kernels import linear_attention
from rlmodules.kernels.linear_attention import chunk_size_of

Pass = Callable[[], list[Tensor]]
"""Runs forward and backward; returns the output and the gradients of q, k and v."""


@dataclass(frozen=True)
class Case:
    """Sizes of a measurement."""

    B: int
    H: int
    T: int
    K: int
    decay: bool = False

    @classmethod
    def parse(cls, name: str) -> "Case":
        """From a name like 8x4x1024x64 or 8x4x1024x64-decay."""
        sizes, _, suffix = name.partition("-")
        return cls(*map(int, sizes.split("x")), decay=suffix == "decay")

    def __str__(self) -> str:
        return f"{self.B}x{self.H}x{self.T}x{self.K}" + ("-decay" if self.decay else "")


class Inputs:
    """Random queries, keys (both positive), values and output gradients, `(B, H, T, K)`."""

    def __init__(self, case: Case, device: str = "cpu", dtype: torch.dtype = torch.float32):
        generator = torch.Generator().manual_seed(0)
        shape = (case.B, case.H, case.T, case.K)

        def rand(*shape: int) -> Tensor:
            return torch.rand(*shape, generator=generator, dtype=torch.float64)

        self.case = case
        self.q, self.k = (rand(*shape).to(device, dtype) for _ in range(2))
        self.v, self.grad = ((rand(*shape) - 0.5).to(device, dtype) for _ in range(2))
        self.log_decay = None
        if case.decay:
            self.log_decay = (-0.1 * rand(*shape[:-1])).to(device, dtype)

    def leaves(self, arrange: Callable[[Tensor], Tensor]) -> list[Tensor]:
        """q, k, v in a peer's layout, laid out outside of what is measured."""
        return [arrange(x).contiguous().detach().requires_grad_() for x in (self.q, self.k, self.v)]


def ours(inputs: Inputs) -> Pass:
    """Our kernel, from an empty state."""
    q, k, v = inputs.leaves(lambda x: x)
    B, H, _, K = q.shape
    state = q.new_zeros(B, H, K, K), q.new_zeros(B, H, K)
    leaves, decay = [q, k, v], inputs.log_decay
    if decay is not None:
        decay = decay.detach().requires_grad_()
        leaves.append(decay)

    def run() -> list[Tensor]:
        out, _ = linear_attention(q, k, v, state, log_decay=decay)
        return [out, *torch.autograd.grad(out, leaves, inputs.grad)]

    return run


class _Given(nn.Module):
    """A layer that returns what it was given at the start."""

    def __init__(self, value: Tensor):
        super().__init__()
        self.value = value

    def forward(self, _: Tensor) -> Tensor:
        return self.value


def popgym(inputs: Inputs) -> Pass:
    """POPGym's own block, heads folded into the batch, stripped to what our kernel computes."""
    from popgym.baselines.models.linear_attention import LinearAttentionBlock

    q, k, v = inputs.leaves(lambda x: x.flatten(0, 1))
    grad = inputs.grad.flatten(0, 1)
    B, _, K = q.shape
    block = LinearAttentionBlock(K, K, feed_forward=False, residual=False)
    block.norm = block.phi = nn.Identity()
    block.query, block.key, block.value = _Given(q), _Given(k), _Given(v)
    state = [q.new_zeros(B, 1, K, K), q.new_zeros(B, 1, K)]

    def run() -> list[Tensor]:
        out, _ = block(q, state)
        results = [out, *torch.autograd.grad(out, [q, k, v], grad)]
        return [x.unflatten(0, (inputs.case.B, inputs.case.H)) for x in results]

    return run


def fla(inputs: Inputs) -> Pass:
    """flash-linear-attention's chunk kernel. CUDA only."""
    from fla.ops.linear_attn import chunk_linear_attn  # pyright: ignore[reportMissingImports]

    q, k, v = inputs.leaves(lambda x: x.transpose(1, 2))
    grad = inputs.grad.transpose(1, 2).contiguous()

    def run() -> list[Tensor]:
        out, _ = chunk_linear_attn(q, k, v, scale=1.0, normalize=True)
        results = [out, *torch.autograd.grad(out, [q, k, v], grad)]
        return [x.transpose(1, 2) for x in results]

    return run


def lstm(inputs: Inputs) -> Pass:
    """torch's LSTM of width H * K over inputs of that width."""
    case = inputs.case
    width = case.H * case.K
    x = inputs.v.transpose(1, 2).flatten(2).contiguous().requires_grad_()
    grad = inputs.grad.transpose(1, 2).flatten(2).contiguous()
    net = nn.LSTM(width, width, batch_first=True).to(x)
    leaves = [x, *net.parameters()]

    def run() -> list[Tensor]:
        out, _ = net(x)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    return run


def sdpa(inputs: Inputs) -> Pass:
    """torch's causal softmax attention on the same tensors."""
    q, k, v = inputs.leaves(lambda x: x)

    def run() -> list[Tensor]:
        out = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return [out, *torch.autograd.grad(out, [q, k, v], inputs.grad)]

    return run


PEERS: dict[str, Callable[[Inputs], Pass]] = {
    "popgym": popgym,
    "fla": fla,
    "lstm": lstm,
    "sdpa": sdpa,
}
SAME_FUNCTION = ("popgym", "fla")
"""The peers that compute what our kernel computes."""


def multiply_adds(case: Case, chunk_size: int | None = None) -> int:
    """Multiply-adds of the chunkwise form's matrix products, forward and backward.

    A chunk of C steps takes q k^T and A v (`C x C`), k^T v and q S (`C x K x K`); the backward pass
    two products for each. What else the kernel does - sums of states, normaliser, decay - counts
    as nothing.
    """
    num_chunks = -(-case.T // (chunk_size or chunk_size_of(case.K)))
    C = -(-case.T // num_chunks)
    forward = 2 * C * C * case.K + 2 * C * case.K * case.K
    return 3 * case.B * case.H * num_chunks * forward


def has_fla() -> bool:
    """Whether flash-linear-attention is installed."""
    return importlib.util.find_spec("fla") is not None
