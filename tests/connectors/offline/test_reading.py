"""Recorded episodes: what is written, and that the Learner's states and targets are exact."""

import copy
from collections import Counter

import gymnasium as gym
import msgpack
import msgpack_numpy
import numpy as np
import pyarrow.parquet
import pytest
import ray.data
import torch
import tree
from hypothesis import given
from hypothesis import strategies as st
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.cql import CQLConfig
from ray.rllib.algorithms.iql import IQLConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.offline.offline_data import OfflineData
from ray.rllib.offline.offline_prelearner import OfflinePreLearner

from connectors import (
    AddPreviousActionsRewards,
    FormatActions,
    MemoryMARWILTorchLearner,
    MemoryPolicy,
    RecordingEnvRunner,
    StateSnapshot,
    connect,
)
from connectors.offline.actions import script_action_struct
from connectors.offline.evaluation import PassRecordedRows
from connectors.offline.reading import RecordedEpisodes, deal, read_episodes, read_trials
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.connectors.helpers import BOX, DISCRETE, lstm_config
from tests.envs import RememberFirst, SampledObservations
from tests.test_parity import SMALL, RecordingLearner

pytestmark = pytest.mark.ray

T = 4
GAMMA = 0.9
SPACES = {
    "observation_space": RememberFirst().observation_space,
    "action_space": RememberFirst().action_space,
}


class Rows:
    """Stands for a `DataIterator` over recorded episodes."""

    def __init__(self, episodes):
        self.rows = [pack(episode) for episode in episodes]

    def iter_batches(self, *, batch_size):
        for start in range(0, len(self.rows), batch_size):
            yield {"item": self.rows[start : start + batch_size]}


def pack(episode):
    return msgpack.packb(episode.get_state(), default=msgpack_numpy.encode)


def play(env, num_episodes, policy):
    """Plays whole episodes, as the recording EnvRunner leaves them."""
    episodes = []
    for seed in range(num_episodes):
        episode = SingleAgentEpisode(
            observation_space=env.observation_space, action_space=env.action_space
        )
        obs, _ = env.reset(seed=seed)
        episode.add_env_reset(obs)
        while not episode.is_done:
            action = policy(env)
            obs, reward, terminated, truncated, _ = env.step(action)
            episode.add_env_step(
                obs,
                action,
                reward,
                terminated=terminated,
                truncated=truncated,
                extra_model_outputs={Columns.ACTION_LOGP: -1.0},
            )
        episodes.append(episode)
    return episodes


def sample_action(env):
    return env.action_space.sample()


def with_spec(config, *, max_seq_len=T, module_class=DeepLinearAttentionRLModule, **settings):
    return config.rl_module(
        rl_module_spec=RLModuleSpec(
            module_class=module_class,
            model_config=DeepLinearAttentionConfig(
                max_seq_len=max_seq_len, **{**SMALL, **settings}
            ),
        )
    )


def offline_config(config_class, input_=(), **settings):
    config = (
        config_class()
        .environment(observation_space=BOX, action_space=DISCRETE)
        .learners(num_learners=0)
        .offline_data(
            input_=list(input_), input_read_episodes=True, dataset_num_iters_per_learner=3
        )
        .training(lr=0.01, gamma=GAMMA, train_batch_size_per_learner=40)
        .debugging(seed=0, log_sys_usage=False)
    )
    return with_spec(config, **settings)


class Recorder(MemoryMARWILTorchLearner):
    """Keeps each batch with the weights that it was made with."""

    def build(self):
        super().build()
        self.seen = []

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        weights = {k: v.clone() for k, v in self.module[module_id].state_dict().items()}
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        self.seen.append((dict(batch), weights))
        return loss


def make_learner(config, observation_space=BOX, action_space=DISCRETE):
    config = connect(config.learners(learner_class=Recorder))
    spaces = {"default_policy": (observation_space, action_space)}
    learner = config.learner_class(
        config=config,
        module_spec=config.get_rl_module_spec(
            spaces={**spaces, "__env_single__": (observation_space, action_space)}
        ),
    )
    learner.build()
    return learner


def dealt(episodes, num_updates, num_learners=1, num_steps=40, **kwargs):
    """What the Learners get for so many updates."""
    recorded = read_trials(Rows(episodes), batch_size=1, **kwargs)
    return [deal(recorded, num_learners, num_steps) for _ in range(num_updates)]


def run(learner, episodes, num_iters=3, **kwargs):
    hands = dealt(episodes, num_updates=num_iters, **kwargs)
    return learner.update(
        training_data=TrainingData(data_iterators=[[hand for (hand,) in hands]]),
        num_iters=num_iters,
        minibatch_size=40,
        timesteps={},
    )


def step_by_step(module, observations):
    """Slow reference: the states before each step and the values, one step after the other."""
    state = tree.map_structure(lambda leaf: leaf[None], module.get_initial_state())
    states, values = [], []
    with torch.no_grad():
        for obs in observations:
            states.append(state)
            batch = {Columns.OBS: obs[None, None], Columns.STATE_IN: state}
            values.append(module.compute_values(batch).item())
            state = module.forward_inference(batch)[Columns.STATE_OUT]
    return states, np.array(values)


def episodes_of(batch):
    """The batch's rows of each episode; an episode ends where the observation is the last."""
    lengths = batch[Columns.SEQ_LENS].tolist()
    ends = (batch[Columns.TERMINATEDS] | batch[Columns.TRUNCATEDS]).any(dim=1).tolist()
    rows, found = [], []
    for row, end in enumerate(ends):
        rows.append(row)
        if end:
            # A bootstrap step may have a row of its own.
            found.append(rows)
            rows = []
    return found, lengths


class Halve(ConnectorV2):
    """A learner connector of the user that makes the observations."""

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        for episode in episodes:
            items = [obs / 2 for obs in episode.get_observations(slice(0, len(episode)))]
            self.add_n_batch_items(batch, Columns.OBS, items, len(episode), episode)
        return batch


def with_lstm(config):
    return config.rl_module(
        rl_module_spec=RLModuleSpec(
            module_class=DefaultPPOTorchRLModule,
            model_config={
                "use_lstm": True,
                "max_seq_len": T,
                "lstm_cell_size": 8,
                "fcnet_hiddens": [8],
            },
        )
    )


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(lambda config: config, id="ours"),
        pytest.param(lambda config: with_spec(config, vf_share_layers=False), id="two memories"),
        pytest.param(
            lambda config: config.learners(learner_connector=lambda *_: Halve()),
            id="observations made by a connector",
        ),
        pytest.param(with_lstm, id="RLlib's LSTM"),
    ],
)
def test_states_are_those_of_the_present_weights(change):
    env = SampledObservations({"observation_space": BOX, "action_space": DISCRETE})
    episodes = play(env, 8, sample_action)
    config = change(offline_config(BCConfig))
    learner = make_learner(config)
    result = run(learner, episodes)
    module = learner.module["default_policy"]
    assert len(learner.seen) == 3
    checked = 0
    used = []
    for batch, weights in learner.seen:
        module.load_state_dict(weights)
        found, lengths = episodes_of(batch)
        assert sum(lengths) >= 40
        assert batch[Columns.LOSS_MASK].sum() == sum(lengths)
        for rows in found:
            obs = torch.cat([batch[Columns.OBS][row, : lengths[row]] for row in rows])
            used.append(len(obs))
            states, _ = step_by_step(module, obs)
            for position, row in enumerate(rows):
                mine = tree.map_structure(
                    lambda leaf, at=row: leaf[at : at + 1], batch[Columns.STATE_IN]
                )
                tree.map_structure(torch.testing.assert_close, mine, states[position * T])
                checked += position > 0
    assert result["default_policy"]["memory"]["num_rebuilt_rows"] == checked > 10
    assert result["default_policy"]["memory"]["num_stale_rows"] == 0
    # Every episode's every step, in turn.
    expected = [len(episode) for episode in episodes]
    assert used == (expected * 3)[: len(used)]


@pytest.mark.parametrize("lambda_", [1.0, 0.5])
def test_marwil_targets_are_those_of_the_present_weights(lambda_):
    env = SampledObservations({"observation_space": BOX, "action_space": DISCRETE})
    episodes = play(env, 8, sample_action)
    # A time limit: its value counts.
    for episode in episodes[::2]:
        episode.is_terminated, episode.is_truncated = False, True
    config = offline_config(MARWILConfig)
    config.lambda_ = lambda_
    learner = make_learner(config)
    run(learner, episodes)
    module = learner.module["default_policy"]
    position = 0
    for batch, weights in learner.seen:
        module.load_state_dict(weights)
        mask = batch[Columns.LOSS_MASK]
        targets = batch[Postprocessing.VALUE_TARGETS][mask].numpy()
        assert batch[Postprocessing.VALUE_TARGETS][~mask].eq(0).all()
        while len(targets):
            episode = episodes[position % len(episodes)]
            position += 1
            observations = torch.from_numpy(np.stack(episode.get_observations()))
            _, values = step_by_step(module, observations)
            if episode.is_terminated:
                values[-1] = 0.0
            expected = np.append(np.zeros(len(episode)), values[-1])
            for t in reversed(range(len(episode))):
                expected[t] = episode.get_rewards(t) + GAMMA * (
                    (1 - lambda_) * values[t + 1] + lambda_ * expected[t + 1]
                )
            mine, targets = targets[: len(episode)], targets[len(episode) :]
            np.testing.assert_allclose(mine, expected[:-1], rtol=1e-4, atol=1e-4)
    assert position > len(episodes)


def test_the_moving_average_is_saved():
    def average(learner):
        return learner.moving_avg_sqd_adv_norms_per_module["default_policy"].item()

    config = offline_config(MARWILConfig).training(moving_average_sqd_adv_norm_update_rate=0.5)
    learner, restored = make_learner(config), make_learner(config.copy(copy_frozen=False))
    start = average(learner)
    env = SampledObservations({"observation_space": BOX, "action_space": DISCRETE})
    run(learner, play(env, 5, sample_action))
    restored.set_state(learner.get_state())
    assert average(restored) == average(learner) != start


def test_module_without_memory():
    config = offline_config(MARWILConfig)
    config.rl_module(rl_module_spec=RLModuleSpec(model_config={"fcnet_hiddens": [8]}))
    learner = make_learner(config)
    env = SampledObservations({"observation_space": BOX, "action_space": DISCRETE})
    run(learner, play(env, 4, sample_action))
    assert Columns.STATE_IN not in learner.seen[0][0]


@pytest.mark.parametrize(
    ("space", "action_space"),
    [
        (gym.spaces.Dict(a=BOX, b=gym.spaces.Discrete(2)), DISCRETE),
        (gym.spaces.Tuple((BOX, gym.spaces.Tuple((gym.spaces.Discrete(2),)))), DISCRETE),
        (BOX, gym.spaces.Tuple((DISCRETE, gym.spaces.Box(-1, 1, (2,), np.float32)))),
    ],
    ids=["dict", "tuple", "tuple of actions"],
)
def test_nested_spaces(space, action_space):
    env = SampledObservations({"observation_space": space, "action_space": action_space})
    episodes = play(env, 4, sample_action)
    config = offline_config(BCConfig).environment(
        observation_space=space, action_space=action_space
    )
    learner = make_learner(config, space, action_space)
    run(learner, episodes, num_iters=1)
    batch, _ = learner.seen[0]
    first = tree.map_structure(lambda leaf: leaf[0, 0].numpy(), batch[Columns.OBS])
    tree.map_structure(np.testing.assert_array_equal, first, episodes[0].get_observations(0))
    first = tree.map_structure(lambda leaf: leaf[0, 0].numpy(), batch[Columns.ACTIONS])
    tree.map_structure(np.testing.assert_array_equal, first, episodes[0].get_actions(0))


ARM = gym.spaces.Dict(
    arm=gym.spaces.Box(np.float32([-3.0, 0.0]), np.float32([1.0, 10.0])),
    half=gym.spaces.Box(-2.0, 6.0, (1,), np.float16),
    free=gym.spaces.Box(-np.inf, np.inf, (1,), np.float32),
    fixed=gym.spaces.Box(2.0, 2.0, (1,), np.float32),
    move=gym.spaces.Discrete(3),
)


@pytest.mark.parametrize(
    ("by", "settings", "normalized"),
    [
        ("script", {}, True),
        ("policy", {}, False),
        ("script", {"actions_in_input_normalized": True}, False),
        ("script", {"normalize_actions": False}, False),
    ],
)
@pytest.mark.parametrize("finished", [False, True], ids=["lists", "arrays"])
def test_actions_of_a_script_are_normalized(by, settings, normalized, finished):
    """They are the environment's; a policy's are recorded before they are unsquashed."""
    env = SampledObservations({"observation_space": BOX, "action_space": ARM})
    (episode,) = play(env, 1, sample_action)
    if by == "script":
        episode.extra_model_outputs.clear()
    recorded = copy.deepcopy(episode).to_numpy() if finished else episode
    config = offline_config(BCConfig).environment(action_space=ARM)
    if "normalize_actions" in settings:
        config.environment(**settings)
    else:
        config.offline_data(**settings)
    struct = script_action_struct(config, ARM)
    read = next(read_episodes(Rows([recorded]), script_actions=struct, batch_size=1))
    actions, taken = read.get_actions(), copy.deepcopy(episode).to_numpy().get_actions()
    if not normalized:
        tree.map_structure(np.testing.assert_array_equal, actions, taken)
        return
    np.testing.assert_allclose(actions["arm"], (taken["arm"] - [-1, 5]) / [2, 5], atol=1e-6)
    np.testing.assert_allclose(actions["half"], (taken["half"] - 2.0) / 4, atol=1e-3)
    for key in ("free", "move"):
        np.testing.assert_array_equal(actions[key], taken[key])
    assert np.isfinite(actions["fixed"]).all()
    # What the policy sends when it takes them.
    sent = FormatActions(BOX, ARM, normalize_actions=True, clip_actions=False)._format(
        {Columns.ACTIONS: actions}
    )[Columns.ACTIONS_FOR_ENV]
    tree.map_structure(
        lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5),
        sent,
        taken,
    )


def test_bc_clones_a_script_in_the_units_of_a_policy():
    """The Learner's batch has the normalised actions."""
    space = gym.spaces.Box(-10.0, 30.0, (1,), np.float32)
    env = SampledObservations({"observation_space": BOX, "action_space": space})
    episodes = play(env, 4, sample_action)
    for episode in episodes:
        episode.extra_model_outputs.clear()
    config = offline_config(BCConfig).environment(observation_space=BOX, action_space=space)
    learner = make_learner(config, BOX, space)
    script_actions = script_action_struct(learner.config, space)
    run(learner, episodes, num_iters=1, script_actions=script_actions)
    batch, _ = learner.seen[0]
    first = episodes[0].get_actions(0)
    torch.testing.assert_close(batch[Columns.ACTIONS][0, 0], torch.as_tensor((first - 10) / 20))


def test_reading():
    with pytest.raises(ValueError, match="`input_` holds no episodes"):
        next(read_episodes(Rows([]), batch_size=1))
    env = SampledObservations({"observation_space": BOX, "action_space": DISCRETE})
    episode, other = play(env, 2, sample_action)
    episodes = read_episodes(Rows([episode, other, episode]), batch_size=2)
    ids = [next(episodes).id_ for _ in range(5)]
    assert ids == [episode.id_, other.id_, episode.id_, other.id_, episode.id_]
    with pytest.raises(ValueError, match="lacks its steps 0 to 1"):
        next(read_episodes(Rows([episode[2:]]), batch_size=1))


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=12),
    num_learners=st.integers(1, 4),
    num_steps=st.integers(1, 80),
)
def test_each_episode_goes_to_one_learner_a_pass(lengths, num_learners, num_steps):
    taken = []

    def passes():
        while True:
            for name, length in enumerate(lengths):
                taken.append(name)
                yield [range(length)]

    episodes, updates = passes(), 5
    for _ in range(updates):
        before = len(taken)
        hands = deal(episodes, num_learners, num_steps)
        # All that was drawn was dealt, so that every pass holds every episode once.
        assert sorted(len(e) for hand in hands for e in hand) == sorted(
            lengths[name] for name in taken[before:]
        )
        steps = [sum(map(len, hand)) for hand in hands]
        assert min(steps) >= num_steps
        assert max(steps) < num_steps + max(lengths)
    whole = len(taken) // len(lengths)
    assert taken[: whole * len(lengths)] == list(range(len(lengths))) * whole


@pytest.mark.slow
def test_learners_train_on_all_that_was_recorded(tmp_path):
    """Two passes over episodes of very different lengths, dealt to two Learners."""
    env = SampledObservations({"observation_space": BOX, "action_space": DISCRETE})
    episodes = play(env, 9, sample_action)
    write(episodes, tmp_path)
    config = connect(offline_config(BCConfig, [str(tmp_path)]))
    recorded = RecordedEpisodes(config)
    recorded.spaces = {INPUT_ENV_SPACES: (BOX, DISCRETE)}
    counts, drawn = Counter(), 0
    while drawn < 18:
        learners = recorded.sample(num_samples=20, return_iterator=True, num_shards=2)
        assert [len(updates) for updates in learners] == [3, 3]
        for updates in learners:
            for hand in updates:
                assert sum(map(len, hand)) >= 20
                counts.update(episode.id_ for episode in hand)
        drawn = counts.total()
    passes, rest = divmod(drawn, 9)
    assert counts.keys() == {episode.id_ for episode in episodes}
    assert sorted(counts.values()) == [passes] * (9 - rest) + [passes + 1] * rest


def test_a_nan_does_not_stay_in_the_moving_average():
    learner = make_learner(offline_config(MARWILConfig))
    env = SampledObservations({"observation_space": BOX, "action_space": DISCRETE})
    episodes = play(env, 5, sample_action)
    run(learner, episodes)
    average = learner.moving_avg_sqd_adv_norms_per_module["default_policy"].item()
    spoilt = play(env, 5, sample_action)
    for episode in spoilt:
        episode.rewards[0] = float("nan")
    result = run(learner, spoilt)
    assert result["default_policy"]["memory"]["num_nonfinite_gradients"] == 3
    assert learner.moving_avg_sqd_adv_norms_per_module["default_policy"].item() == average
    result = run(learner, episodes)
    assert result["default_policy"]["memory"]["num_nonfinite_gradients"] == 0


def recording_config(path, *, write_episodes):
    return with_spec(
        PPOConfig()
        .environment(
            SampledObservations, env_config={"observation_space": BOX, "action_space": DISCRETE}
        )
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2, batch_mode="complete_episodes")
        .learners(learner_class=RecordingLearner)
        .training(train_batch_size_per_learner=40, minibatch_size=None, num_epochs=1, lr=0.01)
        .offline_data(output=str(path), output_write_episodes=write_episodes)
        .debugging(seed=0, log_sys_usage=False)
    )


def rows_in(path):
    return pyarrow.parquet.read_table(str(path)).to_pylist()


def test_recording_while_training(tmp_path):
    """PPO trains on what it records; the files hold the same episodes, without states."""
    config = connect(recording_config(tmp_path, write_episodes=True))
    algorithm = config.build_algo()
    try:
        assert type(algorithm.env_runner) is RecordingEnvRunner
        algorithm.train()
        learner = algorithm.learner_group._learner
    finally:
        algorithm.stop()
    assert max(learner.errors) <= 1e-5
    states = [
        msgpack.unpackb(row["item"], object_hook=msgpack_numpy.decode) for row in rows_in(tmp_path)
    ]
    episodes = [SingleAgentEpisode.from_state(state) for state in states]
    assert all(episode.is_done and episode.t_started == 0 for episode in episodes)
    assert sum(map(len, episodes)) == learner.batches[0][Columns.LOSS_MASK].sum()
    assert Columns.ACTION_LOGP in episodes[0].extra_model_outputs
    assert Columns.STATE_OUT not in episodes[0].extra_model_outputs


@pytest.mark.slow
@pytest.mark.parametrize("evaluation", [True, False])
def test_inputs_that_connectors_made(evaluation, tmp_path):
    """Previous actions and rewards stand in the recordings; who trains must know their space."""

    def connectors(env, spaces, device):
        return AddPreviousActionsRewards()

    config = recording_config(tmp_path, write_episodes=True)
    config.env_runners(env_to_module_connector=connectors)
    runner = RecordingEnvRunner(config=connect(config))
    episodes = runner.sample(num_episodes=6)
    bc = offline_config(BCConfig, [str(tmp_path)]).learners(learner_class=Recorder)
    bc.env_runners(env_to_module_connector=connectors)
    if evaluation:
        bc.environment(config.env, env_config=config.env_config)
        bc.evaluation(evaluation_interval=1, evaluation_duration=2)
    else:
        space = runner.module.observation_space
        bc.environment(observation_space=space, action_space=DISCRETE)
    algorithm = connect(bc).build_algo()
    try:
        algorithm.train()
        batch, _ = algorithm.learner_group._learner.seen[0]
    finally:
        algorithm.stop()
    first = batch[Columns.OBS]["observations"][0, 0].numpy()
    (episode,) = [e for e in episodes if (e.get_observations(0)["observations"] == first).all()]
    for t, observation in enumerate(episode.get_observations(slice(0, min(T, len(episode))))):
        for key, value in observation.items():
            np.testing.assert_array_equal(batch[Columns.OBS][key][0, t], value)


def episodes_in(path):
    rows = [row["item"] for row in rows_in(path)]
    return [msgpack.unpackb(row, object_hook=msgpack_numpy.decode) for row in rows]


@pytest.mark.parametrize("rows_per_file", [None, 4])
def test_nothing_that_was_sampled_is_lost(rows_per_file, tmp_path):
    """All full files are written, and the rest when the EnvRunner stops."""
    config = recording_config(tmp_path, write_episodes=True)
    config.env_runners(batch_mode="truncate_episodes", num_envs_per_env_runner=3)
    config.offline_data(output_max_rows_per_file=rows_per_file)
    runner = RecordingEnvRunner(config=connect(config))
    sampled = []
    for _ in range(3):
        sampled += runner.sample(num_timesteps=3 * 14)
        if rows_per_file:
            assert len(episodes_in(tmp_path)) == len(sampled) // rows_per_file * rows_per_file
    runner.stop()
    files = [pyarrow.parquet.read_table(path).num_rows for path in tmp_path.rglob("*.parquet")]
    if rows_per_file:
        full = len(sampled) // rows_per_file
        assert sorted(files, reverse=True)[:full] == [rows_per_file] * full
        assert len(files) == -(-len(sampled) // rows_per_file)
    recorded = episodes_in(tmp_path)
    parts = {(state["id_"], state["t_started"]) for state in recorded}
    assert len(parts) == len(recorded)
    assert parts == {(episode.id_, episode.t_started) for episode in sampled}
    # Read back, cut or not: each step once.
    rows = Rows([])
    rows.rows = [row["item"] for row in rows_in(tmp_path)]
    episodes = read_episodes(rows, batch_size=2)
    once = [next(episodes) for _ in {id_ for id_, _ in parts}]
    assert len({episode.id_ for episode in once}) == len(once)
    assert sum(map(len, once)) == sum(map(len, sampled))


def test_what_cannot_be_written_is_an_error(tmp_path):
    config = recording_config(tmp_path / "file", write_episodes=True)
    (tmp_path / "file").write_text("in the way")
    runner = RecordingEnvRunner(config=connect(config))
    with pytest.raises(Exception, match="file"):
        runner.sample(num_episodes=1)


def test_recording_columns(tmp_path):
    runner = RecordingEnvRunner(config=connect(recording_config(tmp_path, write_episodes=False)))
    episodes = runner.sample(num_episodes=2)
    for episode in episodes:
        states = episode.get_extra_model_outputs(Columns.STATE_OUT)
        assert len(states) == len(episode)
        assert all(isinstance(state, StateSnapshot) for state in states)
    rows = rows_in(tmp_path)
    assert len(rows) == sum(map(len, episodes))
    assert Columns.ACTION_LOGP in rows[0]
    assert Columns.STATE_OUT not in rows[0]


def write(episodes, path):
    # One block: in the order given.
    rows = ray.data.from_items([pack(episode) for episode in episodes], override_num_blocks=1)
    rows.write_parquet(str(path))


@pytest.mark.slow
def test_bc_clones_a_policy_that_remembers(tmp_path):
    """The expert's action names a cue that was shown in the first of eight steps."""
    write(play(RememberFirst(), 32, lambda env: env.cue), tmp_path)
    config = offline_config(BCConfig, [str(tmp_path)]).environment(RememberFirst, **SPACES)
    config.offline_data(
        dataset_num_iters_per_learner=1,
        iter_batches_kwargs={"local_shuffle_buffer_size": 8, "local_shuffle_seed": 0},
    )
    config.training(train_batch_size_per_learner=80)
    config.evaluation(
        evaluation_interval=40,
        evaluation_duration=20,
        evaluation_config=BCConfig.overrides(explore=False),
    )
    algorithm = connect(config).build_algo()
    losses = []
    try:
        for _ in range(40):
            result = algorithm.train()
            losses.append(float(result["learners"]["default_policy"]["policy_loss"]))
        checkpoint = algorithm.save_to_path(str(tmp_path / "checkpoint"))
    finally:
        algorithm.stop()
    assert result["evaluation"]["env_runners"]["episode_return_mean"] == 1.0
    assert losses[-1] < 0.5 * losses[0]
    policy = MemoryPolicy.from_checkpoint(checkpoint)
    for seed in range(6):
        env = RememberFirst()
        observation, _ = env.reset(seed=seed)
        over = False
        while not over:
            action = policy.act(observation)
            observation, reward, over, *_ = env.step(action)
        policy.reset()
        assert reward == 1.0


@pytest.mark.parametrize("num_batches", [None, 1])
def test_the_loss_on_recorded_episodes(num_batches):
    """It is that of whole episodes, from states of the weights that the runner has."""
    episodes = play(RememberFirst(), 6, lambda env: env.cue)
    config = offline_config(BCConfig).environment(**SPACES)
    config.evaluation(
        offline_evaluation_interval=1,
        offline_eval_batch_size_per_runner=48,
        dataset_num_iters_per_offline_eval_runner=num_batches,
    )
    connect(config)
    assert config.prelearner_class is PassRecordedRows
    spaces = tuple(SPACES.values())
    runner = config.offline_eval_runner_class(
        config=config,
        module_spec=config.get_multi_rl_module_spec(
            spaces={"default_policy": spaces, "__env__": spaces}
        ),
    )
    # One of them cut, as PPO records by default.
    runner.set_dataset_iterator(Rows([*episodes[1:], episodes[0][:3], episodes[0][3:]]))
    module = runner.module["default_policy"]
    for _ in range(2):
        result = runner.run(train=True, explore=False)
    losses = []
    for episode in episodes:
        state = tree.map_structure(lambda leaf: leaf[None], module.get_initial_state())
        for obs, action in zip(episode.get_observations(), episode.get_actions(), strict=False):
            batch = {Columns.OBS: torch.as_tensor(obs)[None, None], Columns.STATE_IN: state}
            with torch.no_grad():
                out = module.forward_inference(batch)
            state = out[Columns.STATE_OUT]
            inputs = out[Columns.ACTION_DIST_INPUTS][0, 0]
            dist = module.get_train_action_dist_cls().from_logits(inputs)
            losses.append(-dist.logp(torch.as_tensor(action)).item())
    evaluated = result["default_policy"]["total_eval_loss"].peek()
    assert float(evaluated) == pytest.approx(np.mean(losses), rel=1e-4)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"input_read_episodes": False}, "`input_read_episodes` is False"),
        ({"dataset_num_iters_per_learner": None}, "`dataset_num_iters_per_learner` is None"),
        ({"burnin_len": 2}, "`burnin_len` is 2"),
        ({"bc_logstd_coeff": 0.1}, "`bc_logstd_coeff` is 0.1"),
        ({"prelearner_class": OfflinePreLearner}, "`prelearner_class` is `OfflinePreLearner`"),
        ({"offline_data_class": OfflineData}, "`offline_data_class` is `OfflineData`"),
    ],
    ids=str,
)
def test_settings_that_are_refused(change, message):
    config = offline_config(MARWILConfig)
    for setting, value in change.items():
        setattr(config, setting, value)
    with pytest.raises(ValueError, match=message):
        connect(config)


@pytest.mark.parametrize("config_class", [CQLConfig, IQLConfig])
def test_algorithms_that_are_refused(config_class):
    with pytest.raises(ValueError, match=f"got a `{config_class.__name__}`, whose losses"):
        connect(with_spec(config_class()))


@pytest.mark.parametrize("config_class", [BCConfig, MARWILConfig])
def test_what_connect_sets(config_class):
    config = offline_config(config_class)
    for _ in range(2):
        connect(config)
    assert config.learner_class is MemoryMARWILTorchLearner
    assert config.offline_data_class is RecordedEpisodes
    assert config.materialize_data is True
    assert config.env_runner_cls is None


def test_an_env_runner_of_the_user_that_records_states():
    config = lstm_config(T).offline_data(output="anywhere")
    config.env_runners(env_runner_cls=SingleAgentEnvRunner)
    with pytest.raises(ValueError, match="would write recurrent states into the files"):
        connect(config)


@pytest.mark.slow
@pytest.mark.parametrize("config_class", [BCConfig, MARWILConfig])
def test_two_learners(config_class, tmp_path):
    """Each Learner trains on episodes of its own, and both end with the same weights."""
    write(play(RememberFirst(), 24, sample_action), tmp_path)
    config = offline_config(config_class, [str(tmp_path)]).environment(**SPACES)
    algorithm = connect(config.learners(num_learners=2)).build_algo()
    try:
        for _ in range(2):
            result = algorithm.train()
        weights = algorithm.learner_group.foreach_learner(
            lambda learner: learner.get_state(components="rl_module")["rl_module"]
        )
    finally:
        algorithm.stop()
    steps = result["learners"]["default_policy"]["num_module_steps_trained_lifetime"]
    # Two Learners, two iterations, three updates, five episodes of eight steps (and the bootstrap).
    assert steps >= 2 * 2 * 3 * 40
    one, two = [states.get()["default_policy"] for states in weights]
    tree.map_structure(np.testing.assert_array_equal, one, two)


def marwils_best_return(config, *, goal, num_iters):
    """The best mean return in evaluation, of returns from -goal to goal."""
    config.offline_data(dataset_num_iters_per_learner=20)
    config.training(
        gamma=1.0,
        train_batch_size_per_learner=512,
        moving_average_sqd_adv_norm_start=0.1,
        moving_average_sqd_adv_norm_update_rate=0.01,
    )
    config.evaluation(
        evaluation_interval=1,
        evaluation_duration=50,
        evaluation_config=MARWILConfig.overrides(explore=False),
    )
    algorithm = connect(config).build_algo()
    best = -goal
    try:
        for _ in range(num_iters):
            result = algorithm.train()
            best = max(best, result["evaluation"]["env_runners"]["episode_return_mean"])
            if best == goal:
                break
    finally:
        algorithm.stop()
    return best


@pytest.mark.slow
def test_marwil_improves_on_what_it_sees(tmp_path):
    """From random actions, whose return is 0 on average."""
    write(play(RememberFirst(), 256, sample_action), tmp_path)
    config = offline_config(MARWILConfig, [str(tmp_path)], max_seq_len=8)
    config.environment(RememberFirst, **SPACES)
    assert marwils_best_return(config, goal=1.0, num_iters=20) == 1.0
