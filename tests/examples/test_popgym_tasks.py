"""The settings of POPGym's tasks: complete, true of the environments, of equal size."""

import pytest
from gymnasium.spaces import Discrete
from ray.rllib.algorithms.ppo.torch.default_ppo_torch_rl_module import DefaultPPOTorchRLModule

from examples.popgym_setup import ENVS, MEMORIES, OURS, build_config, make_env
from examples.popgym_tasks import FAMILIES, MODELS, family_of, settings, split, tasks

NUM_PARAMETERS = 72_000


def test_every_task_of_the_installed_popgym_has_settings():
    mazes = {name for name in ENVS if name.startswith("Labyrinth")}
    assert set(tasks()) == ENVS.keys() - mazes


def test_an_unknown_task():
    with pytest.raises(ValueError, match="RepeatPrevious"):
        split("RepeatNext")


@pytest.mark.parametrize("task", tasks())
def test_episodes_are_as_long_as_the_table_says(task):
    env = make_env({"name": task})
    env.action_space.seed(0)
    expected = family_of(task).steps[("Easy", "Medium", "Hard").index(split(task)[1])]
    for seed in range(2):
        env.reset(seed=seed)
        over, steps = False, 0
        while not over:
            *_, terminated, truncated, _ = env.step(env.action_space.sample())
            over, steps = terminated or truncated, steps + 1
        assert steps <= expected
        assert steps == expected or not family_of(task).equal_lengths


@pytest.mark.parametrize("task", tasks())
def test_rows_hold_whole_episodes_and_minibatches_several_rows(task):
    found = settings(task, "gtrxl")
    rows, fragment = found["max_seq_len"], found["fragment"]
    assert found["hyperparameters"]["minibatch_size"] >= 4 * rows
    assert 1024 <= fragment * 16 < 2 * 4096 or fragment < 2 * rows
    if FAMILIES[split(task)[0]].row_steps is None:
        assert found["model"]["memory_inference"] < rows
    if family_of(task).equal_lengths and family_of(task).row_steps is None:
        assert fragment % (rows - 1) == 0


def test_settings_follow_from_the_family_and_the_level():
    hard = settings("RepeatPreviousHard", "gtrxl")
    assert (hard["max_seq_len"], hard["model"]["memory_inference"]) == (156, 72)
    assert hard["hyperparameters"]["gamma"] == 0.5
    assert hard["hyperparameters"]["lr"][0] == [0, 5e-4]
    assert settings("RepeatPreviousHard", "gru", lr=3e-3)["hyperparameters"]["lr"][0] == [0, 3e-3]
    assert "memory_inference" not in settings("RepeatPreviousHard", "gru")["model"]


def test_the_kl_loss_is_on_where_the_family_has_a_target():
    first = settings("RepeatFirstEasy", "gru")["hyperparameters"]
    assert (first["use_kl_loss"], first["kl_target"]) == (True, 0.01)
    count = settings("CountRecallEasy", "gru")["hyperparameters"]
    assert count["use_kl_loss"] is False
    assert "kl_target" not in count


@pytest.mark.parametrize("memory", MODELS)
def test_memories_have_equal_size(memory):
    model = MODELS[memory]
    assert model.name in MEMORIES
    if model.name in OURS:
        built = OURS[model.name](max_seq_len=64, **model.options).build_memory(64)
        size = sum(p.numel() for p in built.parameters())
    else:
        lstm = {"use_lstm": True, "max_seq_len": 64} if memory == "rllib-lstm" else {}
        module = DefaultPPOTorchRLModule(
            observation_space=make_env({"name": "PositionOnlyPendulumEasy"}).observation_space,
            action_space=Discrete(4),
            model_config={"head_fcnet_hiddens": [], **lstm, **model.options},
        )
        size = sum(p.numel() for p in module.parameters())
    assert size == pytest.approx(NUM_PARAMETERS, rel=0.1)


@pytest.mark.parametrize("memory", ["deep", "rllib-lstm"])
def test_tasks_that_need_the_previous_action_get_it(memory):
    def pieces(task):
        config = build_config(task, memory, max_seq_len=16)
        builder = config._env_to_module_connector
        assert builder is not None
        built = builder(None, None, None)
        return [type(piece).__name__ for piece in built]

    assert "AddPreviousActionsRewards" in pieces("BattleshipEasy")
    assert "AddPreviousActionsRewards" not in pieces("RepeatPreviousEasy")
