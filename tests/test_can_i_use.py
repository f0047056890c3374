"""What `docs/can-i-use.md` promises: each algorithm with each module, space and setup.

Tiny runs through `connect`. Each has to reach the Learner with what the EnvRunner computed, a
finite loss and other weights than before. What is not supported has to be refused before that.
"""

import dataclasses
import functools
import time
from collections import defaultdict

import gymnasium as gym
import numpy as np
import pytest
import torch
import tree
from pettingzoo import ParallelEnv
from pettingzoo.utils.conversions import parallel_to_aec
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.cql import CQLConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.dqn.dqn_learner import QF_PREDS
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.iql import IQLConfig
from ray.rllib.algorithms.marwil import MARWILConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.algorithms.sac.sac_learner import QF_TARGET_NEXT
from ray.rllib.algorithms.tqc import TQCConfig
from ray.rllib.connectors.env_to_module import MeanStdFilter
from ray.rllib.connectors.env_to_module.frame_stacking import FrameStackingEnvToModule
from ray.rllib.connectors.learner.frame_stacking import FrameStackingLearner
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import TargetNetworkAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner
from ray.rllib.env.wrappers.pettingzoo_env import PettingZooEnv

import rlmodules
from connectors import (
    AddPreviousActionsRewards,
    RecordingEnvRunner,
    RecordingMultiAgentEnvRunner,
    connect,
)
from connectors.learners.sac import LOGP, LOGP_NEXT, Q_CURR
from connectors.offline.reading import deal, read_trials
from connectors.offline.several_agents import module_mapping
from connectors.setup.algorithms import support_for
from rlmodules.memories import compilation
from rlmodules.memories.memory import Memory, State, mask_padding
from rlmodules.modules.catalogue import CONFIGS as CATALOGUE
from tests.connectors.helpers import CountingRLModule, CountingTargetRLModule
from tests.connectors.offline.test_reading import dealt, play
from tests.envs import RandomAgents, RememberCue, RememberFirst, SampledObservations

pytestmark = pytest.mark.ray

T = 4
NUM_ENVS = 2
FRAGMENT = 10
BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(3)
CONTINUOUS = gym.spaces.Box(-2.0, 2.0, (2,), np.float32)
ACTIONS = {
    "box": CONTINUOUS,
    "multi-discrete": gym.spaces.MultiDiscrete([3, 2]),
    "nested": gym.spaces.Dict(
        a=gym.spaces.MultiDiscrete([3, 2]), b=gym.spaces.Tuple((CONTINUOUS, DISCRETE))
    ),
}
IMAGE = gym.spaces.Box(0, 255, (6, 6, 3), np.uint8)
OBSERVATIONS = {
    "two axes": gym.spaces.Box(-1.0, 1.0, (2, 3), np.float64),
    "image": IMAGE,
    "discrete": gym.spaces.Discrete(5),
    "multi-discrete": gym.spaces.MultiDiscrete([3, 2]),
    "multi-binary": gym.spaces.MultiBinary(4),
    "nested": gym.spaces.Dict(
        a=gym.spaces.Tuple((BOX, gym.spaces.MultiBinary(4))), b=IMAGE, c=gym.spaces.Discrete(5)
    ),
}

CONFIGS = {
    "PPO": PPOConfig,
    "APPO": APPOConfig,
    "IMPALA": IMPALAConfig,
    "DQN": DQNConfig,
    "SAC": SACConfig,
    "BC": BCConfig,
    "MARWIL": MARWILConfig,
}
OFFLINE = ["BC", "MARWIL"]
ON_POLICY = {"train_batch_size_per_learner": NUM_ENVS * FRAGMENT, "lr": 0.01}
REPLAY = {"num_steps_sampled_before_learning_starts": 50}
TRAINING = {
    "PPO": {**ON_POLICY, "minibatch_size": None, "num_epochs": 1},
    "APPO": ON_POLICY,
    "IMPALA": ON_POLICY,
    "DQN": {**REPLAY, "train_batch_size": 40, "lr": 0.01},
    "SAC": {**REPLAY, "train_batch_size_per_learner": 40, "actor_lr": 0.01, "critic_lr": 0.01},
    "BC": {"train_batch_size_per_learner": 40, "lr": 0.01},
    "MARWIL": {"train_batch_size_per_learner": 40, "lr": 0.01},
}
SMALL = {"max_seq_len": T, "fcnet_hiddens": [8], "compile": False}
SIZES = {"d_model": 8, "num_heads": 2, "head_dim": 4, "feedforward_dim": 8, "state_dim": 6}
SIZES |= {"num_traces": 3, "window": 5, "hidden_size": 25, "layers": ["window", "lstm", "min_gru"]}


class OwnGRU(Memory):
    """A memory as a user would write it."""

    def __init__(self, input_dim: int, width: int):
        super().__init__()
        self.input_dim, self.output_dim = input_dim, width
        self.gru = torch.nn.GRU(input_dim, width, batch_first=True)

    def initial_state(self) -> State:
        return {"h": torch.zeros(self.output_dim)}

    def forward(self, x, state, *, valid=None, resets=None):
        if resets is not None:
            return self.step_by_step(x, state, valid, resets)
        y, h = self.gru(mask_padding(x, valid), state["h"][None].contiguous())
        if valid is None:
            return y, {"h": h[0]}
        return y, {"h": y[torch.arange(len(y)), valid.sum(1) - 1]}

    def step_by_step(self, x, state, valid, resets):
        h, outputs = state["h"], []
        valid = torch.ones_like(resets) if valid is None else valid
        x = mask_padding(x, valid)
        for t in range(x.shape[1]):
            before = torch.where((resets & valid)[:, t, None], 0.0, h)
            y, after = self.gru(x[:, t : t + 1], before[None].contiguous())
            h = torch.where(valid[:, t, None], after[0], h)
            outputs.append(y)
        return torch.cat(outputs, 1), {"h": h}


@dataclasses.dataclass(kw_only=True)
class OwnConfig(rlmodules.MemoryConfig):
    width: int = 8

    def build_memory(self, input_dim: int) -> Memory:
        return OwnGRU(input_dim, self.width)


class OwnRLModule(rlmodules.MemoryRLModule):
    config_class = OwnConfig


class OwnQRLModule(rlmodules.MemoryQRLModule):
    config_class = OwnConfig


class OwnSACRLModule(rlmodules.MemorySACRLModule):
    config_class = OwnConfig


class QRLModuleOfOnesOwn(CountingRLModule, TargetNetworkAPI):
    """Not made for this package, for DQN."""

    def make_target_networks(self):
        self.target_policy = make_target_network(self.policy)

    def get_target_network_pairs(self):
        return [(self.policy, self.target_policy)]

    def forward_target(self, batch):
        return {QF_PREDS: self.target_policy(self._run(batch)[0])}

    def _forward(self, batch, **kwargs):
        features, state = self._run(batch)
        values = self.policy(features)
        actions = values.argmax(-1)
        return {QF_PREDS: values, Columns.ACTIONS: actions, Columns.STATE_OUT: state}


class SACRLModuleOfOnesOwn(CountingRLModule, TargetNetworkAPI):
    """The same for SAC, with `Discrete` actions: means over both of them."""

    def setup(self):
        super().setup()
        self.pi, self.qf = torch.nn.Linear(4, 2), torch.nn.Linear(4, 2)

    def make_target_networks(self):
        self.target_qf = make_target_network(self.qf)

    def get_target_network_pairs(self):
        return [(self.qf, self.target_qf)]

    def forward_target(self, batch):
        return self.target_qf(self._run(batch)[0])

    def _forward(self, batch, **kwargs):
        features, state = self._run(batch)
        return {Columns.ACTION_DIST_INPUTS: self.pi(features), Columns.STATE_OUT: state}

    def _forward_train(self, batch, **kwargs):
        features, _ = self._run(batch)
        inputs = self.pi(features.detach())
        probs, values = inputs.softmax(-1), self.qf(features)
        logp = (probs * inputs.log_softmax(-1)).sum(-1)
        with torch.no_grad():
            target = (probs * self.target_qf(features)).sum(-1)
        return {
            Columns.ACTION_DIST_INPUTS: inputs,
            QF_PREDS: values.gather(-1, batch[Columns.ACTIONS][..., None])[..., 0],
            LOGP: logp,
            Q_CURR: (probs * values.detach()).sum(-1),
            LOGP_NEXT: logp.detach().roll(-1, dims=1),
            QF_TARGET_NEXT: target.roll(-1, dims=1),
        }


MODULES_OF_ONES_OWN = {"DQN": QRLModuleOfOnesOwn, "SAC": SACRLModuleOfOnesOwn}


class Recording:
    """Keeps losses and, of the first update, how far its outputs are from those of the rollout."""

    def build(self):
        super().build()
        self.losses, self.errors, self.errors_without_state = defaultdict(list), {}, {}
        self.first_outputs = {}
        self.first_weights = self.weights()

    def weights(self):
        return {
            (module_id, name): parameter.detach().clone()
            for module_id, module in self.module.items()
            for name, parameter in module.named_parameters()
        }

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        if Columns.STATE_IN in batch and module_id not in self.first_outputs:
            self.compare(self.module[module_id].unwrapped(), module_id, batch, fwd_out)
        loss = super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )
        self.losses[module_id].append(loss.item())
        return loss

    def compare(self, module, module_id, batch, fwd_out):
        # DQN's modules have values instead of distributions.
        key = next(key for key in (Columns.ACTION_DIST_INPUTS, QF_PREDS) if key in fwd_out)
        mask = batch[Columns.LOSS_MASK]
        self.first_outputs[module_id] = fwd_out[key].detach()[mask]
        if key not in batch:
            # Recorded episodes hold no outputs.
            return

        def error(outputs):
            return (outputs[key].detach() - batch[key])[mask].abs().max().item()

        self.errors[module_id] = error(fwd_out)
        zeros = tree.map_structure(torch.zeros_like, batch[Columns.STATE_IN])
        with torch.no_grad():
            outputs = module.forward_train({**batch, Columns.STATE_IN: zeros})
        self.errors_without_state[module_id] = error(outputs)


class RecordsValues:
    """Has the episodes of a DQN module record the action values."""

    def _forward_exploration(self, batch, **kwargs):
        values = self.compute_q_values(batch)[QF_PREDS]
        return {**super()._forward_exploration(batch, **kwargs), QF_PREDS: values}


OURS = (rlmodules.MemoryRLModule, rlmodules.MemoryQRLModule, rlmodules.MemorySACRLModule)
NAMED = {
    "LinearAttention": rlmodules.LinearAttentionRLModule,
    "DeepLinearAttention": rlmodules.DeepLinearAttentionRLModule,
    "GTrXL": rlmodules.GTrXLRLModule,
}
# Config, module class, that of DQN and that of SAC: each memory of the catalogue, and one more.
MODULES = {
    kind: (config_class, NAMED.get(kind, OURS[0]), *OURS[1:])
    for config_class in CATALOGUE.values()
    for kind in [config_class.__name__.removesuffix("Config")]
}
MODULES["own memory"] = (OwnConfig, OwnRLModule, OwnQRLModule, OwnSACRLModule)


def spec_of(algorithm, kind="DeepLinearAttention", **settings):
    """A small module of one of these kinds."""
    config_class, *classes = MODULES[kind]
    module_class = classes[{"DQN": 1, "SAC": 2}.get(algorithm, 0)]
    if algorithm == "DQN":
        module_class = type("Recording", (RecordsValues, module_class), {})
    known = {field.name for field in dataclasses.fields(config_class)}
    sizes = {name: size for name, size in SIZES.items() if name in known}
    return RLModuleSpec(module_class, model_config=config_class(**{**SMALL, **sizes, **settings}))


def rllibs_spec(**settings):
    """RLlib's default module of whatever algorithm."""
    model_config = DefaultModelConfig(fcnet_hiddens=[8], lstm_cell_size=8, **settings)
    return RLModuleSpec(model_config=model_config)


def make_config(algorithm, spec=None, **env_config):
    """An unconnected config on random observations."""
    config = CONFIGS[algorithm]()
    spaces = {"observation_space": BOX, "action_space": DISCRETE}
    if algorithm == "SAC":
        spaces["action_space"] = CONTINUOUS
    config.environment(SampledObservations, env_config={**spaces, **env_config})
    config.env_runners(
        num_env_runners=0,
        num_envs_per_env_runner=NUM_ENVS,
        rollout_fragment_length=FRAGMENT,
    )
    config.rl_module(rl_module_spec=spec or spec_of(algorithm))
    ours = support_for(config).learner_class
    config.learners(num_learners=0, learner_class=type("Recorder", (Recording, ours), {}))
    config.training(**TRAINING[algorithm])
    if algorithm in OFFLINE:
        config.offline_data(input_read_episodes=True, dataset_num_iters_per_learner=2)
    config.reporting(min_time_s_per_iteration=0, min_sample_timesteps_per_iteration=0)
    # The monitor of system usage takes half a second to stop.
    return config.debugging(seed=0, log_sys_usage=False)


def train(config, **settings):
    """Trains until each module had two updates, and checks them; returns the Learner."""
    connect(config, **settings)
    if isinstance(config, MARWILConfig):
        return train_offline(config)
    algorithm = config.build_algo()
    try:
        learner = algorithm.learner_group._learner
        # With a remote EnvRunner an iteration may end before an update does.
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            algorithm.train()
            if learner.losses and min(map(len, learner.losses.values())) >= 2:
                break
        check(learner)
    finally:
        algorithm.stop()
    for module_id, error in learner.errors.items():
        assert error <= 1e-5
        # The test sees a wrong state.
        assert learner.errors_without_state[module_id] > 1e-5
    stateful = {id_ for id_, module in learner.module.items() if module.is_stateful()}
    assert learner.errors.keys() == stateful
    return learner


def train_offline(config, episodes=None, observation_space=None):
    """The same on recorded episodes, by the Learner alone: its algorithm only evaluates."""
    env = config.env(config.env_config)
    spaces = (observation_space or env.observation_space, env.action_space)
    learner = config.learner_class(
        config=config,
        module_spec=config.get_rl_module_spec(
            spaces={"default_policy": spaces, "__env_single__": spaces}
        ),
    )
    learner.build()
    learner.update(
        training_data=TrainingData(
            data_iterators=[[hand for (hand,) in dealt(episodes or play(env, 8, act), 2)]]
        ),
        num_iters=2,
        minibatch_size=40,
        timesteps={},
    )
    check(learner)
    return learner


def act(env):
    """A random action that the mask allows."""
    space = env.action_space
    if env.mask is None:
        return space.sample()
    masks = tuple(np.split(env.mask, np.cumsum(env.sizes)[:-1]))
    return space.sample(mask=masks if len(masks) > 1 else masks[0])


def check(learner):
    """Finite losses, and each module's weights have changed."""
    assert learner.losses.keys() == set(learner.module.keys())
    weights = learner.weights()
    for module_id, losses in learner.losses.items():
        assert len(losses) >= 2
        assert np.isfinite(losses).all()
        assert any(
            not torch.equal(weight, learner.first_weights[key])
            for key, weight in weights.items()
            if key[0] == module_id
        )
    assert all(weight.isfinite().all() for weight in weights.values())


# Modules.


def pairs():
    """Algorithms with kinds of modules: for most kinds one algorithm is quick, the others slow."""
    quick = {(list(CONFIGS)[i % len(CONFIGS)], kind) for i, kind in enumerate(MODULES)}
    quick |= {(algorithm, kind) for algorithm in CONFIGS for kind in [*NAMED, "own memory"]}
    return [
        pytest.param(*pair, id="-".join(pair), marks=[] if pair in quick else pytest.mark.slow)
        for kind in MODULES
        for algorithm in CONFIGS
        for pair in [(algorithm, kind)]
    ]


@pytest.mark.parametrize(("algorithm", "kind"), pairs())
def test_modules(algorithm, kind):
    learner = train(make_config(algorithm, spec_of(algorithm, kind)))
    if algorithm in OFFLINE:
        # Rows of a few steps see what rows of whole episodes see.
        whole = train(make_config(algorithm, spec_of(algorithm, kind, max_seq_len=64)))
        (outputs,), (expected,) = learner.first_outputs.values(), whole.first_outputs.values()
        torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODULES)
@pytest.mark.parametrize("algorithm", ["PPO", "APPO", "IMPALA", "SAC", "BC", "MARWIL"])
def test_two_memories(algorithm, kind):
    train(make_config(algorithm, spec_of(algorithm, kind, vf_share_layers=False)))


@pytest.mark.parametrize("algorithm", ["PPO", "APPO", "IMPALA", "BC", "MARWIL"])
def test_rllibs_lstm(algorithm):
    train(make_config(algorithm, rllibs_spec(use_lstm=True, max_seq_len=T)))


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_a_module_of_ones_own(algorithm):
    module_class = MODULES_OF_ONES_OWN.get(algorithm, CountingTargetRLModule)
    spec = RLModuleSpec(module_class, model_config={"max_seq_len": T})
    train(make_config(algorithm, spec, action_space=gym.spaces.Discrete(2)))


@pytest.mark.parametrize("algorithm", CONFIGS)
def test_no_memory(algorithm):
    learner = train(make_config(algorithm, rllibs_spec()))
    assert not learner.first_outputs


# Setups.


class ParallelAgents(ParallelEnv):
    """`RandomAgents` as PettingZoo knows environments."""

    def __init__(self, config):
        self.metadata, self.render_mode = {"name": "agents_v0"}, None
        self.env = RandomAgents(config)
        self.possible_agents = self.env.possible_agents

    def observation_space(self, agent):
        return self.env.observation_spaces[agent]

    def action_space(self, agent):
        return self.env.action_spaces[agent]

    def reset(self, seed=None, options=None):
        observations, _ = self.env.reset()
        self.agents = list(self.possible_agents)
        return observations, {agent: {} for agent in self.agents}

    def step(self, actions):
        observations, rewards, terminated, *_ = self.env.step(actions)
        over = terminated["__all__"]
        acting, self.agents = self.agents, [] if over else self.agents
        infos = {agent: {} for agent in acting}
        ended = dict.fromkeys(acting, over)
        return observations, rewards, ended, dict.fromkeys(acting, False), infos


class AgentsInTurn(PettingZooEnv):
    """Those as PettingZoo's AEC, in RLlib's wrapper."""

    def __init__(self, config):
        super().__init__(parallel_to_aec(ParallelAgents(config)))


@pytest.mark.parametrize("algorithm", ["APPO", "IMPALA", "DQN", "SAC"])
def test_several_agents(algorithm):
    """In a PettingZoo environment, where they take turns."""
    space = CONTINUOUS if algorithm == "SAC" else gym.spaces.Discrete(2)
    env_config = {"num_agents": 2, "action_spaces": {"a0": space, "a1": space}}
    config = make_config(algorithm).environment(AgentsInTurn, env_config=env_config)
    config.env_runners(rollout_fragment_length=2 * FRAGMENT)
    specs = {"a0": spec_of(algorithm), "a1": spec_of(algorithm, "GTrXL")}
    config.multi_agent(policies=set(specs), policy_mapping_fn=lambda agent, *_, **__: agent)
    train(config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs)))


@pytest.mark.parametrize("algorithm", ["APPO", "IMPALA", "DQN", "SAC"])
def test_trials(algorithm):
    """Episodes are no longer than a row, so that each row's state comes from another episode."""
    env = RememberCue if algorithm == "SAC" else RememberFirst
    config = make_config(algorithm).environment(env, env_config={"length": T - 1})
    train(config, episodes_per_trial=2)


@pytest.mark.filterwarnings("ignore")  # PyTorch's compiler raises warnings of its own.
@pytest.mark.parametrize("algorithm", ["IMPALA", "BC", "MARWIL"])
def test_compiled(algorithm, monkeypatch):
    """Traced but not generated, to save time; at a width that nothing else compiles."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    learner = train(make_config(algorithm, spec_of(algorithm, compile=True, d_model=28)))
    blocks = learner.module["default_policy"].core.memory.blocks
    assert all(compilation.is_compiled(block) for block in blocks)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["IMPALA", "SAC"])
def test_remote_env_runner(algorithm):
    train(make_config(algorithm).env_runners(num_env_runners=1))


@pytest.mark.slow
def test_appo_with_two_learners_and_a_remote_env_runner():
    config = make_config("APPO").env_runners(num_env_runners=1).learners(num_learners=2)
    algorithm = connect(config).build_algo()

    def in_learners(function):
        return [result.get() for result in algorithm.learner_group.foreach_learner(function)]

    try:
        num_updates = [0]
        deadline = time.monotonic() + 60
        while min(num_updates) < 2 and time.monotonic() < deadline:
            algorithm.train()
            num_updates = in_learners(lambda learner: len(learner.losses["default_policy"]))
        errors = in_learners(lambda learner: learner.errors)
        in_learners(check)
    finally:
        algorithm.stop()
    assert max(error["default_policy"] for error in errors) <= 1e-5


def outputs_of(episodes):
    """What the steps of each agent's episode recorded, by episode and agent."""
    outputs = defaultdict(list)
    for episode in episodes:
        for agent_id, agent in getattr(episode, "agent_episodes", {None: episode}).items():
            if len(agent):
                outputs[episode.id_, agent_id] += [
                    *agent.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS)
                ]
    return outputs


def train_on_recordings(algorithm, change, runner_class, path, **settings):
    """Records with one algorithm and trains with another, through files; with equal weights first.

    Args:
        algorithm: BC or MARWIL.
        change: What makes the setup of a config.
        runner_class: The recording EnvRunner.
        path: For the files.
        settings: For `connect`.
    """
    recording = change(make_config("PPO")).offline_data(output=str(path))
    runner = runner_class(config=connect(recording, **settings))
    recorded = outputs_of([e for _ in range(3) for e in runner.sample(num_timesteps=60)])
    runner.stop()
    config = change(make_config(algorithm)).offline_data(input_=[str(path)])
    config.evaluation(evaluation_interval=10, evaluation_duration=1)
    algo = connect(config, **settings).build_algo()
    try:
        learner, data = algo.learner_group._learner, algo.offline_data
        modules = runner.module if recording.is_multi_agent else {"default_policy": runner.module}
        for module_id, module in modules.items():
            # Without the heads that only a Learner has.
            learner.module[module_id].load_state_dict(module.state_dict(), strict=False)
        learner.first_weights = learner.weights()
        algo.train()
        check(learner)
        trials = read_trials(data.data.iterator(), module_of=module_mapping(config), batch_size=1)
        ((first,),) = [deal(trials, 1, 40)]
    finally:
        algo.stop()
    expected = defaultdict(list)
    for episode in first:
        for agent_id, agent in getattr(episode, "agent_episodes", {None: episode}).items():
            module_id = agent.module_id or "default_policy"
            expected[module_id] += recorded[episode.id_, agent_id]
    assert learner.first_outputs.keys() == expected.keys() == modules.keys()
    for module_id, outputs in learner.first_outputs.items():
        np.testing.assert_allclose(outputs, np.stack(expected[module_id]), rtol=0, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OFFLINE)
def test_recorded_agents(algorithm, tmp_path):
    specs = {"a0": spec_of(algorithm), "a1": spec_of(algorithm, "GTrXL")}

    def change(config):
        config.environment(RandomAgents, env_config={"num_agents": 2})
        config.multi_agent(policies=set(specs), policy_mapping_fn=lambda agent, *_, **__: agent)
        return config.rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))

    train_on_recordings(algorithm, change, RecordingMultiAgentEnvRunner, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", OFFLINE)
def test_recorded_trials(algorithm, tmp_path):
    """Episodes are no longer than a row, so that each row's state comes from another episode."""

    def change(config):
        return config.environment(RememberFirst, env_config={"length": T - 1})

    train_on_recordings(algorithm, change, RecordingEnvRunner, tmp_path, episodes_per_trial=3)


@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
def test_refused_setups(algorithm):
    config = make_config(algorithm)
    config.rl_module(rl_module_spec=rllibs_spec(use_lstm=True, max_seq_len=T))
    with pytest.raises(ValueError, match="with `use_lstm` cannot be trained on replayed rows"):
        connect(config)


@pytest.mark.parametrize("algorithm", ["DQN", "SAC"])
@pytest.mark.parametrize("several", [False, True])
def test_a_module_without_target_network_is_refused(algorithm, several):
    config = make_config(algorithm)
    spec = RLModuleSpec(CountingRLModule, model_config={"max_seq_len": T})
    if several:
        config.multi_agent(policies={"a", "b"}, policy_mapping_fn=lambda *_, **__: "b")
        spec = MultiRLModuleSpec(rl_module_specs={"a": spec_of(algorithm), "b": spec})
    config.rl_module(rl_module_spec=spec)
    with pytest.raises(ValueError, match="`CountingRLModule` has no target network"):
        connect(config)


@pytest.mark.parametrize("config_class", [CQLConfig, IQLConfig, TQCConfig])
def test_refused_algorithms(config_class):
    with pytest.raises(ValueError, match=f"got a `{config_class.__name__}`, whose losses count"):
        connect(config_class())


@pytest.mark.filterwarnings("ignore")  # RLlib makes an environment while it imports DreamerV3.
def test_other_algorithms():
    from ray.rllib.algorithms.dreamerv3 import DreamerV3Config

    with pytest.raises(ValueError, match=r"got a `DreamerV3Config`, but supports .* only"):
        connect(DreamerV3Config())


# Spaces.


def of_algorithms(algorithms, kinds, *more):
    """All pairs of an algorithm and a kind of space, and more of them."""
    pairs = [(algorithm, kind) for algorithm in algorithms for kind in kinds]
    return [pytest.param(*pair, id="-".join(pair)) for pair in [*pairs, *more]]


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    of_algorithms(["PPO", "APPO", "IMPALA", *OFFLINE], ACTIONS, ("SAC", "discrete")),
)
def test_actions(algorithm, kind):
    train(make_config(algorithm, action_space={**ACTIONS, "discrete": DISCRETE}[kind]))


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    of_algorithms(
        ["APPO", "IMPALA", *OFFLINE],
        ["discrete", "multi-discrete"],
        ("DQN", "discrete"),
        ("SAC", "discrete"),
    ),
)
def test_action_masks(algorithm, kind):
    """The environment raises on an action that its mask forbids."""
    spec = spec_of(algorithm, action_mask="action_mask")
    space = DISCRETE if kind == "discrete" else ACTIONS[kind]
    train(make_config(algorithm, spec, action_space=space, action_mask=True))


@pytest.mark.parametrize("kind", OBSERVATIONS)
@pytest.mark.parametrize("algorithm", CONFIGS)
def test_observations(algorithm, kind):
    spec = spec_of(algorithm, conv_filters=[[4, 3, 2], [4, 3, 1]])
    train(make_config(algorithm, spec, observation_space=OBSERVATIONS[kind]))


@pytest.mark.parametrize(
    ("algorithm", "kind"),
    of_algorithms(["DQN", "SAC"], ["multi-discrete", "nested"], ("DQN", "box")),
)
def test_refused_actions(algorithm, kind):
    config = connect(make_config(algorithm, action_space=ACTIONS[kind]))
    with pytest.raises(ValueError, match="The action space is "):
        config.build_algo()


# Connectors that make observations.

INPUTS = {
    "previous actions and rewards": lambda env, spaces, device: AddPreviousActionsRewards(),
    "filter": lambda env, spaces, device: MeanStdFilter(),
}
FRAME = gym.spaces.Box(-1.0, 1.0, (4, 3, 1), np.float32)


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("algorithm", ["APPO", "IMPALA", "DQN", "SAC"])
def test_inputs(algorithm, kind):
    train(make_config(algorithm).env_runners(env_to_module_connector=INPUTS[kind]))


@pytest.mark.parametrize("kind", INPUTS)
@pytest.mark.parametrize("algorithm", OFFLINE)
def test_recorded_inputs(algorithm, kind):
    """They stand in the episodes as the module saw them."""
    recording = make_config("PPO").env_runners(
        env_to_module_connector=INPUTS[kind],
        # As RLlib's recorder leaves them.
        episodes_to_numpy=False,
    )
    runner = SingleAgentEnvRunner(config=connect(recording))
    episodes = runner.sample(num_episodes=8)
    for episode in episodes:
        del episode.extra_model_outputs[Columns.STATE_OUT]
    config = connect(make_config(algorithm))
    train_offline(config, episodes, runner.module.observation_space)


@pytest.mark.parametrize("algorithm", ["APPO", "IMPALA", "DQN", "SAC", "BC", "MARWIL"])
def test_stacked_frames(algorithm):
    config = make_config(algorithm, spec_of(algorithm, conv_filters=[]), observation_space=FRAME)
    config.env_runners(
        env_to_module_connector=lambda *_: FrameStackingEnvToModule(num_frames=3),
        episode_lookback_horizon=2,
    )
    config.learners(learner_connector=lambda *_: FrameStackingLearner(num_frames=3))
    if algorithm in OFFLINE:
        stacked = gym.spaces.Box(-1.0, 1.0, (4, 3, 3), np.float32)
        train_offline(connect(config), observation_space=stacked)
    else:
        train(config)
