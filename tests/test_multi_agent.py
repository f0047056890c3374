"""Several agents: the Learner sees what each of them saw, through real PPO runs.

Two checks. The first log-probabilities of an update equal the recorded `ACTION_LOGP` on every
valid step. And each row starts from the state that the module reaches when it runs, step by step,
over all that the agent has seen since its episode's start.
"""

from collections import defaultdict

import numpy as np
import pytest
import ray
import torch
import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner

from connectors import MemoryPPOTorchLearner, connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.connectors.helpers import CountingRLModule
from tests.envs import RandomAgents

pytestmark = pytest.mark.ray


def deep(max_seq_len):
    settings = DeepLinearAttentionConfig(
        max_seq_len=max_seq_len,
        fcnet_hiddens=[8],
        d_model=8,
        num_heads=2,
        head_dim=4,
        feedforward_dim=8,
        compile=False,
    )
    return RLModuleSpec(DeepLinearAttentionRLModule, model_config=settings)


def rllib(**settings):
    model_config = DefaultModelConfig(fcnet_hiddens=[8], lstm_cell_size=8, **settings)
    return RLModuleSpec(DefaultPPOTorchRLModule, model_config=model_config)


def modules():
    """Ours twice, RLlib's LSTM, its MLP, and a module of someone else."""
    return {
        "ours": deep(4),
        "lstm": rllib(use_lstm=True, max_seq_len=7),
        "mlp": rllib(),
        "counting": RLModuleSpec(CountingRLModule, model_config={"max_seq_len": 5}),
    }


def module_of(agent_id, episode, **kwargs):
    """`a0` and `a4` share a module."""
    return ["ours", "lstm", "mlp", "counting"][int(agent_id[1:]) % 4]


class RecordingLearner(MemoryPPOTorchLearner):
    """Keeps how far log-probabilities are from those of the rollout, by module."""

    def build(self):
        super().build()
        self.errors, self.steps = defaultdict(list), defaultdict(int)

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        module = self.module[module_id].unwrapped()
        dist_class = module.get_train_action_dist_cls()
        dist = dist_class.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS].detach())
        difference = dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
        mask = batch[Columns.LOSS_MASK]
        # A minibatch may hold nothing but bootstrap steps.
        self.errors[module_id].append(difference[mask].abs().amax().item() if mask.any() else 0.0)
        self.steps[module_id] += int(mask.sum())
        return super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )


def ppo(*, num_envs=2, fragment=19, num_learners=0, train=None, **env_config):
    config = (
        PPOConfig()
        .environment(RandomAgents, env_config={"num_agents": 5, **env_config})
        .env_runners(
            num_env_runners=0,
            num_envs_per_env_runner=num_envs,
            rollout_fragment_length=fragment,
        )
        .learners(num_learners=num_learners, learner_class=RecordingLearner)
        .training(
            train_batch_size_per_learner=num_envs * fragment,
            minibatch_size=8 if num_learners > 1 else None,
            num_epochs=1,
            # The action of an agent that waits at the end of a fragment is trained on one update
            # later. Without updates the check holds for such steps, too.
            lr=0.0,
        )
        .multi_agent(policies=set(modules()), policy_mapping_fn=module_of, policies_to_train=train)
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=modules()))
        .debugging(seed=0, log_sys_usage=False)
    )
    return connect(config)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("schedule", ["together", "turns", "rates", "lives"])
def test_parity(schedule, num_envs):
    algo = ppo(schedule=schedule, num_envs=num_envs, truncate=num_envs == 1).build_algo()
    try:
        learner = algo.learner_group._learner
        for _ in range(4):
            results = algo.train()["learners"]
    finally:
        algo.stop()
    assert set(learner.errors) == set(modules())
    for module_id, errors in learner.errors.items():
        assert max(errors) <= 1e-5, module_id
        if module_id != "mlp":
            assert results[module_id]["memory"]["num_rebuilt_rows"] == 0
            assert results[module_id]["memory"]["num_stale_rows"] == 0


def check_states(runner, samples):
    """Compares all snapshots with a run of the module, step by step, over each agent's episode."""
    pieces = defaultdict(list)
    for episode in samples:
        for agent in episode.agent_episodes.values():
            if agent.module_id != "mlp":
                pieces[agent.id_].append(agent)
    num_rows = 0
    for chunks in pieces.values():
        module = runner.module[chunks[0].module_id]
        max_seq_len = module.model_config["max_seq_len"]
        initial = state = tree.map_structure(lambda leaf: leaf[None], module.get_initial_state())
        # No step is lost or comes twice.
        assert [chunk.t_started for chunk in chunks] == [0, *(chunk.t for chunk in chunks[:-1])]
        for chunk in chunks:
            snapshots = chunk.get_extra_model_outputs(Columns.STATE_OUT)
            for step in range(len(chunk) + 1):
                t = chunk.t_started + step
                # The bootstrap step refers to the snapshot of the last step.
                snapshot = snapshots[min(step, len(chunk) - 1)]
                if step % max_seq_len == 0:
                    num_rows += 1
                    recorded = snapshot.state_at(t)
                    if t == 0:
                        assert recorded is None
                        assert state is initial
                    else:
                        for name, leaf in state.items():
                            np.testing.assert_allclose(
                                recorded[name], leaf[0], rtol=1e-5, atol=1e-5
                            )
                if step == len(chunk):
                    break
                obs = torch.as_tensor(chunk.get_observations(step))[None, None]
                outputs = module.forward_inference({Columns.OBS: obs, Columns.STATE_IN: state})
                state = outputs[Columns.STATE_OUT]
                np.testing.assert_allclose(
                    outputs[Columns.ACTION_DIST_INPUTS][0, 0],
                    chunk.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS, step),
                    atol=1e-5,
                )
    return num_rows


@pytest.mark.parametrize(
    ("schedule", "fragment"),
    [("together", 4), ("turns", 1), ("turns", 4), ("rates", 1), ("rates", 19), ("lives", 4)],
)
def test_states(schedule, fragment):
    """Short fragments cut episodes while agents wait, several times in a row."""
    config = ppo(schedule=schedule, num_envs=2, fragment=fragment, truncate=fragment == 4)
    runner = MultiAgentEnvRunner(config=config)
    samples = [episode for _ in range(100 // fragment) for episode in runner.sample()]
    assert check_states(runner, samples) > 50


class ReturningAgents(RandomAgents):
    """Agent a1 dies at step 4 and comes back at step 30."""

    def reset(self, *, seed=None, options=None):
        super().reset()
        self.length = 60
        self.births = dict.fromkeys(self.possible_agents, 0)
        self.deaths = {**dict.fromkeys(self.possible_agents, 60), "a1": 4}
        self.agents = list(self.possible_agents)
        return {agent: self._see() for agent in self.agents}, {}

    def step(self, actions):
        if self.t == 29:
            self.births["a1"], self.deaths["a1"] = 30, 60
        return super().step(actions)


def test_an_agent_that_comes_back_starts_anew():
    config = ppo(schedule="lives", fragment=10).environment(ReturningAgents)
    runner = MultiAgentEnvRunner(config=config)
    samples = [episode for _ in range(12) for episode in runner.sample()]
    lives = {
        (episode.id_, agent.id_)
        for episode in samples
        for agent_id, agent in episode.agent_episodes.items()
        if agent_id == "a1"
    }
    assert len(lives) > len({episode_id for episode_id, _ in lives})
    assert check_states(runner, samples) > 50


@pytest.mark.slow
def test_two_learners():
    """Episodes are cut to share them out; rows start from exact states all the same.

    Agents are there for a few steps only, so that a Learner may get none of a module's.
    """
    config = ppo(schedule="lives", num_envs=3, fragment=14, num_learners=2)
    config.training(minibatch_size=8, num_epochs=2)
    algo = connect(config).build_algo()
    counts = defaultdict(int)
    try:
        for _ in range(12):
            for module_id, results in algo.train()["learners"].items():
                for name, value in results.get("memory", {}).items():
                    # NaN where no batch of the module was built.
                    counts[module_id, name] += int(np.nan_to_num(value))
        errors = algo.learner_group.foreach_learner(lambda learner: dict(learner.errors))
    finally:
        algo.stop()
    for result in errors:
        for module_id, values in result.get().items():
            assert max(values) <= 1e-5, module_id
    for module_id in modules():
        assert counts[module_id, "num_stale_rows"] == 0
    assert sum(counts[module_id, "num_rebuilt_rows"] for module_id in modules()) > 0


def logp_errors(config, runner, episodes):
    """The largest differences between recorded log-probabilities and those of train batches."""
    pipeline = config.build_learner_connector(None, None)
    pipeline.prepend(AddOneTsToEpisodesAndTruncate())
    batches = pipeline(rl_module=runner.module, batch={}, episodes=episodes, shared_data={})
    errors = {}
    for module_id, batch in batches.items():
        module = runner.module[module_id]
        outputs = module.forward_inference(batch)
        dist_class = module.get_inference_action_dist_cls()
        dist = dist_class.from_logits(outputs[Columns.ACTION_DIST_INPUTS])
        difference = dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
        errors[module_id] = difference[batch[Columns.LOSS_MASK]].abs().max().item()
    assert errors.keys() == modules().keys()
    return errors


@pytest.mark.parametrize("schedule", ["together", "rates"])
def test_a_failed_environment_leaves_no_state_behind(schedule):
    """RLlib makes all environments of the runner anew, and drops their running episodes."""
    config = ppo(schedule=schedule, num_envs=2, fails_at=30)
    config.fault_tolerance(restart_failed_sub_environments=True)
    runner = MultiAgentEnvRunner(config=config)
    episodes = [episode for _ in range(6) for episode in runner.sample(num_timesteps=38)]
    assert max(logp_errors(config, runner, episodes).values()) <= 1e-5


def test_modules_that_are_not_trained():
    config = ppo(schedule="lives", train={"ours"})
    config.training(lr=0.01)
    algo = config.build_algo()
    try:
        learner = algo.learner_group._learner
        before = {id_: module.get_state() for id_, module in learner.module.items()}
        algo.train()
        after = {id_: module.get_state() for id_, module in learner.module.items()}
    finally:
        algo.stop()
    assert learner.errors.keys() == {"ours"}
    changed = {
        id_
        for id_, state in after.items()
        if any(not np.array_equal(state[key], before[id_][key]) for key in state)
    }
    assert changed == {"ours"}


@pytest.mark.slow
def test_a_killed_env_runner_is_replaced():
    config = ppo(schedule="rates", num_envs=1, fragment=30)
    config.env_runners(num_env_runners=2).training(train_batch_size_per_learner=60)
    config.fault_tolerance(restart_failed_env_runners=True)
    algo = config.build_algo()
    try:
        learner = algo.learner_group._learner
        algo.train()
        actors = algo.env_runner_group._worker_manager.actors()
        ray.kill(actors[1], no_restart=False)
        for _ in range(50):
            algo.train()
            if algo.env_runner_group.num_healthy_remote_workers() == 2:
                break
        algo.train()
        assert algo.env_runner_group.num_healthy_remote_workers() == 2
    finally:
        algo.stop()
    assert len(learner.errors["ours"]) > 2
    assert all(max(errors) <= 1e-5 for errors in learner.errors.values())
