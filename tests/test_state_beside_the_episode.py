"""No episode under way silently starts from the initial state: neither to act nor to learn.

Scripts that keep nothing from step to step, episodes that were recorded without states, and
clients that send their episodes over a socket.
"""

import socket

import numpy as np
import pytest
import torch
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.env.external import RLlink, get_rllink_message, send_rllink_message
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from connectors import BuildTrainBatch, StateSnapshot, connect
from tests.connectors.helpers import (
    BOX,
    counting_module,
    lstm_config,
    lstm_module,
    make_episodes,
    run_pipeline,
)
from tests.envs import RandomObservations

pytestmark = pytest.mark.ray
T = 4


class OtherObservations(ConnectorV2):
    """Makes the module's input, and leaves the episode alone."""

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        for episode in episodes:
            self.add_batch_item(batch, Columns.OBS, 2 * episode.get_observations(-1), episode)
        return batch


class HalveObservations(ConnectorV2):
    """Writes what the module sees into the episode."""

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        for episode in episodes:
            episode.set_observations(at_indices=-1, new_data=episode.get_observations(-1) / 2)
        return batch


@pytest.fixture(scope="module")
def make_script():
    """The pipelines and the module of a runner, with a connector of the user or without."""
    runners = {}

    def make(piece=None, episodes_per_trial=1):
        key = (piece, episodes_per_trial)
        if key not in runners:
            config = lstm_config(T).environment(RandomObservations, disable_env_checking=True)
            if piece is not None:
                config.env_runners(env_to_module_connector=lambda *_: piece())
            config = connect(config, episodes_per_trial=episodes_per_trial)
            runners[key] = SingleAgentEnvRunner(config=config)
        return Script(runners[key])

    return make


class Script:
    """Acts as RLlib's published inference script does, with `shared_data` from outside."""

    def __init__(self, runner):
        self.pipelines = runner._env_to_module, runner._module_to_env
        self.module = runner.module
        space = runner.env.single_observation_space
        self.random = np.random.default_rng(0)
        self.width = space.shape
        self.episode = SingleAgentEpisode(
            observations=[self.observe()],
            observation_space=space,
            action_space=runner.env.single_action_space,
        )
        self.state = tree.map_structure(lambda leaf: leaf[None], self.module.get_initial_state())

    def observe(self):
        return self.random.uniform(-1, 1, self.width).astype(np.float32)

    def look(self, shared_data):
        """The module's batch, which must hold the state after the step before."""
        batch = self.pipelines[0](batch={}, **self.call(shared_data))
        torch.testing.assert_close(batch[Columns.STATE_IN], self.state)
        return batch

    def act(self, shared_data):
        """The module's outputs as episodes record them, and the state after the step."""
        outputs = self.module.forward_inference(self.look(shared_data))
        state = tree.map_structure(torch.clone, outputs[Columns.STATE_OUT])
        return self.pipelines[1](batch=outputs, **self.call(shared_data)), state

    def call(self, shared_data):
        return {
            "episodes": [self.episode],
            "rl_module": self.module,
            "explore": False,
            "shared_data": shared_data,
        }

    def step(self, shared_data, *, record=True):
        out, self.state = self.act(shared_data)
        action = out.pop(Columns.ACTIONS)[0]
        out.pop(Columns.ACTIONS_FOR_ENV, None)
        self.episode.add_env_step(
            self.observe(),
            action,
            0.0,
            extra_model_outputs={key: value[0] for key, value in out.items()} if record else None,
        )


@pytest.mark.parametrize("piece", [None, HalveObservations])
def test_state_beside_the_episode_of_a_script_that_keeps_nothing(make_script, piece):
    script = make_script(piece)
    for _ in range(2 * T + 1):
        script.step({})
    script.episode = script.episode.cut(len_lookback_buffer=1)
    for _ in range(T):
        script.step({})


def test_state_beside_the_episode_is_rebuilt_from_the_snapshot_of_its_row(make_script):
    script, shared_data = make_script(), {}
    for _ in range(2 * T - 1):
        script.step(shared_data)
    assert script.episode.get_extra_model_outputs(Columns.STATE_OUT, -1).t == T
    script.step({})
    # The first dict knows of an earlier step; the second call at a step, of a later one.
    script.step(shared_data)
    script.look(shared_data)
    script.act(shared_data)
    script.step(shared_data)


def test_state_beside_the_episode_as_rllib_records_it(make_script):
    script = make_script()
    (plain,) = make_episodes(script.module, [(5, 0, "cut")], observation_space=BOX)
    script.episode = plain
    script.state = tree.map_structure(
        lambda leaf: torch.as_tensor(leaf[-1:]), plain.get_extra_model_outputs(Columns.STATE_OUT)
    )
    script.look({})


def test_state_beside_the_episode_that_nobody_knows_is_an_error(make_script):
    message = r"`shared_data` has no state of episode .*, which is at its step 1"
    unrecorded, changed = make_script(), make_script(OtherObservations)
    unrecorded.step({}, record=False)
    changed.step({})
    for script in (unrecorded, changed):
        # Still an error if the script tries again.
        shared_data = {}
        for _ in range(2):
            with pytest.raises(ValueError, match=message):
                script.step(shared_data)
    trials = make_script(episodes_per_trial=2)
    trials.step({})
    with pytest.raises(ValueError, match="`episodes_per_trial` is 2, but `shared_data` has no"):
        trials.step({})


def test_state_beside_the_episode_with_a_dict_for_each_pipeline_is_an_error(make_script):
    with pytest.raises(ValueError, match=r"found no `STATE_IN` .* same `shared_data` dict"):
        make_script().step(None)


def test_a_script_that_keeps_its_dict_needs_no_records(make_script):
    script, shared_data = make_script(), {}
    for _ in range(2 * T + 1):
        script.step(shared_data, record=False)
    script.episode.validate()
    assert Columns.STATE_OUT not in script.episode.extra_model_outputs


def without_states(episodes):
    for episode in episodes:
        del episode.extra_model_outputs[Columns.STATE_OUT]
    return episodes


@pytest.mark.parametrize("build", [lstm_module, counting_module])
def test_state_beside_the_episode_recorded_elsewhere_is_rebuilt(build):
    module = build(T)
    # The second one's lookback reaches back to its first step.
    episodes = make_episodes(
        module["default_policy"], [(15, 0, "terminated"), (9, 6, "cut"), (2, 0, "cut")], lookback=6
    )
    expected = run_pipeline(None, module, episodes)
    metrics = MetricsLogger(root=True)
    mine = without_states(episodes)
    BuildTrainBatch()(rl_module=module, batch={}, episodes=mine, metrics=metrics)
    counts = metrics.reduce()["default_policy"]["memory"]
    assert (counts["num_rebuilt_rows"], counts["num_stale_rows"]) == (3 + 3, 0)
    batch = run_pipeline(lambda *_: BuildTrainBatch(), module, mine)
    torch.testing.assert_close(
        batch[Columns.STATE_IN], expected[Columns.STATE_IN], check_dtype=False
    )


def test_state_beside_the_episode_whose_beginning_is_missing_is_counted():
    module = counting_module(T)
    episodes = without_states(make_episodes(module["default_policy"], [(9, 6, "cut")], lookback=5))
    metrics = MetricsLogger(root=True)
    batch = BuildTrainBatch()(rl_module=module, batch={}, episodes=episodes, metrics=metrics)
    counts = metrics.reduce()["default_policy"]["memory"]
    assert (counts["num_rebuilt_rows"], counts["num_stale_rows"]) == (0, 3)
    # The steps that are there are read.
    (states,) = next(iter(batch[Columns.STATE_IN].values()))
    assert states["t"].tolist() == [0, T, 2 * T]


def test_state_beside_the_episode_survives_rllink(make_script):
    """What a client on the config's pipelines sends, through RLlib's own messages."""
    script, shared_data = make_script(), {}
    client, server = socket.socketpair()
    received, sent = [], []
    with client, server:
        for length in (1, 2 * T + 1, 3):
            for _ in range(length):
                script.step(shared_data)
            message = {"type": RLlink.EPISODES.name, "episodes": [script.episode.get_state()]}
            send_rllink_message(client, message)
            kind, body = get_rllink_message(server)
            assert kind == RLlink.EPISODES
            # As `EnvRunnerServerForExternalInference` does it.
            received += [SingleAgentEpisode.from_state(s).to_numpy() for s in body["episodes"]]
            sent.append(script.episode)
            script.episode = script.episode.cut()
    for mine, other in zip(sent, received, strict=True):
        ours, theirs = (e.get_extra_model_outputs(Columns.STATE_OUT) for e in (mine, other))
        assert all(isinstance(snapshot, StateSnapshot) for snapshot in theirs)
        assert [s.t for s in ours] == [s.t for s in theirs]
        # Each snapshot travels once.
        assert len({id(s) for s in ours}) == len({id(s) for s in theirs})
    module = script.module.as_multi_rl_module()
    metrics = MetricsLogger(root=True)
    mine = [run_pipeline(lambda *_: BuildTrainBatch(), module, e) for e in (sent, received)]
    torch.testing.assert_close(mine[0][Columns.STATE_IN], mine[1][Columns.STATE_IN])
    BuildTrainBatch()(rl_module=module, batch={}, episodes=received, metrics=metrics)
    assert metrics.reduce()["default_policy"]["memory"]["num_stale_rows"] == 0


def test_snapshots_are_recorded_at_the_steps_of_a_script(make_script):
    """What such a script records trains as what an EnvRunner records."""
    script = make_script()
    for _ in range(2 * T + 1):
        script.step({})
    references = script.episode.get_extra_model_outputs(Columns.STATE_OUT)
    assert [snapshot.t for snapshot in references] == list(range(2 * T + 1))
    assert references[0].state is None
