"""Action masks: impossible actions stay impossible, all numbers stay finite, no value changes."""

import numpy as np
import pytest
import torch
from gymnasium import spaces
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.target_network_api import TARGET_NETWORK_ACTION_DIST_INPUTS
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from rlmodules.networks.heads import action_dist_class
from rlmodules.networks.masks import ActionMask

B, T = 4, 6
BOX = spaces.Box(-1.0, 1.0, (3,), np.float32)
ACTIONS = {"discrete": (spaces.Discrete(4), [4]), "multi": (spaces.MultiDiscrete([3, 2]), [3, 2])}


def masked_space(num_actions, mask=None):
    return spaces.Dict(observations=BOX, action_mask=mask or spaces.MultiBinary(num_actions))


def random_masks(sizes, *lead):
    masks = [torch.rand(*lead, size) < 0.5 for size in sizes]
    for mask, size in zip(masks, sizes, strict=True):
        mask.scatter_(-1, torch.randint(size, (*lead, 1)), True)
    return torch.cat(masks, dim=-1).to(torch.int8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("kind", ACTIONS)
def test_distributions(kind, dtype):
    space, sizes = ACTIONS[kind]
    mask = ActionMask("action_mask", masked_space(sum(sizes)), space)
    allowed = random_masks(sizes, B, T)
    raw = (40 * torch.randn(B, T, sum(sizes))).to(dtype).requires_grad_()
    logits = mask.apply(raw, {"action_mask": allowed})
    assert logits.dtype == dtype
    dist = action_dist_class(space).from_logits(logits)
    other = action_dist_class(space).from_logits(mask.apply(raw + 1, {"action_mask": allowed}))
    for _ in range(20):
        actions = dist.sample().reshape(B, T, len(sizes))
        offset = 0
        for component, size in enumerate(sizes):
            part = allowed[..., offset : offset + size]
            assert part.gather(-1, actions[..., component : component + 1].long()).all()
            offset += size
    # Each component's probabilities: a softmax over what is allowed.
    expected = raw.detach().masked_fill(allowed == 0, -torch.inf)
    for part, reference in zip(
        logits.detach().split(sizes, -1), expected.split(sizes, -1), strict=True
    ):
        torch.testing.assert_close(part.softmax(-1), reference.softmax(-1))
    loss = dist.entropy() + dist.kl(other) + dist.logp(dist.sample())
    assert loss.isfinite().all()
    loss.sum().backward()
    assert raw.grad.isfinite().all()
    assert raw.grad[allowed == 0].eq(0).all()


def test_a_step_that_allows_nothing_keeps_its_logits():
    mask = ActionMask("action_mask", masked_space(5), ACTIONS["multi"][0])
    logits = torch.randn(2, 5)
    masks = torch.tensor([[0, 0, 0, 1, 0], [0, 0, 0, 0, 0]])
    masked = mask.apply(logits, {"action_mask": masks})
    assert masked[0, :4].equal(logits[0, :4])
    assert masked[0, 4] < -1e30
    assert masked[1].equal(logits[1])


@pytest.fixture(params=[True, False], ids=["one memory", "two memories"])
def module(request):
    torch.manual_seed(0)
    return RLModuleSpec(
        module_class=DeepLinearAttentionRLModule,
        observation_space=masked_space(4),
        action_space=ACTIONS["discrete"][0],
        model_config=DeepLinearAttentionConfig(
            max_seq_len=T,
            action_mask="action_mask",
            d_model=8,
            vf_share_layers=request.param,
            compile=False,
        ),
    ).build()


def batch_of(module, masks):
    generator = torch.Generator().manual_seed(1)
    observations = torch.rand(B, T, 3, generator=generator)
    return {
        Columns.OBS: {"observations": observations, "action_mask": masks},
        Columns.STATE_IN: _expand(module.get_initial_state()),
        Columns.SEQ_LENS: torch.tensor([T, 1, 3, T]),
    }


def _expand(state):
    if isinstance(state, dict):
        return {name: _expand(leaf) for name, leaf in state.items()}
    return state.expand(B, *state.shape)


def test_every_pass_is_masked_and_nothing_else_sees_the_mask(module):
    module.make_target_networks()
    masks = random_masks([4], B, T)
    batch, open_batch = batch_of(module, masks), batch_of(module, torch.ones_like(masks))
    valid = torch.arange(T) < batch[Columns.SEQ_LENS][:, None]
    outputs = module.forward_train(batch)
    inference, without = module.forward_inference(batch), module.forward_inference(open_batch)
    target = module.forward_target(batch)[TARGET_NETWORK_ACTION_DIST_INPUTS]
    logits = outputs[Columns.ACTION_DIST_INPUTS]
    for other in (inference[Columns.ACTION_DIST_INPUTS], target):
        torch.testing.assert_close(other, logits)
    forbidden = valid[..., None] & (masks == 0)
    assert forbidden.any()
    assert logits[forbidden].lt(-1e30).all()
    kept = without[Columns.ACTION_DIST_INPUTS]
    torch.testing.assert_close(logits[~forbidden], kept[~forbidden])
    torch.testing.assert_close(inference[Columns.STATE_OUT], without[Columns.STATE_OUT])
    torch.testing.assert_close(module.compute_values(batch), module.compute_values(open_batch))
    torch.testing.assert_close(
        module.compute_values(batch, embeddings=outputs[Columns.EMBEDDINGS]),
        module.compute_values(batch),
    )


def test_padding_without_a_mask(module):
    batch = batch_of(module, random_masks([4], B, T))
    padding = torch.arange(T) >= batch[Columns.SEQ_LENS][:, None]
    batch[Columns.OBS]["action_mask"][padding] = 0
    batch[Columns.OBS]["observations"][padding] = torch.nan
    dist = module.get_train_action_dist_cls().from_logits(
        module.forward_train(batch)[Columns.ACTION_DIST_INPUTS]
    )
    loss = dist.entropy() + dist.logp(torch.zeros(B, T))
    assert loss.isfinite().all()
    loss[~padding].sum().backward()
    gradients = [p.grad for p in module.parameters() if p.grad is not None]
    assert gradients
    assert all(gradient.isfinite().all() for gradient in gradients)


@pytest.mark.parametrize(
    ("observation_space", "action_space", "message"),
    [
        (BOX, spaces.Discrete(4), r"is no Dict with that key.*MultiBinary\(4\)"),
        (spaces.Dict(mask=BOX), spaces.Discrete(4), "is no Dict with that key"),
        (masked_space(3), spaces.Discrete(4), r"MultiBinary\(3\) there.* of shape \(4,\)"),
        (masked_space(3), spaces.MultiDiscrete([3, 2]), r"of shape \(5,\)"),
        # What a filter makes of a Box from 0 to 1.
        (masked_space(4, spaces.Box(-10, 10, (4,))), spaces.Discrete(4), "from 0 to 1"),
        (masked_space(4, spaces.Discrete(4)), spaces.Discrete(4), r"has Discrete\(4\) there"),
        (spaces.Dict(action_mask=spaces.MultiBinary(4)), spaces.Discrete(4), "holds nothing else"),
        (masked_space(4), BOX, "`action_mask` is set, but the action space is Box"),
    ],
)
def test_wrong_spaces(observation_space, action_space, message):
    with pytest.raises(ValueError, match=message):
        RLModuleSpec(
            module_class=DeepLinearAttentionRLModule,
            observation_space=observation_space,
            action_space=action_space,
            model_config={"max_seq_len": T, "action_mask": "action_mask"},
        ).build()


@pytest.mark.parametrize(
    "mask",
    [spaces.MultiBinary(4), spaces.Box(0, 1, (4,), np.int8)],
    ids=str,
)
def test_spaces_of_masks(mask):
    encoded = ActionMask("action_mask", masked_space(4, mask), spaces.Discrete(4)).encoded_space
    assert encoded == spaces.Dict(observations=BOX)
