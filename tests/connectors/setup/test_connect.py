"""`connect`: what it plugs in, keeps, and refuses."""

import pickle

import gymnasium as gym
import pytest
from ray import tune
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import EnvToModulePipeline
from ray.rllib.connectors.module_to_env import (
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    NormalizeAndClipActions,
    UnBatchToIndividualItems,
)
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.examples.rl_modules.classes.lstm_containing_rlm import LSTMContainingRLModule

from connectors import (
    BuildModuleBatch,
    BuildTrainBatch,
    FormatActions,
    MemoryLearnerMixin,
    MemoryPPOTorchLearner,
    SampleActions,
    connect,
)
from connectors.rollout.build_module_batch import MapSpaces
from connectors.setup import module_specs
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule, MemoryRLModule
from tests.connectors.helpers import BOX, DISCRETE, CountingRLModule, lstm_config

SPACES = {"__env_single__": (BOX, DISCRETE)}


class First(ConnectorV2):
    def __call__(self, *, batch, **kwargs):
        return batch


class Second(First):
    pass


def first_and_second(*args):
    return [First(), Second()]


def only_env(env):
    return First()


def a_pipeline(env, spaces, device):
    return EnvToModulePipeline(connectors=[BuildModuleBatch(), First()])


def kinds(pipeline):
    return [type(piece) for piece in pipeline.connectors]


def pipelines(config):
    return (
        kinds(config.build_env_to_module_connector(spaces=SPACES, device="cpu")),
        kinds(config.build_module_to_env_connector(spaces=SPACES)),
        kinds(config.build_learner_connector(BOX, DISCRETE)),
    )


@pytest.mark.parametrize("times", [1, 2])
def test_plugs_in(times):
    config = lstm_config(8)
    for _ in range(times):
        assert connect(config) is config
    env_to_module, module_to_env, learner = pipelines(config)
    assert env_to_module == [BuildModuleBatch]
    assert module_to_env == [SampleActions, FormatActions]
    assert learner[0] is BuildTrainBatch
    assert learner.count(BuildTrainBatch) == 1
    assert config.learner_class is MemoryPPOTorchLearner


@pytest.mark.parametrize("times", [1, 2])
def test_keeps_connectors_of_the_user(times):
    config = (
        lstm_config(8)
        .env_runners(
            env_to_module_connector=first_and_second, module_to_env_connector=first_and_second
        )
        .learners(learner_connector=first_and_second)
    )
    for _ in range(times):
        connect(config)
    env_to_module, module_to_env, learner = pipelines(config)
    assert env_to_module == [First, Second, BuildModuleBatch]
    assert module_to_env == [
        SampleActions,
        UnBatchToIndividualItems,
        First,
        Second,
        NormalizeAndClipActions,
        ListifyDataForVectorEnv,
    ]
    assert learner[:3] == [First, Second, BuildTrainBatch]


def test_keeps_the_order_of_a_builder_that_returns_our_pieces():
    config = (
        lstm_config(8)
        .env_runners(
            env_to_module_connector=lambda *_: [First(), BuildModuleBatch(), Second()],
            module_to_env_connector=lambda *_: [SampleActions(), First()],
        )
        .learners(learner_connector=lambda *_: [BuildTrainBatch(), First()])
    )
    env_to_module, module_to_env, learner = pipelines(connect(config))
    assert env_to_module == [First, BuildModuleBatch, Second]
    assert module_to_env == [SampleActions, First]
    assert learner[:2] == [BuildTrainBatch, First]
    config.env_runners(env_to_module_connector=a_pipeline)
    assert pipelines(connect(config))[0] == [EnvToModulePipeline]


def test_accepts_builders_of_earlier_ray_versions():
    config = lstm_config(8).env_runners(
        env_to_module_connector=only_env, module_to_env_connector=only_env
    )
    env_to_module, module_to_env, _ = pipelines(connect(config))
    assert env_to_module == [First, BuildModuleBatch]
    assert module_to_env[2] is First


def test_builder_errors_are_not_hidden():
    def broken(env, spaces, device):
        raise TypeError("a bug of the user, missing 1 required positional argument")

    config = connect(lstm_config(8).env_runners(env_to_module_connector=broken))
    with pytest.raises(TypeError):
        config._env_to_module_connector(None, None, None)


def test_builder_that_returns_no_connector():
    config = connect(lstm_config(8).learners(learner_connector=lambda *_: 3))
    with pytest.raises(ValueError, match="`learner_connector` returned a int"):
        config.build_learner_connector(BOX, DISCRETE)


def test_private_attributes_of_ray():
    # `connect` reads these three; there is no public getter in Ray 2.60.
    config = AlgorithmConfig()
    config.env_runners(env_to_module_connector=only_env, module_to_env_connector=a_pipeline)
    config.learners(learner_connector=first_and_second)
    assert config._env_to_module_connector is only_env
    assert config._module_to_env_connector is a_pipeline
    assert config._learner_connector is first_and_second
    config.rl_module(model_config={"a": 1})
    assert config._model_config == {"a": 1}


def test_builders_are_picklable():
    config = connect(lstm_config(8).env_runners(env_to_module_connector=first_and_second))
    for builder in (
        config._env_to_module_connector,
        config._module_to_env_connector,
        config._learner_connector,
    ):
        assert pickle.loads(pickle.dumps(builder)) == builder
    copied = config.copy(copy_frozen=False)
    assert pipelines(copied)[0] == [First, Second, BuildModuleBatch]


def counting_config(**model_config):
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .rl_module(rl_module_spec=RLModuleSpec(CountingRLModule, model_config=model_config))
    )


def test_max_seq_len_is_missing():
    with pytest.raises(ValueError, match="`max_seq_len` is missing"):
        connect(counting_config())
    # RLlib reads the config's `model_config` too.
    config = counting_config()
    config.rl_module(
        model_config={"max_seq_len": 16}, rl_module_spec=RLModuleSpec(CountingRLModule)
    )
    connect(config)


@pytest.mark.parametrize("value", [0, -3, 2.5, "8", None, True])
def test_max_seq_len_is_wrong(value):
    with pytest.raises(ValueError, match=r"`max_seq_len` is .*, but must be an integer"):
        connect(counting_config(max_seq_len=value))


def test_module_without_memory_needs_no_max_seq_len():
    connect(PPOConfig().environment("CartPole-v1").rl_module(model_config={"fcnet_hiddens": [8]}))


class Derived(DefaultPPOTorchRLModule):
    """Of a user: RLlib's module, without a memory unless the config asks for an LSTM."""


@pytest.mark.parametrize(
    ("module_class", "model_config", "row_lengths"),
    [
        (Derived, {"fcnet_hiddens": [8]}, {}),
        (Derived, {"use_lstm": True, "max_seq_len": 7}, {"default_policy": 7}),
        (LSTMContainingRLModule, {"max_seq_len": 5}, {"default_policy": 5}),
    ],
)
def test_modules_derived_from_rllibs(module_class, model_config, row_lengths):
    spec = RLModuleSpec(module_class=module_class, model_config=model_config)
    config = PPOConfig().environment("CartPole-v1").rl_module(rl_module_spec=spec)
    assert module_specs.row_lengths(config) == row_lengths


def test_minibatch_size():
    config = counting_config(max_seq_len=64).training(minibatch_size=63)
    with pytest.raises(ValueError, match="`minibatch_size` is 63, but must be at least 64"):
        connect(config)
    connect(config.training(minibatch_size=64))
    connect(config.training(minibatch_size=None))
    with pytest.raises(ValueError, match="`minibatch_size` is None, but must be a number with 2"):
        connect(config.learners(num_learners=2))


def test_algorithm():
    with pytest.raises(ValueError, match="`connect` got a `AlgorithmConfig`, but supports"):
        connect(AlgorithmConfig())


class PolicyOnlyRLModule(TorchRLModule):
    pass


def several_agents(specs, **model_config):
    config = PPOConfig().multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda *_: "a")
    return config.rl_module(model_config=model_config, rl_module_spec=specs)


def counting(max_seq_len):
    return RLModuleSpec(CountingRLModule, model_config={"max_seq_len": max_seq_len})


def multi(**specs):
    return MultiRLModuleSpec(rl_module_specs=specs)


@pytest.mark.parametrize(
    ("specs", "expected"),
    [
        pytest.param(counting(8), {"a": 8, "b": 8}, id="one spec for all"),
        pytest.param(multi(a=counting(8), b=counting(4)), {"a": 8, "b": 4}, id="one each"),
        pytest.param(multi(a=counting(8)), {"a": 8, "b": 16}, id="default"),
        pytest.param(multi(a=counting(8), c=counting(3)), {"a": 8, "b": 16, "c": 3}, id="more"),
    ],
)
def test_row_lengths_of_several_modules(specs, expected):
    shared = {"use_lstm": True, "max_seq_len": 16}
    assert module_specs.row_lengths(several_agents(specs, **shared)) == expected


def test_modules_without_memory_among_several():
    specs = multi(a=counting(8), b=RLModuleSpec(model_config={"use_lstm": False}))
    assert module_specs.row_lengths(several_agents(specs)) == {"a": 8}


def test_settings_of_several_modules_are_checked():
    with pytest.raises(ValueError, match=r"`max_seq_len` is 0, .* row of `b`"):
        connect(several_agents(multi(a=counting(8), b=counting(0))))
    config = several_agents(multi(a=counting(8), b=counting(64))).training(minibatch_size=63)
    with pytest.raises(ValueError, match="`minibatch_size` is 63"):
        connect(config)
    wrong = RLModuleSpec(DeepLinearAttentionRLModule, model_config={"max_seq_length": 8})
    with pytest.raises(ValueError, match="`max_seq_length` is no setting"):
        connect(several_agents(multi(a=counting(8), b=wrong)))
    plain = RLModuleSpec(DeepLinearAttentionRLModule, model_config={"max_seq_len": 8})
    config = connect(several_agents(multi(a=counting(8), b=plain)))
    assert config.rl_module_spec["b"].model_config == DeepLinearAttentionConfig(max_seq_len=8)


def test_several_modules_for_a_single_agent():
    with pytest.raises(ValueError, match="has the modules `a`, but the config has a single agent"):
        connect(lstm_config(8).rl_module(rl_module_spec=multi(a=counting(8))))
    model = RLModuleSpec(PolicyOnlyRLModule, learner_only=True)
    specs = multi(default_policy=counting(8), model=model)
    connect(lstm_config(8).rl_module(rl_module_spec=specs))


@pytest.mark.parametrize("times", [1, 2])
def test_plugs_into_a_config_of_several_agents(times):
    config = several_agents(multi(a=counting(8), b=counting(4))).env_runners(
        module_to_env_connector=first_and_second
    )
    for _ in range(times):
        connect(config)
    spaces = {
        "__env_single__": tuple(
            gym.spaces.Dict({"x": space, "y": space}) for space in (BOX, DISCRETE)
        )
    }
    env_to_module = config.build_env_to_module_connector(spaces=spaces, device="cpu")
    assert kinds(env_to_module) == [BuildModuleBatch, MapSpaces]
    # RLlib builds the modules with these spaces.
    assert env_to_module.observation_space == gym.spaces.Dict({"a": BOX, "b": BOX})
    assert env_to_module.action_space == gym.spaces.Dict({"a": DISCRETE, "b": DISCRETE})
    assert kinds(config.build_module_to_env_connector(spaces=spaces)) == [
        SampleActions,
        UnBatchToIndividualItems,
        ModuleToAgentUnmapping,
        First,
        Second,
        NormalizeAndClipActions,
        ListifyDataForVectorEnv,
    ]


def test_default_pieces_of_the_learner_are_needed():
    config = lstm_config(8).learners(add_default_connectors_to_learner_pipeline=False)
    with pytest.raises(ValueError, match="`add_default_connectors_to_learner_pipeline` is False"):
        connect(config)


def test_learner_class():
    class Foreign(PPOTorchLearner):
        pass

    class Derived(MemoryLearnerMixin, Foreign):
        pass

    class ForeignConfig(PPOConfig):
        def get_default_learner_class(self):
            return Foreign

    with pytest.raises(ValueError, match="`learner_class` is `Foreign`"):
        connect(ForeignConfig())
    with pytest.raises(ValueError, match=r"`learner_class` is `Foreign`.*`MemoryPPOTorchLearner`"):
        connect(lstm_config(8).learners(learner_class=Foreign))
    assert connect(lstm_config(8).learners(learner_class=Derived)).learner_class is Derived


def test_several_learners_keep_enough_lookback():
    assert connect(lstm_config(8)).episode_lookback_horizon == 1
    assert connect(lstm_config(8).learners(num_learners=2)).episode_lookback_horizon == 8


def configured(model_config, shared=None):
    config = PPOConfig().environment("CartPole-v1")
    if shared is not None:
        config.rl_module(model_config=shared)
    return config.rl_module(
        rl_module_spec=RLModuleSpec(DeepLinearAttentionRLModule, model_config=model_config)
    )


def test_plain_dict_is_checked_by_the_module_config_class():
    config = connect(configured({"max_seq_len": 16}))
    expected = DeepLinearAttentionConfig(max_seq_len=16)
    assert config.rl_module_spec.model_config == expected
    assert connect(config).rl_module_spec.model_config == expected
    config = connect(configured(None, shared={"max_seq_len": 24}))
    assert config.rl_module_spec.model_config == DeepLinearAttentionConfig(max_seq_len=24)
    with pytest.raises(ValueError, match=r"`max_seq_length` is no setting"):
        connect(configured({"max_seq_length": 16}))
    given = DeepLinearAttentionConfig(max_seq_len=5)
    assert connect(configured(given)).rl_module_spec.model_config is given


@pytest.mark.ray
def test_trains():
    config = connect(lstm_config(8))
    algorithm = config.build_algo()
    try:
        result = algorithm.train()
    finally:
        algorithm.stop()
    learner = result["learners"]
    assert learner["__all_modules__"]["memory"]["num_nonfinite_gradients"] == 0
    assert learner["default_policy"]["memory"]["num_stale_rows"] == 0
    assert learner["default_policy"]["memory"]["num_rebuilt_rows"] == 0


@pytest.mark.parametrize("own", [None, True, False])
@pytest.mark.parametrize("pack_rows", [True, False])
def test_rows_are_packed_where_nobody_says_no(own, pack_rows):
    config = lstm_config(4).training(minibatch_size=256)
    if own is not None:
        given = BuildTrainBatch(pack_rows=own)
        config.learners(learner_connector=lambda *_: given)
    connect(config, pack_rows=pack_rows)
    piece = config._learner_connector(BOX, DISCRETE)[0]
    assert piece.pack_rows == (pack_rows and own is not False)
    assert piece.minibatch_size == 256


def test_packing_is_on_or_off():
    with pytest.raises(ValueError, match="`pack_rows` is 64, but must be True or False"):
        connect(lstm_config(4), pack_rows=64)


def searching(**spaces):
    model_config = {"memory": "gru", "max_seq_len": 8, "d_model": 16, **spaces}
    return PPOConfig().environment("CartPole-v1").rl_module(model_config=model_config)


def test_a_models_settings_may_be_search_spaces():
    """With the memory's defaults beside them: RLlib's own would be those of the algorithm."""
    space = tune.grid_search([8, 16])
    config = connect(connect(searching(d_model=space)))
    assert config.rl_module_spec.module_class is MemoryRLModule
    assert config._model_config["d_model"] is space
    assert config._model_config["vf_share_layers"] is True
    trial = config.copy(copy_frozen=False)
    trial.rl_module(model_config={**config._model_config, "d_model": 8})
    module = trial.get_rl_module_spec(env=gym.make("CartPole-v1")).build()
    assert (module.memory_config.d_model, module.memory_config.vf_share_layers) == (8, True)
    assert len(pipelines(trial)) == 3


@pytest.mark.parametrize(
    ("spaces", "message"),
    [
        (
            {"max_seq_len": tune.choice([8, 16])},
            "`max_seq_len` is a search space, .* needs a value",
        ),
        ({"memory": tune.choice(["gru", "lstm"])}, "`memory` is a search space, .* needs a value"),
        ({"d_modle": tune.choice([8, 16])}, "`d_modle` is no setting of GRUConfig"),
        ({"d_model": tune.choice([8]), "num_layers": "2"}, "`num_layers` is '2', but must be"),
    ],
)
def test_searches_that_cannot_be(spaces, message):
    with pytest.raises(ValueError, match=message):
        connect(searching(**spaces))


def test_a_trial_checks_what_it_drew():
    config = connect(searching(d_model=tune.choice([0])))
    trial = config.copy(copy_frozen=False)
    trial.rl_module(model_config={**config._model_config, "d_model": 0})
    with pytest.raises(ValueError, match="`d_model` is 0, but must be"):
        pipelines(trial)
