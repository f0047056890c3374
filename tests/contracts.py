"""The memory contract: every registered memory has to keep each promise of `Memory`.

A new memory gets all of these tests by adding a line to `MEMORIES` in
`tests/rlmodules/memories/test_memories.py`. The checks themselves are those of
`rlmodules.contract`.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rlmodules.contract import memory as contract

B, D = contract.ROWS, contract.WIDTH

# Hypothesis' examples may share the memory: no check changes it.
some_examples = settings(
    max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class MemoryContract:
    """Tests over a `memory` fixture."""

    @pytest.mark.parametrize("check", contract.CHECKS, ids=lambda check: check.__name__)
    def test_keeps_its_promises(self, memory, check):
        check(memory)

    @some_examples
    @given(cuts=st.lists(st.integers(0, 150), max_size=4))
    def test_cuts_do_not_matter(self, memory, cuts):
        contract.check_cuts(memory, cuts)

    @some_examples
    @given(lengths=st.lists(st.integers(0, 70), min_size=B, max_size=B))
    def test_padding_is_inert(self, memory, lengths):
        contract.check_padding(memory, lengths)

    @some_examples
    @given(
        resets=st.lists(st.tuples(st.integers(0, B - 1), st.integers(0, 69)), max_size=5),
    )
    def test_resets_isolate(self, memory, resets):
        contract.check_resets(memory, resets)


def inputs(num_steps: int) -> torch.Tensor:
    """Fixed inputs `(B, num_steps, D)`."""
    generator = torch.Generator().manual_seed(num_steps)
    return torch.randn(B, num_steps, D, generator=generator, dtype=torch.float64)


def initial(memory, dtype=torch.float64):
    """The initial state of B rows."""
    return {
        key: value.to(dtype if value.is_floating_point() else value.dtype)
        .expand(B, *value.shape)
        .clone()
        for key, value in memory.initial_state().items()
    }


def assert_equal(actual, expected, tolerance=1e-10):
    """Equality of trees of tensors, relative to their largest entry."""
    if isinstance(actual, torch.Tensor):
        scale = max(1.0, expected.abs().max().item()) if expected.numel() else 1.0
        torch.testing.assert_close(actual, expected, rtol=0, atol=tolerance * scale)
        return
    if isinstance(actual, dict):
        assert actual.keys() == expected.keys()
        actual, expected = actual.values(), [expected[key] for key in actual]
    for a, b in zip(actual, expected, strict=True):
        assert_equal(a, b, tolerance)
