"""`BuildTrainBatch` gives RLlib's own train batch, bit for bit."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from connectors import BuildTrainBatch
from tests.connectors.helpers import (
    BOX,
    DISCRETE,
    assert_same_batch,
    counting_module,
    lstm_module,
    make_episodes,
    run_pipeline,
    with_snapshots,
)

T = 4
CHUNKS = [
    (3, 0, "terminated"),
    (9, 0, "truncated"),
    (4, 0, "terminated"),
    (8, 0, "cut"),
    (1, 0, "truncated"),
    (6, 5, "cut"),
    (4, 8, "terminated"),
    (12, 4, "truncated"),
    (7, 4, "cut"),
]
DICT_OBS = gym.spaces.Dict(
    {
        "image": gym.spaces.Box(0, 255, (2, 2, 3), np.uint8),
        "inner": gym.spaces.Dict(
            {"vector": BOX, "scalar": gym.spaces.Box(-1.0, 1.0, (), np.float32)}
        ),
    }
)
DICT_ACTIONS = gym.spaces.Dict(
    {"move": gym.spaces.Discrete(3), "turn": gym.spaces.Box(-1.0, 1.0, (2,), np.float32)}
)
SPACES = {
    "box": (BOX, DISCRETE),
    "dict_obs": (DICT_OBS, DISCRETE),
    "dict_actions": (BOX, DICT_ACTIONS),
    "float64": (gym.spaces.Box(-1.0, 1.0, (2, 2), np.float64), gym.spaces.MultiDiscrete([2, 3])),
}


def ours(observation_space, action_space):
    return [BuildTrainBatch()]


@pytest.mark.parametrize("spaces", list(SPACES))
@pytest.mark.parametrize("recorded", ["snapshots", "states"])
def test_equals_rllib(spaces, recorded):
    observation_space, action_space = SPACES[spaces]
    module = counting_module(T, observation_space, action_space)
    episodes = make_episodes(
        module["default_policy"],
        CHUNKS,
        observation_space=observation_space,
        action_space=action_space,
    )
    mine = episodes
    if recorded == "snapshots":
        mine = with_snapshots(module["default_policy"], episodes, T)
    assert_same_batch(run_pipeline(ours, module, mine), run_pipeline(None, module, episodes))


@pytest.mark.parametrize("max_seq_len", [1, 2, 5, 64])
@pytest.mark.parametrize("bootstrap", [True, False])
def test_equals_rllib_for_any_row_length(max_seq_len, bootstrap):
    module = lstm_module(max_seq_len)
    episodes = make_episodes(module["default_policy"], CHUNKS)
    mine = with_snapshots(module["default_policy"], episodes, max_seq_len)
    assert_same_batch(
        run_pipeline(ours, module, mine, bootstrap=bootstrap),
        run_pipeline(None, module, episodes, bootstrap=bootstrap),
    )


def test_columns_equal_rllibs_without_recorded_states():
    """But for the states, which RLlib takes for the initial one: they are rebuilt."""
    module = lstm_module(T)
    episodes = make_episodes(module["default_policy"], CHUNKS)
    for episode in episodes:
        del episode.extra_model_outputs[Columns.STATE_OUT]
    batches = [run_pipeline(build, module, episodes) for build in (ours, None)]
    for batch in batches:
        del batch[Columns.STATE_IN]
    assert_same_batch(*batches)


class DoubleObservations(ConnectorV2):
    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        for episode in episodes:
            self.add_n_batch_items(
                batch,
                Columns.OBS,
                episode.get_observations(slice(0, len(episode))) * 2,
                len(episode),
                episode,
            )
            self.add_n_batch_items(
                batch, "index", [np.float32(i) for i in range(len(episode))], len(episode), episode
            )
        return batch


def test_lays_out_columns_of_other_connectors():
    module = lstm_module(T)
    episodes = make_episodes(module["default_policy"], CHUNKS)
    assert_same_batch(
        run_pipeline(
            lambda *_: [DoubleObservations(), BuildTrainBatch()],
            module,
            with_snapshots(module["default_policy"], episodes, T),
        ),
        run_pipeline(lambda *_: [DoubleObservations()], module, episodes),
    )


def test_leaves_a_module_without_memory_alone():
    batch = {"column": object()}

    class Stateless:
        def unwrapped(self):
            return self

        def get_initial_state(self):
            return {}

        def is_stateful(self):
            return False

    module = lstm_module(T)
    episodes = make_episodes(module["default_policy"], CHUNKS[:1])
    result = BuildTrainBatch()(rl_module=Stateless(), batch=batch, episodes=episodes)
    assert result is batch
    assert list(batch) == ["column"]


@pytest.mark.parametrize("build", [lstm_module, counting_module])
@pytest.mark.parametrize("lookback", [0, T])
def test_sliced_episodes_get_exact_states(build, lookback):
    module = build(T)
    single = module["default_policy"]
    episodes = make_episodes(single, [(23, 0, "terminated"), (17, 8, "cut")])
    slices = []
    for plain, episode in zip(episodes, with_snapshots(single, episodes, T), strict=True):
        # As RLlib shares episodes out over Learners.
        for cut in (6, 8, 9):
            slices.append((plain[:cut], episode[:cut]))
            slices.append(
                tuple(
                    e.slice(slice(cut, None), len_lookback_buffer=length)
                    for e, length in ((plain, 1), (episode, lookback))
                )
            )
    expected = run_pipeline(None, module, [plain for plain, _ in slices])
    metrics = MetricsLogger(root=True)
    mine = [episode for _, episode in slices]
    batch = BuildTrainBatch()(
        rl_module=module, batch={}, episodes=copy.deepcopy(mine), metrics=metrics
    )
    counts = metrics.reduce()["default_policy"]["memory"]
    num_stale = int(counts["num_stale_rows"])
    assert counts["num_rebuilt_rows"] > 0
    assert (num_stale == 0) == (lookback == T)
    if num_stale:
        return
    states = run_pipeline(ours, module, mine)[Columns.STATE_IN]
    assert batch
    tree.map_structure(
        lambda a, b: torch.testing.assert_close(a, b, check_dtype=False),
        states,
        expected[Columns.STATE_IN],
    )


def test_wrong_number_of_items_is_an_error():
    module = lstm_module(T)
    episodes = make_episodes(module["default_policy"], [(5, 0, "cut")])
    batch = {"index": {(episodes[0].id_,): [1.0, 2.0]}}
    with pytest.raises(ValueError, match="`index` has 2 items for the 5 timesteps"):
        BuildTrainBatch()(rl_module=module, batch=batch, episodes=episodes)
    with pytest.raises(ValueError, match="`index` does not hold"):
        BuildTrainBatch()(rl_module=module, batch={"index": {}}, episodes=episodes)


def test_columns_recorded_in_some_episodes_only_are_an_error():
    module = lstm_module(T)
    episodes = make_episodes(module["default_policy"], [(5, 0, "cut"), (5, 0, "cut")])
    del episodes[1].extra_model_outputs[Columns.ACTION_LOGP]
    with pytest.raises(ValueError, match="`action_logp` was recorded in 1 of 2 episodes"):
        BuildTrainBatch()(rl_module=module, batch={}, episodes=episodes)
