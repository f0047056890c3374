"""`ComputeAdvantages` gives RLlib's value targets, and advantages of the trained steps only."""

import copy

import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.learner import GeneralAdvantageEstimation
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.postprocessing.value_predictions import compute_value_targets

from connectors import BuildTrainBatch, ComputeAdvantages
from connectors.rows import values
from connectors.rows.advantages import value_targets
from connectors.rows.values import values_of_batch
from tests.connectors.helpers import BOX, DISCRETE, lstm_module, make_episodes, run_pipeline

T = 4
CHUNKS = [(3, 0, "terminated"), (9, 0, "truncated"), (8, 0, "cut"), (6, 5, "terminated")]
SETTINGS = {"gamma": 0.93, "lambda_": 0.8}


class StatelessRLModule(TorchRLModule, ValueFunctionAPI):
    def setup(self):
        super().setup()
        self.layer = torch.nn.Linear(3, 1)

    def _forward(self, batch, **kwargs):
        return {}

    def compute_values(self, batch, embeddings=None):
        return self.layer(batch[Columns.OBS]).squeeze(-1)


class PolicyOnlyRLModule(TorchRLModule):
    def _forward(self, batch, **kwargs):
        return {}


def spec(module_class):
    return RLModuleSpec(module_class, observation_space=BOX, action_space=DISCRETE, model_config={})


def prepared(stateful):
    """A module, its episodes with the bootstrap step, and its train batch."""
    recurrent = lstm_module(T)
    episodes = make_episodes(recurrent["default_policy"], CHUNKS)
    if stateful:
        module, builder = recurrent, lambda *_: BuildTrainBatch()
        batch = run_pipeline(builder, module, episodes)
    else:
        torch.manual_seed(0)
        module = spec(StatelessRLModule).build().as_multi_rl_module()
        lengths = [length + 1 for length, _, _ in CHUNKS]
        rng = np.random.default_rng(0)
        ends = np.cumsum(lengths) - 1
        flags = {name: torch.zeros(sum(lengths), dtype=torch.bool) for name in ("term", "trunc")}
        for end, (_, _, kind) in zip(ends, CHUNKS, strict=True):
            flags["term" if kind == "terminated" else "trunc"][end - 1] = True
        mask = torch.ones(sum(lengths), dtype=torch.bool)
        mask[torch.as_tensor(ends)] = False
        batch = {
            Columns.OBS: torch.as_tensor(rng.normal(size=(sum(lengths), 3)), dtype=torch.float32),
            Columns.REWARDS: torch.as_tensor(rng.normal(size=sum(lengths)), dtype=torch.float32),
            Columns.TERMINATEDS: flags["term"],
            Columns.TRUNCATEDS: flags["trunc"],
            Columns.LOSS_MASK: mask,
        }
    for episode in episodes:
        episode.rewards.append(0.0)
        episode.actions.append(0)
        episode.t += 1
    return module, episodes, batch


@pytest.mark.parametrize("stateful", [True, False])
def test_equals_rllib(stateful):
    module, episodes, batch = prepared(stateful)
    call = {"rl_module": module, "episodes": episodes}
    theirs = GeneralAdvantageEstimation(**SETTINGS)(
        batch={"default_policy": copy.copy(batch)}, **call
    )["default_policy"]
    piece = ComputeAdvantages(config=PPOConfig().training(**SETTINGS))
    mine = piece(batch={"default_policy": copy.copy(batch)}, **call)["default_policy"]
    mask = batch[Columns.LOSS_MASK]
    if stateful:
        # The row of the third chunk's bootstrap step holds nothing else, and is dropped.
        kept = mask.any(1)
        assert kept.tolist() == [True, True, True, True, True, True, False, True, True]
        theirs = tree.map_structure(lambda column: column[kept], theirs)
        mask = mask[kept]
        for column in (Columns.OBS, Columns.STATE_IN, Columns.SEQ_LENS):
            tree.map_structure(torch.testing.assert_close, mine[column], theirs[column])
    for column in (Postprocessing.ADVANTAGES, Postprocessing.VALUE_TARGETS):
        assert mine[column].dtype == theirs[column].dtype
        assert mine[column].shape == theirs[column].shape
        assert not mine[column][~mask].any()
        assert not mine[column].requires_grad
    # The LSTM's forward pass rounds differently without gradient.
    torch.testing.assert_close(
        mine[Postprocessing.VALUE_TARGETS][mask], theirs[Postprocessing.VALUE_TARGETS][mask]
    )
    advantages = mine[Postprocessing.ADVANTAGES][mask]
    torch.testing.assert_close(advantages.mean(), torch.tensor(0.0), atol=1e-6, rtol=0)
    torch.testing.assert_close(advantages.std(correction=0), torch.tensor(1.0))
    # The same advantages up to the standardisation.
    other = theirs[Postprocessing.ADVANTAGES][mask]
    other = (other - other.mean()) / other.std(correction=0)
    torch.testing.assert_close(advantages, other, atol=1e-5, rtol=1e-5)


def test_several_modules():
    module, episodes, batch = prepared(True)
    other = spec(StatelessRLModule).build()
    module.add_module("other", other)
    module.add_module("policy_only", spec(PolicyOnlyRLModule).build())
    module.add_module("absent", spec(StatelessRLModule).build())
    flat = {
        Columns.OBS: torch.zeros(3, 3),
        Columns.REWARDS: torch.tensor([1.0, 2.0, 0.0]),
        Columns.TERMINATEDS: torch.tensor([False, True, False]),
        Columns.TRUNCATEDS: torch.zeros(3, dtype=torch.bool),
        Columns.LOSS_MASK: torch.tensor([True, True, False]),
    }
    for episode in episodes:
        episode.module_id = "default_policy"
    episodes.append(make_episodes(lstm_module(T)["default_policy"], [(3, 0, "cut")])[0])
    episodes[-1].module_id = "other"
    batches = {"default_policy": batch, "other": flat, "policy_only": {"obs": flat["obs"]}}
    several = MultiAgentEpisode()
    several.agent_episodes = dict(enumerate(episodes))
    config = PPOConfig().training(**SETTINGS)
    # Each module's own settings.
    overrides = PPOConfig.overrides(gamma=0.5, lambda_=1.0)
    config.multi_agent(algorithm_config_overrides_per_module={"other": overrides})
    piece = ComputeAdvantages(config=config)
    result = piece(rl_module=module, episodes=[several], batch=batches)
    assert list(result) == ["default_policy", "other", "policy_only"]
    assert result["policy_only"].keys() == {"obs"}
    expected = torch.tensor([2.0, 2.0, 0.0])
    torch.testing.assert_close(result["other"][Postprocessing.VALUE_TARGETS], expected)
    num_rows = int(batch[Columns.LOSS_MASK].any(1).sum())
    assert result["default_policy"][Postprocessing.ADVANTAGES].shape == (num_rows, T)


class WatchedRLModule(StatelessRLModule):
    """A module of a user's, with what differs in training, that notes how it is run."""

    def setup(self):
        super().setup()
        self.dropout = torch.nn.Dropout(0.5)
        # As a user may freeze a part of a module.
        self.frozen = torch.nn.Linear(1, 1).eval()
        self.runs = []

    def compute_values(self, batch, embeddings=None):
        self.runs.append((self.dropout.training, torch.is_grad_enabled(), len(batch[Columns.OBS])))
        return super().compute_values(batch)


@pytest.mark.parametrize(("num_rows", "most_rows"), [(3, None), (1300, None), (30, 7)])
def test_values_of_modules_of_others(num_rows, most_rows, monkeypatch):
    """In eval mode, without gradient, and in blocks that are bounded in steps and bytes."""
    if most_rows is not None:
        monkeypatch.setattr(values, "VALUE_BYTES", most_rows * T * 3 * 4)
    module = spec(WatchedRLModule).build()
    module.train()
    module.frozen.eval()
    batch = {
        Columns.OBS: torch.randn(num_rows, T, 3),
        Columns.STATE_IN: {"h": torch.zeros(num_rows, 2)},
        Columns.SEQ_LENS: torch.full((num_rows,), T),
        Columns.INFOS: [{}] * 7,
    }
    outputs = values_of_batch(module, batch)
    torch.testing.assert_close(outputs, module.layer(batch[Columns.OBS]).squeeze(-1))
    assert not outputs.requires_grad
    rows = [rows for _, _, rows in module.runs]
    assert sum(rows) == num_rows
    assert max(rows) * T <= values.VALUE_STEPS
    assert max(rows) <= (most_rows or num_rows)
    assert {run[:2] for run in module.runs} == {(False, False)}
    assert module.training
    assert module.dropout.training
    assert not module.frozen.training


@pytest.mark.parametrize("kind", [bool, int, np.float32])
def test_masks_of_any_kind(kind):
    module, episodes, batch = prepared(False)
    call = {"rl_module": module, "episodes": episodes}
    results = []
    for mask in (batch[Columns.LOSS_MASK], batch[Columns.LOSS_MASK].numpy().astype(kind)):
        changed = {**batch, Columns.LOSS_MASK: torch.as_tensor(mask)}
        piece = ComputeAdvantages(config=PPOConfig().training(**SETTINGS))
        results.append(piece(batch={"default_policy": changed}, **call))
    expected, mine = (result["default_policy"][Postprocessing.ADVANTAGES] for result in results)
    assert torch.equal(mine, expected)


def test_value_targets_equal_rllib_bit_for_bit():
    rng = np.random.default_rng(1)
    size = 300
    data = {
        "values": rng.normal(size=size).astype(np.float32),
        "rewards": rng.normal(size=size).astype(np.float32),
        "terminateds": rng.random(size) < 0.05,
        "truncateds": rng.random(size) < 0.05,
    }
    assert np.array_equal(
        value_targets(**data, **SETTINGS), compute_value_targets(**data, **SETTINGS)
    )


def test_constructor_arguments_round_trip():
    config = PPOConfig()
    piece = ComputeAdvantages(BOX, DISCRETE, config=config)
    args, kwargs = piece.get_ctor_args_and_kwargs()
    assert kwargs == {"config": config}
    assert ComputeAdvantages(*args, **kwargs).get_ctor_args_and_kwargs() == (args, kwargs)
    settings = {"bootstrap_slot": True, "episodes_per_trial": 2}
    settings |= {"pack_rows": False, "minibatch_size": 64}
    args, kwargs = BuildTrainBatch(BOX, DISCRETE, **settings).get_ctor_args_and_kwargs()
    assert (args, kwargs) == ((BOX, DISCRETE), settings)
    assert BuildTrainBatch(*args, **kwargs).bootstrap_slot
