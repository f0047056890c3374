"""An encoder of one's own in front of the memory, for every kind of module."""

import gymnasium as gym
import pytest
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from torch import nn

from rlmodules import (
    DeepLinearAttentionRLModule,
    MemoryQRLModule,
    MemorySACRLModule,
)
from rlmodules.networks.encoders import ObservationEncoder

B, T = 3, 5
SPACE = gym.spaces.MultiDiscrete([7, 7])
BOX = gym.spaces.Box(-1.0, 1.0, (2,))
SMALL = {
    "memory": "deep_linear_attention",
    "max_seq_len": T,
    "d_model": 8,
    "num_heads": 2,
    "head_dim": 4,
    "feedforward_dim": 8,
}


class Tiles(nn.Module):
    """The mean of its tiles' embeddings."""

    output_dim = 6

    def __init__(self, num_tiles):
        super().__init__()
        self.embedding = nn.Embedding(num_tiles, self.output_dim)

    def forward(self, obs):
        return self.embedding(obs).mean(-2)


class SeesTiles:
    def build_encoder(self, config):
        return Tiles(int(self.observation_space.nvec.max()))


class TilesRLModule(SeesTiles, DeepLinearAttentionRLModule):
    pass


class TilesQRLModule(SeesTiles, MemoryQRLModule):
    pass


class TilesSACRLModule(SeesTiles, MemorySACRLModule):
    pass


KINDS = {
    "actor-critic": (TilesRLModule, gym.spaces.Discrete(3), {"core"}),
    "two memories": (TilesRLModule, gym.spaces.Discrete(3), {"core", "critic_core"}),
    "q": (TilesQRLModule, gym.spaces.Discrete(3), {"core"}),
    "sac": (TilesSACRLModule, BOX, {"qf_encoder"}),
    "sac, two memories": (TilesSACRLModule, BOX, {"qf_encoder", "pi_encoder"}),
}


def build(kind):
    module_class, action_space, cores = KINDS[kind]
    return RLModuleSpec(
        module_class=module_class,
        observation_space=SPACE,
        action_space=action_space,
        model_config={**SMALL, "vf_share_layers": len(cores) == 1},
    ).build()


def batch_of(module, num_steps=T):
    state = tree.map_structure(lambda x: x.expand(B, *x.shape), module.get_initial_state())
    generator = torch.Generator().manual_seed(0)
    return {
        Columns.OBS: torch.randint(7, (B, num_steps, 2), generator=generator),
        Columns.ACTIONS: torch.zeros(B, num_steps, 2),
        Columns.STATE_IN: state,
        Columns.SEQ_LENS: torch.tensor([num_steps, 2, 1]),
    }


@pytest.mark.parametrize("kind", KINDS)
def test_every_module_takes_it(kind, tmp_path):
    module = build(kind)
    assert not any(isinstance(part, ObservationEncoder) for part in module.modules())
    module.make_target_networks()
    batch = batch_of(module)

    outputs = module.forward_train(batch)
    if Columns.EMBEDDINGS in outputs:
        outputs["values"] = module.compute_values(batch, outputs[Columns.EMBEDDINGS])
    sum(x.sum() for x in outputs.values() if x.requires_grad).backward()
    for core in KINDS[kind][2]:
        assert getattr(module, core).encoder.embedding.weight.grad.any(), core

    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    module.save_to_path(tmp_path)
    restored = type(module).from_checkpoint(tmp_path)
    tree.map_structure(
        torch.testing.assert_close,
        restored.forward_inference(batch),
        module.forward_inference(batch),
    )
