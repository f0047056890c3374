"""Heads: RLlib's distributions for every action space it serves, and a remedy for the others."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from gymnasium import spaces
from ray.rllib.core.distribution.torch.torch_distribution import (
    TorchCategorical,
    TorchDiagGaussian,
    TorchMultiCategorical,
    TorchMultiDistribution,
)
from ray.rllib.utils.spaces.space_utils import flatten_space

from rlmodules.networks.heads import PolicyHead, ValueHead, action_dist_class

D = 6
SPACES = {
    "discrete": (spaces.Discrete(3), 3, TorchCategorical),
    "box": (spaces.Box(-1, 1, (2,)), 4, TorchDiagGaussian),
    "float64 box": (spaces.Box(-1, 1, (2,), np.float64), 4, TorchDiagGaussian),
    "unbounded box": (spaces.Box(-np.inf, np.inf, (1,)), 2, TorchDiagGaussian),
    "multi-discrete": (spaces.MultiDiscrete([2, 3, 4]), 9, TorchMultiCategorical),
    "dict": (
        spaces.Dict(move=spaces.Discrete(3), arm=spaces.Box(-1, 1, (2,))),
        7,
        TorchMultiDistribution,
    ),
    "tuple": (
        spaces.Tuple([spaces.MultiDiscrete([2, 3]), spaces.Box(-1, 1, (1,)), spaces.Discrete(2)]),
        9,
        TorchMultiDistribution,
    ),
    "nested": (
        spaces.Dict(
            z=spaces.Tuple([spaces.Box(-1, 1, (3,)), spaces.Dict(a=spaces.Discrete(2))]),
            b=spaces.Box(-1, 1, (1,)),
        ),
        10,
        TorchMultiDistribution,
    ),
}
LEADS = [(4, 5), (4, 1), (1, 1), (1, 5)]


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("kind", SPACES)
def test_sampling_and_log_probabilities(kind: str, lead: tuple[int, int]) -> None:
    space, width, rllib_class = SPACES[kind]
    dist_class = action_dist_class(space)
    assert issubclass(dist_class, rllib_class)
    assert dist_class.required_input_dim(space) == width
    head = PolicyHead(D, space, [8], "relu")
    inputs = head(torch.randn(*lead, D))
    assert inputs.shape == (*lead, head.output_dim) == (*lead, width)

    dist = dist_class.from_logits(inputs)
    actions = dist.sample()
    logp = dist.logp(actions)
    assert logp.shape == dist.entropy().shape == lead
    assert dist.kl(dist).shape == lead
    assert logp.isfinite().all()

    def step(b: int, t: int):
        return tree.map_structure(lambda x: x[b, t].numpy(), actions)

    # The same actions, one step at a time through RLlib's own class for each leaf.
    for b in range(lead[0]):
        for t in range(lead[1]):
            expected, at = 0.0, 0
            action = step(b, t)
            for leaf, part in zip(flatten_space(space), tree.flatten(action), strict=True):
                leaf_class = action_dist_class(leaf)
                n = leaf_class.required_input_dim(leaf)
                leaf_dist = leaf_class.from_logits(inputs[b, t, at : at + n])
                expected, at = expected + leaf_dist.logp(torch.as_tensor(part)), at + n
            torch.testing.assert_close(logp[b, t], expected)
    if not any(isinstance(leaf, spaces.Box) for leaf in flatten_space(space)):
        assert space.contains(step(0, 0))


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize("kind", SPACES)
def test_most_likely_action(kind: str, lead: tuple[int, int]) -> None:
    space, width, rllib_class = SPACES[kind]
    inputs = torch.randn(*lead, width)
    dist = action_dist_class(space).from_logits(inputs).to_deterministic()
    actions = dist.sample()
    first, second = tree.flatten(actions), tree.flatten(dist.sample())
    for one, two, leaf in zip(first, second, flatten_space(space), strict=True):
        assert one.shape == (*lead, *leaf.shape)
        torch.testing.assert_close(one, two)
    if rllib_class is TorchMultiDistribution:
        assert dist.logp(actions).eq(0).all()
        assert dist.logp(actions).shape == lead


def test_gradient_of_the_log_probability() -> None:
    for space, _, _ in SPACES.values():
        head = PolicyHead(D, space, [8], "relu")
        dist = action_dist_class(space).from_logits(head(torch.randn(4, 5, D)))
        dist.logp(dist.sample()).sum().backward()
        assert all(p.grad is not None and p.grad.ne(0).any() for p in head.parameters())


@pytest.mark.parametrize("kind", ["box", "dict", "tuple", "nested"])
def test_free_log_std(kind: str) -> None:
    space, width, _ = SPACES[kind]
    head = PolicyHead(D, space, [], None, free_log_std=True)
    sizes = [int(np.prod(leaf.shape)) for leaf in flatten_space(space) if type(leaf) is spaces.Box]
    assert head.log_std is not None
    assert head.log_std.shape == (sum(sizes),)
    values = torch.linspace(-1, 1, sum(sizes))
    with torch.no_grad():
        head.log_std.copy_(values)
    inputs = head(torch.randn(4, 5, D))
    assert inputs.shape == (4, 5, width)
    dist = action_dist_class(space).from_logits(inputs)
    children = getattr(dist, "_flat_child_distributions", [dist])
    scales = [child._dist.scale for child in children if isinstance(child, TorchDiagGaussian)]
    expected = values.exp().expand(4, 5, -1)
    torch.testing.assert_close(torch.cat(scales, -1), expected)
    dist.logp(dist.sample()).sum().backward()
    assert head.log_std.grad is not None
    assert head.log_std.grad.ne(0).all()


@pytest.mark.parametrize("free", [False, True])
def test_log_stds_are_clipped_and_nothing_else(free: bool) -> None:
    space = spaces.Tuple([spaces.Box(-1, 1, (1,)), spaces.Discrete(2)])
    head = PolicyHead(D, space, [], None, free_log_std=free, log_std_clip=2.0)
    with torch.no_grad():
        head.net[0].bias.fill_(50.0)
        if head.log_std is not None:
            head.log_std.fill_(50.0)
    assert head(torch.zeros(1, 1, D)).tolist() == [[[50, 2, 50, 50]]]
    unclipped = PolicyHead(D, space, [], None, free_log_std=free, log_std_clip=float("inf"))
    unclipped.load_state_dict(head.state_dict())
    assert unclipped(torch.zeros(1, 1, D)).tolist() == [[[50, 50, 50, 50]]]


def test_a_fresh_policy_is_near_uniform_and_a_fresh_value_near_zero() -> None:
    features = torch.randn(4, 5, 64)
    logits = PolicyHead(64, spaces.Discrete(4), [64], "tanh")(features)
    assert logits.softmax(-1).sub(0.25).abs().max() < 0.1
    values = ValueHead(64, [64], "tanh")(features)
    assert values.shape == (4, 5)
    assert values.abs().max() < 0.5


def test_copies_and_state_dict() -> None:
    space = SPACES["nested"][0]
    head = PolicyHead(D, space, [8], "relu", free_log_std=True)
    assert set(head.state_dict()) == {
        *(f"net.{i}.{name}" for i in (0, 2) for name in ("weight", "bias")),
        "log_std",
    }
    features = torch.randn(4, 5, D)
    for copied in (copy.deepcopy(head), pickle.loads(pickle.dumps(head))):
        torch.testing.assert_close(copied(features), head(features))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.MultiBinary(3), r"is MultiBinary\(3\).*Use MultiDiscrete\(\[2\] \* 3\)"),
        (spaces.Box(-1, 1, (2, 3)), r"is Box\(.*Use a Box of shape \(6,\)"),
        (spaces.Box(-1, 1, ()), r"is Box\(.*Use a Box of shape \(1,\)"),
        (spaces.Box(0, 9, (2,), np.int64), r"is Box\(.*int64.*Use a MultiDiscrete"),
        (spaces.Discrete(3, start=1), r"is Discrete\(3, start=1\).*Use `start=0`"),
        (spaces.MultiDiscrete([2, 3], start=[0, 1]), r"is MultiDiscrete.*Use `start=0`"),
        (spaces.MultiDiscrete([[2, 3]]), r"is MultiDiscrete.*one axis"),
        (spaces.Text(3), r"is Text.*Use Discrete"),
        (
            spaces.Dict(a=spaces.Tuple([spaces.Discrete(2), spaces.MultiBinary(2)])),
            r"action space at \['a'\]\[1\] is MultiBinary",
        ),
    ],
)
def test_unsupported_spaces(space: gym.Space, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        action_dist_class(space)
    with pytest.raises(ValueError, match=message):
        PolicyHead(D, space, [], None)


def test_free_log_std_needs_a_gaussian() -> None:
    with pytest.raises(ValueError, match=r"`free_log_std` is True.*Discrete\(3\)"):
        PolicyHead(D, spaces.Discrete(3), [], None, free_log_std=True)
