"""Memories by name: one module class an algorithm builds whatever memory its config names."""

import dataclasses

import pytest
from gymnasium import spaces
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect
from rlmodules import (
    GTrXLConfig,
    GTrXLRLModule,
    MemoryQRLModule,
    MemoryRLModule,
    MemorySACRLModule,
)
from rlmodules.memories import GTrXL, MemoryConfig
from rlmodules.modules.catalogue import CONFIGS
from tests.envs import RandomObservations

MODULES = {
    MemoryRLModule: spaces.Discrete(2),
    MemoryQRLModule: spaces.Discrete(2),
    MemorySACRLModule: spaces.Box(-1.0, 1.0, (2,)),
}
SMALL = {"max_seq_len": 8, "compile": False}


def build(model_config, module_class=MemoryRLModule):
    return RLModuleSpec(
        module_class=module_class,
        observation_space=spaces.Discrete(3),
        action_space=MODULES.get(module_class, spaces.Discrete(2)),
        model_config=model_config,
    ).build()


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("module_class", MODULES)
@pytest.mark.parametrize("form", [lambda config: config, dataclasses.asdict], ids=["class", "dict"])
def test_every_name_builds_its_memory(name, module_class, form):
    config = CONFIGS[name](**SMALL)
    assert config.memory == name
    assert build(form(config), module_class).memory_config == config


def test_a_dict_needs_the_name_alone():
    module = build({"memory": "gtrxl", "max_seq_len": 64})
    assert isinstance(module.core.memory, GTrXL)
    assert module.memory_config == GTrXLConfig(max_seq_len=64)


@pytest.mark.parametrize(
    ("model_config", "message"),
    [
        ({"memory": "gtrlx"}, r"`memory` is 'gtrlx', .* Did you mean 'gtrxl'\?"),
        ({"memory": "GTrXL"}, r"`memory` is 'GTrXL', .* Did you mean 'gtrxl'\?"),
        ({"memory": "zzz"}, "`memory` is 'zzz', .* Use one of 'linear_attention', "),
        ({"memory": None}, "`memory` is None, which is the name of no memory"),
        ({}, "`memory` is missing in the model config"),
        ({"memory": "gtrxl", "num_layer": 2}, "Did you mean `num_layers`"),
    ],
)
def test_names_that_there_are_not(model_config, message):
    with pytest.raises(ValueError, match=message):
        build({"max_seq_len": 8, **model_config})


def test_a_named_class_takes_no_other_memory():
    with pytest.raises(ValueError, match="`memory` is 'linear_attention', but must be 'gtrxl'"):
        build({"memory": "linear_attention", "max_seq_len": 8}, GTrXLRLModule)
    # Its own name may be there or not.
    assert build({"max_seq_len": 8}, GTrXLRLModule).memory_config == GTrXLConfig(max_seq_len=8)


@dataclasses.dataclass(kw_only=True)
class OwnConfig(MemoryConfig):
    width: int = 8

    def build_memory(self, input_dim):
        return GTrXLConfig(max_seq_len=self.max_seq_len, d_model=self.width).build_memory(input_dim)


class OwnRLModule(MemoryRLModule):
    config_class = OwnConfig


def test_a_memory_of_ones_own_needs_only_a_config_class():
    assert build(OwnConfig(max_seq_len=8), OwnRLModule).core.memory.output_dim == 8
    with pytest.raises(ValueError, match="A config of your own needs a module class"):
        build(OwnConfig(max_seq_len=8))


@pytest.mark.ray
@pytest.mark.parametrize(
    ("base", "module_class", "model_config"),
    [
        (PPOConfig, MemoryRLModule, GTrXLConfig(max_seq_len=8, memory_inference=6)),
        (PPOConfig, MemoryRLModule, {"memory": "gtrxl", "max_seq_len": 8}),
        (DQNConfig, MemoryQRLModule, GTrXLConfig(max_seq_len=8, memory_inference=6)),
        (DQNConfig, MemoryQRLModule, {"memory": "linear_attention", "max_seq_len": 8}),
    ],
)
def test_trains_an_iteration(base, module_class, model_config):
    config = base().environment(RandomObservations).env_runners(num_env_runners=0)
    config.rl_module(
        rl_module_spec=RLModuleSpec(module_class=module_class, model_config=model_config)
    )
    if base is PPOConfig:
        config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1)
    else:
        config.training(num_steps_sampled_before_learning_starts=0)
        config.reporting(min_sample_timesteps_per_iteration=32)
    algo = connect(config).build_algo()
    assert algo.train()["num_env_steps_sampled_lifetime"] > 0
    algo.stop()


@pytest.mark.ray
def test_connect_knows_the_names():
    config = PPOConfig().environment(RandomObservations)
    spec = RLModuleSpec(
        module_class=MemoryRLModule, model_config={"memory": "gtrlx", "max_seq_len": 8}
    )
    with pytest.raises(ValueError, match="Did you mean 'gtrxl'"):
        connect(config.rl_module(rl_module_spec=spec))
