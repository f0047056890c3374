"""Checks of the memory contract, for memories of this package and of yours. Torch only.

`check_memory` runs all of them. They work on copies in float64 where not said otherwise.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from torch import Tensor
from torch.autograd.gradcheck import GradcheckError

from rlmodules.contract.case import ROWS, Case, Promise, row_of, with_gradients
from rlmodules.memories import Memory

WIDTH = 5


def check_memory(memory: Memory | Callable[[int], Memory], *, seed: int = 0) -> None:
    """Checks that a memory keeps all promises of [`Memory`][rlmodules.memories.Memory].

    Always does the same for a seed. Takes seconds, most of them for 100,000 steps.

    Args:
        memory: The memory, which stays as it is; or what builds one for an input width, such as a
            config's `build_memory`.
        seed: Of the inputs, and of the weights of a memory that is built.

    Raises:
        AssertionError: If a promise is broken. The message names the promise, where and by how much
            it is broken, and the case.
        TypeError: If `memory` is no memory and builds none.

    Example:
        ```python
        from rlmodules import check_memory
        from rlmodules.memories import LinearAttentionConfig

        config = LinearAttentionConfig(max_seq_len=8, d_model=8, num_heads=2, head_dim=4)
        check_memory(config.build_memory)
        ```
    """
    if not isinstance(memory, Memory):
        built = None
        if callable(memory) and not isinstance(memory, torch.nn.Module):
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                built = memory(WIDTH)
        if not isinstance(built, Memory):
            raise TypeError(
                f"`memory` is {memory!r}, but must be a `Memory` or build one for an input width. "
                "Derive your class from `rlmodules.memories.Memory`, or pass `config.build_memory`."
            )
        memory = built
    for check in CHECKS:
        check(memory, seed=seed)


def check_shapes(memory: Memory, *, seed: int = 0) -> None:
    """Outputs and states have the shapes and dtypes that `Memory.forward` names. In float32."""
    for num_steps in (1, 7):
        case = Case(memory, Promise.SHAPES, num_steps, seed, torch.float32)
        before = case.memory.initial_state()
        case.require(len(before) > 0, "`initial_state` holds no tensor")
        for key, value in before.items():
            known = value.dtype in (torch.float32, torch.int64)
            case.require(known, f"the initial state `{key}` has the dtype {value.dtype}")
        y, state = case.run(case.x, case.initial())
        expected = (ROWS, num_steps, case.memory.output_dim)
        case.require(
            y.shape == expected, f"the output has the shape {tuple(y.shape)}, not {expected}"
        )
        case.require(
            state.keys() == before.keys(),
            f"the new state has the keys {sorted(state)}, the initial one {sorted(before)}",
        )
        for key, value in before.items():
            expected, after = (ROWS, *value.shape), state[key]
            case.require(
                after.shape == expected and after.dtype == value.dtype,
                f"the new state `{key}` has the shape {tuple(after.shape)} and the dtype "
                f"{after.dtype}, but should have {expected} and {value.dtype}",
            )


def check_inputs_kept(memory: Memory, *, seed: int = 0) -> None:
    """Neither the inputs nor the incoming state nor the initial one are changed in place."""
    case = Case(memory, Promise.INPUTS_KEPT, 9, seed)
    x, before, initial = case.x.clone(), case.busy(), case.initial()
    resets = torch.zeros(ROWS, 9, dtype=torch.bool)
    resets[0, 4] = True
    how = "before and after a call"
    for masks in ({}, {"resets": resets}):
        state = {key: value.clone() for key, value in before.items()}
        case.run(x, state, **masks)
        case.same_steps(x, case.x, how, name="input")
        case.same_states(state, before, f"{how} with it")
        case.same_states(case.initial(), initial, f"calls of `initial_state` {how}")


def check_rows(memory: Memory, *, seed: int = 0) -> None:
    """What is computed for a row depends on that row alone."""
    case = Case(memory, Promise.ROWS_APART, 21, seed)
    before = case.busy()
    together = case.run(case.x, before)
    for b in range(ROWS):
        alone = case.run(case.x[b : b + 1], row_of(before, b))
        case.same(row_of(together, b), alone, f"row {b} among {ROWS} and by itself", b)


def check_steps(memory: Memory, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> None:
    """T calls with one step equal one call with T steps."""
    case = Case(memory, Promise.STEPS, 37, seed, dtype)
    stepped = case.run_in_parts(case.x, case.initial(), range(38))
    how = "37 calls with one step and one call with 37 steps"
    case.same(stepped, case.run(case.x, case.initial()), how)


def check_float32_steps(memory: Memory, *, seed: int = 0) -> None:
    """The same in float32, to 1e-5."""
    check_steps(memory, dtype=torch.float32, seed=seed)


def check_cuts(memory: Memory, cuts: Sequence[int] = (1, 3, 64, 128), *, seed: int = 0) -> None:
    """Rows of 150 steps may be cut anywhere into consecutive calls."""
    case = Case(memory, Promise.CUTS, 150, seed)
    bounds = sorted({0, *cuts, 150})
    parts = case.run_in_parts(case.x, case.initial(), bounds)
    how = f"one call and calls that end at the steps {bounds[1:]}"
    case.same(parts, case.run(case.x, case.initial()), how)


def check_padding(memory: Memory, lengths: Sequence[int] = (70, 33, 0), *, seed: int = 0) -> None:
    """NaN and resets in the padding of rows of 70 steps change nothing, gradients included.

    Args:
        memory: The memory.
        lengths: Valid steps of each of the 3 rows.
        seed: Of the inputs.
    """
    case = Case(memory, Promise.PADDING, 70, seed)
    valid = torch.arange(70) < torch.tensor(lengths)[:, None]
    x = torch.where(valid[..., None], case.x, torch.nan).requires_grad_()
    before = case.busy()
    y, state = case.run(x, before, valid=valid, resets=~valid)
    for b, length in enumerate(lengths):
        how = f"a row padded with NaN from step {length} on and the row without padding"
        if length == 0:
            case.same_states(row_of(state, b), row_of(before, b), how, row=b)
            continue
        alone = case.run(case.x[b : b + 1, :length], row_of(before, b))
        case.same((y[b : b + 1, :length], row_of(state, b)), alone, how, b)
    case.require(y.requires_grad, "outputs have no gradient")
    y[valid].square().sum().backward()
    gradients = {"inputs": x.grad, **{n: p.grad for n, p in case.memory.named_parameters()}}
    for name, grad in gradients.items():
        finite = grad is None or bool(grad.isfinite().all())
        case.require(finite, f"with NaN in the padding, the gradient of `{name}` isn't finite")
    flows = x.grad is not None and bool((x.grad[~valid] != 0).any())
    case.require(not flows, "a gradient flows into the padding")


def check_resets(
    memory: Memory,
    resets: Sequence[tuple[int, int]] = ((0, 0), (1, 1), (1, 33), (2, 5), (2, 6), (2, 69)),
    *,
    seed: int = 0,
) -> None:
    """A row with resets equals several rows.

    Args:
        memory: The memory.
        resets: Row and step of each reset, in 3 rows of 70 steps.
        seed: Of the inputs.
    """
    case = Case(memory, Promise.RESETS, 70, seed)
    flags = torch.zeros(ROWS, 70, dtype=torch.bool)
    for b, t in resets:
        flags[b, t] = True
    before = case.busy()
    whole = case.run(case.x, before, resets=flags)
    for b in range(ROWS):
        starts = flags[b].nonzero()[:, 0].tolist()
        outputs, state = [], row_of(before, b)
        for start, end in pairwise(sorted({0, *starts, 70})):
            if start in starts:
                state = row_of(case.initial(), b)
            y, state = case.run(case.x[b : b + 1, start:end], state)
            outputs.append(y)
        how = f"a row with resets at the steps {starts} and a row for each part of it"
        case.same(row_of(whole, b), (torch.cat(outputs, 1), state), how, b)


def check_reset_gradients(memory: Memory, *, seed: int = 0) -> None:
    """No gradient flows back over a reset."""
    case = Case(memory, Promise.RESETS, 60, seed)
    x, before = case.x.requires_grad_(), with_gradients(case.busy())
    resets = torch.zeros(ROWS, 60, dtype=torch.bool)
    resets[:, 30] = True
    y, _ = case.run(x, before, resets=resets)
    case.require(y.requires_grad, "outputs have no gradient")
    y[:, 30:].square().sum().backward()
    flowing = torch.zeros_like(x) if x.grad is None else x.grad
    case.require(bool(flowing[:, 30:].any()), "no gradient flows into the inputs behind a reset")
    gradients = {f"incoming state `{key}`": value.grad for key, value in before.items()}
    for name, grad in {"inputs before it": flowing[:, :30], **gradients}.items():
        size = 0.0 if grad is None else grad.abs().max().item()
        what = f"after a reset at step 30, the gradient of the {name} is up to {size:.2g}, not 0"
        case.require(size == 0.0, what)


def check_causality(memory: Memory, *, seed: int = 0) -> None:
    """The output at a step depends on inputs up to it only, and does depend on them."""
    for start in (1, 40):
        case = Case(memory, Promise.CAUSALITY, 60, seed)
        changed = case.x.clone()
        changed[:, start:] += 1.0
        y, _ = case.run(case.x, case.initial())
        y_changed, _ = case.run(changed, case.initial())
        how = f"two calls whose inputs differ from step {start} on only"
        case.same_steps(y_changed[:, :start], y[:, :start], how)
        same = torch.allclose(y[:, start:], y_changed[:, start:])
        case.require(not same, f"no output from step {start} on depends on the inputs there")


def check_state_gradients(memory: Memory, *, seed: int = 0) -> None:
    """All inputs get a gradient; the incoming state just where `detaches_state` is False."""
    case = Case(memory, Promise.GRADIENTS, 9, seed)
    x, before = case.x.requires_grad_(), with_gradients(case.busy())
    y, after = case.run(x, before)
    losses = [v.square().sum() for v in (y, *after.values()) if v.requires_grad]
    case.require(len(losses) > 0, "neither outputs nor states have a gradient")
    torch.stack(losses).sum().backward()
    for key, value in before.items():
        if value.is_floating_point():
            got = "no gradient" if value.grad is None else "a gradient"
            what = f"`detaches_state` is {memory.detaches_state}, but the state `{key}` gets {got}"
            case.require((value.grad is None) == memory.detaches_state, what)
    grad = torch.zeros_like(x) if x.grad is None else x.grad
    if without := (grad == 0).all(-1).nonzero().tolist():
        b, t = without[0]
        case.fail(f"the input of row {b} at step {t} gets no gradient")


def check_gradients(memory: Memory, *, seed: int = 0) -> None:
    """Gradients of inputs and incoming state equal finite differences, with padding and a reset."""
    case = Case(memory, Promise.GRADIENTS, 9, seed)
    valid = torch.arange(9) < torch.tensor([[9], [5], [7]])
    resets = torch.zeros(ROWS, 9, dtype=torch.bool)
    resets[0, 4] = True
    before = case.busy()
    floats = [key for key, value in before.items() if value.is_floating_point()]
    keys = [] if memory.detaches_state else floats

    def run(x: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        state = before | dict(zip(keys, values, strict=True))
        y, after = case.run(x, state, valid=valid, resets=resets)
        return y[valid], *(after[key] for key in floats)

    values = [before[key].requires_grad_() for key in keys]
    try:
        torch.autograd.gradcheck(run, (case.x.requires_grad_(), *values), fast_mode=True)
    except GradcheckError as error:
        # What follows are the matrices.
        summary = " ".join(str(error).split("\n\n")[0].split())
        case.fail(f"gradients differ from finite differences: {summary}")


def check_autocast(memory: Memory, *, seed: int = 0) -> None:
    """Under autocast to bfloat16 states stay float32; outputs are off by less than a tenth.

    On average: where something is rounded or chosen, single outputs may differ much.
    """
    case = Case(memory, Promise.DTYPES, 40, seed, torch.float32)
    expected, _ = case.run(case.x, case.initial())
    with torch.autocast("cpu", torch.bfloat16):
        y, state = case.run(case.x, case.initial())
    for key, value in state.items():
        known = value.dtype in (torch.float32, torch.int64)
        case.require(known, f"under autocast the new state `{key}` has the dtype {value.dtype}")
    error = ((y - expected).abs().mean() / expected.abs().mean()).item()
    what = f"under autocast to bfloat16 outputs are off by {error:.2g} of their mean size"
    case.require(error < 0.1, what)


def check_bounds(memory: Memory, *, seed: int = 0) -> None:
    """Outputs and states stay finite over 100,000 steps and do not grow faster than steps do.

    In float32. After 100,000 steps they are at most 4 times as large as after 50,000: a sum over
    the steps is twice as large.
    """
    case = Case(memory, Promise.BOUNDS, 5000, seed, torch.float32)
    state, middle = case.initial(), {}
    with torch.no_grad():
        for num_calls in range(1, 21):
            y, state = case.run(case.x, state)
            sizes = {key: _size(value) for key, value in {"output": y, **state}.items()}
            for name, size in sizes.items():
                what = f"`{name}` isn't finite after {5000 * num_calls} steps"
                case.require(math.isfinite(size), what)
            if num_calls == 10:
                middle = sizes
    for name, size in sizes.items():
        what = (
            f"`{name}` grows from {middle[name]:.2g} after 50,000 steps to {size:.2g} after "
            "100,000, more than 4 times"
        )
        case.require(size <= 4 * middle[name], what)


def _size(value: Tensor) -> float:
    """The largest absolute entry."""
    return value.abs().max().item() if value.numel() else 0.0


# In the order in which a mistake shows most plainly; the slowest last.
CHECKS = (
    check_shapes,
    check_inputs_kept,
    check_rows,
    check_causality,
    check_steps,
    check_float32_steps,
    check_cuts,
    check_padding,
    check_resets,
    check_reset_gradients,
    check_state_gradients,
    check_gradients,
    check_autocast,
    check_bounds,
)
