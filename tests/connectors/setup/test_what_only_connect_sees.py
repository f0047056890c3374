"""Algorithm, module class and model config together, as only `connect` knows them.

Kind of fault: combinations that trained something else than was asked for, or failed while the
algorithm was built with a message about something else.
"""

import dataclasses

import gymnasium as gym
import pytest
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect
from rlmodules import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    GTrXLConfig,
    MemoryConfig,
    MemoryQRLModule,
    MemoryRLModule,
    MemorySACRLModule,
)
from tests.connectors.helpers import BOX, DISCRETE, CountingRLModule

SMALL = {"max_seq_len": 8, "d_model": 8, "num_heads": 2, "head_dim": 4, "compile": False}
DEEP = DeepLinearAttentionConfig(**SMALL)
GTRXL = GTrXLConfig(**SMALL)
ALGORITHMS = [
    (PPOConfig, MemoryRLModule),
    (APPOConfig, MemoryRLModule),
    (IMPALAConfig, MemoryRLModule),
    (DQNConfig, MemoryQRLModule),
    (SACConfig, MemorySACRLModule),
    (BCConfig, MemoryRLModule),
    (MARWILConfig, MemoryRLModule),
]


class OwnRLModule(MemoryRLModule):
    pass


@dataclasses.dataclass(kw_only=True)
class OwnConfig(MemoryConfig):
    def build_memory(self, input_dim):
        raise NotImplementedError


def config_of(config_class=PPOConfig, **rl_module):
    config = config_class().environment("CartPole-v1")
    if config_class in (BCConfig, MARWILConfig):
        config.offline_data(
            input_=["nowhere"], input_read_episodes=True, dataset_num_iters_per_learner=1
        )
    return config.rl_module(**rl_module)


def two_agents(**rl_module):
    config = config_of(**rl_module)
    return config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda *_, **__: "a")


def module_of(config):
    """The module as RLlib builds it, on an EnvRunner or a Learner."""
    box = gym.spaces.Box(-1.0, 1.0, (2,))
    actions = box if isinstance(config, SACConfig) else DISCRETE
    return config.get_rl_module_spec(spaces={"default_policy": (BOX, actions)}).build()


# A memory's config alone.


@pytest.mark.parametrize(("config_class", "module_class"), ALGORITHMS)
@pytest.mark.parametrize(
    "rl_module",
    [
        pytest.param({"model_config": GTRXL}, id="config"),
        pytest.param({"model_config": {"memory": "gtrxl", **SMALL}}, id="dict"),
        pytest.param({"rl_module_spec": RLModuleSpec(model_config=GTRXL)}, id="spec"),
        pytest.param(
            {"rl_module_spec": RLModuleSpec(model_config={"memory": "gtrxl", **SMALL})},
            id="dict in spec",
        ),
        pytest.param(
            {"model_config": GTRXL, "rl_module_spec": RLModuleSpec()}, id="config beside spec"
        ),
    ],
)
def test_a_memorys_config_alone_gets_the_algorithms_module(config_class, module_class, rl_module):
    config = config_of(config_class, **rl_module)
    for _ in range(2):
        module = module_of(connect(config))
        assert type(module) is module_class
        assert module.memory_config == GTRXL


def test_several_agents_get_it_too():
    both = connect(two_agents(model_config=DEEP))
    assert both.rl_module_spec.module_class is MemoryRLModule
    specs = {
        "a": RLModuleSpec(model_config=DEEP),
        "b": RLModuleSpec(model_config=DefaultModelConfig()),
    }
    config = two_agents(rl_module_spec=MultiRLModuleSpec(rl_module_specs=dict(specs)))
    modules = connect(config).rl_module_spec
    assert modules["a"].module_class is MemoryRLModule
    assert modules["b"].module_class is DefaultPPOTorchRLModule
    # A policy without a spec has the config's.
    one = MultiRLModuleSpec(rl_module_specs={"a": RLModuleSpec(model_config=DEEP)})
    modules = connect(two_agents(model_config=DEEP, rl_module_spec=one)).rl_module_spec
    assert modules["a"].module_class is modules["b"].module_class is MemoryRLModule
    assert modules["b"].model_config == DEEP


@pytest.mark.parametrize(
    "rl_module",
    [
        {},
        {"model_config": {"fcnet_hiddens": [8]}},
        {"model_config": DefaultModelConfig(use_lstm=True, max_seq_len=8)},
        {"rl_module_spec": RLModuleSpec(model_config=DefaultModelConfig())},
        {
            "model_config": DEEP,
            "rl_module_spec": RLModuleSpec(model_config=DefaultModelConfig(use_lstm=True)),
        },
    ],
)
def test_rllibs_own_modules_stay(rl_module):
    assert connect(config_of(**rl_module)).rl_module_spec.module_class is DefaultPPOTorchRLModule


@pytest.mark.parametrize("module_class", [OwnRLModule, CountingRLModule])
def test_a_class_of_the_users_stays(module_class):
    spec = RLModuleSpec(module_class, model_config=DEEP)
    assert connect(config_of(rl_module_spec=spec)).rl_module_spec.module_class is module_class


def test_a_loaded_modules_config_is_read():
    module = module_of(connect(config_of(model_config=DEEP)))
    _, kwargs = module.get_ctor_args_and_kwargs()
    spec = RLModuleSpec(MemoryRLModule, model_config=kwargs["model_config"])
    assert module_of(connect(config_of(rl_module_spec=spec))).memory_config == DEEP


# What does not go together.


@pytest.mark.parametrize(
    ("config_class", "module_class", "right"),
    [
        (SACConfig, DeepLinearAttentionRLModule, "MemorySACRLModule"),
        (DQNConfig, MemoryRLModule, "MemoryQRLModule"),
        (PPOConfig, MemoryQRLModule, "MemoryRLModule"),
        (IMPALAConfig, MemorySACRLModule, "MemoryRLModule"),
        (BCConfig, MemoryQRLModule, "MemoryRLModule"),
    ],
)
def test_the_module_of_another_algorithm_is_refused(config_class, module_class, right):
    spec = RLModuleSpec(module_class, model_config=DEEP)
    message = f"`{module_class.__name__}`, which has no heads for a `{config_class.__name__}`.*"
    with pytest.raises(ValueError, match=f"{message}`{right}`"):
        connect(config_of(config_class, rl_module_spec=spec))


@pytest.mark.parametrize("shared", [True, False])
def test_the_config_of_another_memory_is_refused(shared):
    given = {"model_config": GTRXL}
    spec = RLModuleSpec(DeepLinearAttentionRLModule, **({} if shared else given))
    config = config_of(rl_module_spec=spec, **(given if shared else {}))
    message = "`GTrXLConfig`, but `DeepLinearAttentionRLModule` takes a `DeepLinearAttentionConfig`"
    with pytest.raises(ValueError, match=message):
        connect(config)


@pytest.mark.parametrize("shared", [True, False])
def test_rllibs_config_for_a_module_with_memory_is_refused(shared):
    given = {"model_config": DefaultModelConfig(use_lstm=True)}
    spec = RLModuleSpec(MemoryRLModule, **({"model_config": DEEP} if shared else given))
    config = config_of(rl_module_spec=spec, **(given if shared else {}))
    with pytest.raises(ValueError, match="RLlib's `DefaultModelConfig`, which describes no memory"):
        connect(config)


def test_two_memories_that_rllib_would_merge_are_refused():
    config = config_of(model_config=DEEP, rl_module_spec=RLModuleSpec(model_config=GTRXL))
    with pytest.raises(ValueError, match=r"`DeepLinearAttentionConfig` in `config.rl_module` and"):
        connect(config)


def test_a_config_of_ones_own_needs_a_class_of_ones_own():
    with pytest.raises(ValueError, match=r"`memory` is missing .*`config_class = MyConfig`"):
        connect(config_of(model_config=OwnConfig(max_seq_len=8)))


def test_a_class_in_the_place_of_a_config():
    with pytest.raises(TypeError, match=r"the class `PPOConfig`.*`connect\(PPOConfig\(\)\)`"):
        connect(PPOConfig)  # pyright: ignore[reportArgumentType]
