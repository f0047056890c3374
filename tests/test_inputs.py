"""What else a policy with memory may be given, in real PPO runs: the Learner sees what the
EnvRunner saw (see `tests/test_parity.py`)."""

import gymnasium as gym
import numpy as np
import pytest
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import AddPreviousActionsRewards, connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.envs import SampledObservations
from tests.test_parity import SMALL, RecordingLearner

pytestmark = pytest.mark.ray

NUM_ENVS = 3
FRAGMENT = 19
BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
FRAME = gym.spaces.Box(-1.0, 1.0, (4, 3, 1), np.float32)


def make_config(observation_space=BOX, *, env=SampledObservations, settings=None, **env_config):
    return (
        PPOConfig()
        .environment(env, env_config={"observation_space": observation_space, **env_config})
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=NUM_ENVS,
            rollout_fragment_length=FRAGMENT,
        )
        .learners(num_learners=0, learner_class=RecordingLearner)
        .training(
            train_batch_size_per_learner=NUM_ENVS * FRAGMENT,
            minibatch_size=None,
            num_epochs=1,
            lr=0.01,
        )
        .rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=DeepLinearAttentionRLModule,
                model_config=DeepLinearAttentionConfig(
                    max_seq_len=8, **{**SMALL, **(settings or {})}
                ),
            )
        )
        .debugging(seed=0, log_sys_usage=False)
    )


def train(config, *, connected=True, iterations=3):
    """Trains, checks that each update's first log-probabilities are those of the rollout, and
    returns the Learner with its batches."""
    algorithm = (connect(config) if connected else config).build_algo()
    try:
        learner = algorithm.learner_group._learner
        for _ in range(iterations):
            algorithm.train()
    finally:
        algorithm.stop()
    assert len(learner.errors) == iterations
    assert max(learner.errors) <= 1e-5
    assert min(learner.errors_without_state[1:]) > 1e-5
    return learner


@pytest.mark.parametrize(
    ("space", "settings"),
    [
        pytest.param(gym.spaces.Dict(b=BOX, a=gym.spaces.Discrete(3, start=1)), {}, id="dict"),
        pytest.param(
            gym.spaces.Tuple((gym.spaces.MultiDiscrete([2, 3]), gym.spaces.Dict(x=BOX))),
            {},
            id="tuple",
        ),
        pytest.param(
            gym.spaces.Box(0, 255, (6, 6, 3), np.uint8),
            {"conv_filters": [[4, 3, 2], [4, 3, 1]]},
            id="image",
        ),
        pytest.param(gym.spaces.Box(-1.0, 1.0, (2, 3), np.float64), {}, id="two axes"),
        pytest.param(gym.spaces.Discrete(5), {}, id="integer"),
    ],
)
def test_observation_spaces(space, settings):
    train(make_config(space, settings=settings))


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "rllib"])
@pytest.mark.parametrize(
    "action_space",
    [gym.spaces.Discrete(4), gym.spaces.MultiDiscrete([3, 2])],
    ids=["discrete", "multi-discrete"],
)
def test_action_masks(action_space, connected):
    """The environment raises on an action that its mask forbids."""
    config = make_config(
        action_space=action_space, action_mask=True, settings={"action_mask": "action_mask"}
    )
    learner = train(config, connected=connected)
    for batch in learner.batches:
        for column in (Columns.ACTION_LOGP, Columns.ADVANTAGES):
            assert batch[column][batch[Columns.LOSS_MASK]].isfinite().all()
    module = learner.module["default_policy"]
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.parametrize(
    "action_space",
    [
        gym.spaces.Discrete(3),
        gym.spaces.Dict(
            move=gym.spaces.MultiDiscrete([2, 3]), arm=gym.spaces.Box(-0.1, 0.1, (2,), np.float32)
        ),
    ],
    ids=["discrete", "dict"],
)
def test_previous_actions_and_rewards(action_space):
    config = make_config(action_space=action_space).env_runners(
        env_to_module_connector=lambda env, spaces, device: AddPreviousActionsRewards()
    )
    learner = train(config)
    observations = learner.batches[-1][Columns.OBS]
    assert set(observations) == {"observations", "previous_action", "previous_reward"}
    assert observations["previous_reward"].abs().max() > 0.5


def test_previous_actions_with_masks():
    config = make_config(
        action_space=gym.spaces.Discrete(4),
        action_mask=True,
        settings={"action_mask": "action_mask"},
    ).env_runners(env_to_module_connector=lambda env, spaces, device: AddPreviousActionsRewards())
    train(config)


@pytest.mark.parametrize("connected", [True, False], ids=["connected", "rllib"])
def test_filtered_observations(connected):
    config = make_config().env_runners(
        env_to_module_connector=lambda env, spaces, device: MeanStdFilter()
    )
    train(config, connected=connected)


def test_stacked_frames():
    """RLlib's piece for the Learner stacks the frames again, as episodes hold single ones."""
    config = (
        make_config(FRAME, settings={"conv_filters": []})
        .env_runners(
            env_to_module_connector=lambda env, spaces, device: FrameStackingEnvToModule(
                num_frames=3
            ),
            episode_lookback_horizon=2,
        )
        .learners(
            learner_connector=lambda observation_space, action_space: FrameStackingLearner(
                num_frames=3
            )
        )
    )
    learner = train(config)
    assert learner.batches[-1][Columns.OBS].shape[2:] == (4, 3, 3)


def test_policy_without_exploration():
    """Log-probabilities of the most likely action are 0 by RLlib's definition."""
    config = make_config().env_runners(explore=False)
    algorithm = connect(config).build_algo()
    try:
        algorithm.train()
        learner = algorithm.learner_group._learner
    finally:
        algorithm.stop()
    batch = learner.batches[0]
    mask = batch[Columns.LOSS_MASK]
    best = batch[Columns.ACTION_DIST_INPUTS].argmax(-1)
    assert batch[Columns.ACTIONS][mask].equal(best[mask])
    assert batch[Columns.ACTION_LOGP][mask].eq(0).all()


@pytest.mark.parametrize(
    "num_env_runners",
    [pytest.param(0, id="local"), pytest.param(1, id="remote", marks=pytest.mark.slow)],
)
def test_evaluation(num_env_runners):
    config = make_config().evaluation(
        evaluation_interval=1,
        evaluation_num_env_runners=num_env_runners,
        evaluation_duration=4,
        evaluation_config=PPOConfig.overrides(explore=False),
    )
    algorithm = connect(config).build_algo()
    try:
        learner = algorithm.learner_group._learner
        for _ in range(2):
            result = algorithm.train()
    finally:
        algorithm.stop()
    evaluated = result["evaluation"]["env_runners"]
    assert evaluated["num_episodes"] >= 4
    assert evaluated["episode_len_mean"] > 0
    # Sampling for training is not disturbed.
    assert max(learner.errors) <= 1e-5


def set_task(algorithm, result, **kwargs):
    """A curriculum: each iteration has a task of its own."""

    def change(env_runner):
        env_runner.env.unwrapped.call("set_task", result["training_iteration"])

    algorithm.env_runner_group.foreach_env_runner(change)


def test_curriculum():
    """Tasks change while episodes are running; their states go on."""
    learner = train(make_config().callbacks(on_train_result=set_task))
    for iteration, batch in enumerate(learner.batches):
        rewards = batch[Columns.REWARDS][batch[Columns.LOSS_MASK]]
        assert rewards.floor().ge(iteration).all()
        assert rewards.max() < iteration + 1.5
