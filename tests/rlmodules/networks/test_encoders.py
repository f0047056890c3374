"""Encoders: every observation space becomes features, the flat ones as gymnasium flattens them."""

import copy
import pickle

import gymnasium as gym
import numpy as np
import pytest
import torch
from gymnasium import spaces
from torch import nn

from rlmodules.networks.encoders import ACTIVATIONS, ObservationEncoder, mlp

FLAT = {
    "scalar": spaces.Box(-1, 1, ()),
    "vector": spaces.Box(-1, 1, (3,)),
    "matrix": spaces.Box(-1, 1, (3, 2)),
    "rank 4": spaces.Box(-1, 1, (2, 3, 2, 2)),
    "float64": spaces.Box(-1, 1, (3,), np.float64),
    "int": spaces.Box(-9, 9, (3,), np.int64),
    "bytes": spaces.Box(0, 255, (3,), np.uint8),
    "discrete": spaces.Discrete(5),
    "discrete from 3": spaces.Discrete(5, start=3),
    "discrete from -1": spaces.Discrete(2, start=-1),
    "multi-discrete": spaces.MultiDiscrete([2, 3, 4]),
    "multi-discrete from 1": spaces.MultiDiscrete([2, 3], start=[1, -2]),
    "multi-discrete matrix": spaces.MultiDiscrete([[2, 3], [4, 5]]),
    "multi-binary": spaces.MultiBinary(4),
    "multi-binary matrix": spaces.MultiBinary((2, 3)),
}
FLAT["dict"] = spaces.Dict({key.replace(" ", "_"): space for key, space in FLAT.items()})
FLAT["tuple"] = spaces.Tuple([spaces.Discrete(2), spaces.Box(-1, 1, (2,))])
FLAT["nested"] = spaces.Dict(
    z=spaces.Tuple([FLAT["tuple"], spaces.Dict(b=spaces.Discrete(3), a=spaces.MultiBinary(2))]),
    a=spaces.Box(-1, 1, (2, 2)),
)
CONV = {"conv_filters": [[4, 3, 2], [8, 3, 2]], "conv_activation": "tanh"}


def sample(space: gym.Space, lead: tuple[int, ...]) -> tuple[object, np.ndarray]:
    """Observations with leading axes, and what gymnasium flattens each of them to."""
    samples = [space.sample() for _ in range(int(np.prod(lead)))]
    flat = np.stack([spaces.flatten(space, x) for x in samples])
    return stack(samples, lead), flat.reshape(*lead, -1)


def stack(samples: list, lead: tuple[int, ...]):
    first = samples[0]
    if isinstance(first, dict):
        return {key: stack([x[key] for x in samples], lead) for key in first}
    if isinstance(first, tuple):
        return tuple(stack([x[i] for x in samples], lead) for i in range(len(first)))
    array = np.stack(samples)
    return torch.as_tensor(array.reshape(*lead, *array.shape[1:]))


@pytest.mark.parametrize("lead", [(2, 3), (1, 1), (4,), (2, 3, 2)])
@pytest.mark.parametrize("kind", FLAT)
def test_features_are_gymnasiums(kind: str, lead: tuple[int, ...]) -> None:
    space = FLAT[kind]
    space.seed(0)
    obs, flat = sample(space, lead)
    encoder = ObservationEncoder(space, [], "tanh")
    features = encoder(obs)
    assert features.dtype == torch.float32
    assert encoder.output_dim == encoder.input_dim == spaces.flatdim(space)
    torch.testing.assert_close(features, torch.as_tensor(flat).float())


@pytest.mark.parametrize("kind", FLAT)
def test_mlp_and_norm(kind: str) -> None:
    encoder = ObservationEncoder(FLAT[kind], [16, 8], "relu", norm=True)
    obs, flat = sample(FLAT[kind], (2, 3))
    features = encoder(obs)
    assert features.shape == (2, 3, encoder.output_dim) == (2, 3, 8)
    torch.testing.assert_close(features.mean(-1), torch.zeros(2, 3), atol=1e-5, rtol=0)
    one, two = encoder.mlp[0], encoder.mlp[2]
    hidden = two(one(torch.as_tensor(flat).float()).relu()).relu()
    torch.testing.assert_close(features, nn.functional.layer_norm(hidden, (8,)))
    features.square().sum().backward()
    assert all(parameter.grad is not None for parameter in encoder.parameters())


@pytest.mark.parametrize("dtype", [np.uint8, np.float32, np.float64])
@pytest.mark.parametrize("shape", [(10, 10, 3), (42, 42, 1), (64, 64, 3), (84, 84, 4)])
def test_images_of_rllibs_sizes(shape: tuple[int, ...], dtype: type) -> None:
    encoder = ObservationEncoder(spaces.Box(0, 255, shape, dtype), [8], "relu")
    obs = torch.as_tensor((255 * torch.rand(2, 2, *shape)).numpy().astype(dtype))
    features = encoder(obs)
    assert features.shape == (2, 2, 8)
    assert features.isfinite().all()
    torch.testing.assert_close(encoder(obs[1:, :1]), features[1:, :1], rtol=1e-4, atol=1e-4)


def test_images_follow_the_model_config() -> None:
    space = spaces.Box(0, 255, (7, 9, 3), np.uint8)
    encoder = ObservationEncoder(space, [], None, model_config=CONV | {"fcnet_hiddens": "unread"})
    assert encoder.output_dim == 2 * 3 * 8
    layers = [type(layer) for layer in encoder.modules() if not list(layer.children())]
    assert layers.count(nn.Conv2d) == 2
    assert layers.count(nn.Tanh) == 2
    obs = torch.randint(0, 256, (2, 3, 7, 9, 3), dtype=torch.uint8)
    floats = ObservationEncoder(spaces.Box(0, 1, (7, 9, 3)), [], None, model_config=CONV)
    floats.load_state_dict(encoder.state_dict())
    torch.testing.assert_close(encoder(obs), floats(obs / 255))


@pytest.mark.parametrize(
    ("shape", "filters"),
    [
        ((4, 84, 84), None),
        ((1, 42, 42), None),
        ((12, 10, 10), None),
        ((3, 210, 160), CONV["conv_filters"]),
        ((2, 5, 5), CONV["conv_filters"]),
    ],
)
def test_channels_first_are_refused(shape, filters) -> None:
    """RLlib's default filters match `shape[1:]` too, and would be moved over the first axes."""
    space = spaces.Dict(eye=spaces.Box(0, 255, shape, np.uint8))
    with pytest.raises(ValueError, match=r"at \['eye'\] is .*channels last.*moveaxis"):
        ObservationEncoder(space, [8], None, model_config={"conv_filters": filters})
    flat = ObservationEncoder(space, [], None, model_config={"conv_filters": []})
    assert flat.output_dim == np.prod(shape)


@pytest.mark.parametrize("shape", [(4, 5), (4, 5, 3), (2, 4, 5, 3)])
@pytest.mark.parametrize(
    ("dtype", "low", "high", "divisor"),
    [
        (np.uint8, 0, 255, 255),
        (np.uint8, 0, 1, 1),
        (np.uint16, 0, 65535, 65535),
        (np.int8, -1, 1, 1),
        (np.int16, -1000, 500, 1000),
        (np.int32, 0, 255, 255),
        (np.int64, 0, 2**40, 1),
        (np.float32, 0, 255, 1),
    ],
)
def test_integers_of_pictures_are_scaled(shape, dtype, low, high, divisor) -> None:
    space = spaces.Box(low, high, shape, dtype)
    obs, flat = sample(space, (2, 3))
    encoder = ObservationEncoder(space, [], None, model_config={"conv_filters": []})
    torch.testing.assert_close(encoder(obs), torch.as_tensor(flat).float() / divisor)
    if len(shape) != 3:
        return
    images = ObservationEncoder(space, [], None, model_config=CONV)
    floats = ObservationEncoder(spaces.Box(0, 1, shape), [], None, model_config=CONV)
    floats.load_state_dict(images.state_dict())
    torch.testing.assert_close(images(obs), floats(obs.float() / divisor))


def test_images_beside_vectors() -> None:
    space = spaces.Dict(
        camera=spaces.Box(0, 255, (7, 7, 3), np.uint8),
        radar=spaces.Box(0, 255, (10, 10, 1), np.uint8),
        speed=spaces.Box(-1, 1, (2,)),
    )
    encoder = ObservationEncoder(space, [16], "silu", model_config=CONV)
    obs, _ = sample(space, (2, 3))
    assert encoder(obs).shape == (2, 3, 16)


def test_images_without_convolutions_are_flattened() -> None:
    space = spaces.Box(0, 1, (2, 3, 2))
    encoder = ObservationEncoder(space, [], None, model_config={"conv_filters": []})
    obs, flat = sample(space, (2, 3))
    torch.testing.assert_close(encoder(obs), torch.as_tensor(flat))


@pytest.mark.parametrize("shape", [(), (4,), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64, np.uint64])
def test_integers_of_boxes_as_one_hot(shape, dtype) -> None:
    """As gymnasium flattens the MultiDiscrete of the same numbers."""
    low = 0 if np.issubdtype(dtype, np.unsignedinteger) else -2
    space = spaces.Box(low, low + 3, shape, dtype)
    same = spaces.MultiDiscrete(np.full(shape or (1,), 4), start=np.full(shape or (1,), low))
    encoder = ObservationEncoder(space, [], None, one_hot_max_values=4)
    samples = [space.sample() for _ in range(6)]
    flat = [spaces.flatten(same, np.reshape(x, shape or (1,)).astype(int)) for x in samples]
    expected = torch.as_tensor(np.array(flat)).view(2, 3, -1).float()
    torch.testing.assert_close(encoder(stack(samples, (2, 3))), expected)


def test_which_boxes_become_one_hot() -> None:
    picture, grid = spaces.Box(0, 255, (8, 8, 3), np.uint8), spaces.Box(0, 4, (5, 5), np.int64)
    wide, floats = spaces.Box(-(2**63), 2**63 - 1, (2,), np.int64), spaces.Box(0, 1, (3,))
    uneven = spaces.Box(np.array([0, -1]), np.array([6, 1]), dtype=np.int64)
    space = spaces.Tuple([picture, grid, wide, floats, uneven])
    encoder = ObservationEncoder(
        space, [], None, model_config={"conv_filters": [[4, 3, 2], [8, 8, 8]]}, one_hot_max_values=7
    )
    assert [leaf.output_dim for leaf in encoder.leaves] == [8, 25 * 5, 2, 3, 7 + 3]
    fewer = ObservationEncoder(spaces.Tuple([grid, uneven]), [], None, one_hot_max_values=6)
    assert [leaf.output_dim for leaf in fewer.leaves] == [25 * 5, 2]


def test_values_outside_the_space_are_zeros() -> None:
    """Padding holds 0, which a space that starts at 3 does not contain."""
    encoder = ObservationEncoder(spaces.Discrete(2, start=3), [], None)
    features = encoder(torch.tensor([[0, 3, 4, 5]]))
    assert features[0].tolist() == [[0, 0], [1, 0], [0, 1], [0, 0]]


@pytest.mark.parametrize(
    "dtype", [torch.int32, torch.uint8, torch.uint16, torch.uint32, torch.uint64, torch.float32]
)
def test_discrete_in_any_dtype(dtype: torch.dtype) -> None:
    encoder = ObservationEncoder(spaces.MultiDiscrete([2, 3]), [], None)
    assert encoder(torch.tensor([[1, 2]], dtype=dtype)).tolist() == [[0, 1, 0, 0, 1]]


def test_double() -> None:
    space = spaces.Dict(a=FLAT["nested"], i=spaces.Box(0, 255, (7, 7, 1), np.uint8))
    encoder = ObservationEncoder(space, [8], "tanh", model_config=CONV).double()
    obs, _ = sample(space, (2, 3))
    assert encoder(obs).dtype == torch.float64


def test_copies_and_state_dict() -> None:
    space = FLAT["nested"]
    encoder = ObservationEncoder(space, [8], "tanh")
    obs, _ = sample(space, (2, 3))
    assert set(encoder.state_dict()) == {"mlp.0.weight", "mlp.0.bias"}
    for copied in (copy.deepcopy(encoder), pickle.loads(pickle.dumps(encoder))):
        torch.testing.assert_close(copied(obs), encoder(obs))


def test_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    space = FLAT["nested"]
    encoder = ObservationEncoder(space, [8], "tanh")
    obs, _ = sample(space, (2, 3))
    compiled = torch.compile(encoder, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(obs), encoder(obs))


@pytest.mark.parametrize(
    ("space", "message"),
    [
        (spaces.Text(3), r"The observation space is Text.*Supported are Box"),
        (spaces.Sequence(spaces.Discrete(2)), r"The observation space is Sequence"),
        (
            spaces.Dict(a=spaces.Tuple([spaces.Discrete(2), spaces.Text(3)])),
            r"The observation space at \['a'\]\[1\] is Text",
        ),
        (spaces.Box(0, 1, (7, 7, 3)), r"shape \(7, 7, 3\). Set `conv_filters`"),
        (spaces.Dict(), "no features to encode"),
        (spaces.Box(0, 1, (0,)), "no features to encode"),
    ],
)
def test_unsupported_spaces(space: gym.Space, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ObservationEncoder(space, [8], "tanh")


@pytest.mark.parametrize("name", [*ACTIVATIONS, None, "ReLU"])
def test_activations(name: str | None) -> None:
    net = mlp(3, [4, 4], name, output_dim=2)
    assert net(torch.randn(5, 3)).shape == (5, 2)
    linear = name in (None, "linear")
    assert len(net) == (3 if linear else 5)


def test_initialisation() -> None:
    net = mlp(16, [16], "relu", output_dim=4)
    torch.testing.assert_close(net[0].weight @ net[0].weight.T, torch.eye(16), atol=1e-5, rtol=0)
    assert 0.005 < net[2].weight.std() < 0.02
    assert not net[2].bias.any()


def test_mlp_errors_name_the_setting() -> None:
    with pytest.raises(ValueError, match=r"`head_fcnet_activation` is 'cubic'.*leaky_relu"):
        mlp(3, [4], "cubic", setting="head_fcnet")
    with pytest.raises(ValueError, match=r"`fcnet_hiddens` is \[4, 0\]"):
        mlp(3, [4, 0], "relu")
    with pytest.raises(ValueError, match=r"`fcnet_hiddens` is \[4\.0\]"):
        mlp(3, [4.0], "relu")  # pyright: ignore
