"""Sampling with our connectors gives the episodes that RLlib's own give, states included."""

import copy
from functools import partial

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.connectors.module_to_env import ListifyDataForVectorEnv, NormalizeAndClipActions
from ray.rllib.connectors.module_to_env.unbatch_to_individual_items import (
    UnBatchToIndividualItems,
)
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.spaces.space_utils import batch as stack_items

from connectors import BuildModuleBatch, FormatActions, SampleActions, StateSnapshot, connect
from tests.connectors.helpers import (
    BOX,
    DISCRETE,
    CountingRLModule,
    assert_same_batch,
    lstm_config,
)

pytestmark = pytest.mark.ray
T = 4


class ShortEnv(gym.Env):
    """Random observations; the episode's length is drawn at its start, both kinds of ends occur."""

    observation_space = BOX
    action_space = DISCRETE

    steps_until_failure = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.t = 0
        self.length = int(self.np_random.integers(1, 15))
        return self._observe(), {}

    def step(self, action):
        self.t += 1
        ShortEnv.steps_until_failure -= 1
        if ShortEnv.steps_until_failure == 0:
            raise RuntimeError("the environment broke")
        done = self.t == self.length
        terminated = done and self.length % 2 == 0
        return self._observe(), float(action), terminated, done and not terminated, {}

    def _observe(self):
        return self.np_random.uniform(-1, 1, 3).astype(np.float32)


ENV = "rllib_memory/ShortEnv-v0"
if ENV not in gym.registry:
    gym.register(ENV, entry_point=ShortEnv)


def make_runner(connected, *, config=None):
    config = config or lstm_config(T).environment(ENV)
    if connected:
        connect(config)
    return SingleAgentEnvRunner(config=config)


def pair(make_config=lambda: None):
    """A connected and a plain runner with the same weights."""
    ours = make_runner(True, config=make_config())
    theirs = make_runner(False, config=make_config())
    ours.module.set_state(theirs.module.get_state())
    return ours, theirs


def sample(runner, seed=0, **kwargs):
    torch.manual_seed(seed)
    return runner.sample(**kwargs)


def state_before(episode, step):
    """The state before a step of an episode that RLlib's default connectors recorded."""
    buffer = episode.extra_model_outputs[Columns.STATE_OUT]
    position = buffer.lookback + step - 1
    return None if position < 0 else tree.map_structure(lambda leaf: leaf[position], buffer.data)


def assert_same_episodes(ours, theirs, module, max_seq_len=T):
    assert len(ours) == len(theirs)
    initial = convert_to_numpy(module.get_initial_state())
    for mine, other in zip(ours, theirs, strict=True):
        assert (mine.t_started, mine.t) == (other.t_started, other.t)
        assert mine.is_terminated == other.is_terminated
        assert mine.is_truncated == other.is_truncated
        for get in ("get_observations", "get_actions", "get_rewards"):
            assert_equal_trees(getattr(mine, get)(), getattr(other, get)())
        assert set(mine.extra_model_outputs) == set(other.extra_model_outputs)
        if not len(mine):
            continue
        for column in mine.extra_model_outputs:
            if column != Columns.STATE_OUT:
                assert_equal_trees(
                    mine.get_extra_model_outputs(column), other.get_extra_model_outputs(column)
                )
        if Columns.STATE_OUT not in mine.extra_model_outputs:
            continue
        references = mine.get_extra_model_outputs(Columns.STATE_OUT)
        for step, snapshot in enumerate(references):
            assert isinstance(snapshot, StateSnapshot)
            start = step - step % max_seq_len
            assert snapshot.t == mine.t_started + start
            expected = state_before(other, start)
            if snapshot.t == 0:
                assert snapshot.state is None
            else:
                assert_equal_trees(snapshot.state, initial if expected is None else expected)
            if start + max_seq_len <= len(mine):
                end = start + max_seq_len
                assert snapshot.end_t == mine.t_started + end
                assert_equal_trees(snapshot.end_state, state_before(other, end))
            else:
                assert snapshot.end_t is None


def assert_equal_trees(mine, other):
    tree.assert_same_structure(mine, other)
    for a, b in zip(tree.flatten(mine), tree.flatten(other), strict=True):
        assert np.asarray(a).dtype == np.asarray(b).dtype
        assert np.array_equal(a, b)


def test_fragments_cut_anywhere():
    ours, theirs = pair()
    for seed, steps in enumerate((60, 45, 4 * 3, 1, 2, 33)):
        mine = sample(ours, seed, num_timesteps=steps)
        assert_same_episodes(mine, sample(theirs, seed, num_timesteps=steps), theirs.module)


def test_whole_episodes_resets_and_inference():
    ours, theirs = pair()
    for seed, call in enumerate(
        (
            {"num_episodes": 5},
            {"num_timesteps": 20},
            {"num_episodes": 4},
            {"num_timesteps": 20, "force_reset": True},
            {"num_timesteps": 20, "explore": False, "force_reset": True},
            {"num_timesteps": 31, "explore": False},
        )
    ):
        assert_same_episodes(
            sample(ours, seed, **call), sample(theirs, seed, **call), theirs.module
        )


def test_module_after_random_actions_starts_from_the_initial_state():
    ours, theirs = pair()
    for runner in (ours, theirs):
        runner.env.action_space.seed(3)
    for seed, random_actions in enumerate((True, False, False)):
        call = {"num_timesteps": 18, "random_actions": random_actions}
        mine, other = sample(ours, seed, **call), sample(theirs, seed, **call)
        if random_actions:
            assert_same_episodes(mine, other, theirs.module)
            continue
        # A piece of the chunk that was sampled at random has no states to compare.
        for a, b in zip(mine, other, strict=True):
            assert_equal_trees(
                a.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS),
                b.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS),
            )


def test_environment_failure():
    def config():
        return lstm_config(T).environment(ENV).fault_tolerance(restart_failed_sub_environments=True)

    ours, theirs = pair(config)
    for seed, steps in enumerate((40, 10_000)):
        samples = []
        for runner in (ours, theirs):
            ShortEnv.steps_until_failure = steps
            samples.append(sample(runner, seed, num_timesteps=70))
        assert_same_episodes(*samples, theirs.module)


class ShiftObservations(ConnectorV2):
    """Rewrites the latest observation in the episode and adds a column of its own."""

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        for episode in episodes:
            episode.set_observations(
                at_indices=-1, new_data=episode.get_observations(-1) + np.float32(0.5)
            )
            self.add_batch_item(batch, "length", np.float32(len(episode)), episode)
        return batch


class FlipActions(ConnectorV2):
    """Sees single items under episode keys, as RLlib hands them out."""

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        assert all(
            len(items) == 1 and np.shape(items[0]) == ()
            for items in batch[Columns.ACTIONS].values()
        )
        self.foreach_batch_item_change_in_place(
            batch, Columns.ACTIONS, lambda action, *ids: 1 - action
        )
        return batch


def test_connectors_of_the_user_before_ours():
    def config():
        return (
            lstm_config(T)
            .environment(ENV)
            .env_runners(
                env_to_module_connector=lambda env, spaces, device: ShiftObservations(),
                module_to_env_connector=lambda env, spaces: [FlipActions()],
            )
        )

    ours, theirs = pair(config)
    for seed in range(3):
        assert_same_episodes(
            sample(ours, seed, num_timesteps=40),
            sample(theirs, seed, num_timesteps=40),
            theirs.module,
        )


class Record(ConnectorV2):
    seen = ()

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        Record.seen = (*Record.seen, dict(batch))
        return batch


def test_connectors_of_the_user_after_ours():
    config = (
        lstm_config(T)
        .environment(ENV)
        .env_runners(
            env_to_module_connector=lambda env, spaces, device: [BuildModuleBatch(), Record()],
            module_to_env_connector=lambda env, spaces: [
                SampleActions(),
                Record(),
                FormatActions(normalize_actions=True, clip_actions=False),
            ],
        )
    )
    runner = make_runner(True, config=config)
    Record.seen = ()
    sample(runner, num_timesteps=6)
    to_module, to_env = Record.seen[:2]
    assert to_module[Columns.OBS].shape == (3, 1, 3)
    assert tree.flatten(to_module[Columns.STATE_IN])[0].shape[0] == 3
    assert to_env[Columns.ACTIONS].shape == (3,)
    assert isinstance(to_env[Columns.STATE_OUT][0], StateSnapshot)


@pytest.mark.parametrize("use_lstm", [True, False])
def test_continuous_actions(use_lstm):
    def config():
        config = lstm_config(T).environment("Pendulum-v1")
        if not use_lstm:
            config.rl_module(model_config={"fcnet_hiddens": [8]})
        return config

    ours, theirs = pair(config)
    for seed in range(2):
        assert_same_episodes(
            sample(ours, seed, num_timesteps=30),
            sample(theirs, seed, num_timesteps=30),
            theirs.module,
        )


def test_batches_through_both_paths_are_equal():
    ours, theirs = pair()
    torch.manual_seed(1)
    batches = []
    for runner in (ours, theirs):
        config = lstm_config(T)
        if runner is ours:
            connect(config)
        pipeline = config.build_learner_connector(BOX, DISCRETE)
        pipeline.prepend(AddOneTsToEpisodesAndTruncate())
        # The second fragment holds continuations of cut episodes.
        sample(runner, 0, num_timesteps=31)
        episodes = sample(runner, 1, num_timesteps=50)
        batches.append(
            pipeline(
                rl_module=runner.module.as_multi_rl_module(),
                batch={},
                episodes=copy.deepcopy(episodes),
                shared_data={},
            )["default_policy"]
        )
    assert_same_batch(*batches)
    mine = batches[0]
    with torch.no_grad():
        out = ours.module.forward_train(mine)
    dist = ours.module.get_train_action_dist_cls().from_logits(out[Columns.ACTION_DIST_INPUTS])
    logp = dist.logp(mine[Columns.ACTIONS])
    mask = mine[Columns.LOSS_MASK]
    torch.testing.assert_close(logp[mask], mine[Columns.ACTION_LOGP][mask], rtol=1e-5, atol=1e-5)


def test_states_before_a_cut_are_not_pickled_again():
    runner = make_runner(True)
    sample(runner, num_timesteps=30)
    for episode in sample(runner, num_timesteps=30):
        buffer = episode.extra_model_outputs[Columns.STATE_OUT]
        if episode.t_started:
            assert buffer.lookback == 1
            assert buffer.data[0] is buffer.data[1]


SPACES = {
    "discrete": gym.spaces.Discrete(4),
    "box": gym.spaces.Box(np.float32([-2, 0]), np.float32([1, 3])),
    "scalar box": gym.spaces.Box(-2.0, 3.0, (), np.float32),
    "unbounded": gym.spaces.Box(-np.inf, np.inf, (2,), np.float32),
    "integer box": gym.spaces.Box(3, 6, (2,), np.int32),
    "nested": gym.spaces.Dict(
        {
            "a": gym.spaces.Tuple(
                (gym.spaces.Discrete(3), gym.spaces.Box(-1, 2, (2,), np.float32))
            ),
            "b": gym.spaces.MultiDiscrete([2, 3]),
        }
    ),
}


@pytest.mark.parametrize("space", list(SPACES))
@pytest.mark.parametrize(
    "flags", [(True, False), (False, True), (False, False)], ids=["normalize", "clip", "neither"]
)
def test_format_actions_equals_rllib(space, flags):
    space = SPACES[space]
    flags = dict(zip(("normalize_actions", "clip_actions"), flags, strict=True))
    rng = np.random.default_rng(0)

    def noisy(leaf):
        noise = rng.normal(size=np.shape(leaf)).astype(np.float32)
        return leaf if np.asarray(leaf).dtype.kind == "i" else leaf + 2 * noise

    episodes = [SingleAgentEpisode() for _ in range(5)]
    space.seed(0)
    actions = convert_to_numpy(
        stack_items([tree.map_structure(noisy, space.sample()) for _ in episodes])
    )
    batch = {Columns.ACTIONS: actions, Columns.ACTION_LOGP: rng.normal(size=5), "tree": actions}
    call = {"rl_module": None, "episodes": episodes}

    expected = copy.deepcopy(batch)
    shared_data = {"memorized_map_structure": [episode.id_ for episode in episodes]}
    for piece in (
        UnBatchToIndividualItems(),
        NormalizeAndClipActions(BOX, space, **flags),
        ListifyDataForVectorEnv(),
    ):
        expected = piece(batch=expected, shared_data=shared_data, **call)
    mine = FormatActions(BOX, space, **flags)(batch=copy.deepcopy(batch), **call)

    if any(flags.values()):  # ours are in the dtype of the space
        expected[Columns.ACTIONS_FOR_ENV] = tree.map_structure(
            lambda action, sample: np.asarray(action, np.asarray(sample).dtype),
            expected[Columns.ACTIONS_FOR_ENV],
            space.sample(),
        )
    assert set(mine) == set(expected)
    for column in expected:
        if column in (Columns.ACTIONS, Columns.ACTIONS_FOR_ENV):
            assert_equal_trees(mine[column], expected[column])
        else:
            for row in range(5):
                assert_equal_trees(mine[column][row], expected[column][row])


class ListState(CountingRLModule):
    def get_initial_state(self):
        return [torch.zeros(3)]


def test_state_that_is_no_dict_is_an_error():
    config = (
        PPOConfig()
        .environment(ENV)
        .env_runners(num_env_runners=0)
        .rl_module(rl_module_spec=RLModuleSpec(ListState, model_config={"max_seq_len": T}))
    )
    runner = make_runner(True, config=config)
    with pytest.raises(TypeError, match="`get_initial_state` of `ListState` returned a list"):
        runner.sample(num_timesteps=3)


@pytest.mark.parametrize(
    "make",
    [
        partial(BuildModuleBatch, device="cpu"),
        SampleActions,
        partial(FormatActions, normalize_actions=True, clip_actions=False),
    ],
)
def test_constructor_arguments_round_trip(make):
    piece = make(BOX, DISCRETE)
    args, kwargs = piece.get_ctor_args_and_kwargs()
    copied = type(piece)(*args, **kwargs)
    assert copied.get_ctor_args_and_kwargs() == (args, kwargs)
    assert copied.input_action_space == DISCRETE
