"""`StateSnapshot` survives what RLlib does to episodes; states are rebuilt exactly."""

import copy
import pickle

import numpy as np
import pytest
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.postprocessing.episodes import add_one_ts_to_episodes_and_truncate

from connectors import StateSnapshot
from connectors.snapshots import copy_rows, rebuild_states
from tests.connectors.helpers import BOX, DISCRETE, counting_module, lstm_module, make_episodes


def make_snapshot(t=0, size=3):
    snapshot = StateSnapshot(t, {"h": np.arange(size, dtype=np.float32)})
    snapshot.finish(t + 4, {"h": np.ones(size, np.float32)})
    return snapshot


def test_state_at():
    snapshot = StateSnapshot(8, {"h": np.zeros(2)})
    assert snapshot.state_at(8) is snapshot.state
    assert snapshot.state_at(12) is None
    snapshot.finish(12, {"h": np.ones(2)})
    assert snapshot.state_at(12) is snapshot.end_state
    assert snapshot.state_at(10) is None
    assert repr(snapshot) == "StateSnapshot(t=8, end_t=12)"


def test_is_a_leaf_and_an_array_item():
    snapshot = make_snapshot()
    assert tree.flatten({"a": [snapshot, 1]}) == [snapshot, 1]
    array = np.array([snapshot, snapshot])
    assert array.shape == (2,)
    assert array[1] is snapshot


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda x: pickle.loads(pickle.dumps(x))])
def test_copies(copied):
    snapshot = make_snapshot(5)
    other = copied(snapshot)
    assert (other.t, other.end_t) == (5, 9)
    assert np.array_equal(other.state["h"], snapshot.state["h"])
    assert np.array_equal(other.end_state["h"], snapshot.end_state["h"])


def test_survives_an_episode():
    episode = SingleAgentEpisode(observation_space=BOX, action_space=DISCRETE)
    episode.add_env_reset(BOX.sample())
    snapshots = [make_snapshot(0), make_snapshot(4)]
    for t in range(7):
        episode.add_env_step(
            BOX.sample(), 0, 0.0, extra_model_outputs={Columns.STATE_OUT: snapshots[t // 4]}
        )
    continued = episode.cut(len_lookback_buffer=1)
    assert continued.get_extra_model_outputs(Columns.STATE_OUT, -1) is snapshots[1]
    episode.to_numpy()
    add_one_ts_to_episodes_and_truncate([episode])
    references = episode.get_extra_model_outputs(Columns.STATE_OUT)
    assert [snapshots.index(reference) for reference in references] == [0] * 4 + [1] * 4
    part = pickle.loads(pickle.dumps(episode[3:6]))
    references = part.get_extra_model_outputs(Columns.STATE_OUT)
    assert references[1] is references[2]
    assert [reference.t for reference in references] == [0, 4, 4]


def test_an_episode_of_snapshots_pickles_one_state_a_row():
    def episode(states):
        episode = SingleAgentEpisode(observation_space=BOX, action_space=DISCRETE)
        episode.add_env_reset(BOX.sample())
        for state in states:
            episode.add_env_step(
                BOX.sample(), 0, 0.0, extra_model_outputs={Columns.STATE_OUT: state}
            )
        return episode.to_numpy()

    def state():
        return {"h": np.random.default_rng(0).normal(size=(4, 32, 32)).astype(np.float32)}

    steps = [state() for _ in range(128)]
    snapshots = [StateSnapshot(t, state()) for t in (0, 64)]
    snapshots[0].finish(64, snapshots[1].state)
    snapshots[1].finish(128, state())
    ours = len(pickle.dumps(episode(snapshots[t // 64] for t in range(128))))
    theirs = len(pickle.dumps(episode(steps)))
    assert theirs > 35 * ours


def test_copy_rows_takes_copies_with_the_dtypes():
    states = {"h": torch.rand(3, 2), "t": torch.arange(3)}
    expected = states["h"].clone()
    rows = copy_rows(states, [2, 0])
    states["h"].zero_()
    assert np.array_equal(rows[0]["h"], expected[2].numpy())
    assert np.array_equal(rows[1]["h"], expected[0].numpy())
    assert rows[0]["t"] == 2
    assert rows[0]["t"].dtype == np.int64


@pytest.mark.parametrize("build", [lstm_module, counting_module])
def test_rebuild_states(build):
    module = build(4)["default_policy"]
    module.train()
    episode = make_episodes(module, [(12, 0, "cut")])[0]
    recorded = episode.get_extra_model_outputs(Columns.STATE_OUT)
    obs = episode.get_observations()
    spans = [(0, 3), (2, 5), (4, 5), (1, 8), (5, 8)]
    states = [
        tree.map_structure(lambda leaf, start=start: leaf[start], recorded) for start, _ in spans
    ]
    steps = [{Columns.OBS: obs[start + 1 : end + 1]} for start, end in spans]
    rebuilt = rebuild_states(module, states, steps)
    for (_, end), state in zip(spans, rebuilt, strict=True):
        expected = tree.map_structure(lambda leaf, end=end: leaf[end], recorded)
        tree.map_structure(
            lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), state, expected
        )
    assert module.training
    assert all(parameter.grad is None for parameter in module.parameters())
