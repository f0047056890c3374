"""The memory contract: every registered memory has to keep each promise of `Memory`.

A new memory gets all of these tests by adding a line to `MEMORIES` in
`tests/rlmodules/test_memories.py`.
"""

from itertools import pairwise

import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

B, D = 3, 5

# Hypothesis' examples may share the memory: no test changes what it computes.
some_examples = settings(
    max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


class MemoryContract:
    """Tests over a `memory` fixture: a module for inputs of width D, in float64."""

    def test_shapes(self, memory):
        y, state = memory(inputs(7), initial(memory))
        assert y.shape == (B, 7, memory.output_dim)
        for key, value in memory.initial_state().items():
            assert state[key].shape == (B, *value.shape)
            assert value.dtype in (torch.float32, torch.int64)

    def test_one_step_at_a_time_equals_the_whole(self, memory):
        x = inputs(37)
        whole, final = memory(x, initial(memory))
        state, steps = initial(memory), []
        for t in range(x.shape[1]):
            y, state = memory(x[:, t : t + 1], state)
            steps.append(y)
        assert_equal((torch.cat(steps, 1), state), (whole, final))

    def test_float32_steps_equal_the_whole(self, memory):
        memory = memory.float()
        x = inputs(37).float()
        whole, final = memory(x, initial(memory, torch.float32))
        state, steps = initial(memory, torch.float32), []
        for t in range(x.shape[1]):
            y, state = memory(x[:, t : t + 1], state)
            steps.append(y)
        assert_equal((torch.cat(steps, 1), state), (whole, final), 1e-5)

    @some_examples
    @given(cuts=st.lists(st.integers(0, 150), max_size=4))
    def test_cuts_do_not_matter(self, memory, cuts):
        x = inputs(150)
        bounds = sorted({0, *cuts, 150})
        state, parts = initial(memory), []
        for start, end in pairwise(bounds):
            y, state = memory(x[:, start:end], state)
            parts.append(y)
        assert_equal((torch.cat(parts, 1), state), memory(x, initial(memory)))

    @some_examples
    @given(lengths=st.lists(st.integers(0, 70), min_size=B, max_size=B))
    def test_padding_is_inert(self, memory, lengths):
        x = inputs(70)
        valid = torch.arange(70) < torch.tensor(lengths)[:, None]
        padded = torch.where(valid[..., None], x, torch.nan).requires_grad_()
        y, state = memory(padded, busy(memory), valid=valid)
        loss = y[valid].square().sum()
        loss.backward()
        gradients = [p.grad for p in memory.parameters() if p.grad is not None]
        assert all(g.isfinite().all() for g in (padded.grad, *gradients))
        for b, length in enumerate(lengths):
            before = {key: value[b : b + 1] for key, value in busy(memory).items()}
            row = {key: value[b : b + 1] for key, value in state.items()}
            if length == 0:
                assert_equal(row, before)
                continue
            assert_equal((y[b : b + 1, :length], row), memory(x[b : b + 1, :length], before))

    @some_examples
    @given(data=st.data())
    def test_resets_isolate(self, memory, data):
        T = 70
        flags = data.draw(st.lists(st.integers(0, B * T - 1), max_size=5))
        resets = torch.zeros(B, T, dtype=torch.bool)
        resets.view(-1)[flags] = True
        x = inputs(T)
        y, state = memory(x, busy(memory), resets=resets)
        for b in range(B):
            starts = [0, *resets[b].nonzero()[:, 0].tolist(), T]
            row = {key: value[b : b + 1] for key, value in busy(memory).items()}
            parts = []
            for start, end in pairwise(starts):
                if start or resets[b, 0]:
                    row = {k: v[:1] for k, v in initial(memory).items()}
                if end > start:
                    out, row = memory(x[b : b + 1, start:end], row)
                    parts.append(out)
            expected = (torch.cat(parts, 1), row)
            assert_equal((y[b : b + 1], {k: v[b : b + 1] for k, v in state.items()}), expected)

    def test_nothing_flows_across_a_reset(self, memory):
        x = inputs(60).requires_grad_()
        resets = torch.zeros(B, 60, dtype=torch.bool)
        resets[:, 30] = True
        before = {
            k: v.requires_grad_() if v.is_floating_point() else v for k, v in busy(memory).items()
        }
        y, _ = memory(x, before, resets=resets)
        y[:, 30:].square().sum().backward()
        assert (x.grad[:, :30] == 0).all()
        assert (x.grad[:, 30:] != 0).any()
        assert all(v.grad is None or (v.grad == 0).all() for v in before.values())

    def test_causality(self, memory):
        x = inputs(60)
        changed = x.clone()
        changed[:, 40:] += 1.0
        y, _ = memory(x, initial(memory))
        y_changed, _ = memory(changed, initial(memory))
        assert_equal(y[:, :40], y_changed[:, :40])
        assert not torch.allclose(y[:, 40:], y_changed[:, 40:])

    def test_gradients(self, memory):
        """The gradients of input and incoming state, over a row with padding and a reset."""
        x = inputs(9)[:2].requires_grad_()
        valid = torch.arange(9) < torch.tensor([[9], [5]])
        resets = torch.zeros(2, 9, dtype=torch.bool)
        resets[0, 4] = True
        before = {key: value[:2] for key, value in busy(memory).items()}
        floats = [k for k, v in before.items() if v.is_floating_point()]
        keys = [] if memory.detaches_state else floats

        def run(x, *values):
            state = before | dict(zip(keys, values, strict=True))
            y, after = memory(x, state, valid=valid, resets=resets)
            return y[valid], *(after[k] for k in floats)

        values = [before[k].detach().requires_grad_() for k in keys]
        assert torch.autograd.gradcheck(run, (x, *values), fast_mode=True)

    def test_detached_states_get_no_gradient(self, memory):
        x = inputs(9).requires_grad_()
        before = {
            k: v.requires_grad_() if v.is_floating_point() else v for k, v in busy(memory).items()
        }
        y, after = memory(x, before)
        sum(v.square().sum() for v in (y, *after.values()) if v.requires_grad).backward()
        grads = [v.grad for v in before.values() if v.is_floating_point()]
        assert all((grad is None) == memory.detaches_state for grad in grads)
        assert (x.grad != 0).any(-1).all()

    def test_stays_bounded(self, memory):
        memory = memory.float()
        x = inputs(5000).float()
        state = initial(memory, torch.float32)
        with torch.no_grad():
            for _ in range(20):
                y, state = memory(x, state)
        assert y.isfinite().all()
        assert all(value.isfinite().all() for value in state.values())

    def test_states_stay_float32_under_autocast(self, memory):
        memory = memory.float()
        x = inputs(40).float()
        expected, _ = memory(x, initial(memory, torch.float32))
        with torch.autocast("cpu", torch.bfloat16):
            y, state = memory(x, initial(memory, torch.float32))
        assert all(value.dtype in (torch.float32, torch.int64) for value in state.values())
        assert (y - expected).abs().max() < 0.1 * expected.abs().max()


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


def busy(memory):
    """A state that something has been written to."""
    with torch.no_grad():
        return memory(inputs(11), initial(memory))[1]


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
