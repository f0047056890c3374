"""Positions: equal to popgym's where it has an answer, and an answer for every other step."""

import pytest
import torch
from popgym.baselines.models import embeddings
from torch import nn

from rlmodules.memories.positions import POSITIONS, PositionalEncoding, rotate, rotation

L = 64
TRAINED = {"learned", "scaled_sine", "perceptron", "time2vec"}


def popgym_encoding(name: str, length: int, size: int) -> nn.Module:
    """What popgym's `BaseModel.setup_embedding` builds."""
    if name in ("learned", "fixed"):
        return nn.Embedding(length, size)
    if name == "sine":
        return nn.Embedding.from_pretrained(embeddings.positional_encoding(length, size))
    if name == "scaled_sine":
        table = embeddings.positional_encoding(length, size)
        return embeddings.ScaledPositionalEncoding.from_pretrained(table)
    classes = {
        "simple_scaled": embeddings.SimpleScaledEncoding,
        "perceptron": embeddings.PerceptronEmbedding,
        "base2": embeddings.Base2Embedding,
        "time2vec": embeddings.Time2Vec,
    }
    return classes[name](length, size)


def copy_weights(source: nn.Module, target: nn.Module) -> None:
    """popgym's weights -> ours."""
    names = {"weight": "table"} if isinstance(source, nn.Embedding) else {}
    if isinstance(source, embeddings.ScaledPositionalEncoding):
        names = {"a": "weight"}
    if isinstance(source, embeddings.PerceptronEmbedding):
        names = {"lin.weight": "weight"}
    if isinstance(source, embeddings.Time2Vec):
        names = {"net.weight": "weight", "net.bias": "bias"}
    ours = target.state_dict()
    theirs = source.state_dict()
    target.load_state_dict(
        {new: theirs[old].reshape(ours[new].shape) for old, new in names.items() if new in ours}
    )


def steps(*values: int) -> torch.Tensor:
    return torch.tensor([values])


@pytest.mark.parametrize("length", [64, 1024])
@pytest.mark.parametrize("name", POSITIONS)
def test_equals_popgym(name: str, length: int) -> None:
    size = 20
    theirs = popgym_encoding(name, length, size)
    module = PositionalEncoding(name, size, length)
    copy_weights(theirs, module.encoding)
    t = torch.arange(length).repeat(2, 1)
    x = torch.randn(2, length, size)
    encoding = theirs(t).reshape(2, length, size)
    # popgym multiplies steps and frequencies in float32, which is off by up to 6e-8 of the angle.
    tolerance = {"atol": 1e-7 * length, "rtol": 1e-5}
    torch.testing.assert_close(module.encoding(t), encoding, **tolerance)
    torch.testing.assert_close(module(x, t), 0.5 * x + 0.5 * encoding, **tolerance)
    plain = PositionalEncoding(name, size, length, learn_scale=False)
    plain.load_state_dict(module.state_dict(), strict=False)
    torch.testing.assert_close(plain(x, t), x + encoding, **tolerance)


@pytest.mark.parametrize("mode", ["add", "cat"])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 70])
@pytest.mark.parametrize("name", POSITIONS)
def test_any_step_and_width(name: str, size: int, mode: str) -> None:
    module = PositionalEncoding(name, size, L, mode=mode)
    t = steps(0, L - 1, L, 100_000, 2**40)
    x = torch.randn(1, 5, size)
    y = module(x, t)
    assert y.shape == (1, 5, module.output_dim)
    assert module.output_dim == (size if mode == "add" else 2 * size)
    assert y.dtype == torch.float32
    assert y.isfinite().all()
    encoding = module.encoding(t)
    # Nothing grows with the length of an episode.
    assert encoding.abs().max() < max(8, 2 * L)
    if mode == "cat":
        torch.testing.assert_close(y, torch.cat([0.5 * x, 0.5 * encoding], -1))


@pytest.mark.parametrize("name", ["learned", "fixed", "simple_scaled"])
def test_last_entry_serves_later_steps(name: str) -> None:
    encoding = PositionalEncoding(name, 8, L).encoding(steps(L - 1, L, 100_000))[0]
    torch.testing.assert_close(encoding[1], encoding[0])
    torch.testing.assert_close(encoding[2], encoding[0])


@pytest.mark.parametrize("name", ["sine", "perceptron", "time2vec"])
def test_angles_are_exact_at_large_steps(name: str) -> None:
    module = PositionalEncoding(name, 8, L).encoding
    t = steps(1_000_003)
    if name == "sine":
        angle = 1_000_003 * L ** (-torch.arange(0, 8, 2).double() / 8)
        expected = torch.stack([angle.sin(), angle.cos()], -1).flatten()
    else:
        bias = module.bias.double() if name == "time2vec" else 0.0
        expected = (1_000_003 * module.weight.double() + bias).sin()
    skip = 1 if name == "time2vec" else 0
    torch.testing.assert_close(module(t)[0, 0, skip:].double(), expected[skip:], atol=1e-5, rtol=0)


def test_base2_holds_every_bit() -> None:
    bits = PositionalEncoding("base2", 70, L).encoding(steps(100_000, 2**40))[0].long()
    assert sum(int(bit) << i for i, bit in enumerate(bits[0, :63])) == 100_000
    assert sum(int(bit) << i for i, bit in enumerate(bits[1, :63])) == 2**40
    assert not bits[:, 63:].any()


def test_base2_of_few_bits_repeats() -> None:
    encoding = PositionalEncoding("base2", 3, L).encoding(steps(5, 13))[0]
    assert encoding.tolist() == [[1, 0, 1], [1, 0, 1]]


@pytest.mark.parametrize("mode", ["add", "cat"])
@pytest.mark.parametrize("name", POSITIONS)
def test_gradients(name: str, mode: str) -> None:
    module = PositionalEncoding(name, 8, L, mode=mode, size=6)
    x = torch.randn(2, 3, 8, requires_grad=True)
    t = torch.tensor([[0, 1, 2], [5, L - 1, 3 * L]])
    (module(x, t) * torch.randn(2, 3, module.output_dim)).sum().backward()
    assert x.grad is not None
    assert x.grad.ne(0).all()
    trained = dict(module.named_parameters())
    assert set(trained) - {"scale"} == (
        {k for k in trained if k.startswith("encoding.")} if name in TRAINED else set()
    )
    assert (len(trained) > 1) == (name in TRAINED)
    for parameter in trained.values():
        assert parameter.grad is not None
        assert parameter.grad.ne(0).any()


def test_narrow_encoding_leaves_the_other_features() -> None:
    module = PositionalEncoding("learned", 6, L, size=2)
    x, t = torch.randn(2, 3, 6), torch.arange(3).repeat(2, 1)
    y = module(x, t)
    torch.testing.assert_close(y[..., 2:], 0.5 * x[..., 2:])
    torch.testing.assert_close(y[..., :2], 0.5 * (x[..., :2] + module.encoding(t)))


@pytest.mark.parametrize(("value", "clamped"), [(-0.5, 0.0), (0.3, 0.3), (1.5, 1.0)])
def test_scale_is_clamped_and_never_stuck(value: float, clamped: float) -> None:
    module = PositionalEncoding("fixed", 4, L)
    with torch.no_grad():
        module.scale.fill_(value)
    x, t = torch.randn(1, 3, 4), steps(0, 1, 2)
    y = module(x, t)
    torch.testing.assert_close(y, x * (1 - clamped) + clamped * module.encoding(t))
    y.square().sum().backward()
    assert module.scale.grad.ne(0).all()
    assert module.scale.item() == pytest.approx(value), "the forward pass wrote to the parameter"


def test_half_precision_features_keep_their_dtype() -> None:
    for name in POSITIONS:
        module = PositionalEncoding(name, 8, L)
        x, t = torch.randn(1, 2, 8), steps(3, 1_000_003)
        y = module(x.bfloat16(), t)
        assert y.dtype == torch.bfloat16
        torch.testing.assert_close(y.float(), module(x, t), atol=0.05, rtol=0.05)


@pytest.mark.parametrize("mode", ["add", "cat"])
@pytest.mark.parametrize("name", POSITIONS)
def test_compiles_without_a_graph_break(name: str, mode: str) -> None:
    torch._dynamo.reset()
    x, t = torch.randn(2, 3, 6), torch.tensor([[0, 1, 2], [70, 71, 72]])
    module = PositionalEncoding(name, 6, L, mode=mode)
    compiled = torch.compile(module, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, t), module(x, t))


def turned(x: torch.Tensor, t: torch.Tensor, base: float = 10_000.0) -> torch.Tensor:
    dtype = torch.promote_types(x.dtype, torch.float32)
    return rotate(x, rotation(t, x.shape[-1], base, dtype))


def test_rotary_compiles_without_a_graph_break() -> None:
    torch._dynamo.reset()
    x, t = torch.randn(2, 4, 3, 6), torch.tensor([[0, 1, 2], [70, 71, 72]])
    compiled = torch.compile(turned, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, t), turned(x, t))


def test_an_encoding_that_is_added_must_fit() -> None:
    with pytest.raises(ValueError, match="`position_size` is 9, but must be at most 8"):
        PositionalEncoding("sine", 8, L, size=9)


@pytest.mark.parametrize("start", [0, 63, 1_000_000, 2**40])
def test_rotary_products_depend_on_the_distance_only(start: int) -> None:
    q, k = torch.randn(2, 2, 3, 8, 16).double()
    t = torch.arange(8).expand(2, 8)
    here = turned(q, t) @ turned(k, t).transpose(-1, -2)
    there = turned(q, t + start) @ turned(k, t + start).transpose(-1, -2)
    # float64 holds the angle of a step of 2**40 to 1e-4 of a turn.
    torch.testing.assert_close(there, here, atol=1e-2 if start == 2**40 else 1e-8, rtol=0)
    in_float32 = turned(q.float(), t + start) @ turned(k.float(), t + start).transpose(-1, -2)
    torch.testing.assert_close(in_float32, there.float(), atol=1e-4, rtol=0)


def test_rotary_is_a_rotation() -> None:
    x, t = torch.randn(2, 3, 4, 6), torch.tensor([[0, 1, 2, 3], [9, 99, 999, 10**6]])
    y = turned(x, t, base=100.0)
    torch.testing.assert_close(y[0, :, 0], x[0, :, 0], msg="step 0 turns nothing")
    torch.testing.assert_close(y.norm(dim=-1), x.norm(dim=-1))
    angle = torch.tensor(99 * 100.0 ** (-2 / 6))
    expected = x[1, :, 1, 1] * angle.cos() - x[1, :, 1, 4] * angle.sin()
    torch.testing.assert_close(y[1, :, 1, 1], expected, atol=1e-5, rtol=1e-4)


def test_rotary_gradient_and_dtypes() -> None:
    x = torch.randn(1, 2, 3, 4).double().requires_grad_()
    t = torch.tensor([[0, 7, 10**6]])
    assert torch.autograd.gradcheck(lambda x: turned(x, t), (x,))
    assert turned(x.bfloat16(), t).dtype == torch.bfloat16
