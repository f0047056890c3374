"""Replayed slices reach the Learner with the very states of the rollout, in bounded memory."""

import copy
import pickle
from types import SimpleNamespace

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.from_config import from_config
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger
from ray.rllib.utils.replay_buffers import ReplayBuffer

from connectors import BuildTrainBatch, SequenceReplayBuffer, StateSnapshot, connect
from connectors.rows.row_states import WARM_UP
from connectors.setup.replay_settings import create_buffer, use_sequence_replay
from tests.connectors.helpers import (
    BOX,
    DISCRETE,
    CountingRLModule,
    counting_module,
    lstm_config,
    lstm_module,
    run_pipeline,
)

T = 6
DICT_OBS = gym.spaces.Dict({"image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8), "vector": BOX})


class Rollout:
    """One episode as our EnvRunner connectors record it, and what it recorded, step by step.

    Attributes:
        chunks: Its parts, as several calls of `sample` return them.
        states: The state before each step, and after the last.
    """

    def __init__(
        self,
        module,
        num_steps,
        fragments,
        end="cut",
        *,
        space=BOX,
        row_length=T,
        seed=0,
        lookback=1,
    ):
        space.seed(seed)
        rng = np.random.default_rng(seed)
        self.observations = [space.sample() for _ in range(num_steps + 1)]
        self.actions = rng.integers(0, 2, num_steps)
        self.rewards = rng.normal(size=num_steps)
        self.end = end
        self.chunks = []
        state = tree.map_structure(lambda leaf: leaf[None], module.get_initial_state())
        self.states = [state]
        episode = SingleAgentEpisode(observation_space=space, action_space=DISCRETE)
        episode.add_env_reset(self.observations[0])
        for t in range(num_steps):
            if (t - episode.t_started) % row_length == 0:
                state = tree.map_structure(lambda leaf: leaf[0].numpy(), self.states[-1])
                snapshot = StateSnapshot(t, None if t == 0 else state)
            episode.add_env_step(
                self.observations[t + 1],
                self.actions[t],
                self.rewards[t],
                terminated=end == "terminated" and t == num_steps - 1,
                truncated=end == "truncated" and t == num_steps - 1,
                extra_model_outputs={Columns.STATE_OUT: snapshot, "q": np.float32(t)},
            )
            self._advance(module, t)
            if len(episode) == fragments and not episode.is_done:
                continued = episode.cut(len_lookback_buffer=lookback)
                self.chunks.append(episode.to_numpy())
                episode = continued
        if len(episode):
            self.chunks.append(episode.to_numpy())
        self.id = episode.id_

    def _advance(self, module, t):
        obs = tree.map_structure(
            lambda leaf: torch.as_tensor(leaf)[None, None], self.observations[t]
        )
        batch = {Columns.OBS: obs, Columns.STATE_IN: self.states[-1]}
        self.states.append(module.forward_inference(batch)[Columns.STATE_OUT])


def filled(rollouts, **settings):
    """A buffer to which the rollouts' chunks were added in turns."""
    buffer = SequenceReplayBuffer(**{"batch_length_T": T, "seed": 0, **settings})
    queues = [list(rollout.chunks) for rollout in rollouts]
    while any(queues):
        buffer.add([queue.pop(0) for queue in queues if queue])
    return buffer


def train_batch(module, slices):
    return run_pipeline(lambda *spaces: [BuildTrainBatch()], module, slices)


def check_rows(module, rollouts, slices, *, rtol=1e-5):
    """Every column of every row against the rollouts; returns the rows' first timesteps."""
    by_id = {rollout.id: rollout for rollout in rollouts}
    batch = train_batch(module, slices)
    starts = []
    assert len(batch["q"]) == len(slices)
    for row, episode in enumerate(slices):
        rollout = by_id[episode.id_]
        warm_up = int(episode.get_extra_model_outputs(WARM_UP).sum())
        start, stop = episode.t_started + warm_up, episode.t
        n = stop - start
        starts.append(start)
        assert 1 <= n <= T - 1
        assert batch[Columns.SEQ_LENS][row] == n + 1
        mask = [True] * n + [False] * (T - n)
        assert batch[Columns.LOSS_MASK][row].tolist() == mask

        def equal(ours, expected):
            expected = np.asarray(expected)
            padded = np.zeros((T, *expected.shape[1:]), expected.dtype)
            padded[: len(expected)] = expected
            np.testing.assert_array_equal(ours.numpy(), padded.astype(ours.numpy().dtype))

        observations = rollout.observations[start : stop + 1]
        tree.map_structure(
            lambda ours, *steps, row=row: equal(ours[row], np.stack(steps)),
            batch[Columns.OBS],
            *observations,
        )
        # Behind the steps stands RLlib's copy of the last action.
        actions = rollout.actions[start:stop]
        equal(batch[Columns.ACTIONS][row], [*actions, actions[-1]])
        equal(batch[Columns.REWARDS][row], rollout.rewards[start:stop].astype(np.float32))
        equal(batch["q"][row], [*range(start, stop), stop - 1])
        is_end = stop == len(rollout.actions)
        ended = {"terminated": "terminateds", "truncated": "truncateds", "cut": None}[rollout.end]
        flags = {column: [False] * T for column in ("terminateds", "truncateds")}
        flags[ended if is_end and ended else "truncateds"][n - 1] = True
        for column, expected in flags.items():
            assert batch[column][row].tolist() == expected, column
        tree.map_structure(
            lambda ours, expected, row=row: torch.testing.assert_close(
                ours[row], expected[0], rtol=rtol, atol=1e-6
            ),
            batch[Columns.STATE_IN],
            rollout.states[start],
        )
    return starts


@pytest.mark.parametrize("build", [counting_module, lstm_module])
@pytest.mark.parametrize("burn_in_len", [0, 1, 9])
@pytest.mark.parametrize(
    "fragments",
    [
        pytest.param(100, id="one chunk"),
        pytest.param(1, id="one step a fragment"),
        pytest.param(4, id="fragments shorter than rows"),
        pytest.param(8, id="fragments end inside rows"),
        pytest.param(6, id="fragments are rows"),
    ],
)
def test_every_slice_starts_from_the_rollouts_state(build, burn_in_len, fragments):
    module = build(T)
    rollout = Rollout(module["default_policy"], 29, fragments)
    buffer = filled([rollout], burn_in_len=burn_in_len)
    slices = buffer.sample(num_items=1000)
    starts = check_rows(module, [rollout], slices)
    # The slices are full, so these are all the starts there are.
    assert set(starts) == set(range(29 - (T - 1) + 1))
    for episode, start in zip(slices, starts, strict=True):
        assert start - episode.t_started >= min(burn_in_len, start)


@pytest.mark.parametrize("end", ["terminated", "truncated", "cut"])
@pytest.mark.parametrize("space", [BOX, DICT_OBS], ids=["box", "dict"])
def test_ends_and_short_episodes(end, space):
    """Episodes shorter than a row come whole; several grow at the same time."""
    module = counting_module(T, observation_space=space)
    rollouts = [
        Rollout(module["default_policy"], length, 3, end, space=space, seed=length)
        for length in (1, 2, 5, 6, 13)
    ]
    slices = filled(rollouts).sample(num_items=600)
    check_rows(module, rollouts, slices)
    whole = {(rollout.id, 0, len(rollout.actions)) for rollout in rollouts[:3]}
    seen = {(episode.id_, episode.t_started, episode.t) for episode in slices}
    assert whole < seen
    assert {id_ for id_, _, _ in seen} == {rollout.id for rollout in rollouts}
    for rollout in rollouts[:3]:
        assert {span for span in seen if span[0] == rollout.id} <= whole


def test_steps_are_sampled_about_equally():
    """Also the first and the last: with RLlib's buffer the first one's share would be a fifth."""
    module = counting_module(T)
    rollout = Rollout(module["default_policy"], 50, 100)
    counts = np.zeros(50)
    slices = filled([rollout]).sample(num_items=20_000)
    for episode in slices:
        start = episode.t_started + int(episode.get_extra_model_outputs(WARM_UP).sum())
        counts[start : episode.t] += 1
    share = counts / counts[10:40].mean()
    assert 0.8 < share[5:45].min() < share[5:45].max() < 1.2
    # Slices that would hang over an end are moved inside, so steps near it are in more of them.
    assert 0.5 < share.min() < share.max() < 1.6


def test_states_are_exact_for_custom_observations():
    """A learner connector that makes `OBS` sees the warm-up too."""

    class Halve(BuildTrainBatch):
        def __call__(self, *, batch, episodes, **kwargs):
            for episode in episodes:
                n = len(episode)
                items = episode.get_observations(slice(0, n)) / 2
                self.add_n_batch_items(batch, Columns.OBS, items, n, episode)
            return batch

    module = counting_module(T)
    rollout = Rollout(module["default_policy"], 29, 8)
    halved = Rollout(module["default_policy"], 0, 8)
    for t in range(29):
        halved.observations = [obs / 2 for obs in rollout.observations]
        halved._advance(module["default_policy"], t)
    # Recorded from what the module saw.
    for chunk in rollout.chunks:
        for snapshot in chunk.get_extra_model_outputs(Columns.STATE_OUT):
            if snapshot.t:
                state = halved.states[snapshot.t]
                snapshot.state = tree.map_structure(lambda leaf: leaf[0].numpy(), state)
    slices = filled([rollout]).sample(num_items=200)
    batch = run_pipeline(lambda *spaces: [Halve(), BuildTrainBatch()], module, slices)
    for row, episode in enumerate(slices):
        start = episode.t_started + int(episode.get_extra_model_outputs(WARM_UP).sum())
        torch.testing.assert_close(
            batch[Columns.STATE_IN]["sum"][row], halved.states[start]["sum"][0]
        )


def test_burn_in_runs_the_current_weights():
    """The state of a row is that of a run over the burn-in, not the recorded one."""
    module = counting_module(T)
    rollout = Rollout(module["default_policy"], 29, 1)
    buffer = filled([rollout], burn_in_len=4)
    with torch.no_grad():
        module["default_policy"].mix.mul_(0.5)
    slices = buffer.sample(num_items=200)
    batch = train_batch(module, slices)
    for row, episode in enumerate(slices):
        warm_up = int(episode.get_extra_model_outputs(WARM_UP).sum())
        fresh = Rollout(module["default_policy"], 0, 1)
        fresh.observations = rollout.observations
        fresh.states = [rollout.states[episode.t_started]]
        for t in range(episode.t_started, episode.t_started + warm_up):
            fresh._advance(module["default_policy"], t)
        torch.testing.assert_close(batch[Columns.STATE_IN]["sum"][row], fresh.states[-1]["sum"][0])


def test_metrics_count_rebuilt_states():
    module = counting_module(T)
    slices = filled([Rollout(module["default_policy"], 29, 1)]).sample(num_items=100)
    metrics = MetricsLogger(root=True)
    batch = AddOneTsToEpisodesAndTruncate()(
        rl_module=module, batch={}, episodes=slices, shared_data={}
    )
    BuildTrainBatch()(rl_module=module, batch=batch, episodes=slices, metrics=metrics)
    warmed = sum(episode.get_extra_model_outputs(WARM_UP).any() for episode in slices)
    assert metrics.peek(("default_policy", "memory", "num_rebuilt_rows")) == warmed > 0
    assert metrics.peek(("default_policy", "memory", "num_stale_rows")) == 0


def test_lookback_comes_along():
    module = counting_module(T)
    rollout = Rollout(module["default_policy"], 29, 4)
    for episode in filled([rollout]).sample(num_items=200, lookback=2):
        expected = min(2, episode.t_started)
        assert episode.actions.lookback == expected
        before = episode.get_actions(slice(-expected, 0), neg_index_as_lookback=True)
        assert before.tolist() == rollout.actions[: episode.t_started][-2:].tolist()


def test_one_state_a_block_is_stored():
    """Also where each fragment, here each step, came with a state of its own."""
    module = counting_module(T)
    rollout = Rollout(module["default_policy"], 61, 1)
    buffer = filled([rollout])
    references = [
        reference
        for _, block in buffer.get_state()["blocks"]["default_policy"]
        for reference in block["extra_model_outputs"][Columns.STATE_OUT]["data"]
    ]
    assert len(references) == 61
    assert len({id(reference) for reference in references}) == 11
    assert all(reference.end_state is None for reference in references)
    # A slice holds the states of the few blocks that it touches.
    for episode in buffer.sample(num_items=100):
        references = episode.get_extra_model_outputs(Columns.STATE_OUT)
        assert len({id(reference) for reference in references}) <= 3


def arrays_in(data):
    """All arrays of episodes, snapshots included."""
    if isinstance(data, SingleAgentEpisode):
        buffers = (
            data.observations,
            data.actions,
            data.rewards,
            *data.extra_model_outputs.values(),
        )
        return [array for buffer in buffers for array in arrays_in(buffer.data)]
    if isinstance(data, StateSnapshot):
        return [array for state in (data.state, data.end_state) for array in arrays_in(state)]
    arrays = [leaf for leaf in tree.flatten(data) if isinstance(leaf, np.ndarray)]
    objects = {id(o): o for array in arrays if array.dtype == object for o in array}.values()
    return arrays + [array for known in objects for array in arrays_in(known)]


def held_and_kept(episodes):
    """Bytes of the arrays, and bytes of what they keep alive, each array once."""
    arrays = {id(array): array for episode in episodes for array in arrays_in(episode)}
    roots = {}
    for array in arrays.values():
        while isinstance(array.base, np.ndarray):
            array = array.base
        roots[id(array)] = array
    return tuple(sum(array.nbytes for array in some.values()) for some in (arrays, roots))


def blocks_of(buffer):
    return [block for _, block in buffer._blocks["default_policy"]._blocks]


@pytest.mark.ray
def test_blocks_keep_no_other_environments_states_alive():
    config = lstm_config(T).env_runners(num_envs_per_env_runner=16)
    runner = SingleAgentEnvRunner(config=connect(config))
    buffer = SequenceReplayBuffer(1000, batch_length_T=T)
    for _ in range(3):
        episodes = runner.sample(num_timesteps=16 * 2 * T, random_actions=False)
        held, kept = held_and_kept(episodes[:1])
        assert kept < 1.1 * held
        buffer.add(episodes[:1])
    held, kept = held_and_kept(blocks_of(buffer))
    assert held > 1000
    assert kept == held


@pytest.mark.parametrize("space", [BOX, DICT_OBS], ids=["box", "dict"])
def test_blocks_keep_no_evicted_steps_alive(space):
    module = counting_module(T, space)
    rollout = Rollout(module["default_policy"], 20 * T, 20 * T, space=space)
    (chunk,) = rollout.chunks
    # As RLlib ships episodes: all states are parts of one piece of memory.
    states = np.zeros((50, 4), np.float32)
    for row, snapshot in enumerate(set(chunk.extra_model_outputs[Columns.STATE_OUT].data)):
        snapshot.state = {"sum": states[row], "t": np.int64(0)}
    buffer = SequenceReplayBuffer(2 * T, batch_length_T=T)
    buffer.add(chunk)
    assert len(buffer) == 2 * T
    held, kept = held_and_kept(blocks_of(buffer))
    assert kept == held
    restored = SequenceReplayBuffer(2 * T, batch_length_T=T)
    restored.set_state(buffer.get_state())
    assert held_and_kept(blocks_of(restored)) == (held, held)


def test_capacity_bounds_endless_episodes():
    module = counting_module(T)
    rollouts = [Rollout(module["default_policy"], 100, 5, seed=seed) for seed in range(2)]
    buffer = SequenceReplayBuffer(40, batch_length_T=T)
    for chunks in zip(*(rollout.chunks for rollout in rollouts), strict=True):
        buffer.add(list(chunks))
        assert len(buffer) <= 40 == buffer.capacity
    assert len(buffer) > 40 - 2 * T
    assert buffer.get_num_episodes() == 2
    assert buffer.get_added_timesteps() == 200
    # What is left are the latest steps, exact as ever.
    slices = buffer.sample(num_items=300)
    assert min(check_rows(module, rollouts, slices)) >= 100 - 20 - T


def test_evicted_episodes_are_counted_and_may_go_on():
    module = counting_module(T)
    long = Rollout(module["default_policy"], 40, 10)
    short = [Rollout(module["default_policy"], 8, 8, "terminated", seed=s) for s in range(1, 4)]
    buffer = SequenceReplayBuffer(20, batch_length_T=T)
    buffer.add(long.chunks[0])
    buffer.add([rollout.chunks[0] for rollout in short])
    assert buffer.get_num_episodes_evicted() == 1
    buffer.add(long.chunks[1])
    assert buffer.get_num_episodes() == 3
    assert buffer.get_num_episodes_evicted() == 2
    check_rows(module, [long, *short], buffer.sample(num_items=200))


def test_what_was_sampled_is_not_changed():
    module = counting_module(T)
    rollout = Rollout(module["default_policy"], 29, 4)
    before = pickle.dumps([chunk.get_state() for chunk in rollout.chunks])
    buffer = filled([rollout])
    stored = pickle.dumps(buffer.get_state()["blocks"])
    slices = buffer.sample(num_items=100)
    train_batch(module, slices)
    for episode in slices:
        AddOneTsToEpisodesAndTruncate()(
            rl_module=module, batch={}, episodes=[episode], shared_data={}
        )
    assert pickle.dumps([chunk.get_state() for chunk in rollout.chunks]) == before
    assert pickle.dumps(buffer.get_state()["blocks"]) == stored


def test_steps_are_counted_as_trained():
    """RLlib's buffer counts one step more for each sequence."""
    module = counting_module(T)
    buffer = filled([Rollout(module["default_policy"], 29, 4)], burn_in_len=3)
    slices = buffer.sample(num_items=50)
    batch = train_batch(module, slices)
    assert int(batch[Columns.LOSS_MASK].sum()) == 50 == buffer.get_sampled_timesteps()
    metrics = buffer.get_metrics()
    assert metrics["num_env_steps_sampled"].peek() == 50


def test_state_restores_everything():
    module = counting_module(T)
    rollouts = [Rollout(module["default_policy"], 29, 4, seed=s) for s in range(2)]
    buffer = filled(rollouts)
    state = pickle.loads(pickle.dumps(buffer.get_state()))
    restored = SequenceReplayBuffer(batch_length_T=T, seed=0)
    restored.set_state(state)
    ours, theirs = restored.sample(num_items=100), buffer.sample(num_items=100)
    assert [(e.id_, e.t_started, e.t) for e in ours] == [(e.id_, e.t_started, e.t) for e in theirs]
    check_rows(module, rollouts, ours)
    assert len(restored) == len(buffer) == 58
    assert restored.get_num_episodes() == 2
    # A state that is restored twice is not there twice; new episodes go in as ever.
    restored.set_state(copy.deepcopy(state))
    restored.add(Rollout(module["default_policy"], 10, 4).chunks)
    assert len(restored) == 68
    assert restored.get_num_episodes() == 3


@pytest.mark.parametrize("settings", [{"batch_length_T": 1}, {"burn_in_len": -1}])
def test_lengths_are_checked(settings):
    with pytest.raises(ValueError, match="must be"):
        SequenceReplayBuffer(**settings)


PRIORITIZED = "PrioritizedEpisodeReplayBuffer"


class MySequences(SequenceReplayBuffer):
    pass


@pytest.mark.parametrize("config_class", [DQNConfig, SACConfig])
@pytest.mark.parametrize(
    ("given", "expected", "capacity"),
    [
        pytest.param(None, "SequenceReplayBuffer", None, id="default"),
        pytest.param({"capacity": 70}, "SequenceReplayBuffer", 70, id="capacity"),
        pytest.param(
            {"type": "EpisodeReplayBuffer", "capacity": 70}, "SequenceReplayBuffer", 70, id="rllib"
        ),
        pytest.param({"type": MySequences, "capacity": 70}, "MySequences", 70, id="class"),
        pytest.param(
            {"type": "connectors.SequenceReplayBuffer"}, "SequenceReplayBuffer", None, id="name"
        ),
    ],
)
def test_settings_choose_the_buffer(config_class, given, expected, capacity):
    config = config_class().debugging(seed=5, log_sys_usage=False)
    config.rl_module(
        rl_module_spec=RLModuleSpec(CountingRLModule, model_config={"max_seq_len": 12})
    )
    default = config.replay_buffer_config["capacity"]
    if given is not None:
        config.training(replay_buffer_config=given)
    if config_class is DQNConfig:
        config.training(burn_in_len=3)
    else:
        config.replay_buffer_config["burn_in_len"] = 3
    for _ in range(2):
        use_sequence_replay(config, {"default_policy": 12})
        assert config.callbacks_on_algorithm_init == [create_buffer]
        # As `Algorithm` builds it, before the callback does.
        from_config(ReplayBuffer, dict(config.replay_buffer_config))
        algorithm = SimpleNamespace(config=config)
        create_buffer(algorithm=algorithm)
        buffer = algorithm.local_replay_buffer
        assert type(buffer).__name__ == expected
        assert (buffer.batch_length_T, buffer.burn_in_len) == (12, 3)
        assert buffer.rng.random() == np.random.default_rng(5).random()
        if capacity is not None or given is None:
            assert buffer.capacity == (capacity or default)


def test_settings_leave_modules_without_memory_alone():
    config = DQNConfig()
    before = copy.deepcopy(config.replay_buffer_config)
    use_sequence_replay(config, {})
    assert config.replay_buffer_config == before


@pytest.mark.parametrize(
    ("settings", "lengths", "message"),
    [
        ({"training": {"replay_buffer_config": {"alpha": 0.7}}}, (8, 0), "SequenceReplayBuffer"),
        ({"training": {"replay_buffer_config": {"type": PRIORITIZED}}}, (8, 0), None),
        ({"multi_agent": {"policies": {"default_policy", "b"}}}, (8, 0), "`b` has no memory"),
        ({}, (1, 0), "`max_seq_len` is 1"),
        ({}, (8, -1), "`burn_in_len` is -1"),
        ({}, (8, 1.5), "`burn_in_len` is 1.5"),
    ],
)
def test_settings_are_checked(settings, lengths, message):
    config = DQNConfig()
    for method, kwargs in settings.items():
        getattr(config, method)(**kwargs)
    max_seq_len, config.burn_in_len = lengths
    if message is None:
        # The default's name with the default's numbers is the default.
        use_sequence_replay(config, {"default_policy": max_seq_len})
        return
    with pytest.raises(ValueError, match=message):
        use_sequence_replay(config, {"default_policy": max_seq_len})
