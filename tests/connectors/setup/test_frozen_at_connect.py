"""What is read from a config when RLlib builds, and what must not change after `connect`.

Kind of fault: settings that were taken over at `connect`, so that a trial's, an evaluation's or a
restored checkpoint's own value did not count, and settings changed later broke what was arranged.
"""

import copy
import functools
import pickle
from types import SimpleNamespace

import gymnasium as gym
import pytest
from ray import tune
from ray.rllib.algorithms.algorithm import Algorithm
from ray.rllib.algorithms.algorithm_config import AlgorithmConfig
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.ppo_torch_learner import PPOTorchLearner
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env import make_multi_agent
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.tune.search.variant_generator import generate_variants

from connectors import MemoryPPOTorchLearner, connect
from connectors.setup.connect import ARRANGED
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.connectors.helpers import BOX, DISCRETE, CountingTargetRLModule

SPACES = {"__env_single__": (BOX, gym.spaces.Box(-2.0, 2.0, (1,)))}
T = 16
TwoCartPoles = make_multi_agent("CartPole-v1")


def counting(max_seq_len=T):
    return RLModuleSpec(CountingTargetRLModule, model_config={"max_seq_len": max_seq_len})


def config_of(config_class=PPOConfig):
    config = config_class().environment("CartPole-v1").rl_module(rl_module_spec=counting())
    if config_class is MARWILConfig:
        config.offline_data(
            input_=["nowhere"], input_read_episodes=True, dataset_num_iters_per_learner=1
        )
    return config


def two_agents():
    config = config_of().environment(TwoCartPoles, env_config={"num_agents": 2})
    return config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda agent, *_, **__: "a")


def trials(config):
    """Configs as Tune builds an Algorithm's from a search over another."""
    variants = generate_variants(config.to_dict())
    return [type(config).from_dict(variant) for _, variant in variants]


def build_all(config):
    """Builds the pipelines as RLlib's EnvRunners and Learners do, from a copy."""
    config = config.copy(copy_frozen=False)
    return (
        config.build_env_to_module_connector(spaces=SPACES, device="cpu"),
        config.build_module_to_env_connector(spaces=SPACES),
        config.build_learner_connector(BOX, DISCRETE),
    )


def flags(config):
    """`normalize_actions` and `clip_actions` of the piece that formats actions."""
    _, kwargs = build_all(config)[1].connectors[-1].get_ctor_args_and_kwargs()
    return kwargs["normalize_actions"], kwargs["clip_actions"]


# The config that a builder reads.


def test_a_trials_own_flags_count():
    config = config_of().environment(
        normalize_actions=tune.grid_search([True, False]), clip_actions=tune.grid_search([False])
    )
    assert {flags(trial) for trial in trials(connect(config))} == {(True, False), (False, False)}


def test_flags_set_after_connect_count():
    config = connect(config_of())
    assert flags(config) == (True, False)
    assert flags(config.environment(normalize_actions=False, clip_actions=True)) == (False, True)


@pytest.mark.parametrize(
    "evaluation", [{"normalize_actions": False}, PPOConfig.overrides(normalize_actions=False)]
)
def test_evaluations_own_flags_count(evaluation):
    config = connect(config_of()).evaluation(evaluation_config=evaluation)
    assert flags(config.get_evaluation_config_object()) == (False, False)
    assert flags(config) == (True, False)


def test_an_evaluation_config_of_its_own_is_read():
    evaluation = connect(config_of()).environment(normalize_actions=False)
    config = connect(config_of()).evaluation(evaluation_config=evaluation)
    assert flags(config) == (True, False)
    assert flags(config.get_evaluation_config_object()) == (False, False)


@pytest.mark.parametrize(
    "carry",
    [
        copy.deepcopy,
        lambda config: config.copy(copy_frozen=True),
        lambda config: pickle.loads(pickle.dumps(config)),
        # What `Algorithm` does, and what it does with a checkpoint.
        lambda config: AlgorithmConfig.from_state(config.get_state()),
        lambda config: AlgorithmConfig.from_state(pickle.loads(pickle.dumps(config.get_state()))),
        lambda config: PPOConfig.from_dict(config.to_dict()),
    ],
)
def test_builders_read_the_config_that_they_were_carried_into(carry):
    carried = carry(connect(config_of())).copy(copy_frozen=False)
    for name in ("_env_to_module_connector", "_module_to_env_connector", "_learner_connector"):
        assert getattr(carried, name).config is carried
    assert flags(carried.environment(normalize_actions=False)) == (False, False)


def test_modules_and_policies_of_the_time_are_mapped():
    config = connect(two_agents())
    # What `Algorithm.add_module` does.
    config.policies = dict.fromkeys(("a", "b", "c"))
    specs = {module_id: counting() for module_id in "abc"}
    config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
    spaces = gym.spaces.Dict({"x": BOX, "y": BOX})
    pipeline = config.copy(copy_frozen=False).build_env_to_module_connector(
        spaces={"__env_single__": (spaces, gym.spaces.Dict({"x": DISCRETE, "y": DISCRETE}))}
    )
    assert set(pipeline.observation_space.spaces) == {"a", "b", "c"}


def test_replay_is_made_for_the_module_of_the_time():
    for config in (config_of(DQNConfig), config_of(SACConfig)):
        connect(config)
        config.rl_module(rl_module_spec=counting(5)).debugging(seed=3)
        build_all(config)
        algorithm = SimpleNamespace(config=config)
        config.callbacks_on_algorithm_init[0](algorithm=algorithm)
        assert algorithm.local_replay_buffer.batch_length_T == 5


@pytest.mark.parametrize("config_class", [DQNConfig, SACConfig])
def test_replay_in_trials(config_class):
    config = config_of(config_class).debugging(seed=tune.grid_search([1, 2]))
    for trial in trials(connect(config)):
        algorithm = SimpleNamespace(config=trial)
        trial.callbacks_on_algorithm_init[0](algorithm=algorithm)
        # RLlib looks for a name in it: a class, which Tune makes of a path, is an error.
        assert trial.replay_buffer_config["type"] == "EpisodeReplayBuffer"
    assert len(trials(config)) == 2


@pytest.mark.ray
def test_a_league_is_restored():
    def to_main_and(other):
        return lambda agent_id, episode, **kwargs: "main" if agent_id == 0 else other

    specs = {"main": counting(8), "opp0": counting(8)}
    config = (
        PPOConfig()
        .environment(TwoCartPoles, env_config={"num_agents": 2})
        .env_runners(num_env_runners=0, rollout_fragment_length=20)
        .training(train_batch_size_per_learner=20, minibatch_size=20, num_epochs=1)
        .multi_agent(policies=set(specs), policy_mapping_fn=to_main_and("opp0"))
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
        .debugging(log_sys_usage=False)
    )
    algorithm, restored = connect(config).build_algo(), None
    try:
        new = RLModuleSpec.from_module(algorithm.get_module("main"))
        algorithm.add_module("opp1", new, new_agent_to_module_mapping_fn=to_main_and("opp1"))
        algorithm.train()
        path = algorithm.save_to_path()
        restored = Algorithm.from_checkpoint(path)
        assert set(restored.env_runner.module.keys()) == {"main", "opp0", "opp1"}
        weights = restored.learner_group.get_weights()
        for module_id, saved in algorithm.learner_group.get_weights().items():
            for name, value in saved.items():
                assert (weights[module_id][name] == value).all()
        results = restored.train()
        assert results["env_runners"]["num_module_steps_sampled"].keys() == {"main", "opp1"}
    finally:
        algorithm.stop()
        if restored is not None:
            restored.stop()


# Search spaces.


class Other(MemoryPPOTorchLearner):
    pass


@pytest.mark.parametrize(
    ("config_class", "setting", "good", "bad", "message"),
    [
        (PPOConfig, "minibatch_size", 32, 8, "`minibatch_size` is 8, but must be at least 16"),
        (PPOConfig, "num_learners", 2, None, None),
        (PPOConfig, "learner_class", Other, PPOTorchLearner, "it is `PPOTorchLear"),
        (PPOConfig, "learner_class", Other, IMPALATorchLearner, "`IMPALATorchLearner`, which lack"),
        (PPOConfig, "episode_lookback_horizon", 20, None, None),
        (PPOConfig, "train_batch_size_per_learner", 400, None, None),
        (PPOConfig, "rollout_fragment_length", 40, None, None),
        (PPOConfig, "batch_mode", "truncate_episodes", None, None),
        (PPOConfig, "seed", 3, None, None),
        (APPOConfig, "minibatch_size", 50, 16, "`minibatch_size` is 16, but must be at least 17"),
        (APPOConfig, "num_learners", 1, None, None),
        (IMPALAConfig, "num_envs_per_env_runner", 2, None, None),
        (DQNConfig, "n_step", 3, 16, "`n_step` is 16"),
        (DQNConfig, "noisy", False, True, "`noisy` is True"),
        (DQNConfig, "burn_in_len", 3, -1, "`burn_in_len` is -1"),
        (DQNConfig, "num_learners", 2, None, None),
        (DQNConfig, "episode_lookback_horizon", 5, None, None),
        (SACConfig, "n_step", 1, 2, "`n_step` is 2"),
        (SACConfig, "num_learners", 2, None, None),
        (MARWILConfig, "burnin_len", 0, 3, "`burnin_len` is 3"),
        (MARWILConfig, "bc_logstd_coeff", 0.0, 0.1, "`bc_logstd_coeff` is 0.1"),
        (MARWILConfig, "beta", 0.0, None, None),
        (MARWILConfig, "num_learners", 2, None, None),
        (MARWILConfig, "dataset_num_iters_per_learner", 2, None, None),
    ],
)
def test_each_trial_checks_its_own_value(config_class, setting, good, bad, message):
    config = config_of(config_class)
    if setting == "rollout_fragment_length":
        config.training(minibatch_size=32)
    elif config_class is APPOConfig:
        config.env_runners(rollout_fragment_length=50)
    name = "_learner_class" if setting == "learner_class" else setting
    setattr(config, name, tune.grid_search([good] if bad is None else [good, bad]))
    first, *others = trials(connect(config))
    assert getattr(first, setting) == good
    build_all(first)
    for trial in others:
        with pytest.raises(ValueError, match=message):
            build_all(trial)


def test_several_learners_in_a_search_keep_the_lookback_that_one_of_them_needs():
    config = config_of().learners(num_learners=tune.choice([0, 2]))
    assert connect(config).episode_lookback_horizon == T
    config = config_of().learners(num_learners=2)
    config.env_runners(episode_lookback_horizon=tune.grid_search([T, 1]))
    enough, short = trials(connect(config))
    build_all(enough)
    with pytest.raises(
        ValueError, match=r"`episode_lookback_horizon` was .* it is 1, but must be 16"
    ):
        build_all(short)


def test_trials_of_two_agents():
    config = two_agents().learners(num_learners=tune.grid_search([0, 2]))
    config.env_runners(env_runner_cls=type("Own", (MultiAgentEnvRunner,), {}))
    one, several = trials(connect(config))
    assert build_learner(one)
    with pytest.raises(ValueError, match="`env_runner_cls` is `Own`"):
        build_learner(several)


def build_learner(config):
    return config.copy(copy_frozen=False)._learner_connector(BOX, DISCRETE)


@pytest.mark.parametrize(
    "setting",
    [
        "_rl_module_spec",
        "_model_config",
        "_env_to_module_connector",
        "_module_to_env_connector",
        "_learner_connector",
        "add_default_connectors_to_learner_pipeline",
        "env_runner_cls",
        "callbacks_on_algorithm_init",
        "callbacks_on_checkpoint_loaded",
        "replay_buffer_config",
        "output",
        "offline_data_class",
        "policies",
        "prelearner_class",
        "offline_eval_runner_class",
        "offline_evaluation_type",
        "materialize_data",
        "materialize_mapped_data",
        "torch_ddp_kwargs",
    ],
)
def test_what_has_to_be_known_is_refused_in_a_search(setting):
    name = setting.removeprefix("_")
    for space in (tune.choice([1, 2]), tune.grid_search([1, 2])):
        config = config_of()
        setattr(config, setting, space)
        with pytest.raises(ValueError, match=f"found a search space in `{name}`"):
            connect(config)


def test_a_search_over_buffers_is_refused():
    config = config_of(DQNConfig)
    config.replay_buffer_config["type"] = tune.choice(["EpisodeReplayBuffer"])
    with pytest.raises(ValueError, match=r"found a search space in `replay_buffer_config\['type'"):
        connect(config)


def test_specs_are_searched_after_connect():
    config = connect(config_of().training(minibatch_size=32))
    config.rl_module(rl_module_spec=tune.grid_search([counting(8), counting(33)]))
    # As an Algorithm without a local EnvRunner does, whose config is no copy.
    (first, second) = trials(config)
    first.build_env_to_module_connector(spaces=SPACES, device="cpu")
    build_all(first)
    with pytest.raises(ValueError, match="`minibatch_size` is 32, but must be at least 33"):
        build_all(second)


# Changes between `connect` and the build.


def no_pieces(*args):
    return []


def nothing(**kwargs):
    pass


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("_env_to_module_connector", no_pieces),
        ("_module_to_env_connector", no_pieces),
        ("_learner_connector", no_pieces),
        ("_learner_connector", None),
        ("add_default_connectors_to_env_to_module_pipeline", True),
        ("add_default_connectors_to_module_to_env_pipeline", True),
        ("_learner_class", PPOTorchLearner),
        ("_learner_class", None),
        ("callbacks_on_checkpoint_loaded", nothing),
        ("episode_lookback_horizon", 3),
    ],
)
def test_what_connect_set_is_verified(setting, value):
    config = config_of().learners(num_learners=2).training(minibatch_size=32)
    build_all(connect(config))
    setattr(config, setting, value)
    pattern = f"`{setting.removeprefix('_')}` was changed after `connect`"
    with pytest.raises(ValueError, match=pattern):
        build_all(config)
    build_all(connect(config))


def test_what_connect_set_for_replay_is_verified():
    for setting, value in (
        ("callbacks_on_algorithm_init", nothing),
        ("replay_buffer_config", {"type": "EpisodeReplayBuffer", "capacity": 10}),
    ):
        config = connect(config_of(DQNConfig))
        setattr(config, setting, value)
        with pytest.raises(ValueError, match=f"`{setting}` was changed after"):
            build_all(config)


def test_what_connect_set_for_recorded_episodes_is_verified():
    for setting, value in (
        ("offline_data_class", None),
        ("torch_ddp_kwargs", {}),
    ):
        config = config_of(MARWILConfig).learners(num_learners=2)
        config.beta = 0.0
        setattr(connect(config), setting, value)
        with pytest.raises(ValueError, match=f"`{setting}` was changed after"):
            build_all(config)


def test_settings_that_decide_are_verified():
    config = connect(config_of().training(minibatch_size=32)).learners(num_learners=2)
    with pytest.raises(
        ValueError, match=r"`episode_lookback_horizon` was .* it is 1, but must be 16"
    ):
        build_all(config)
    config = connect(config_of()).training(minibatch_size=8)
    with pytest.raises(ValueError, match="`minibatch_size` is 8"):
        build_all(config)
    config = connect(config_of(), episodes_per_trial=2).env_runners(batch_mode="complete_episodes")
    with pytest.raises(ValueError, match="`episodes_per_trial` is 2"):
        build_all(config)
    config = connect(config_of()).multi_agent(policies={"a"}, policy_mapping_fn=lambda *_: "a")
    with pytest.raises(ValueError, match=r"`env_runner_cls` was .* it is None"):
        build_learner(config)
    spec = RLModuleSpec(model_config=DeepLinearAttentionConfig(max_seq_len=8))
    config = connect(config_of()).rl_module(rl_module_spec=spec)
    with pytest.raises(ValueError, match="it is `DefaultPPOTorchRLModule`, but"):
        build_all(config)
    build_all(connect(config))


def test_evaluation_keeps_the_connectors():
    config = connect(config_of(), episodes_per_trial=2)
    build_all(config.get_evaluation_config_object())
    config.evaluation(evaluation_config={"_env_to_module_connector": no_pieces})
    with pytest.raises(ValueError, match=r"`env_to_module_connector` was changed after"):
        build_all(config.get_evaluation_config_object())


class Callback:
    """As `functools.partial`, equal to itself alone and not to its copies."""

    def __call__(self, **kwargs):
        pass


@pytest.mark.parametrize("config_class", [PPOConfig, DQNConfig])
@pytest.mark.parametrize("callback", [Callback(), functools.partial(print)], ids=["own", "partial"])
def test_callbacks_that_equal_no_copy_are_no_change(config_class, callback):
    config = config_of(config_class).callbacks(
        on_algorithm_init=callback, on_checkpoint_loaded=[callback, callback]
    )
    build_all(connect(config))
    build_all(pickle.loads(pickle.dumps(config)))


@pytest.mark.parametrize(
    "config_class", [PPOConfig, APPOConfig, IMPALAConfig, DQNConfig, SACConfig, MARWILConfig]
)
def test_all_that_connect_sets_is_verified(config_class):
    config = config_of(config_class).learners(num_learners=1)
    config.rl_module(
        rl_module_spec=RLModuleSpec(CountingTargetRLModule, model_config={"max_seq_len": 8})
    )
    before = dict(vars(config.copy()))
    changed = {name for name, value in vars(connect(config)).items() if before[name] != value}
    # The module's spec by its class, the Learner's class by the property.
    assert changed - {"_rl_module_spec", "_learner_class"} <= set(ARRANGED)


@pytest.mark.ray
def test_the_algorithm_says_what_was_changed():
    spec = RLModuleSpec(
        DeepLinearAttentionRLModule,
        model_config=DeepLinearAttentionConfig(max_seq_len=8, d_model=8, num_heads=2, head_dim=4),
    )
    config = config_of().env_runners(num_env_runners=0).rl_module(rl_module_spec=spec)
    connect(config).learners(learner_connector=no_pieces)
    with pytest.raises(ValueError, match=r"`learner_connector` was changed after"):
        config.build_algo()
