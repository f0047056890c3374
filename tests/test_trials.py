"""Memory across episodes: the state of a sub-environment lasts for a trial of several episodes."""

import numpy as np
import pytest
import torch
import tree
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env_runner import MultiAgentEnvRunner
from ray.rllib.env.single_agent_env_runner import SingleAgentEnvRunner

from connectors import BuildModuleBatch, MemoryPPOTorchLearner, connect
from tests.connectors.helpers import CountingRLModule
from tests.envs import RandomAgents, RandomObservations

pytestmark = pytest.mark.ray

EPISODES = 3
T = 4


class Numbered:
    """Shows in each observation which sub-environment it is of."""

    num_instances = 0

    def __init__(self, config=None):
        Numbered.num_instances += 1
        super().__init__({**(config or {}), "seed": Numbered.num_instances})
        self.number = Numbered.num_instances

    def _observation(self):
        return self._number(super()._observation())

    def _see(self):
        return self._number(super()._see())

    def _number(self, observation):
        observation[0] = self.number / 1000
        return observation


class NumberedObservations(Numbered, RandomObservations):
    pass


class NumberedAgents(Numbered, RandomAgents):
    pass


def ppo(*, several=False, num_envs=2, fragment=19, episodes_per_trial=EPISODES, **env_config):
    config = (
        PPOConfig()
        .environment(
            NumberedAgents if several else NumberedObservations,
            env_config=env_config,
            disable_env_checking=True,
        )
        .env_runners(
            num_env_runners=0, num_envs_per_env_runner=num_envs, rollout_fragment_length=fragment
        )
        .training(
            train_batch_size_per_learner=num_envs * fragment,
            minibatch_size=None,
            num_epochs=1,
            lr=0.0 if several else 0.01,
        )
        .rl_module(rl_module_spec=RLModuleSpec(CountingRLModule, model_config={"max_seq_len": T}))
        .debugging(seed=0, log_sys_usage=False)
    )
    if several:
        config.multi_agent(policies={"shared"}, policy_mapping_fn=lambda *_, **__: "shared")
    return connect(config, episodes_per_trial=episodes_per_trial)


def agent_chunks(episode):
    agents = getattr(episode, "agent_episodes", {None: episode})
    return list(agents.items())


def number_of(episode):
    return round(1000 * agent_chunks(episode)[0][1].get_observations(0)[0])


def check_states(module, samples, episodes_per_trial=EPISODES):
    """Compares all recorded states with a run of the module, step by step, through each trial.

    Returns:
        How many rows started an episode with a state of the episode before.
    """
    initial = tree.map_structure(lambda leaf: leaf[None], module.get_initial_state())
    present, states, num_carried = {}, {}, 0
    for episode in samples:
        # In a short piece of an episode no agent may have completed a step.
        if not agent_chunks(episode):
            continue
        number = number_of(episode)
        id_, count = present.get(number, (episode.id_, 0))
        if id_ != episode.id_:
            count += 1
        if count % episodes_per_trial == 0 and id_ != episode.id_:
            states = {key: state for key, state in states.items() if key[0] != number}
        present[number] = (episode.id_, count)
        for agent_id, chunk in agent_chunks(episode):
            state = states.get((number, agent_id), initial)
            snapshots = chunk.get_extra_model_outputs(Columns.STATE_OUT)
            for step in range(len(chunk)):
                t = chunk.t_started + step
                if step % T == 0:
                    recorded = snapshots[step].state_at(t)
                    if recorded is None:
                        assert t == 0
                        assert state is initial
                    else:
                        num_carried += t == 0
                        assert_close(recorded, state)
                obs = torch.as_tensor(chunk.get_observations(step))[None, None]
                out = module.forward_inference({Columns.OBS: obs, Columns.STATE_IN: state})
                state = out[Columns.STATE_OUT]
                np.testing.assert_allclose(
                    out[Columns.ACTION_DIST_INPUTS][0, 0],
                    chunk.get_extra_model_outputs(Columns.ACTION_DIST_INPUTS, step),
                    atol=1e-5,
                )
            states[number, agent_id] = state
    return num_carried


def assert_close(recorded, state):
    for name, leaf in state.items():
        np.testing.assert_allclose(recorded[name], leaf[0], atol=1e-5)


@pytest.mark.parametrize("num_envs", [1, 3])
@pytest.mark.parametrize("schedule", [None, "together", "turns", "lives"])
def test_states_last_for_a_trial(schedule, num_envs):
    """`schedule` is that of several agents, None for a single one."""
    several = schedule is not None
    config = ppo(several=several, num_envs=num_envs, schedule=schedule)
    runner = (MultiAgentEnvRunner if several else SingleAgentEnvRunner)(config=config)
    samples = [
        episode
        for steps in (19, 33, 8, 120, 60)
        for episode in runner.sample(num_timesteps=steps * num_envs)
    ]
    module = runner.module["shared"] if several else runner.module
    assert check_states(module, samples) > 2
    # A reset of all environments starts new trials.
    assert check_states(module, runner.sample(num_timesteps=50, force_reset=True)) >= 0


@pytest.mark.parametrize("several", [False, True])
def test_learner_starts_rows_from_carried_states(several):
    class Recording(MemoryPPOTorchLearner):
        def build(self):
            super().build()
            self.errors = []

        def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
            module = self.module[module_id].unwrapped()
            dist_class = module.get_train_action_dist_cls()
            dist = dist_class.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS].detach())
            difference = dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
            self.errors.append(difference[batch[Columns.LOSS_MASK]].abs().max().item())
            return super().compute_loss_for_module(
                module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
            )

    config = ppo(several=several, fragment=50).learners(learner_class=Recording)
    algo = connect(config, episodes_per_trial=EPISODES).build_algo()
    try:
        for _ in range(4):
            results = algo.train()
        errors = algo.learner_group._learner.errors
    finally:
        algo.stop()
    assert max(errors) <= 1e-5
    counts = results["learners"]["shared" if several else "default_policy"]["memory"]
    assert counts["num_stale_rows"] == counts["num_rebuilt_rows"] == 0


def test_a_part_of_an_episode_is_rebuilt_from_the_carried_state():
    config = ppo(num_envs=1)
    runner = SingleAgentEnvRunner(config=config)
    samples = runner.sample(num_timesteps=200)
    module = runner.module
    pipeline = config.build_learner_connector(module.observation_space, module.action_space)
    # As RLlib shares episodes out: the steps before the cut are in the lookback.
    parts = [
        episode.slice(slice(2, None), len_lookback_buffer=T)
        for episode in samples
        if episode.t_started == 0 and len(episode) > 3
    ]
    batch = pipeline(
        rl_module=module.as_multi_rl_module(), batch={}, episodes=parts, shared_data={}
    )["default_policy"]
    out = module.forward_inference(batch)
    dist = module.get_inference_action_dist_cls().from_logits(out[Columns.ACTION_DIST_INPUTS])
    difference = dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
    assert difference[batch[Columns.LOSS_MASK]].abs().max() <= 1e-5


@pytest.mark.parametrize("value", [0, 1.5, True, "2"])
def test_number_of_episodes(value):
    with pytest.raises(ValueError, match=r"`episodes_per_trial` is .*, but must be an integer"):
        ppo(episodes_per_trial=value)


def test_complete_episodes_reset_all_environments():
    config = ppo().env_runners(batch_mode="complete_episodes")
    with pytest.raises(ValueError, match="`episodes_per_trial` is 2, but `batch_mode` is"):
        connect(config, episodes_per_trial=2)


def test_a_builder_that_returns_our_piece():
    config = ppo(episodes_per_trial=1)
    config._env_to_module_connector = None
    config.env_runners(env_to_module_connector=lambda *_: BuildModuleBatch(episodes_per_trial=2))
    SingleAgentEnvRunner(config=connect(config, episodes_per_trial=2))
    with pytest.raises(ValueError, match="`episodes_per_trial` is 3 in `connect`, but 2 in the"):
        SingleAgentEnvRunner(config=connect(config, episodes_per_trial=3))
