"""Episodes of several agents: recorded, joined, and trained on with each agent's states."""

import random
from collections import defaultdict

import gymnasium as gym
import msgpack
import msgpack_numpy
import numpy as np
import pytest
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from connectors import RecordingMultiAgentEnvRunner, connect
from connectors.offline.reading import read_episodes
from connectors.offline.several_agents import module_mapping, state_of
from tests.connectors.offline.test_reading import (
    Rows,
    marwils_best_return,
    play,
    rows_in,
    sample_action,
)
from tests.envs import RandomAgents, RememberFirstAgents, SampledObservations
from tests.test_multi_agent import deep

pytestmark = pytest.mark.ray

T = 4
SEEN = RandomAgents().observation_spaces["a0"]
# RLlib's connectors take spaces by policy where there is no environment.
SPACES = {
    "observation_space": gym.spaces.Dict(p0=SEEN, p1=SEEN),
    "action_space": gym.spaces.Dict(p0=gym.spaces.Discrete(2), p1=gym.spaces.Discrete(2)),
}


def policy_of(agent_id, *_, **__):
    """`a0` and `a2` share a policy."""
    return f"p{int(agent_id[1:]) % 2}"


def several(config, env=RandomAgents, **env_config):
    config.environment(env, env_config=env_config)
    config.multi_agent(policies={"p0", "p1"}, policy_mapping_fn=policy_of)
    return config.rl_module(rl_module_spec=deep(T)).debugging(seed=0, log_sys_usage=False)


def recorder(path, *, num_envs=2, env=RandomAgents, rows_per_file=None, **env_config):
    config = several(PPOConfig(), env, **env_config)
    config.env_runners(num_env_runners=0, num_envs_per_env_runner=num_envs)
    config.offline_data(output=str(path), output_max_rows_per_file=rows_per_file)
    assert connect(config).env_runner_cls is RecordingMultiAgentEnvRunner
    return RecordingMultiAgentEnvRunner(config=config)


def record(path, **env_config):
    """What a runner sampled, in parts, and the runner."""
    runner = recorder(path, **env_config)
    samples = [e for steps in (19, 33, 8, 120) for e in runner.sample(num_timesteps=2 * steps)]
    runner.stop()
    return samples, runner


def offline(config_class, path, env=RandomAgents, **env_config):
    config = several(config_class(), env, **env_config)
    config.learners(num_learners=0).training(train_batch_size_per_learner=60, lr=0.01)
    return config.offline_data(
        input_=[str(path)], input_read_episodes=True, dataset_num_iters_per_learner=2
    )


def rows_of(path):
    rows = Rows([])
    rows.rows = [row["item"] for row in rows_in(path)]
    return rows


def read(rows, config, num_episodes):
    episodes = read_episodes(rows, module_of=module_mapping(config), batch_size=3)
    return [next(episodes) for _ in range(num_episodes)]


def steps_of(samples, read_column):
    """What the parts of each agent's episode hold, one after the other."""
    steps = defaultdict(list)
    for episode in samples:
        for agent_id, agent in episode.agent_episodes.items():
            steps[episode.id_, agent_id] += [*read_column(agent)] if len(agent) else []
    return {key: found for key, found in steps.items() if found}


@pytest.mark.parametrize("schedule", ["together", "turns", "rates", "lives"])
def test_the_learner_sees_what_each_agent_saw(schedule, tmp_path):
    """Log-probabilities from files are those of the rollout, whoever waited at a cut."""
    samples, runner = record(tmp_path, schedule=schedule)
    rows = rows_of(tmp_path)
    random.Random(0).shuffle(rows.rows)
    ids = {episode.id_ for episode in samples if len(episode)}
    assert len(ids) < len(samples)
    # Unpacked: rows in the order of what was recorded.
    config = connect(offline(BCConfig, tmp_path, schedule=schedule), pack_rows=False)
    episodes = read(rows, config, len(ids))
    assert {episode.id_ for episode in episodes} == ids

    rewards = steps_of(samples, lambda agent: agent.get_rewards())
    mine = steps_of(episodes, lambda agent: agent.get_rewards())
    assert {key: list(map(float, of)) for key, of in mine.items()} == rewards
    assert all(
        agent.t_started == 0 and agent.module_id == policy_of(agent_id)
        for episode in episodes
        for agent_id, agent in episode.agent_episodes.items()
    )

    recorded = steps_of(samples, lambda agent: agent.get_extra_model_outputs(Columns.ACTION_LOGP))
    expected = defaultdict(list)
    for episode in episodes:
        for agent_id in episode.agent_episodes:
            expected[policy_of(agent_id)] += recorded[episode.id_, agent_id]
    pipeline = config.build_learner_connector(*SPACES.values())
    batches = pipeline(rl_module=runner.module, batch={}, episodes=episodes, shared_data={})
    assert batches.keys() == expected.keys() == {"p0", "p1"}
    for module_id, batch in batches.items():
        module = runner.module[module_id]
        out = module.forward_inference(batch)
        dist = module.get_train_action_dist_cls().from_logits(out[Columns.ACTION_DIST_INPUTS])
        mask = batch[Columns.LOSS_MASK]
        logp = dist.logp(batch[Columns.ACTIONS])[mask].numpy()
        np.testing.assert_allclose(logp, expected[module_id], atol=1e-5)


@pytest.mark.parametrize("rows_per_file", [None, 3])
def test_what_files_hold(rows_per_file, tmp_path):
    samples, _ = record(tmp_path, schedule="lives", rows_per_file=rows_per_file)
    states = [
        msgpack.unpackb(item, object_hook=msgpack_numpy.decode) for item in rows_of(tmp_path).rows
    ]
    parts = sorted((state["id_"], state["env_t_started"]) for state in states)
    assert parts == sorted((e.id_, e.env_t_started) for e in samples if len(e))
    outputs = [
        agent["extra_model_outputs"] for state in states for agent in state["agent_episodes"]
    ]
    assert all(Columns.ACTION_LOGP in of and Columns.STATE_OUT not in of for of in outputs)
    # What is sampled has its states all the same.
    agents = [agent for episode in samples for agent in episode.agent_episodes.values()]
    assert all(Columns.STATE_OUT in a.extra_model_outputs for a in agents if len(a))


def test_a_policy_of_another_name():
    """The config's mapping decides where it has no policy of the recorded name."""
    config = several(BCConfig())
    episode = MultiAgentEpisode()
    module_of = module_mapping(config)
    assert module_of("a0", "p1", episode) == "p1"
    assert module_of("a1", "expert", episode) == module_of("a1", None, episode) == "p1"
    config.multi_agent(policy_mapping_fn=lambda *_, **__: "nobody")
    with pytest.raises(ValueError, match="`policy_mapping_fn` returned 'nobody' for the recorded"):
        module_mapping(config)("a1", "expert", episode)


def script(action_space, agent_id="a0"):
    """An episode of one agent among several, as a script would make it."""
    episode = MultiAgentEpisode(
        observation_space={agent_id: SEEN},
        action_space={agent_id: action_space},
        agent_to_module_mapping_fn=lambda *_, **__: "script",
    )
    episode.add_env_reset(observations={agent_id: np.zeros(3, np.float32)}, infos={})
    for t in range(3):
        episode.add_env_step(
            observations={agent_id: np.ones(3, np.float32)},
            actions={agent_id: action_space.sample()},
            rewards={agent_id: 1.0},
            infos={},
            terminateds={"__all__": t == 2},
            truncateds={"__all__": False},
        )
    return episode


def rows_with(*episodes):
    rows = Rows([])
    rows.rows = [msgpack.packb(state_of(e), default=msgpack_numpy.encode) for e in episodes]
    return rows


def test_actions_of_a_script_are_normalized():
    space = gym.spaces.Box(-10.0, 30.0, (1,), np.float32)
    episode = script(space)
    config = several(BCConfig())
    kwargs = {"module_of": module_mapping(config), "batch_size": 1}
    (agent,) = next(
        read_episodes(rows_with(episode), script_actions={"p0": space}, **kwargs)
    ).agent_episodes.values()
    taken = np.stack(episode.agent_episodes["a0"].get_actions())
    np.testing.assert_allclose(agent.get_actions(), (taken - 10) / 20, atol=1e-6)
    # Another policy's space is none of its.
    (agent,) = next(
        read_episodes(rows_with(episode), script_actions={"p1": space}, **kwargs)
    ).agent_episodes.values()
    np.testing.assert_array_equal(agent.get_actions(), taken)


def test_agents_with_tuples_for_names():
    config = several(BCConfig()).multi_agent(policy_mapping_fn=lambda *_, **__: "p0")
    (episode,) = read(rows_with(script(gym.spaces.Discrete(2), ("blue", 1))), config, 1)
    assert episode.agent_episodes.keys() == {("blue", 1)}
    assert episode.agent_episodes["blue", 1].agent_id == ("blue", 1)


def test_files_of_the_other_kind():
    env = SampledObservations({"observation_space": SEEN})
    with pytest.raises(ValueError, match="is one of one agent, which the config is not for"):
        read(Rows(play(env, 1, sample_action)), several(BCConfig()), 1)
    with pytest.raises(ValueError, match="is one of several agents, which the config is not for"):
        read(rows_with(script(gym.spaces.Discrete(2))), BCConfig(), 1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"output_write_episodes": False}, "`output_write_episodes` is False"),
        ({"output_filesystem": "s3"}, "`output_filesystem` is 's3', which only RLlib's"),
        ({"env_runner_cls": SingleAgentEnvRunner}, "from `RecordingMultiAgentEnvRunner`"),
    ],
    ids=str,
)
def test_settings_that_are_refused(change, message):
    config = several(PPOConfig()).offline_data(output="anywhere")
    for setting, value in change.items():
        setattr(config, setting, value)
    with pytest.raises(ValueError, match=message):
        connect(config)


@pytest.mark.parametrize("base", [MultiAgentEnvRunner, RecordingMultiAgentEnvRunner])
def test_env_runners_that_can_stay_or_be_replaced(base):
    config = several(PPOConfig()).offline_data(output="anywhere").env_runners(env_runner_cls=base)
    for _ in range(2):
        assert connect(config).env_runner_cls is RecordingMultiAgentEnvRunner


def test_the_loss_on_recorded_episodes(tmp_path):
    """RLlib's offline evaluation has one for each policy."""
    record(tmp_path)
    config = offline(BCConfig, tmp_path)
    config.evaluation(offline_evaluation_interval=1, offline_eval_batch_size_per_runner=40)
    connect(config)
    spaces = SEEN, gym.spaces.Discrete(2)
    runner = config.offline_eval_runner_class(
        config=config,
        module_spec=config.get_multi_rl_module_spec(
            spaces=dict.fromkeys(("p0", "p1", "__env__", DEFAULT_MODULE_ID), spaces)
        ),
    )
    runner.set_dataset_iterator(rows_of(tmp_path))
    result = runner.run(train=True, explore=False)
    assert all(np.isfinite(float(result[id_]["total_eval_loss"].peek())) for id_ in ("p0", "p1"))


@pytest.mark.slow
@pytest.mark.parametrize("turns", [False, True], ids=["together", "turns"])
def test_marwil_improves_on_what_it_sees(turns, tmp_path):
    """Each agent's own cue, from actions whose return is about 0 in sum."""
    runner = recorder(tmp_path, num_envs=8, env=RememberFirstAgents, turns=turns)
    runner.sample(num_episodes=256, random_actions=True)
    runner.stop()
    config = offline(MARWILConfig, tmp_path, RememberFirstAgents, turns=turns)
    config.rl_module(rl_module_spec=deep(8))
    assert marwils_best_return(config, goal=2.0, num_iters=30) == 2.0
