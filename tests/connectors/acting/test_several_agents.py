"""Several agents from one checkpoint: each acts as in RLlib's EnvRunner, with its own module."""

import copy
import pickle
import shutil

import gymnasium as gym
import numpy as np
import pytest
import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import FlattenObservations, MeanStdFilter
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

from connectors import AddPreviousActionsRewards, MemoryPolicy, connect
from tests.connectors.acting.test_policy import GOOD, with_previous
from tests.connectors.rollout.test_several_agents import FlipActions
from tests.envs import RandomAgents
from tests.test_multi_agent import ReturningAgents, modules, ppo

pytestmark = pytest.mark.ray

BOX = gym.spaces.Box(-3.0, 1.0, (2,), np.float32)
# The module of a3 knows two actions only.
SPACES = dict.fromkeys(["a0", "a1", "a2", "a4"], BOX)


class SeeOthers(ConnectorV2):
    """Shows each agent a bit of what all that act at the step see."""

    def __call__(self, *, rl_module, batch, episodes, **kwargs):
        for episode in episodes:
            seen = episode.get_observations(-1)
            acting = sorted(episode.get_agents_to_act())
            seen = sum((seen[agent] for agent in acting), np.zeros(3, np.float32))
            for agent in self.single_agent_episode_iterator([episode]):
                shown = agent.get_observations(-1) + np.float32(0.3) * seen
                agent.set_observations(at_indices=-1, new_data=shown)
        return batch


class Log(RandomAgents):
    """Keeps what was seen and paid at each step, and the actions that followed."""

    def __init__(self, config=None):
        super().__init__(config)
        self.steps = []

    def reset(self, **kwargs):
        observations, infos = super().reset(**kwargs)
        self.steps.append(Step(observations))
        return copy.deepcopy(observations), infos

    def step(self, actions):
        self.steps[-1].actions = copy.deepcopy(actions)
        answer = super().step(actions)
        observations, rewards, terminated, truncated, _ = answer
        ended = {agent for agent in observations if terminated.get(agent) or truncated.get(agent)}
        over = terminated["__all__"] or truncated["__all__"]
        self.steps.append(Step(observations, rewards, ended, over))
        return copy.deepcopy(answer)


class Step:
    def __init__(self, observations, rewards=None, ended=(), over=False):
        self.observations = {a: seen for a, seen in observations.items() if a not in ended}
        self.rewards = rewards
        self.ended, self.over = ended, over
        self.actions = {}


class ReturningLog(Log, ReturningAgents):
    """An agent that dies comes back."""


def connected():
    config = ppo(train={"ours", "lstm"}, action_spaces=SPACES).environment(Log)
    return connect(
        config.env_runners(
            env_to_module_connector=lambda *_: [
                SeeOthers(),
                MeanStdFilter(multi_agent=True),
                AddPreviousActionsRewards(multi_agent=True),
                FlattenObservations(multi_agent=True),
            ]
        )
    )


@pytest.fixture(scope="module")
def trained(tmp_path_factory, _ray_session):
    """A checkpoint, and the EnvRunner that belongs to it."""
    algorithm = connected().build_algo()
    algorithm.train()
    path = algorithm.save_to_path(str(tmp_path_factory.mktemp("agents")))
    state = algorithm.env_runner.get_state()
    algorithm.stop()

    def play(num_episodes, **env_config):
        """Whole episodes in one environment, greedily: what it was asked and got."""
        env = env_config.pop("env", Log)
        config = connected().environment(
            env, env_config={"num_agents": 5, "action_spaces": SPACES, **env_config}
        )
        runner = MultiAgentEnvRunner(config=config.env_runners(num_envs_per_env_runner=1))
        runner.set_state(state)
        for piece in runner._env_to_module.connectors:
            if isinstance(piece, MeanStdFilter):
                piece._update_stats = False
        return played(runner, num_episodes)

    return path, play


def played(runner, num_episodes):
    steps = runner.env.envs[0].unwrapped.steps
    steps.clear()  # RLlib tries its environments out, with random actions
    while sum(step.over for step in steps) < num_episodes:
        runner.sample(num_timesteps=5, explore=False)
    return steps[: 1 + max(i for i, step in enumerate(steps) if step.over)]


def follow(policy, steps, *, num_equal=0):
    """Acts at each step as the environment's log says, and compares."""
    for t, step in enumerate(steps):
        for agent in step.ended:
            policy.reset("game", agent=agent)
        if step.over:
            policy.reset("game")
            continue
        actions = policy.act(step.observations, reward=step.rewards or 0.0, client="game")
        assert actions.keys() == step.actions.keys(), t
        for agent, action in actions.items():
            np.testing.assert_allclose(action, step.actions[agent], rtol=1e-5, atol=1e-5)
            num_equal += 1
    return num_equal


@pytest.mark.parametrize("schedule", ["together", "turns", "rates", "lives"])
def test_equals_the_env_runner(trained, schedule):
    """Whole episodes with connectors that rewrite, compare and filter observations."""
    path, play = trained
    policy = MemoryPolicy.from_checkpoint(path)
    policy._lookback = 7  # less than it holds else, so that it often forgets
    assert follow(policy, play(3, schedule=schedule, lengths=[40])) > 60


def test_an_agent_that_comes_back(trained):
    """It has been reset alone, and starts anew; the others go on."""
    path, play = trained
    steps = play(1, env=ReturningLog, schedule="lives")
    assert ["a1"] in [list(step.ended) for step in steps]
    follow(MemoryPolicy.from_checkpoint(path), steps)


def by_agent(policy, steps):
    """Asks for one agent after the other, each with its own reward; not for the dead ones."""
    for step in steps:
        for agent, seen in step.observations.items():
            reward = (step.rewards or {}).get(agent, 0.0)
            yield agent, policy.act(seen, reward=reward, client="game", agent=agent)


@pytest.fixture(scope="module")
def plain(tmp_path_factory, _ray_session):
    """A checkpoint without connectors of a user, and steps of an episode."""
    algorithm = ppo(schedule="rates").build_algo()
    path = algorithm.save_to_path(str(tmp_path_factory.mktemp("plain")))
    algorithm.stop()
    env = Log({"num_agents": 5, "schedule": "rates", "lengths": [60]})
    env.reset()
    while not env.steps[-1].over:
        env.step(dict.fromkeys(env.steps[-1].observations, 0))
    return path, env.steps[:-1]


def test_one_agent_after_the_other(plain):
    """It makes no difference which agents are asked together."""
    path, steps = plain
    together = MemoryPolicy.from_checkpoint(path)
    expected = [
        item
        for step in steps
        for item in together.act(step.observations, reward=step.rewards or 0.0).items()
    ]
    assert list(by_agent(MemoryPolicy.from_checkpoint(path), steps)) == expected


def equal(states, others):
    """Up to rounding, which depends on who is in a pass."""
    for leaf, other in zip(tree.flatten(states), tree.flatten(others), strict=True):
        np.testing.assert_allclose(leaf, other, rtol=1e-4, atol=1e-5)


def test_resets(plain):
    """Of one agent, and of all."""
    path, steps = plain
    policy = MemoryPolicy.from_checkpoint(path)

    def play():
        for step in steps[:13]:
            policy.act(step.observations)
        return policy.state()["states"]

    first = play()
    policy.reset(agent="a0")
    # Never seen, or no longer.
    policy.reset(agent="a0")
    policy.reset("nobody", agent="a0")
    rest = policy.state()["states"]
    assert rest.keys() == first.keys() - {"a0"}
    equal(rest, {agent: first[agent] for agent in rest})
    again = play()
    equal(again["a0"], first["a0"])
    assert not np.allclose(again["a1"]["h"], first["a1"]["h"])
    policy.reset()
    equal(play(), first)
    for agent in policy.agents:
        policy.reset(agent=agent)
    with pytest.raises(ValueError, match="has not acted since"):
        policy.state()


def states_after(policy, steps, *, client=None):
    for step in steps:
        policy.act(step.observations, client=client)
    return policy.state(client)["states"]


def test_state_survives_a_reboot(plain):
    """Also twice, in one pass."""
    path, steps = plain
    policy = MemoryPolicy.from_checkpoint(path)
    whole = states_after(policy, steps[:30])
    policy.reset()
    states_after(policy, steps[:21])
    saved = pickle.dumps(policy.state())
    assert pickle.dumps(policy.state()) == saved

    policy = MemoryPolicy.from_checkpoint(path)
    for client in ("a", "b"):
        policy.restore(client, pickle.loads(saved))
    policy.act(steps[0].observations, client="b")
    for step in steps[21:30]:
        policy.act_batch(dict.fromkeys("ab", step.observations))
    equal(policy.state("a")["states"], whole)
    other = policy.state("b")["states"]
    assert not np.allclose(other["a1"]["h"], whole["a1"]["h"])


def test_memory_is_bounded(plain):
    path, steps = plain
    policy = MemoryPolicy.from_checkpoint(path)
    policy._lookback = 10
    sizes = []
    for _ in range(6):
        states_after(policy, steps[:12])
        sizes.append(len(pickle.dumps(policy.state())))
    assert max(sizes[2:]) < 1.5 * sizes[1]


def test_after_an_error_nobody_has_acted(plain):
    """Whoever's number was not finite."""
    path, steps = plain
    clean, policy = (MemoryPolicy.from_checkpoint(path, explore=True, seed=0) for _ in range(2))
    for t, step in enumerate(steps[:30]):
        if t in (0, 6, 25):
            broken = {**step.observations, "a0": np.array([0.0, np.nan, 0.0])}
            with pytest.raises(ValueError, match=r"of the clients \[\('new', 'a0'\)\]"):
                policy.act_batch({"game": step.observations, "new": broken})
        expected = clean.act(step.observations, client="game")
        assert policy.act(step.observations, client="game") == expected
    with pytest.raises(ValueError, match="has not acted since"):
        policy.state("new")


def test_mapping(plain):
    """Asked once for each agent of an episode; another one than in training may be given."""
    path, steps = plain
    asked = []

    def everyone(agent, episode, **kwargs):
        asked.append((agent, episode.id_))
        return "ours"

    policy = MemoryPolicy.from_checkpoint(path, policy_mapping_fn=everyone)
    for step in steps[:12]:
        policy.act(step.observations)
    assert sorted(agent for agent, _ in asked) == policy.agents
    assert len({id_ for _, id_ in asked}) == 1
    # The same module, and what it has seen is the same.
    policy.reset()
    states = policy.act_batch(
        {client: {agent: np.ones(3)} for client, agent in enumerate(policy.agents)}
    )
    assert list(states) == [0, 1, 2, 3, 4]
    seen = [policy.state(client)["states"][f"a{client}"] for client in states]
    for other in seen[1:]:
        equal(other, seen[0])

    policy = MemoryPolicy.from_checkpoint(path, policy_mapping_fn=lambda *_, **__: "gone")
    with pytest.raises(ValueError, match=r"agent 'a0' the module 'gone', but the checkpoint has"):
        policy.act({"a0": np.ones(3)})


ONES = np.ones(3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: p.act(ONES), "`observation` is a ndarray, but must be a dict with the obs"),
        (lambda p: p.act({"b": ONES}), r"`agent` is 'b', but .* agents \['a0', 'a1'"),
        (lambda p: p.act(ONES, agent="b"), "`agent` is 'b'"),
        (lambda p: p.reset(agent="b"), "`agent` is 'b'"),
        (lambda p: p.act({"a0": ONES}, reward={"b": 1.0}), "`agent` is 'b'"),
        (lambda p: p.act({"a0": ONES}, reward=1.0), r"`reward` is 1\.0, but must be a dict"),
        (lambda p: p.act({"a0": np.ones(4)}), r"`observation\['a0'\]` has shape \(4,\)"),
    ],
)
def test_wrong_calls(plain, call, message):
    policy = MemoryPolicy.from_checkpoint(plain[0])
    with pytest.raises(ValueError, match=message):
        call(policy)
    assert policy.act({}) == {}


def test_agents_of_a_single_agents_checkpoint(tmp_path):
    """What only several agents have."""
    algorithm = with_previous().build_algo()
    path = algorithm.save_to_path(str(tmp_path / "one"))
    algorithm.stop()
    policy = MemoryPolicy.from_checkpoint(path)
    assert policy.agents == []
    for call in (lambda: policy.act(GOOD, agent="a0"), lambda: policy.reset(agent="a0")):
        with pytest.raises(ValueError, match="`agent` is 'a0', but the checkpoint is that of one"):
            call()
    with pytest.raises(ValueError, match="`policy_mapping_fn` is given, but the checkpoint at"):
        MemoryPolicy.from_checkpoint(path, policy_mapping_fn=lambda *_, **__: "a")


def test_rllibs_connectors(tmp_path):
    """Without `connect`, and with a module-to-env connector."""
    config = (
        PPOConfig()
        .environment(Log, env_config={"num_agents": 2, "schedule": "turns"})
        .env_runners(num_env_runners=0, module_to_env_connector=lambda *_: FlipActions())
        .multi_agent(policies={"lstm", "mlp"}, policy_mapping_fn=one_of_two)
        .rl_module(
            rl_module_spec=MultiRLModuleSpec(
                rl_module_specs={name: modules()[name] for name in ("lstm", "mlp")}
            )
        )
    )
    algorithm = config.build_algo()
    path = algorithm.save_to_path(str(tmp_path / "rllib"))
    steps = played(algorithm.env_runner, 2)
    algorithm.stop()
    assert follow(MemoryPolicy.from_checkpoint(path), steps) > 20


def one_of_two(agent, episode, **kwargs):
    return "lstm" if agent == "a0" else "mlp"


def test_agents_of_recorded_episodes_alone(plain, tmp_path):
    """Their checkpoint has no spaces."""
    path = tmp_path / "recorded"
    shutil.copytree(plain[0], path)
    shutil.rmtree(path / "env_runner")
    with pytest.raises(ValueError, match="of several agents that were trained without an env"):
        MemoryPolicy.from_checkpoint(path)
    alone = MemoryPolicy.from_checkpoint(path / "learner_group/learner/rl_module/ours")
    assert alone.act(np.ones(3)) in (0, 1)
