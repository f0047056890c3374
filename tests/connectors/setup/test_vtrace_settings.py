"""What `connect` does with APPO's and IMPALA's settings, and refuses before training."""

import pytest
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.impala.torch.impala_torch_learner import IMPALATorchLearner
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import (
    BuildTrainBatch,
    MemoryAPPOTorchLearner,
    MemoryIMPALATorchLearner,
    connect,
)
from tests.connectors.helpers import BOX, DISCRETE, CountingRLModule, lstm_config

T = 16


@pytest.fixture(params=[APPOConfig, IMPALAConfig])
def config(request):
    spec = RLModuleSpec(CountingRLModule, model_config={"max_seq_len": T})
    return request.param().environment("CartPole-v1").rl_module(rl_module_spec=spec)


def builder_of(*pieces):
    return lambda observation_space, action_space: list(pieces)


def train_batch_piece(config):
    pipeline = config.build_learner_connector(BOX, DISCRETE)
    (piece,) = [p for p in pipeline.connectors if isinstance(p, BuildTrainBatch)]
    return piece


def test_rows_and_learner(config):
    connect(connect(config))
    ours = {APPOConfig: MemoryAPPOTorchLearner, IMPALAConfig: MemoryIMPALATorchLearner}
    assert config.learner_class is ours[type(config)]
    assert train_batch_piece(config).bootstrap_slot
    assert not train_batch_piece(connect(lstm_config(T))).bootstrap_slot
    # RLlib slices no episodes here, so none need the steps before them.
    assert connect(config.learners(num_learners=2)).episode_lookback_horizon == 1
    config.validate()


def test_a_learner_that_lacks_the_mixin(config):
    class Foreign(IMPALATorchLearner):
        pass

    with pytest.raises(ValueError, match="`learner_class` is `Foreign`"):
        connect(config.learners(learner_class=Foreign))


def test_train_batch_piece_of_the_user(config):
    own = BuildTrainBatch(bootstrap_slot=True)
    connect(config.learners(learner_connector=builder_of(own)))
    assert train_batch_piece(config) is own

    connect(config.learners(learner_connector=builder_of(BuildTrainBatch())))
    with pytest.raises(ValueError, match=r"`bootstrap_slot` of .* is False, but must be True"):
        config.build_learner_connector(BOX, DISCRETE)
    ppo = connect(lstm_config(T).learners(learner_connector=builder_of(own)))
    with pytest.raises(ValueError, match=r"`bootstrap_slot` of .* is True, but must be False"):
        ppo.build_learner_connector(BOX, DISCRETE)


def test_minibatches_hold_a_row(config):
    config.env_runners(rollout_fragment_length=1)
    with pytest.raises(ValueError, match="`minibatch_size` is 16, but must be at least 17"):
        connect(config.training(minibatch_size=16))
    connect(config.training(minibatch_size=17)).validate()


def test_minibatches_need_a_fragment_length_in_numbers(config):
    config.env_runners(rollout_fragment_length="auto")
    connect(config).validate()
    with pytest.raises(ValueError, match='`rollout_fragment_length` is "auto"'):
        connect(config.training(minibatch_size=100))


def test_minibatches_with_several_learners(config):
    config.training(minibatch_size=100)
    connect(config.learners(num_learners=2)).validate()


def test_a_sample_for_each_learner(config):
    config.env_runners(num_envs_per_env_runner=10, rollout_fragment_length=50)
    config.training(train_batch_size_per_learner=250)
    connect(config.learners(num_learners=1))
    # One sample of 500 steps makes a whole train batch.
    with pytest.raises(ValueError, match=r"`train_batch_size_per_learner` is 250.* least 500"):
        connect(config.learners(num_learners=2))
    connect(config.learners(num_aggregator_actors_per_learner=1))
    config.learners(num_aggregator_actors_per_learner=0)
    connect(config.training(train_batch_size_per_learner=500))
