"""Behind our pieces: columns that come into the batch once its rows are laid out."""

import copy

import numpy as np
import pytest
import torch
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.learner import (
    AddColumnsFromEpisodesToTrainBatch,
    AddNextObservationsFromEpisodesToTrainBatch,
    BatchIndividualItems,
)
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.training_data import TrainingData
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModuleSpec
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.examples.learners.classes.intrinsic_curiosity_learners import (
    ICM_MODULE_ID,
    add_intrinsic_curiosity_connectors,
)
from ray.rllib.examples.rl_modules.classes.intrinsic_curiosity_model_rlm import (
    IntrinsicCuriosityModel,
)
from ray.rllib.utils.spaces.space_utils import BatchedNdArray

from connectors import BuildTrainBatch, MemoryPPOTorchLearner, SequenceReplayBuffer, connect
from connectors.rows.later_columns import LayOutLaterColumns
from connectors.rows.vtrace import NEUTRAL_LOGP
from tests.connectors.helpers import (
    BOX,
    DISCRETE,
    assert_same_batch,
    counting_module,
    lstm_config,
    lstm_module,
    make_episodes,
    run_pipeline,
    with_snapshots,
)
from tests.test_multi_agent import ppo

T = 4
CHUNKS = [
    (3, 0, "terminated"),
    (9, 0, "truncated"),
    (8, 0, "cut"),
    (1, 0, "truncated"),
    (6, 5, "cut"),
]


class AddStepNumbers(ConnectorV2):
    """One item a step, as numbers and as an array."""

    def __call__(self, *, batch, episodes, **kwargs):
        for agent in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            steps = np.arange(len(agent)) + agent.t_started
            items = [int(step) for step in steps]
            self.add_n_batch_items(batch, "number", items, len(agent), agent)
            self.add_n_batch_items(batch, "squared", steps**2, len(agent), agent)
        return batch


class ReplaceRewards(ConnectorV2):
    """Another column than the one that stands in rows already, under the same name."""

    def __call__(self, *, batch, episodes, **kwargs):
        batch[Columns.REWARDS] = {}
        for agent in self.single_agent_episode_iterator(episodes, agents_that_stepped_only=False):
            rewards = np.full(len(agent), 7.0, np.float32)
            self.add_n_batch_items(batch, Columns.REWARDS, rewards, len(agent), agent)
        return batch


@pytest.mark.parametrize("chunks", [CHUNKS, CHUNKS[1:2], [(1, 0, "cut")]], ids=len)
@pytest.mark.parametrize("max_seq_len", [1, T])
@pytest.mark.parametrize("bootstrap", [True, False])
def test_equals_rllib(chunks, max_seq_len, bootstrap):
    """The same pieces, in front of RLlib's and behind ours."""
    module = lstm_module(max_seq_len)
    episodes = make_episodes(module["default_policy"], chunks)

    def pieces():
        return [AddNextObservationsFromEpisodesToTrainBatch(), AddStepNumbers(), ReplaceRewards()]

    mine = run_pipeline(
        lambda *_: [BuildTrainBatch(), *pieces(), LayOutLaterColumns()],
        module,
        with_snapshots(module["default_policy"], episodes, max_seq_len),
        bootstrap=bootstrap,
    )
    theirs = run_pipeline(lambda *_: pieces(), module, episodes, bootstrap=bootstrap)
    # States behind the next observations: of use where each row is run a second time.
    del theirs[Columns.NEXT_STATE_IN]
    assert_same_batch(mine, theirs)


class AddRows(ConnectorV2):
    """Sees rows and adds a column in rows, which stays as it is."""

    def __call__(self, *, batch, **kwargs):
        ((key, (rewards,)),) = batch[Columns.REWARDS].items()
        batch["doubled"] = {key: [rewards * 2]}
        self.foreach_batch_item_change_in_place(batch, Columns.REWARDS, lambda rows, *ids: -rows)
        assert isinstance(batch[Columns.REWARDS][key][0], BatchedNdArray)
        return batch


@pytest.mark.parametrize("chunks", [CHUNKS, CHUNKS[1:2]], ids=len)
def test_columns_in_rows_stay(chunks):
    module = lstm_module(T)
    episodes = make_episodes(module["default_policy"], chunks)
    batch = run_pipeline(
        lambda *_: [BuildTrainBatch(), AddRows(), LayOutLaterColumns()], module, episodes
    )
    assert torch.equal(batch["doubled"], -2 * batch[Columns.REWARDS])


@pytest.mark.parametrize("kind", [bool, int, np.float32])
@pytest.mark.parametrize("behind", [False, True])
def test_a_mask_of_any_kind_masks(kind, behind):
    """An int mask used to lose the bootstrap slots of V-trace's rows."""

    class Mask(ConnectorV2):
        def __call__(self, *, batch, episodes, **kwargs):
            batch[Columns.LOSS_MASK] = {}
            for episode in episodes:
                items = [kind(t != 1) for t in range(len(episode))]
                self.add_n_batch_items(batch, Columns.LOSS_MASK, items, len(episode), episode)
            return batch

    module = counting_module(T)
    episodes = make_episodes(module["default_policy"], CHUNKS)
    rows = BuildTrainBatch(bootstrap_slot=True)
    pieces = [rows, Mask(), LayOutLaterColumns()] if behind else [Mask(), rows]
    batch = run_pipeline(lambda *_: pieces, module, episodes)
    mask = batch[Columns.LOSS_MASK]
    real = torch.arange(T + 1) < batch[Columns.SEQ_LENS][:, None] - 1
    first_rows = [0, 1, 4, 6, 7]
    real[first_rows, 1] = False
    assert mask.dtype == torch.bool
    assert torch.equal(mask, real)
    assert (batch[Columns.ACTION_LOGP][~mask] == NEUTRAL_LOGP).all()
    assert (batch[Columns.ACTION_LOGP][mask] != NEUTRAL_LOGP).all()


def test_steps_that_stand_in_no_row():
    """Replayed slices bring a warm-up along, of which later columns know nothing."""
    module = counting_module(T)
    episodes = make_episodes(module["default_policy"], [(23, 0, "terminated"), (17, 0, "cut")])
    buffer = SequenceReplayBuffer(1000, batch_length_T=T, burn_in_len=3, seed=0)
    buffer.add(with_snapshots(module["default_policy"], episodes, T))
    slices = buffer.sample(30)
    for number, episode in enumerate(slices):
        # As RLlib's bootstrap step does it.
        episode.id_ += f"_{number}"
    batch = run_pipeline(
        lambda *_: [BuildTrainBatch(), AddStepNumbers(), LayOutLaterColumns()],
        module,
        slices,
        bootstrap=False,
    )
    for episode, row, length in zip(slices, batch["number"], batch[Columns.SEQ_LENS], strict=True):
        expected = range(episode.t - int(length), episode.t)
        assert row[:length].tolist() == list(expected)
        assert not row[length:].any()


class AddBehind(MemoryPPOTorchLearner):
    """Puts a piece where users and RLlib's own Learners put theirs."""

    def build(self):
        super().build()
        pipeline = self._learner_connector
        pipeline.insert_after(AddColumnsFromEpisodesToTrainBatch, AddStepNumbers())


def make_learner(config, spaces):
    spaces = {**spaces, "__env_single__": (BOX, DISCRETE)}
    learner = config.learner_class(
        config=config, module_spec=config.get_multi_rl_module_spec(spaces=spaces)
    )
    learner.build()
    return learner


def test_several_agents():
    """Modules with memory get rows; the others their steps in the order of their other columns."""
    config = connect(ppo(schedule="rates").learners(learner_class=AddBehind))
    runner = MultiAgentEnvRunner(config=config)
    spaces = {
        id_: (module.observation_space, module.action_space)
        for id_, module in runner.module.items()
    }
    learner = config.learner_class(
        config=config, module_spec=config.get_multi_rl_module_spec(spaces=spaces)
    )
    learner.build()
    episodes = runner.sample(num_timesteps=60)
    batches = learner._learner_connector(
        rl_module=learner.module, batch={}, episodes=episodes, shared_data={}
    )
    checked = set()
    for episode in episodes:
        for agent in episode.agent_episodes.values():
            columns = batches[agent.module_id]
            assert columns["number"].shape == columns[Columns.REWARDS].shape
            # Each observation with its own number.
            for t, obs in enumerate(agent.get_observations(slice(0, len(agent) - 1))):
                same = (columns[Columns.OBS] == torch.as_tensor(obs)).all(-1)
                assert agent.t_started + t in columns["number"][same].tolist()
                checked.add(agent.module_id)
    assert checked == set(batches)


def test_rays_curiosity_example():
    """The curiosity module gets next observations in the policy's rows, and both are trained."""

    class Curious(MemoryPPOTorchLearner):
        def build(self):
            super().build()
            add_intrinsic_curiosity_connectors(self)

    config = (
        PPOConfig()
        .environment(observation_space=BOX, action_space=DISCRETE)
        .training(
            train_batch_size_per_learner=40,
            minibatch_size=20,
            num_epochs=1,
            learner_config_dict={"forward_loss_weight": 0.2, "intrinsic_reward_coeff": 0.5},
        )
        .rl_module(
            rl_module_spec=MultiRLModuleSpec(
                rl_module_specs={
                    "default_policy": RLModuleSpec(
                        module_class=DefaultPPOTorchRLModule,
                        model_config=DefaultModelConfig(
                            use_lstm=True, max_seq_len=T, lstm_cell_size=8, fcnet_hiddens=[8]
                        ),
                    ),
                    ICM_MODULE_ID: RLModuleSpec(
                        module_class=IntrinsicCuriosityModel,
                        observation_space=BOX,
                        action_space=DISCRETE,
                        model_config={"feature_dim": 8, "feature_net_hiddens": [8]},
                        learner_only=True,
                    ),
                }
            )
        )
        .learners(learner_class=Curious)
        .debugging(seed=0)
    )
    connect(config)
    learner = make_learner(config, {"default_policy": (BOX, DISCRETE)})
    assert learner._learner_connector[BatchIndividualItems]
    episodes = make_episodes(learner.module["default_policy"], CHUNKS)
    batch = learner._learner_connector(
        rl_module=learner.module, batch={}, episodes=copy.deepcopy(episodes), shared_data={}
    )["default_policy"]
    # Where an observation follows in the same row, it is the next one.
    obs, next_obs = batch[Columns.OBS], batch[Columns.NEXT_OBS]
    both = batch[Columns.LOSS_MASK][:, :-1] & (
        torch.arange(1, T) < batch[Columns.SEQ_LENS][:, None]
    )
    assert next_obs.shape == obs.shape
    assert torch.equal(next_obs[:, :-1][both], obs[:, 1:][both])
    result = learner.update(
        training_data=TrainingData(episodes=episodes), minibatch_size=20, num_epochs=1, timesteps={}
    )
    assert result[ICM_MODULE_ID]["forward_loss"] > 0


@pytest.mark.parametrize("given", [True, False])
def test_connect_lays_out_what_the_users_builder_puts_behind(given):
    """Also where there is no Learner, as in aggregator actors."""
    config = lstm_config(T)
    if given:
        config.learners(learner_connector=lambda *_: [BuildTrainBatch(), AddStepNumbers()])
    kinds = [type(piece) for piece in connect(config)._learner_connector(BOX, DISCRETE)]
    behind = [AddStepNumbers, LayOutLaterColumns] if given else []
    assert kinds == [BuildTrainBatch, *behind]


def test_constructor_arguments_round_trip():
    args, kwargs = LayOutLaterColumns(BOX, DISCRETE).get_ctor_args_and_kwargs()
    assert (args, kwargs) == ((BOX, DISCRETE), {})
