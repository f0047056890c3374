"""The pieces of the pipelines with several agents, against what RLlib's own pieces do."""

import copy

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.module_to_env import (
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    NormalizeAndClipActions,
    UnBatchToIndividualItems,
)
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode

from connectors import (
    DivisibleEpisode,
    FormatActions,
    MemoryMultiAgentEnvRunner,
    SampleActions,
    connect,
)
from connectors.rollout.build_module_batch import MapSpaces
from connectors.rollout.states import rollout_of
from tests.connectors.helpers import BOX, DISCRETE
from tests.test_multi_agent import logp_errors, module_of, ppo

SPACES = gym.spaces.Dict(
    {
        "a0": gym.spaces.Box(-2.0, 3.0, (2,), np.float32),
        "a1": gym.spaces.Box(-2.0, 3.0, (2,), np.float32),
        "a2": gym.spaces.Box(np.float32([0, -1]), np.float32([1, 5])),
        "a3": gym.spaces.Discrete(3),
    }
)
# Two agents of equal spaces, two of different ones, and one alone.
ROWS = {
    "same": [(0, "a0"), (1, "a0"), (1, "a1")],
    "mixed": [(1, "a2"), (0, "a1")],
    "one": [(0, "a3")],
}


@pytest.mark.parametrize(
    "flags", [(True, False), (False, True), (False, False)], ids=["normalize", "clip", "neither"]
)
def test_format_actions_equals_rllib(flags):
    flags = dict(zip(("normalize_actions", "clip_actions"), flags, strict=True))
    episodes = [MultiAgentEpisode(), MultiAgentEpisode(), MultiAgentEpisode()]
    rng = np.random.default_rng(0)
    batch = {
        module_id: {
            Columns.ACTIONS: rng.integers(0, 3, len(rows))
            if module_id == "one"
            else 3 * rng.normal(size=(len(rows), 2)).astype(np.float32),
            Columns.ACTION_LOGP: rng.normal(size=len(rows)),
            f"only {module_id}": {"x": rng.normal(size=len(rows))},
        }
        for module_id, rows in ROWS.items()
    }
    shared_data = {
        "memorized_map_structure": {
            module_id: [(episodes[i].id_, agent) for i, agent in rows]
            for module_id, rows in ROWS.items()
        }
    }
    rollout_of(shared_data).rows = ROWS
    call = {"rl_module": None, "episodes": episodes, "shared_data": shared_data}

    expected = copy.deepcopy(batch)
    for piece in (
        UnBatchToIndividualItems(),
        ModuleToAgentUnmapping(),
        NormalizeAndClipActions(BOX, SPACES, **flags),
        ListifyDataForVectorEnv(),
    ):
        expected = piece(batch=expected, **call)
    mine = FormatActions(BOX, SPACES, **flags)(batch=copy.deepcopy(batch), **call)
    assert mine.keys() == expected.keys()
    for column, environments in expected.items():
        for ours, theirs in zip(mine[column], environments, strict=True):
            assert ours.keys() == theirs.keys()
            tree.map_structure(np.testing.assert_array_equal, ours, theirs)


class ShiftObservations(ConnectorV2):
    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        for agent in self.single_agent_episode_iterator(episodes):
            observation = agent.get_observations(-1) + np.float32(0.5)
            agent.set_observations(at_indices=-1, new_data=observation)
            self.add_batch_item(batch, Columns.OBS, observation, agent)
        return batch


class FlipActions(ConnectorV2):
    """Sees single items under the agents' keys, as RLlib hands them out."""

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        assert all(len(items) == 1 for items in batch[Columns.ACTIONS].values())
        self.foreach_batch_item_change_in_place(
            batch, Columns.ACTIONS, lambda action, *ids: 1 - action
        )
        return batch


class AddColumn(ConnectorV2):
    """Adds a column for the agents of one module only."""

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        for agent in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            if agent.module_id == "lstm":
                items = [np.float32(t) for t in range(len(agent))]
                self.add_n_batch_items(batch, "t", items, len(agent), agent)
        return batch


@pytest.mark.ray
def test_a_column_of_one_module():
    config = ppo(schedule="rates")
    config._learner_connector = None
    config.learners(learner_connector=lambda *_: AddColumn())
    runner = MultiAgentEnvRunner(config=connect(config))
    batches = config.build_learner_connector(None, None)(
        rl_module=runner.module,
        batch={},
        episodes=runner.sample(num_timesteps=60),
        shared_data={},
    )
    assert [id_ for id_, columns in batches.items() if "t" in columns] == ["lstm"]
    assert batches["lstm"]["t"].shape == batches["lstm"][Columns.OBS].shape[:2]
    assert {Columns.OBS, Columns.ACTIONS} <= batches["mlp"].keys()
    assert batches["mlp"][Columns.OBS].ndim == 2


class CountRows(ConnectorV2):
    """Stands behind `SampleActions` and sees numpy batches by module."""

    rows = 0

    def __call__(self, *, batch, **kwargs):
        CountRows.rows += sum(len(columns[Columns.ACTIONS]) for columns in batch.values())
        return batch


@pytest.mark.ray
@pytest.mark.parametrize("schedule", ["turns", "lives"])
def test_connectors_of_the_user(schedule):
    config = ppo(schedule=schedule)
    config._env_to_module_connector = config._module_to_env_connector = None
    config.env_runners(
        env_to_module_connector=lambda *_: ShiftObservations(),
        module_to_env_connector=lambda *_: FlipActions(),
    )
    runner = MultiAgentEnvRunner(config=connect(config))
    num_flipped = 0
    for episode in runner.sample(num_timesteps=60):
        for agent in episode.agent_episodes.values():
            # The first observation of each agent goes through the pipeline, too.
            assert agent.observations.data.min() > -0.5
            module = runner.module[agent.module_id]
            dist_class = module.get_inference_action_dist_cls()
            for step in range(len(agent)):
                outputs = agent.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS, step)
                dist = dist_class.from_logits(torch.as_tensor(outputs))
                action = torch.as_tensor(1 - agent.get_actions(step))
                logp = agent.get_extra_model_outputs(Columns.ACTION_LOGP, step)
                assert float(dist.logp(action)) == pytest.approx(logp, abs=1e-5)
                num_flipped += 1
    assert num_flipped > 20


@pytest.mark.ray
def test_a_connector_between_our_pieces():
    config = ppo(schedule="rates")
    flags = {"normalize_actions": True, "clip_actions": False}
    config._module_to_env_connector = None
    config.env_runners(
        module_to_env_connector=lambda *_: [SampleActions(), CountRows(), FormatActions(**flags)]
    )
    runner = MultiAgentEnvRunner(config=connect(config))
    episodes = runner.sample(num_timesteps=60)
    steps = sum(len(agent) for e in episodes for agent in e.agent_episodes.values())
    assert CountRows.rows >= steps > 60


@pytest.mark.ray
def test_random_actions_in_between():
    """Nothing is known of what the module would have remembered: it starts anew."""
    # RLlib allows the change within an episode only where no lookback shows the random steps.
    config = ppo(schedule="together").env_runners(episode_lookback_horizon=0)
    runner = MultiAgentEnvRunner(config=config)
    runner.sample(num_timesteps=25)
    runner.sample(num_timesteps=25, random_actions=True)
    episodes = runner.sample(num_timesteps=50)
    assert any(episode.env_t_started > 0 for episode in episodes)
    assert max(logp_errors(config, runner, episodes).values()) <= 1e-5


class CountConversions:
    """Counts how often RLlib and we convert the same episode to numpy."""

    def __init__(self, monkeypatch):
        self.counts = {}
        original = MultiAgentEpisode.to_numpy

        def to_numpy(episode):
            self.counts[id(episode)] = self.counts.get(id(episode), 0) + 1
            return original(episode)

        monkeypatch.setattr(MultiAgentEpisode, "to_numpy", to_numpy)


@pytest.mark.ray
@pytest.mark.parametrize("schedule", ["together", "rates"])
def test_env_runner_samples_and_reports_what_rllibs_does(schedule, monkeypatch):
    conversions = CountConversions(monkeypatch)
    samples, metrics, most_conversions, seen = [], [], [], []
    for runner_class in (MultiAgentEnvRunner, MemoryMultiAgentEnvRunner):
        config = ppo(schedule=schedule).debugging(seed=3)
        config.callbacks(
            on_sample_end=lambda env_runner, metrics_logger, samples, **kwargs: seen.append(
                all(episode.is_numpy for episode in samples)
            )
        )
        torch.manual_seed(0)
        runner = runner_class(config=config)
        torch.manual_seed(1)
        conversions.counts.clear()
        chunks = runner.sample(num_timesteps=60)
        most_conversions.append(max(conversions.counts.values()))
        chunks += runner.sample(num_timesteps=60)
        samples.append(chunks)
        first = runner.get_metrics()
        runner.sample(num_episodes=3)
        metrics.append([first, runner.get_metrics()])
    assert seen == [True] * 6
    # RLlib repeats the work; should it no longer, our EnvRunner need not step in.
    assert most_conversions[0] > most_conversions[1] == 1

    theirs, ours = samples
    assert len(theirs) == len(ours)
    for a, b in zip(theirs, ours, strict=True):
        assert (len(a), a.env_t_started, a.is_done) == (len(b), b.env_t_started, b.is_done)
        assert a.agent_episodes.keys() == b.agent_episodes.keys()
        for agent_id, agent in a.agent_episodes.items():
            other = b.agent_episodes[agent_id]
            for get in ("get_observations", "get_actions", "get_rewards"):
                np.testing.assert_array_equal(getattr(agent, get)(), getattr(other, get)())
    for expected, reported in zip(*metrics, strict=True):
        assert expected.keys() == reported.keys()
        counted = [key for key in expected if key.startswith("num_")]
        assert len(counted) >= 8
        for key in counted:
            values = [tree.map_structure(lambda s: s.peek(), m[key]) for m in (expected, reported)]
            tree.map_structure(np.testing.assert_array_equal, *values)


@pytest.mark.ray
def test_parts_of_an_episode_hold_all_steps():
    config = ppo(schedule="rates", num_envs=1, num_learners=2)
    assert config.env_runner_cls is MemoryMultiAgentEnvRunner
    runner = MemoryMultiAgentEnvRunner(config=config)
    runner.sample(num_timesteps=30)
    for episode in runner.sample(num_timesteps=60):
        assert isinstance(episode, DivisibleEpisode)
        middle = len(episode) // 3
        parts = [episode[:middle], *(episode[middle:][i : i + 4] for i in range(0, 60, 4))]
        assert sum(map(len, parts)) == len(episode)
        for agent_id, agent in episode.agent_episodes.items():
            pieces = [p.agent_episodes[agent_id] for p in parts if agent_id in p.agent_episodes]
            assert sum(map(len, pieces)) == len(agent)
            assert [p.t_started for p in pieces[1:]] == [p.t for p in pieces[:-1]]
            assert pieces[-1].is_done == agent.is_done
            assert not any(p.is_done for p in pieces[:-1])
            for piece in pieces:
                assert (piece.agent_id, piece.module_id) == (agent_id, agent.module_id)
                assert piece.multi_agent_episode_id == episode.id_


def test_env_runner_class():
    class Own(MultiAgentEnvRunner):
        pass

    class Derived(MemoryMultiAgentEnvRunner):
        pass

    config = ppo().env_runners(env_runner_cls=Own)
    assert connect(config).env_runner_cls is Own
    with pytest.raises(ValueError, match="`env_runner_cls` is `Own`, whose episodes"):
        connect(config.learners(num_learners=2).training(minibatch_size=8))
    config.env_runners(env_runner_cls=Derived)
    assert connect(config).env_runner_cls is Derived


def test_constructor_arguments_round_trip():
    spaces = [gym.spaces.Dict({"a0": space, "a1": space}) for space in (BOX, DISCRETE)]
    settings = {"rl_module_specs": {"ours", "lstm"}, "agent_to_module_mapping_fn": module_of}
    piece = MapSpaces(*spaces, **settings)
    args, kwargs = piece.get_ctor_args_and_kwargs()
    assert (args, kwargs) == (tuple(spaces), settings)
    assert MapSpaces(*args, **kwargs).get_ctor_args_and_kwargs() == (args, kwargs)
