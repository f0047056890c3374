"""`MemoryMetrics`: every metric against the number that follows from what was sampled and trained.

What was sampled is kept by a second callback, what was trained by the Learner; the numbers are
computed from that with plain loops.
"""

import copy
import re
import time
from pathlib import Path

import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.tune.utils import flatten_dict

from connectors import (
    MemoryDQNTorchLearner,
    MemoryLearnerMixin,
    MemoryMetrics,
    MemoryPPOTorchLearner,
    connect,
)
from connectors.rows.row_states import WARM_UP
from tests.connectors.helpers import CountingRLModule, lstm_config
from tests.connectors.learners.test_dqn import dqn_config
from tests.envs import RandomAgents, RememberFirst
from tests.test_multi_agent import rllib

pytestmark = pytest.mark.ray
T = 4
DOCS = Path(__file__).parents[3] / "docs" / "how-to" / "metrics.md"


class KeepSamples(RLlibCallback):
    """A callback of the user's own."""

    def on_sample_end(self, *, env_runner, samples, **kwargs):
        # A local Learner's connectors write into the episodes they get.
        env_runner.kept = copy.deepcopy(samples)


class KeepBatches(MemoryLearnerMixin):
    """Keeps masks and states of all minibatches."""

    def build(self):
        super().build()
        self.kept = []

    def compute_losses(self, *, fwd_out, batch):
        self.kept.append(
            {
                module_id: (columns[Columns.LOSS_MASK].numpy(), columns[Columns.STATE_IN])
                for module_id, columns in batch.items()
                if Columns.STATE_IN in columns
            }
        )
        return super().compute_losses(fwd_out=fwd_out, batch=batch)


class PPOLearner(KeepBatches, MemoryPPOTorchLearner):
    pass


class DQNLearner(KeepBatches, MemoryDQNTorchLearner):
    pass


class SlowRLModule(CountingRLModule):
    def _forward_train(self, batch):
        time.sleep(0.02)
        return self._forward(batch)


def norms(states):
    return [float(np.sqrt((np.asarray(state, np.float64) ** 2).sum())) for state in states]


def rollout_states(module, agents, leaf):
    """What `module` knows at the row starts and row ends of each chunk, run step by step.

    Without the initial state; each state once.
    """
    found, running = [], {}
    for agent in agents:
        state = running.get(agent.id_)
        if state is None:
            state = tree.map_structure(lambda x: x[None], module.get_initial_state())
        for step in range(len(agent) + 1):
            t = agent.t_started + step
            full_row = step > 0 and step % T == 0
            if (full_row or step == 0) and t > 0:
                found.append(state[leaf][0].numpy())
            if step < len(agent):
                obs = torch.as_tensor(agent.get_observations(step))[None, None]
                batch = {Columns.OBS: obs, Columns.STATE_IN: state}
                with torch.no_grad():
                    state = module.forward_inference(batch)[Columns.STATE_OUT]
        running[agent.id_] = state
    return found


def joined(minibatches, module_id):
    """The batch that was cut into minibatches."""
    masks, states = zip(*(kept[module_id] for kept in minibatches), strict=True)
    return np.concatenate(masks), tree.map_structure(lambda *leaves: torch.cat(leaves), *states)


def check_learners(result, kept):
    """Metrics of a module against what each Learner kept: a list of `(mask, states)` a Learner."""
    masks = [mask for learner in kept for mask, _ in learner]
    assert result["num_rows"] == sum(len(mask) for mask in masks)
    shares = [np.mean([1 - mask.mean() for mask, _ in learner]) for learner in kept]
    assert result["padding_share"] == pytest.approx(np.mean(shares), rel=1e-5)
    leaves = {
        path: [
            [norms(dict(tree.flatten_with_path(s))[path]) for _, s in learner] for learner in kept
        ]
        for path, leaf in tree.flatten_with_path(kept[0][0][1])
        if leaf.is_floating_point()
    }
    assert set(flatten_dict(result["state_norm_mean"])) == {"/".join(path) for path in leaves}
    for path, by_learner in leaves.items():
        mean, largest = result["state_norm_mean"], result["state_norm_max"]
        for key in path:
            mean, largest = mean[key], largest[key]
        means = [np.mean([np.mean(batch) for batch in batches]) for batches in by_learner]
        assert mean == pytest.approx(np.mean(means), rel=1e-5)
        everything = [norm for batches in by_learner for batch in batches for norm in batch]
        assert largest == pytest.approx(max(everything), rel=1e-5)


def ppo(module_class=SlowRLModule):
    """Two environments, fragments of 19 steps, episodes of 8, rows of 4, one update on all."""
    return (
        PPOConfig()
        .environment(RememberFirst, env_config={"length": 8})
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2, rollout_fragment_length=19)
        .learners(learner_class=PPOLearner)
        # Without updates the module stays the one that has sampled.
        .training(train_batch_size_per_learner=38, minibatch_size=None, num_epochs=1, lr=0.0)
        .rl_module(
            rl_module_spec=RLModuleSpec(module_class=module_class, model_config={"max_seq_len": T})
        )
        .debugging(seed=0, log_sys_usage=False)
    )


@pytest.fixture
def built():
    """Builds algorithms, and stops them."""
    algorithms = []

    def build(config):
        algorithms.append(connect(config).build_algo())
        return algorithms[-1]

    yield build
    for algorithm in algorithms:
        algorithm.stop()


def poison(learner):
    """The next gradients hold a NaN."""
    parameter = next(next(iter(learner.module.values())).parameters())
    parameter.register_hook(lambda gradient: torch.full_like(gradient, float("nan")))


def test_one_agent(built):
    algo = built(ppo().callbacks([MemoryMetrics, KeepSamples]))
    learner = algo.learner_group._learner
    started = time.perf_counter()
    result = algo.train()
    seconds = time.perf_counter() - started
    runner = result["env_runners"]["default_policy"]["memory"]

    # Each environment has played two episodes of 8 steps and 3 steps of a third.
    assert sorted(len(episode) for episode in algo.env_runner.kept) == [3, 3, 8, 8, 8, 8]
    assert runner["episode_starts_per_step"] == pytest.approx(6 / 38)
    # Four float32 and a counter. Stored: after 4 and after 8 steps of each full episode.
    assert runner["state_bytes"] == 4 * 4 + 8
    assert runner["stored_bytes_per_step"] == pytest.approx(8 * 24 / 38)
    expected = norms(rollout_states(algo.env_runner.module, algo.env_runner.kept, "sum"))
    assert len(expected) == 8
    assert set(runner["state_norm_mean"]) == {"sum"}
    assert runner["state_norm_mean"]["sum"] == pytest.approx(np.mean(expected), rel=1e-5)
    assert runner["state_norm_max"]["sum"] == pytest.approx(max(expected), rel=1e-5)

    # 5 rows of 4 slots an environment, one of which holds a bootstrap step.
    memory = result["learners"]["default_policy"]["memory"]
    assert memory["num_rows"] == 10
    assert memory["padding_share"] == pytest.approx(1 / 20)
    assert memory["num_rebuilt_rows"] == memory["num_stale_rows"] == 0
    (batch,) = learner.kept
    check_learners(memory, [[batch["default_policy"]]])
    assert memory["state_norm_mean"]["sum"] > 0

    everything = result["learners"]["__all_modules__"]["memory"]
    assert 0.02 <= everything["forward_time_s"] <= seconds
    gradients = [parameter.grad for parameter in learner._params.values()]
    largest = max(gradient.abs().max().item() for gradient in gradients)
    assert everything["largest_gradient"] == pytest.approx(largest)
    assert everything["num_nonfinite_gradients"] == 0

    # The second fragment goes on in the middle of an episode.
    before = algo.env_runner.kept
    poison(learner)
    result = algo.train()
    runner = result["env_runners"]["default_policy"]["memory"]
    assert sorted(len(episode) for episode in algo.env_runner.kept) == [5, 5, 6, 6, 8, 8]
    assert runner["episode_starts_per_step"] == pytest.approx(4 / 38)
    both = [*before, *algo.env_runner.kept]
    expected = norms(rollout_states(algo.env_runner.module, both, "sum"))[8:]
    assert runner["stored_bytes_per_step"] == pytest.approx(len(expected) * 24 / 38)
    assert runner["state_norm_mean"]["sum"] == pytest.approx(np.mean(expected), rel=1e-5)
    everything = result["learners"]["__all_modules__"]["memory"]
    assert everything["num_nonfinite_gradients"] == 1
    assert np.isnan(everything["largest_gradient"])


def test_rllibs_lstm(built):
    config = lstm_config(T).learners(learner_class=PPOLearner).training(lr=0.0)
    algo = built(config.callbacks([MemoryMetrics, KeepSamples]))
    result = algo.train()
    runner = result["env_runners"]["default_policy"]["memory"]
    assert runner["state_bytes"] == 2 * 8 * 4
    for leaf in ("h", "c"):
        expected = norms(rollout_states(algo.env_runner.module, algo.env_runner.kept, leaf))
        assert runner["state_norm_mean"][leaf] == pytest.approx(np.mean(expected), rel=1e-5)
        assert runner["state_norm_max"][leaf] == pytest.approx(max(expected), rel=1e-5)
    memory = result["learners"]["default_policy"]["memory"]
    kept = algo.learner_group._learner.kept
    assert len(kept) == 2
    check_learners(memory, [[joined(kept, "default_policy")]])


class CountWarmUps(ConnectorV2):
    count = 0

    def __call__(self, *, batch, episodes, **kwargs):
        CountWarmUps.count += sum(
            bool(np.any(episode.get_extra_model_outputs(WARM_UP))) for episode in episodes
        )
        return batch


def test_replay(built):
    config = dqn_config().callbacks(MemoryMetrics)
    config.learners(learner_class=DQNLearner, learner_connector=lambda *_: CountWarmUps())
    algo = built(config)
    kept, num_rebuilt = algo.learner_group._learner.kept, CountWarmUps.count
    while not kept:
        result = algo.train()
    memory = result["learners"]["default_policy"]["memory"]
    check_learners(memory, [[batch["default_policy"] for batch in kept]])
    assert len(kept) > 1
    # The last observation of each row is not trained on.
    assert memory["padding_share"] > 1 / 8
    assert memory["num_rebuilt_rows"] == CountWarmUps.count - num_rebuilt > 0
    assert memory["num_stale_rows"] == 0
    assert result["env_runners"]["default_policy"]["memory"]["state_bytes"] > 0


class UnlikeAgents(RandomAgents):
    """Other numbers in each EnvRunner."""

    def __init__(self, config):
        super().__init__({**config, "seed": config.worker_index})


def keys(result):
    """The keys of all metrics, as the docs write them."""
    found = set()
    for key in flatten_dict({name: result[name] for name in ("env_runners", "learners")}):
        parts = key.split("/")
        if "memory" in parts:
            if parts[1] != "__all_modules__":
                parts[1] = "<module>"
            if "state_norm" in parts[3]:
                parts[4:] = ["<leaf>"]
            found.add("/".join(parts))
    return found


@pytest.mark.slow
def test_two_env_runners_and_two_learners(built):
    """Several agents that come and go: two of a module with memory, one of a module without."""
    specs = {
        "counting": RLModuleSpec(CountingRLModule, model_config={"max_seq_len": T}),
        "mlp": rllib(),
    }
    config = (
        PPOConfig()
        .environment(UnlikeAgents, env_config={"num_agents": 3, "schedule": "lives"})
        .env_runners(num_env_runners=2, rollout_fragment_length=41)
        .learners(num_learners=2, learner_class=PPOLearner)
        .training(train_batch_size_per_learner=41, minibatch_size=41, num_epochs=1, lr=0.0)
        .multi_agent(
            policies=set(specs),
            policy_mapping_fn=lambda agent, *_, **__: "mlp" if agent == "a2" else "counting",
        )
        .rl_module(rl_module_spec=MultiRLModuleSpec(rl_module_specs=specs))
        .callbacks([KeepSamples, MemoryMetrics])
        .debugging(seed=0, log_sys_usage=False)
    )
    algo = built(config)
    result = algo.train()
    assert set(result["env_runners"]["counting"]) == {"memory"}
    assert "mlp" not in result["env_runners"]
    counts = {"num_nonfinite_gradients", "num_skipped_batches"}
    assert set(result["learners"]["mlp"]["memory"]) == counts

    def agents_of(samples):
        agents = [agent for episode in samples for agent in episode.agent_episodes.values()]
        return [agent for agent in agents if agent.module_id == "counting" and len(agent)]

    samples = algo.env_runner_group.foreach_env_runner(lambda r: r.kept, local_env_runner=False)
    runners = [agents_of(kept) for kept in samples]
    module = algo.env_runner.module["counting"]
    states = [norms(rollout_states(module, agents, "sum")) for agents in runners]
    steps = [sum(map(len, agents)) for agents in runners]
    starts = [sum(agent.t_started == 0 for agent in agents) for agents in runners]
    memory = result["env_runners"]["counting"]["memory"]
    assert starts[0] != starts[1]
    assert memory["episode_starts_per_step"] == pytest.approx(np.mean(np.divide(starts, steps)))
    stored = np.divide([24 * len(found) for found in states], steps)
    assert memory["stored_bytes_per_step"] == pytest.approx(np.mean(stored))
    assert memory["state_bytes"] == 24
    assert memory["state_norm_mean"]["sum"] == pytest.approx(
        np.mean([*map(np.mean, states)]), rel=1e-5
    )
    assert memory["state_norm_max"]["sum"] == pytest.approx(max(map(max, states)), rel=1e-5)

    learners = [kept.get() for kept in algo.learner_group.foreach_learner(lambda x: x.kept)]
    batches = [joined(kept, "counting") for kept in learners]
    assert len(batches) == 2
    assert batches[0][0].mean() != batches[1][0].mean()
    memory = result["learners"]["counting"]["memory"]
    check_learners(memory, [[batch] for batch in batches])
    assert memory["num_skipped_batches"] == 0

    # Both Learners skip the same update.
    algo.learner_group.foreach_learner(poison)
    assert algo.train()["learners"]["__all_modules__"]["memory"]["num_nonfinite_gradients"] == 1

    # A run as large as this one logs all there is.
    documented = re.findall(r"^\| `((?:env_runners|learners)/\S+)`", DOCS.read_text(), re.MULTILINE)
    assert len(documented) == len(set(documented))
    assert set(documented) == keys(result)


def test_nothing_more_is_measured_without_the_callback(built):
    result = built(ppo(CountingRLModule)).train()
    assert keys(result) == {
        "learners/__all_modules__/memory/num_nonfinite_gradients",
        "learners/<module>/memory/num_nonfinite_gradients",
        "learners/<module>/memory/num_rebuilt_rows",
        "learners/<module>/memory/num_stale_rows",
    }


def test_needs_the_learner_of_connect():
    with pytest.raises(ValueError, match=r"`callbacks` has `MemoryMetrics`.*`PPOTorchLearner`"):
        lstm_config(T).callbacks(MemoryMetrics).build_algo()
