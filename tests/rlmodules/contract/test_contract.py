"""The checks of the contract find what is wrong with memories and modules that break it."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch import nn

from rlmodules import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    MemoryQRLModule,
    check_memory,
    check_module,
)
from rlmodules.memories import Memory
from tests.connectors.helpers import lstm_module


class Trace(Memory):
    """A leaky sum of the inputs that keeps all promises; its parts are there to be broken."""

    def __init__(self, input_dim=5):
        super().__init__()
        self.input_dim, self.output_dim = input_dim, 4
        self.linear = nn.Linear(input_dim, 4)
        self.decay = 0.9

    def initial_state(self):
        return {"h": torch.zeros(4), "t": torch.zeros((), dtype=torch.int64)}

    def forward(self, x, state, *, valid=None, resets=None):
        if valid is not None:
            x = self.mask(x, valid)
            resets = resets & valid if resets is not None else None
        u, outputs = self.read(x), []
        for t in range(x.shape[1]):
            if resets is not None:
                state = self.reset(state, resets[:, t])
            after = self.update(state, u[:, t])
            outputs.append(after["h"] + 0.01 * after["t"][:, None])
            state = after if valid is None else self.keep(state, after, valid[:, t])
        return torch.stack(outputs, 1), state

    def mask(self, x, valid):
        return torch.where(valid[..., None], x, 0.0)

    def read(self, x):
        return self.linear(x).tanh()

    def reset(self, state, resets):
        return {
            "h": torch.where(resets[:, None], 0.0, state["h"]),
            "t": torch.where(resets, 0, state["t"]),
        }

    def update(self, state, u):
        return {"h": self.decay * state["h"] + u, "t": state["t"] + 1}

    def keep(self, before, after, valid):
        return {
            "h": torch.where(valid[:, None], after["h"], before["h"]),
            "t": torch.where(valid, after["t"], before["t"]),
        }


class WrongWidth(Trace):
    def __init__(self):
        super().__init__()
        self.output_dim = 3


class LosesAKey(Trace):
    def update(self, state, u):
        return {**super().update(state, u), "extra": u}


class StateWithoutRows(Trace):
    def forward(self, x, state, **masks):
        y, state = super().forward(x, state, **masks)
        return y, {**state, "t": state["t"][0]}


class HalfState(Trace):
    def initial_state(self):
        return {key: x.half() if key == "h" else x for key, x in super().initial_state().items()}


class WritesIntoTheState(Trace):
    def update(self, state, u):
        state["h"].mul_(self.decay).add_(u.detach())
        return {"h": state["h"].clone(), "t": state["t"] + 1}


class WritesIntoTheInput(Trace):
    def read(self, x):
        return super().read(x.detach().clamp_(-1, 1))


class SharesItsInitialState(Trace):
    def __init__(self):
        super().__init__()
        self.last = torch.zeros(4)

    def initial_state(self):
        return {**super().initial_state(), "h": self.last}

    def forward(self, x, state, **masks):
        y, state = super().forward(x, state, **masks)
        self.last = state["h"][0].detach().float()
        return y, state


class MixesRows(Trace):
    def read(self, x):
        return super().read(x - x.mean(0))


class LooksAhead(Trace):
    def read(self, x):
        return super().read(x + torch.cat([x[:, 1:], torch.zeros_like(x[:, :1])], 1))


class IgnoresItsInput(Trace):
    def read(self, x):
        return 0 * super().read(x)


class StepsDiffer(Trace):
    """A window over the call instead of over the episode."""

    def read(self, x):
        return super().read(x + torch.cat([torch.zeros_like(x[:, :1]), x[:, :-1]], 1))


class LongCallsDiffer(Trace):
    """Blocks of 64 steps that forget the block before."""

    def forward(self, x, state, *, valid=None, resets=None):
        if x.shape[1] > 70:
            resets = torch.zeros(x.shape[:2], dtype=torch.bool)
            resets[:, 64::64] = True
        return super().forward(x, state, valid=valid, resets=resets)


class GoesOnInPadding(Trace):
    def keep(self, before, after, valid):
        return after


class MasksTooLate(Trace):
    """The outputs are right, but the gradients are NaN."""

    def mask(self, x, valid):
        self.valid = valid
        return x

    def read(self, x):
        u = super().read(x)
        valid = self.__dict__.pop("valid", None)
        return u if valid is None else torch.where(valid[..., None], u, 0.0)


class IgnoresResets(Trace):
    def reset(self, state, resets):
        return state


class CountsOverResets(Trace):
    def reset(self, state, resets):
        return {**super().reset(state, resets), "t": state["t"]}


class SharesGradientsOverResets(Trace):
    """The state after a reset is 0, but its gradient flows into the state before."""

    def reset(self, state, resets):
        h = state["h"]
        return {
            **super().reset(state, resets),
            "h": torch.where(resets[:, None], h - h.detach(), h),
        }


class RoundsToFloat32(Trace):
    def read(self, x):
        return super().read(x).float().to(x.dtype)


class DetachesSilently(Trace):
    def update(self, state, u):
        return super().update({**state, "h": state["h"].detach()}, u)


class DoesNotDetach(Trace):
    detaches_state = True


class HalfUnderAutocast(Trace):
    def update(self, state, u):
        return super().update({**state, "h": state["h"].to(u.dtype)}, u)


class Explodes(Trace):
    def __init__(self):
        super().__init__()
        self.decay = 1.1


class GrowsExponentially(Trace):
    """Finite after 100,000 steps, 150 times as large as after 50,000."""

    def __init__(self):
        super().__init__()
        self.decay = 1.0001


class WrongUnderAutocast(Trace):
    """All outputs but those of the first steps, which are large."""

    def __init__(self):
        super().__init__()
        self.decay = 0.5

    def update(self, state, u):
        after = super().update(state, -u if u.dtype == torch.bfloat16 else u)
        return {**after, "h": after["h"] + 100.0 * (state["t"] == 0)[:, None]}


BROKEN = {
    WrongWidth: r"breaks the shapes .*: the output has the shape \(3, 1, 4\), not \(3, 1, 3\)",
    LosesAKey: r"shapes .*: the new state has the keys \['extra', 'h', 't'\]",
    StateWithoutRows: r"shapes .*: the new state `t` has the shape \(\) .* should have \(3,\)",
    HalfState: "shapes .*: the initial state `h` has the dtype torch.float16",
    WritesIntoTheState: "promise 8, inputs: the state `h` differs by up to .* with it",
    WritesIntoTheInput: "promise 8, inputs: the input differs by",
    SharesItsInitialState: "promise 8, inputs: the state `h` .* calls of `initial_state`",
    MixesRows: "promise 8, rows: the output differs .* row 0, between row 0 among 3 and by itself",
    LooksAhead: "promise 5, causality: the output .* at step 0 of row 0, .* from step 1 on only",
    IgnoresItsInput: "promise 5, causality: no output from step 1 on depends on the inputs",
    StepsDiffer: "promise 1, steps: the output .* at step 1 of row 0, between 37 calls with one",
    LongCallsDiffer: r"promise 2, cuts: the output .* at step 64 of .* \[1, 3, 64, 128, 150\]",
    GoesOnInPadding: "promise 3, padding: the state `h` .* row 1, between a row padded with NaN",
    MasksTooLate: "promise 3, padding: .* the gradient of `inputs` isn't finite",
    IgnoresResets: "promise 4, resets: the output .* at step 0 of row 0, between a row with resets",
    CountsOverResets: "promise 4, resets: the output differs by up to",
    SharesGradientsOverResets: "promise 4, resets: .* the gradient of the inputs before it is up",
    RoundsToFloat32: "promise 7, gradients: gradients differ from finite differences",
    DetachesSilently: "promise 7, gradients: `detaches_state` is False, but the state `h` gets no",
    DoesNotDetach: "promise 7, gradients: `detaches_state` is True, but the state `h` gets a",
    HalfUnderAutocast: "promise 6, dtypes: .* the new state `h` has the dtype torch.bfloat16",
    WrongUnderAutocast: "promise 6, dtypes: under autocast to bfloat16 outputs are off by",
    Explodes: "promise 6, bounds: `output` isn't finite after 5000 steps",
    GrowsExponentially: "promise 6, bounds: `output` grows from .* after 50,000 .* than 4 times",
}


@pytest.mark.parametrize("broken", BROKEN, ids=lambda broken: broken.__name__)
def test_a_broken_promise_is_found(broken):
    torch.manual_seed(0)
    memory = broken()
    with pytest.raises(AssertionError, match=BROKEN[broken]) as first:
        check_memory(memory)
    with pytest.raises(AssertionError) as second:
        check_memory(memory)
    assert str(first.value) == str(second.value)
    assert f"{broken.__name__} breaks" in str(first.value)


def test_a_memory_and_what_builds_one():
    memory = Trace()
    memory.linear.weight.grad = torch.ones(4, 5)
    before = copy.deepcopy(memory)
    check_memory(memory)
    assert all(
        torch.equal(a, b) for a, b in zip(memory.parameters(), before.parameters(), strict=True)
    )
    assert memory.linear.weight.dtype == torch.float32
    assert (memory.linear.weight.grad == 1).all()

    random = torch.get_rng_state()
    with pytest.raises(AssertionError, match="seed 3"):
        check_memory(lambda input_dim: Explodes(), seed=3)
    assert torch.equal(torch.get_rng_state(), random)


class Rotates(Trace):
    """Complex parameters and buffers: the state turns in the complex plane, kept as real pairs."""

    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(0.9 * torch.exp(1j * torch.tensor([1.0, 2.0])))
        self.register_buffer("start", torch.tensor([1j, -1j]))

    def read(self, x):
        u = torch.view_as_complex(self.linear(x).unflatten(-1, (2, 2)).to(x.dtype).contiguous())
        return torch.view_as_real(u * self.start).flatten(-2)

    def update(self, state, u):
        h = torch.view_as_complex(state["h"].unflatten(-1, (2, 2)).contiguous())
        return {"h": torch.view_as_real(self.turn * h).flatten(-2) + u, "t": state["t"] + 1}


class Sums(Trace):
    """Grows with the steps, not exponentially."""

    def __init__(self):
        super().__init__()
        self.decay = 1.0


class Switches(Trace):
    """In bfloat16 a few outputs fall on the other side of a threshold: far off, the mean is not."""

    def read(self, x):
        u = self.linear(x)
        return u.tanh() + 5.0 * (u > 1)


@pytest.mark.parametrize("memory_class", [Rotates, Sums, Switches])
def test_kept_promises(memory_class):
    torch.manual_seed(0)
    check_memory(memory_class())


@pytest.mark.parametrize("value", [None, nn.Linear(5, 5), lambda input_dim: nn.Linear(5, 5)])
def test_no_memory(value):
    with pytest.raises(TypeError, match="must be a `Memory` or build one for an input width"):
        check_memory(value)


def test_an_error_in_a_memory_says_what_was_checked():
    class TakesNoMasks(Trace):
        def forward(self, x, state):
            return super().forward(x, state)

    with pytest.raises(TypeError) as error:
        check_memory(TakesNoMasks())
    assert "Raised while checking promise 8, inputs: 3 rows of 9 steps" in error.value.__notes__[0]


# Modules.


class IgnoresItsState(DeepLinearAttentionRLModule):
    def _forward_train(self, batch, **kwargs):
        state = {key: torch.zeros_like(x) for key, x in batch[Columns.STATE_IN].items()}
        return super()._forward_train({**batch, Columns.STATE_IN: state})


class ValuesIgnoreTheState(DeepLinearAttentionRLModule):
    def compute_values(self, batch, embeddings=None):
        state = {key: torch.zeros_like(x) for key, x in batch[Columns.STATE_IN].items()}
        return super().compute_values({**batch, Columns.STATE_IN: state}, embeddings)


class KeepsItsOwnState(DeepLinearAttentionRLModule):
    """As modules did that were called for one environment only."""

    def _forward(self, batch, **kwargs):
        if batch[Columns.OBS].shape[1] == 1 and hasattr(self, "last"):
            batch = {**batch, Columns.STATE_IN: self.last}
        out = super()._forward(batch)
        self.last = out[Columns.STATE_OUT]
        return out


class ExploresDifferently(DeepLinearAttentionRLModule):
    def _forward_exploration(self, batch, **kwargs):
        out = super()._forward(batch)
        return {**out, Columns.ACTION_DIST_INPUTS: 2 * out[Columns.ACTION_DIST_INPUTS]}


BROKEN_MODULES = {
    IgnoresItsState: "another action distribution .* with `forward_exploration` .* at step 0",
    ValuesIgnoreTheState: "another value step by step",
    KeepsItsOwnState: "another action distribution .* with `forward_inference`",
    ExploresDifferently: "another action distribution .* with `forward_exploration`",
}


def build(module_class, observation_space, **settings):
    torch.manual_seed(0)
    config = DeepLinearAttentionConfig(
        max_seq_len=8, fcnet_hiddens=[8], d_model=8, head_dim=4, compile=False, **settings
    )
    return RLModuleSpec(
        module_class=module_class,
        observation_space=observation_space,
        action_space=gym.spaces.Discrete(3),
        model_config=config,
    ).build()


BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)


@pytest.mark.parametrize("module_class", BROKEN_MODULES, ids=lambda cls: cls.__name__)
def test_a_broken_module_is_found(module_class):
    with pytest.raises(AssertionError, match=BROKEN_MODULES[module_class]):
        check_module(build(module_class, BOX))


@pytest.mark.parametrize("vf_share_layers", [True, False])
def test_modules_of_this_package(vf_share_layers):
    space = gym.spaces.Dict(
        observations=BOX, n=gym.spaces.Discrete(4), action_mask=gym.spaces.MultiBinary(3)
    )
    settings = {"action_mask": "action_mask", "vf_share_layers": vf_share_layers}
    check_module(build(DeepLinearAttentionRLModule, space, **settings))


def test_rllibs_lstm():
    check_module(lstm_module(8)["default_policy"])


class Stateless(DeepLinearAttentionRLModule):
    def get_initial_state(self):
        return {}


@pytest.mark.parametrize("module_class", [Stateless, MemoryQRLModule])
def test_modules_that_cannot_be_checked(module_class):
    with pytest.raises(ValueError, match=f"{module_class.__name__} can't be checked: only a"):
        check_module(build(module_class, BOX))
