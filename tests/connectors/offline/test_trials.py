"""Recorded trials: the Learner carries states over episodes as the rollout did."""

import random
from collections import defaultdict

import gymnasium as gym
import numpy as np
import pytest
import torch
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from connectors import (
    BuildTrainBatch,
    RecordingEnvRunner,
    RecordingMultiAgentEnvRunner,
    connect,
)
from connectors.offline.reading import read_trials
from connectors.offline.several_agents import module_mapping
from connectors.offline.trials import join_trials
from connectors.trials import TRIAL, Trial, trial_of
from tests.connectors.offline.test_reading import Rows, rows_in
from tests.connectors.offline.test_several_agents import SPACES, policy_of
from tests.envs import RandomAgents, RandomObservations
from tests.test_multi_agent import deep

pytestmark = pytest.mark.ray

T = 4
EPISODES = 3


def configure(config, schedule, **env_config):
    config.rl_module(rl_module_spec=deep(T)).debugging(seed=0, log_sys_usage=False)
    if schedule is None:
        return config.environment(RandomObservations, env_config=env_config)
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=policy_of)
    return config.environment(RandomAgents, env_config={"schedule": schedule, **env_config})


def record(path, schedule, episodes_per_trial=EPISODES):
    """Episodes of which some end with a row and some within."""
    config = configure(PPOConfig(), schedule, lengths=[3, 4, 5, 8, 9])
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=2)
    config.offline_data(output=str(path))
    connect(config, episodes_per_trial=episodes_per_trial)
    runner_class = RecordingMultiAgentEnvRunner if schedule else RecordingEnvRunner
    runner = runner_class(config=config)
    samples = [e for steps in (19, 10, 55) for e in runner.sample(num_timesteps=2 * steps)]
    runner.stop()
    if schedule:
        return samples, runner.module
    modules = runner.module.as_multi_rl_module()
    # RLlib builds a new module there.
    modules["default_policy"].load_state_dict(runner.module.state_dict())
    return samples, modules


def pipeline_of(config):
    if config.is_multi_agent:
        return config.build_learner_connector(*SPACES.values())
    return config.build_learner_connector(
        RandomObservations.observation_space, gym.spaces.Discrete(2)
    )


def agents_of(episode):
    return list(getattr(episode, "agent_episodes", {None: episode}).items())


def read(path, config, num_trials):
    rows = Rows([])
    rows.rows = [row["item"] for row in rows_in(path)]
    random.Random(0).shuffle(rows.rows)
    trials = read_trials(rows, module_of=module_mapping(config), batch_size=2)
    return [next(trials) for _ in range(num_trials)]


@pytest.mark.parametrize("config_class", [BCConfig, MARWILConfig])
@pytest.mark.parametrize("schedule", [None, "turns", "lives"])
def test_states_go_on_as_in_the_rollout(schedule, config_class, tmp_path):
    """`schedule` is that of several agents, None for a single one."""
    samples, modules = record(tmp_path, schedule)
    recorded, numbers = defaultdict(list), defaultdict(set)
    for episode in samples:
        trial = trial_of(episode)
        numbers[trial.id_].add(trial.number)
        for agent_id, agent in agents_of(episode):
            if len(agent):
                recorded[episode.id_, agent_id] += [
                    *agent.get_extra_model_outputs(Columns.ACTION_LOGP)
                ]
    config = configure(config_class(), schedule).offline_data(
        input_=[str(tmp_path)], input_read_episodes=True, dataset_num_iters_per_learner=1
    )
    # Unpacked: rows in the order of what was recorded.
    connect(config, episodes_per_trial=EPISODES, pack_rows=False)
    # A second pass, too: what it repeats follows nothing.
    trials = read(tmp_path, config, len(numbers) + 2)
    assert sorted(map(len, trials[: len(numbers)])) == sorted(map(len, numbers.values()))
    assert max(map(len, trials)) == EPISODES
    episodes = [episode for trial in trials for episode in trial]
    expected = defaultdict(list)
    for episode in episodes:
        for agent_id, agent in agents_of(episode):
            module_id = agent.module_id if schedule else "default_policy"
            expected[module_id] += recorded[episode.id_, agent_id]
    pipeline = pipeline_of(config)
    # The EnvRunner's modules have no values.
    pipeline.remove(GeneralAdvantageEstimation)
    batches = pipeline(rl_module=modules, batch={}, episodes=episodes, shared_data={})
    assert batches.keys() == expected.keys()
    for module_id, batch in batches.items():
        module, mask = modules[module_id], batch[Columns.LOSS_MASK]

        def error(batch, module=module, mask=mask, logp=expected[module_id]):
            inputs = module.forward_inference(batch)[Columns.ACTION_DIST_INPUTS]
            dist = module.get_train_action_dist_cls().from_logits(inputs)
            return np.abs(dist.logp(batch[Columns.ACTIONS])[mask].numpy() - logp)

        assert error(batch).max() <= 1e-5
        # The test sees a state that is not carried.
        zeros = {key: torch.zeros_like(leaf) for key, leaf in batch[Columns.STATE_IN].items()}
        assert error({**batch, Columns.STATE_IN: zeros}).max() > 1e-4


def episode_of(trial_id, number, episodes=EPISODES):
    episode = SingleAgentEpisode()
    if trial_id is not None:
        episode.custom_data[TRIAL] = [trial_id, number, episodes]
    return episode


def places(trials):
    return [[trial_of(episode).number for episode in trial] for trial in trials]


def test_trials_in_any_order():
    alone = episode_of(None, 0)
    episodes = [episode_of(id_, number) for id_ in "ab" for number in range(EPISODES)]
    episodes.append(episode_of("c", 0))
    for seed in range(5):
        random.Random(seed).shuffle(episodes)
        trials = list(join_trials([*episodes, alone]))
        assert [alone] in trials
        trials.remove([alone])
        assert sorted(places(trials), key=len) == [[0], [0, 1, 2], [0, 1, 2]]
        for trial in trials:
            assert len({trial_of(episode).id_ for episode in trial}) == 1


def test_a_trial_is_another_one_in_each_pass():
    ids = set()
    for _ in range(2):
        (trial,) = join_trials([episode_of("a", number) for number in range(EPISODES)])
        ids.add(trial_of(trial[0]).id_)
    assert len(ids) == 2


def test_a_missing_episode_is_an_error():
    with pytest.raises(ValueError, match=r"Recorded trial a lacks its episodes \[0\]"):
        list(join_trials([episode_of("a", 1), episode_of("b", 0)]))


@pytest.mark.parametrize(
    ("recorded", "message"), [(1, "in no trials"), (2, "in trials of 2 episodes")]
)
def test_recorded_otherwise(recorded, message, tmp_path):
    _, modules = record(tmp_path, None, episodes_per_trial=recorded)
    config = connect(
        configure(BCConfig(), None).offline_data(
            input_=[str(tmp_path)], input_read_episodes=True, dataset_num_iters_per_learner=1
        ),
        episodes_per_trial=EPISODES,
    )
    (episodes,) = read(tmp_path, config, 1)
    pipeline = pipeline_of(config)
    with pytest.raises(ValueError, match=f"`episodes_per_trial` is 3, but .* {message}"):
        pipeline(rl_module=modules, batch={}, episodes=episodes, shared_data={})


def test_a_piece_of_the_users_has_to_know():
    config = configure(BCConfig(), None).offline_data(
        input_=["anywhere"], input_read_episodes=True, dataset_num_iters_per_learner=1
    )
    config.learners(learner_connector=lambda *_: BuildTrainBatch())
    connect(config, episodes_per_trial=2)
    with pytest.raises(ValueError, match=r"2 in `connect`, but 1 in the `BuildTrainBatch`"):
        pipeline_of(config)


def test_the_place_of_an_episode_survives_a_cut():
    episode = episode_of("a", 1)
    episode.add_env_reset(np.zeros(3))
    episode.add_env_step(np.zeros(3), 0, 0.0)
    assert trial_of(episode.cut()) == Trial("a", 1, EPISODES)
