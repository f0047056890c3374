"""What `starting_point` sets, and that it stays out of what a user sets."""

import pytest
from ray.rllib.algorithms.appo import APPOConfig
from ray.rllib.algorithms.bc import BCConfig
from ray.rllib.algorithms.dqn import DQNConfig
from ray.rllib.algorithms.impala import IMPALAConfig
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.algorithms.sac import SACConfig
from ray.rllib.core.rl_module.rl_module import RLModuleSpec

from connectors import connect, starting_point
from connectors.setup.starting_point import APPO, DQN, IMPALA, PPO, SAC
from rlmodules import DeepLinearAttentionConfig

CASES = [(PPOConfig, PPO), (APPOConfig, APPO), (IMPALAConfig, IMPALA), (DQNConfig, DQN),
         (SACConfig, SAC)]  # fmt: skip


@pytest.mark.parametrize(("config_class", "settings"), CASES)
def test_all_settings_are_set_and_later_ones_win(config_class, settings):
    config = config_class()
    gamma = config.gamma
    assert starting_point(config) is config
    assert {name: getattr(config, name) for name in settings} == settings
    assert (config.num_envs_per_env_runner, config.gamma) == (16, gamma)
    name, value = next((n, v) for n, v in settings.items() if n.endswith("lr"))
    config.training(**{name: value / 2}).env_runners(num_envs_per_env_runner=3)
    assert (getattr(config, name), config.num_envs_per_env_runner) == (value / 2, 3)


@pytest.mark.parametrize("config_class", [case[0] for case in CASES])
def test_the_checks_of_config_and_connect_pass(config_class):
    environment = "Pendulum-v1" if config_class is SACConfig else "CartPole-v1"
    config = starting_point(config_class()).environment(environment)
    model_config = DeepLinearAttentionConfig(max_seq_len=64)
    connect(config.rl_module(rl_module_spec=RLModuleSpec(model_config=model_config)))
    config.validate()


def test_the_table_in_the_docstring_is_true():
    table = {
        cells[0].strip("` "): cells[1:]
        for line in (starting_point.__doc__ or "").splitlines()
        if line.strip().startswith("| `")
        for cells in [[cell.strip() for cell in line.strip().strip("|").split("|")]]
    }
    for i, (_, settings) in enumerate(CASES):
        shown = {
            name: float(cells[i])
            for name, cells in table.items()
            if cells[i].replace(".", "").replace("e", "").replace("-", "").isdigit()
        }
        shown.pop("num_envs_per_env_runner")
        assert shown == {name: settings[name] for name in shown}
        assert "train_batch_size_per_learner" in shown


def test_an_algorithm_that_learns_from_recordings_is_refused():
    with pytest.raises(ValueError, match="`BCConfig`"):
        starting_point(BCConfig())
