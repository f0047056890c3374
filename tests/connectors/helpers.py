"""Modules, episodes and pipelines shared by the connector tests."""

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors.learner import AddOneTsToEpisodesAndTruncate
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import TargetNetworkAPI
from ray.rllib.core.rl_module.apis.target_network_api import TARGET_NETWORK_ACTION_DIST_INPUTS
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from connectors import StateSnapshot

BOX = gym.spaces.Box(-1.0, 1.0, (3,), np.float32)
DISCRETE = gym.spaces.Discrete(2)


class CountingRLModule(TorchRLModule, ValueFunctionAPI):
    """A leaky sum of the observations and an int64 step counter; serves nested spaces."""

    def setup(self) -> None:
        super().setup()
        width = sum(
            int(np.prod(space.shape)) for space in tree.flatten(_spaces(self.observation_space))
        )
        generator = torch.Generator().manual_seed(0)
        self.mix = torch.nn.Parameter(torch.randn(width, 4, generator=generator) * 0.3)
        self.policy = torch.nn.Linear(4, 2)
        self.value = torch.nn.Linear(4, 1)

    def get_initial_state(self) -> dict[str, torch.Tensor]:
        return {"sum": torch.zeros(4), "t": torch.zeros((), dtype=torch.int64)}

    def _run(self, batch: dict[str, Any]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        leaves = tree.flatten(batch[Columns.OBS])
        obs = torch.cat([leaf.float().reshape(*leaf.shape[:2], -1) for leaf in leaves], dim=-1)
        state = batch[Columns.STATE_IN]["sum"]
        outputs = []
        for t in range(obs.shape[1]):
            state = 0.9 * state + torch.tanh(obs[:, t] @ self.mix + 0.1 * state)
            outputs.append(state)
        steps = batch[Columns.STATE_IN]["t"] + obs.shape[1]
        return torch.stack(outputs, dim=1), {"sum": state, "t": steps}

    def _forward(self, batch: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        features, state = self._run(batch)
        return {Columns.ACTION_DIST_INPUTS: self.policy(features), Columns.STATE_OUT: state}

    def compute_values(self, batch: dict[str, Any], embeddings: Any = None) -> torch.Tensor:
        return self.value(self._run(batch)[0]).squeeze(-1)


class CountingTargetRLModule(CountingRLModule, TargetNetworkAPI):
    """The same with the target network that APPO, DQN and SAC ask for."""

    def make_target_networks(self):
        self.target_mix = torch.nn.Parameter(self.mix.detach().clone(), requires_grad=False)
        self.target_policy = make_target_network(self.policy)

    def get_target_network_pairs(self):
        return [(self.policy, self.target_policy)]

    def forward_target(self, batch):
        with torch.no_grad():
            inputs = self.target_policy(self._run(batch)[0])
        return {TARGET_NETWORK_ACTION_DIST_INPUTS: inputs}


def _spaces(space: gym.Space) -> Any:
    if isinstance(space, gym.spaces.Dict):
        return {key: _spaces(child) for key, child in space.spaces.items()}
    return space


def lstm_config(max_seq_len: int, **model: Any) -> PPOConfig:
    """PPO with RLlib's own LSTM on a small environment, everything in this process."""
    return (
        PPOConfig()
        .environment("CartPole-v1")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=3, rollout_fragment_length=20)
        .training(train_batch_size_per_learner=60, minibatch_size=32, num_epochs=1)
        .rl_module(
            model_config=DefaultModelConfig(
                use_lstm=True,
                max_seq_len=max_seq_len,
                lstm_cell_size=8,
                fcnet_hiddens=[8],
                **model,
            )
        )
        .debugging(seed=0, log_sys_usage=False)
    )


def lstm_module(max_seq_len: int, observation_space=BOX, action_space=DISCRETE):
    """RLlib's LSTM as the Learner holds it."""
    torch.manual_seed(0)
    return (
        RLModuleSpec(
            module_class=DefaultPPOTorchRLModule,
            observation_space=observation_space,
            action_space=action_space,
            model_config=DefaultModelConfig(
                use_lstm=True, max_seq_len=max_seq_len, lstm_cell_size=8, fcnet_hiddens=[8]
            ),
        )
        .build()
        .as_multi_rl_module()
    )


def counting_module(max_seq_len: int, observation_space=BOX, action_space=DISCRETE):
    """`CountingRLModule` as the Learner holds it."""
    torch.manual_seed(0)
    return (
        RLModuleSpec(
            module_class=CountingRLModule,
            observation_space=observation_space,
            action_space=action_space,
            model_config={"max_seq_len": max_seq_len},
        )
        .build()
        .as_multi_rl_module()
    )


def make_episodes(
    module: Any,
    chunks: list[tuple[int, int, str]],
    *,
    observation_space: gym.Space = BOX,
    action_space: gym.Space = DISCRETE,
    lookback: int = 1,
    seed: int = 0,
) -> list[SingleAgentEpisode]:
    """Episode chunks as RLlib's default connectors record them, states of `module` included.

    Args:
        module: Single module with memory.
        chunks: `(length, t_started, end)` with end one of "cut", "terminated", "truncated".
        observation_space: To sample observations from.
        action_space: To sample actions from.
        lookback: Steps kept from before the chunk.
        seed: For everything random.
    """
    observation_space.seed(seed)
    action_space.seed(seed)
    rng = np.random.default_rng(seed)
    episodes = []
    for length, t_started, end in chunks:
        total = t_started + length
        observations = [observation_space.sample() for _ in range(total + 1)]
        episode = SingleAgentEpisode(observation_space=observation_space, action_space=action_space)
        episode.add_env_reset(observations[0])
        state = tree.map_structure(lambda leaf: leaf[None], module.get_initial_state())
        for t in range(total):
            obs = tree.map_structure(
                lambda leaf: torch.as_tensor(leaf)[None, None], observations[t]
            )
            out = module.forward_inference({Columns.OBS: obs, Columns.STATE_IN: state})
            state = out[Columns.STATE_OUT]
            episode.add_env_step(
                observations[t + 1],
                action_space.sample(),
                float(rng.normal()),
                terminated=end == "terminated" and t == total - 1,
                truncated=end == "truncated" and t == total - 1,
                extra_model_outputs={
                    Columns.ACTION_LOGP: np.float32(rng.normal()),
                    Columns.ACTION_DIST_INPUTS: rng.normal(size=2).astype(np.float32),
                    Columns.STATE_OUT: tree.map_structure(lambda leaf: leaf[0].numpy(), state),
                    "weights_seq_no": 3,
                },
            )
            if t + 1 == t_started:
                episode = episode.cut(len_lookback_buffer=lookback)
        episodes.append(episode.to_numpy())
    return episodes


def with_snapshots(
    module: Any, episodes: list[SingleAgentEpisode], max_seq_len: int
) -> list[SingleAgentEpisode]:
    """The same episodes as our connectors record them."""
    changed = []
    for episode in copy.deepcopy(episodes):
        buffer = episode.extra_model_outputs[Columns.STATE_OUT]
        states = buffer.data
        before = buffer.lookback

        def state_before(step: int, states=states, before=before) -> Any:
            position = before + step - 1
            if position < 0:
                return None
            return tree.map_structure(lambda leaf: leaf[position], states)

        references = np.empty(before + len(episode), dtype=object)
        for start in range(0, len(episode), max_seq_len):
            end = start + max_seq_len
            snapshot = StateSnapshot(episode.t_started + start, state_before(start))
            if end <= len(episode):
                snapshot.finish(episode.t_started + end, state_before(end))
            references[before + start : before + end] = snapshot
        references[:before] = references[before]
        buffer.data = references
        changed.append(episode)
    return changed


def run_pipeline(
    builder: Any, module: Any, episodes: list[SingleAgentEpisode], *, bootstrap: bool = True
) -> dict[str, Any]:
    """A Learner pipeline, RLlib's defaults included, on copies of the episodes."""
    config = PPOConfig()
    if builder is not None:
        config.learners(learner_connector=builder)
    single = next(iter(module.values()))
    pipeline = config.build_learner_connector(single.observation_space, single.action_space)
    if bootstrap:
        pipeline.prepend(AddOneTsToEpisodesAndTruncate())
    shared_data: dict[str, Any] = {}
    batch = pipeline(
        rl_module=module, batch={}, episodes=copy.deepcopy(episodes), shared_data=shared_data
    )
    assert shared_data["_zero_padded_for_mid=default_policy"]
    return batch["default_policy"]


def assert_same_batch(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """Same columns, shapes, dtypes and bits."""
    assert set(ours) == set(theirs)
    for column, expected in theirs.items():
        tree.assert_same_structure(ours[column], expected)
        for path, leaf in tree.flatten_with_path(expected):
            mine = ours[column]
            for key in path:
                mine = mine[key]
            assert mine.shape == leaf.shape, (column, path, mine.shape, leaf.shape)
            assert mine.dtype == leaf.dtype, (column, path, mine.dtype, leaf.dtype)
            assert torch.equal(mine, leaf), (column, path)
