"""What memories say about the gradient of their outputs by their inputs is what autograd says."""

import pytest
import torch
from torch.autograd.functional import jacobian

from rlmodules.memories.compilation import compile_blocks
from tests.contracts import B, assert_equal, initial, inputs
from tests.rlmodules.memories.test_memories import MEMORIES

T = 5
SOME = ["deep", "gtrxl", "window", "delta", "gru", "lstm", "min-gru", "lru", "ffm", "mixed"]


@pytest.fixture(params=[*SOME, "popgym-max"])
def memory(request):
    return MEMORIES[request.param]().double()


def test_it_is_the_norm_of_the_jacobian(memory):
    with torch.no_grad():
        _, state = memory(inputs(11), initial(memory))
        found = memory.gradient_map(inputs(T), state)
    assert found.shape == (B, T, T)
    assert (found.triu(1) == 0).all()
    assert (found.diagonal(dim1=1, dim2=2) > 0).all()
    last = {key: leaf[-1:] for key, leaf in state.items()}
    whole = jacobian(lambda x: memory(x, last)[0], inputs(T)[-1:])[0]
    assert_equal(found[-1], torch.linalg.vector_norm(whole, dim=(1, 2, 4)))


def test_nothing_of_the_memory_changes(memory):
    x, state = inputs(T), initial(memory)
    before, _ = memory(x, state)
    assert not memory.gradient_map(x, state).requires_grad
    assert not x.requires_grad
    assert all(p.requires_grad and p.grad is None for p in memory.parameters())
    assert torch.equal(memory(x, state)[0], before)


def test_compiled_blocks_have_the_same_gradient():
    memory = MEMORIES["min-gru"]().double()
    expected = memory.gradient_map(inputs(T), initial(memory))
    assert compile_blocks(memory.compilable(), True, torch.device("cpu"))
    assert torch.equal(memory.gradient_map(inputs(T), initial(memory)), expected)
