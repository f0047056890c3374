"""Rows, agents and sessions at random, against a module that is stepped along each episode."""

import asyncio

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from hypothesis import given, settings
from hypothesis import strategies as st
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from connectors import BuildTrainBatch, MemoryMultiAgentEnvRunner, MemoryPolicy, connect
from connectors.acting.loading import _module_parts
from connectors.agents import agents_by_module, batch_key, modules_by_id
from connectors.serving.sessions import RequestError, Sessions
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.envs import RandomAgents, RandomObservations
from tests.test_spaces import build

SMALL = {"num_layers": 1, "d_model": 8, "num_heads": 1, "head_dim": 4, "compile": False}
SMALL |= {"feedforward_dim": 8, "fcnet_hiddens": [8]}


def spec(max_seq_len):
    config = DeepLinearAttentionConfig(max_seq_len=max_seq_len, **SMALL)
    return RLModuleSpec(module_class=DeepLinearAttentionRLModule, model_config=config)


def make_runner(runner_class, env, max_seq_len, env_config, **settings):
    config = (
        PPOConfig()
        .environment(env, env_config=env_config)
        .env_runners(num_env_runners=0, **settings)
        .training(train_batch_size_per_learner=512, minibatch_size=256)
        .rl_module(rl_module_spec=spec(max_seq_len))
        .debugging(seed=0, log_sys_usage=False)
    )
    if runner_class is MemoryMultiAgentEnvRunner:
        config.multi_agent(
            policies={"p0", "p1"},
            policy_mapping_fn=lambda agent_id, episode, **kwargs: f"p{int(agent_id[1:]) % 2}",
        )
    return runner_class(config=connect(config))


def check_rows(runner, episodes, max_seq_len, known):
    """Each row starts from the state that its episode's steps lead to; each step was taken from it.

    Args:
        runner: Who sampled.
        episodes: A sample.
        max_seq_len: Steps of a row.
        known: By ID of an agent's episode: the state after its last chunk.

    Returns:
        The number of rows.
    """
    columns = BuildTrainBatch(pack_rows=False)(
        rl_module=runner.module, batch={}, episodes=episodes, shared_data={}
    )
    groups = agents_by_module(episodes)
    num_rows = 0
    for module_id, module in modules_by_id(runner.module, groups).items():
        agents = groups[module_id]
        (states,) = columns[Columns.STATE_IN][batch_key(agents[0])]
        expected = []
        for agent in agents:
            state = known.get(agent.id_)
            if state is None:
                state = tree.map_structure(lambda leaf: leaf[None], module.get_initial_state())
            for t in range(len(agent)):
                if t % max_seq_len == 0:
                    expected.append(state)
                obs = torch.as_tensor(agent.get_observations(t))[None, None]
                with torch.no_grad():
                    out = module.forward_inference({Columns.OBS: obs, Columns.STATE_IN: state})
                state = out[Columns.STATE_OUT]
                np.testing.assert_allclose(
                    out[Columns.ACTION_DIST_INPUTS][0, 0],
                    agent.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS, t),
                    atol=1e-5,
                )
            known[agent.id_] = state
        expected = tree.map_structure(lambda *rows: torch.cat(rows).numpy(), *expected)
        tree.map_structure(
            lambda ours, theirs: np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5),
            states,
            expected,
        )
        num_rows += len(tree.flatten(states)[0])
    return num_rows


@pytest.mark.ray
@settings(max_examples=10)
@given(
    max_seq_len=st.integers(1, 9),
    num_envs=st.integers(1, 3),
    fragments=st.lists(st.integers(1, 30), min_size=2, max_size=4),
    truncate=st.booleans(),
)
def test_rows(max_seq_len, num_envs, fragments, truncate):
    runner = make_runner(
        SingleAgentEnvRunner,
        RandomObservations,
        max_seq_len,
        {"truncate": truncate},
        num_envs_per_env_runner=num_envs,
    )
    known, num_rows = {}, 0
    for fragment in fragments:
        episodes = runner.sample(num_timesteps=fragment * num_envs)
        num_rows += check_rows(runner, episodes, max_seq_len, known)
    assert num_rows >= sum(fragments) * num_envs / max_seq_len
    runner.stop()


@pytest.mark.ray
@settings(max_examples=8)
@given(
    max_seq_len=st.integers(1, 9),
    num_envs=st.integers(1, 2),
    num_agents=st.integers(1, 4),
    schedule=st.sampled_from(["together", "turns", "rates", "lives"]),
    fragments=st.lists(st.integers(1, 25), min_size=2, max_size=3),
    seed=st.integers(0, 99),
)
def test_agents(max_seq_len, num_envs, num_agents, schedule, fragments, seed):
    runner = make_runner(
        MemoryMultiAgentEnvRunner,
        RandomAgents,
        max_seq_len,
        {"schedule": schedule, "num_agents": num_agents, "seed": seed},
        num_envs_per_env_runner=num_envs,
    )
    known, num_rows = {}, 0
    for fragment in fragments:
        episodes = runner.sample(num_timesteps=fragment * num_envs)
        num_rows += check_rows(runner, episodes, max_seq_len, known)
    assert num_rows > 0
    runner.stop()


# What a client does: ends, starts anew, acts, or sends a NaN.
VERBS = st.lists(st.sampled_from(["end", "reset", "act", "act", "act", "act", "nan"]), max_size=25)


@settings(max_examples=15)
@given(scripts=st.lists(VERBS, min_size=1, max_size=5), max_batch_size=st.integers(1, 4))
def test_sessions(scripts, max_batch_size):
    """All clients at once; each acts as if it were alone, with a step for each answer."""
    module = build(gym.spaces.Box(-1.0, 1.0, (3,), np.float32), gym.spaces.Box(-1.0, 1.0, (2,)))
    sessions = Sessions(
        MemoryPolicy(_module_parts(module)),
        max_sessions=8,
        ttl_s=60.0,
        max_batch_size=max_batch_size,
    )

    async def play(name, script):
        alone = MemoryPolicy(_module_parts(module))
        rng = np.random.default_rng(len(name))
        playing = False
        for verb in script:
            observation = rng.uniform(-1, 1, 3).astype(np.float32)
            if verb == "reset" or not playing:
                sessions.reset(name)
                alone.reset()
                playing = True
            if verb == "end":
                sessions.end(name)
                playing = False
            elif verb == "nan":
                with pytest.raises(RequestError, match="as before"):
                    await sessions.act(name, np.full(3, np.nan, np.float32), 0.0)
            elif verb == "act":
                action = await sessions.act(name, observation, 0.0)
                np.testing.assert_allclose(action, alone.act(observation), rtol=1e-4, atol=1e-5)

    async def play_all():
        await asyncio.gather(*(play("s" * (i + 1), script) for i, script in enumerate(scripts)))

    asyncio.run(asyncio.wait_for(play_all(), 60))
