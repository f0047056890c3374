"""The PettingZoo example: its environments keep PettingZoo's contracts, and are learnt."""

import numpy as np
import pytest
from pettingzoo.test import api_test, parallel_api_test
from pettingzoo.utils.conversions import parallel_to_aec
from ray.rllib.env.wrappers.pettingzoo_env import PettingZooEnv

from connectors import MemoryPolicy
from examples import pettingzoo_relay
from examples.pettingzoo_relay import AGENTS, APIS, ParallelRelay, TurnRelay
from examples.runner import make_parser, train_until


def test_parallel_contract():
    parallel_api_test(ParallelRelay({}), num_cycles=50)


# The runner sees nothing before it hears the word.
@pytest.mark.filterwarnings("ignore:Observation numpy array is all zeros")
@pytest.mark.filterwarnings("ignore:.*render")
def test_aec_contract():
    api_test(TurnRelay({}), num_cycles=50)


def play(api, answer):
    """What RLlib sees of a game: who acts at each step, and the sum of the rewards."""
    env = APIS[api]({"length": 6})
    observations, _ = env.reset(seed=0)
    game = env.get_sub_environments.game
    acting, total, over, ended = [], 0.0, False, {}
    while not over:
        acting.append([agent for agent in observations if not ended.get(agent)])
        actions = {agent: answer(game) for agent in acting[-1]}
        observations, rewards, ended, truncated, _ = env.step(actions)
        total += sum(rewards.values())
        over = ended["__all__"] or truncated["__all__"]
    return acting, total


@pytest.mark.parametrize("api", APIS)
def test_pays_for_the_word(api):
    assert play(api, lambda game: game.word)[1] == 1.0
    assert play(api, lambda game: (game.word + 1) % 4)[1] == -1.0


def test_who_acts():
    """The scout leaves after its fourth step; where they take turns it is alone in its steps."""
    both, scout, runner = ["scout_0", "runner_0"], ["scout_0"], ["runner_0"]
    assert play("parallel", lambda game: 0)[0] == 4 * [both] + 2 * [runner]
    turns = 4 * [scout, runner] + 2 * [runner]
    assert play("aec", lambda game: 0)[0] == turns


class EndsInTwoWays(ParallelRelay):
    """After a step, one agent terminated and the other one truncated."""

    render_mode = None

    def step(self, actions):
        observations, rewards, *_, infos = super().step(actions)
        self.agents = []
        scout, runner = ({a: a == agent for a in AGENTS} for agent in AGENTS)
        return observations, rewards, scout, runner, infos


class WholeEpisodes(PettingZooEnv):
    """That of the docs, for AEC."""

    def step(self, action):
        observations, rewards, terminated, truncated, infos = super().step(action)
        terminated["__all__"] = not self.env.agents and not truncated["__all__"]
        return observations, rewards, terminated, truncated, infos


def test_what_the_docs_say_of_rllibs_wrapper():
    """Ends in two ways are none to it; if this fails, Ray has mended it."""
    for wrapper, is_over in ((WholeEpisodes, True), (PettingZooEnv, False)):
        env = wrapper(parallel_to_aec(EndsInTwoWays({})))
        observations, _ = env.reset(seed=0)
        for _ in AGENTS:
            observations, _, terminated, truncated, _ = env.step(dict.fromkeys(observations, 0))
        assert observations.keys() == set(AGENTS)
        assert (terminated["__all__"], truncated["__all__"]) == (is_over, False)
    with pytest.raises(KeyError):
        env.step({})


@pytest.mark.ray
@pytest.mark.parametrize("api", APIS)
def test_trains_in_small(api):
    parser = make_parser("", api=api, num_envs_per_env_runner=2, stop_iters=1)
    args = parser.parse_args([])
    config = pettingzoo_relay.build_config(args)
    config.training(train_batch_size_per_learner=64, minibatch_size=32, num_epochs=1)
    training = train_until(config, args)
    training.algo.stop()
    assert not training.reached
    assert np.isfinite(training.means["episode_return_mean"])


@pytest.mark.ray
def test_acts_in_pettingzoos_own_loop(tmp_path):
    """What RLlib's wrapper shows an agent is what PettingZoo does, with the same actions."""
    config = pettingzoo_relay.build_config(make_parser("", api="aec").parse_args([]))
    algo = config.build_algo()
    policy = MemoryPolicy.from_checkpoint(algo.save_to_path(str(tmp_path)))
    algo.stop()
    wrapped, env = APIS["aec"]({}), TurnRelay({})
    observations, _ = wrapped.reset(seed=0)
    env.reset(seed=0)
    num_turns, total = 0, 0.0
    for agent in env.agent_iter():
        observation, reward, terminated, _, _ = env.last()
        total += reward
        np.testing.assert_array_equal(observation, observations[agent])
        if terminated:
            policy.reset(agent=agent)
            env.step(None)
            continue
        action = policy.act(observation, reward=reward, agent=agent)
        together = policy.act({agent: observation}, client="wrapped")
        assert together == {agent: action}
        env.step(action)
        observations, _, ended, _, _ = wrapped.step({agent: action})
        num_turns += 1
    assert num_turns == 5 + 8
    assert ended["__all__"]
    assert total in (-1.0, 0.0, 1.0)


@pytest.mark.ray
@pytest.mark.learning
@pytest.mark.parametrize("seed", ["0", "1", "2"])
@pytest.mark.parametrize("api", APIS)
def test_learns(api, seed):
    assert pettingzoo_relay.main(["--api", api, "--seed", seed]) == 0
