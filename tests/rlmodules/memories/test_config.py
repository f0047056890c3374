"""The config dataclasses: keys, values, JSON, documentation."""

import ast
import dataclasses
import inspect
import json
import textwrap

import pytest
from gymnasium import spaces
from ray import tune
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from rlmodules import (
    DeepLinearAttentionConfig,
    DeepLinearAttentionRLModule,
    GTrXLConfig,
    LinearAttentionConfig,
    POPGymLinearAttentionConfig,
)
from rlmodules.modules.catalogue import CONFIGS as CONFIGS_BY_NAME

CONFIGS = list(CONFIGS_BY_NAME.values())
PRESETS = [
    LinearAttentionConfig,
    DeepLinearAttentionConfig,
    GTrXLConfig,
    POPGymLinearAttentionConfig,
    POPGymLinearAttentionConfig.deep,
]


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("max_seq_length", "Did you mean `max_seq_len`?"),
        ("num_layer", "Did you mean `num_layers`?"),
        ("fcnet_hidden", "Did you mean `fcnet_hiddens`?"),
        ("qqq", "Known keys: ['action_mask', 'compile', 'conv_activation'"),
    ],
)
def test_unknown_key(key, hint):
    with pytest.raises(ValueError, match=f"`{key}` is no setting of DeepLinear") as error:
        DeepLinearAttentionConfig.from_dict({"max_seq_len": 8, key: 1})
    assert hint in str(error.value)


@pytest.mark.parametrize("space", [tune.grid_search([8, 16]), tune.choice([8, 16])])
def test_search_spaces_are_refused(space):
    with pytest.raises(ValueError, match="`d_model` is a search space"):
        DeepLinearAttentionConfig(max_seq_len=8, d_model=space)


def test_unknown_key_in_a_module():
    with pytest.raises(ValueError, match="Did you mean `num_heads`"):
        RLModuleSpec(
            module_class=DeepLinearAttentionRLModule,
            observation_space=spaces.Discrete(2),
            action_space=spaces.Discrete(2),
            model_config={"max_seq_len": 8, "n_heads": 2},
        ).build()


@pytest.mark.parametrize(
    "algorithm_config",
    [PPOConfig, APPOConfig, IMPALAConfig, BCConfig, MARWILConfig, DQNConfig, SACConfig],
)
@pytest.mark.parametrize("config_class", CONFIGS)
def test_keys_of_algorithms_are_ignored(algorithm_config, config_class):
    injected = algorithm_config()._model_config_auto_includes
    config = config_class.from_dict({**injected, "max_seq_len": 8, "vf_share_layers": True})
    assert config == config_class(max_seq_len=8)


def test_max_seq_len_is_missing():
    with pytest.raises(ValueError, match="`max_seq_len` is missing in the model config of Linear"):
        LinearAttentionConfig.from_dict({"d_model": 8})


@pytest.mark.parametrize("value", [0, -1, 2.5, "8", None, True])
def test_max_seq_len_is_wrong(value):
    with pytest.raises(ValueError, match=r"`max_seq_len` is .*, but must be an integer of"):
        LinearAttentionConfig(max_seq_len=value)


@pytest.mark.parametrize("value", ["yes", 2, None])
def test_compile_is_wrong(value):
    with pytest.raises(ValueError, match=r"`compile` is .*, but must be 'auto' or True or False"):
        LinearAttentionConfig(max_seq_len=8, compile=value)


@pytest.mark.parametrize("preset", PRESETS, ids=lambda preset: preset.__qualname__)
def test_json(preset):
    config = preset(max_seq_len=8)
    copied = type(config).from_dict(json.loads(json.dumps(dataclasses.asdict(config))))
    assert copied == config


def test_presets_can_be_changed():
    config = POPGymLinearAttentionConfig.deep(max_seq_len=8, num_layers=2, fcnet_hiddens=[16])
    assert (config.positions, config.num_layers, config.fcnet_hiddens) == ("none", 2, [16])
    assert POPGymLinearAttentionConfig.deep(max_seq_len=8).fcnet_hiddens == [128]


def test_presets_share_no_lists():
    first = POPGymLinearAttentionConfig(max_seq_len=8)
    first.head_fcnet_hiddens.append(3)
    assert POPGymLinearAttentionConfig(max_seq_len=8).head_fcnet_hiddens == [128, 128]


@pytest.mark.parametrize("config_class", CONFIGS)
def test_every_field_is_documented(config_class):
    """A docstring under each field that the class adds, which the documentation shows."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(config_class)))
    body = tree.body[0].body
    fields = [i for i, node in enumerate(body) if isinstance(node, ast.AnnAssign)]
    assert fields
    for i in fields:
        below = body[i + 1] if i + 1 < len(body) else None
        assert isinstance(below, ast.Expr), body[i].target.id
        assert isinstance(below.value, ast.Constant), body[i].target.id
        assert isinstance(below.value.value, str), body[i].target.id


@pytest.mark.parametrize("config_class", CONFIGS)
def test_no_field_changes_the_meaning_of_an_inherited_one(config_class):
    own = config_class.__annotations__
    for base in config_class.__mro__[1:]:
        inherited = getattr(base, "__annotations__", {})
        # Other defaults are welcome; the constant that names the memory is each one's own.
        changed = {key for key in own.keys() & inherited.keys() if own[key] != inherited[key]}
        assert changed <= {"memory"}
