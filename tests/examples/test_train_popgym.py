"""The example from end to end: train, interrupt, resume, compare, evaluate."""

import json
import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from examples.arguments import common_settings, model_settings, parse, settings_text
from examples.popgym_setup import (
    ENVS,
    MEMORIES,
    OURS,
    build_config,
    count_parameters,
    make_env,
    mlp_of_size,
)
from examples.reporting import metrics_row
from examples.run_dir import RunDir
from examples.train_popgym import StopRequest, stopped_by

ROOT = Path(__file__).parents[2]
DEADLINE = 240


def start(*arguments):
    return subprocess.Popen(
        [sys.executable, "-m", "examples.train_popgym", *arguments],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process):
    output, _ = process.communicate(timeout=DEADLINE)
    return process.returncode, output


def wait_for_rows(run, number, process):
    end = time.monotonic() + DEADLINE
    while len(run.read_rows()) < number:
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < end, "the training did not start"
        time.sleep(0.1)


@pytest.mark.slow
@pytest.mark.ray
def test_train_interrupt_resume_evaluate(tmp_path):
    run = RunDir(tmp_path / "run")
    process = start("--memory", "linear", "--run-dir", str(run.path), "--num-cpus", "1")
    wait_for_rows(run, 1, process)
    process.send_signal(signal.SIGINT)
    code, output = finish(process)
    assert code == 128 + signal.SIGINT, output
    assert f"--resume {run.path}" in output
    assert "Traceback" not in output
    done = len(run.read_rows())
    assert run.progress()["iteration"] == done
    assert (run.path / "learning_curve.png").exists()

    code, output = finish(
        start(
            "--resume", str(run.path), "--stop-iters", str(done + 1), "--evaluation-duration", "5"
        )
    )
    assert code == 0, output
    assert "WARNING" not in output
    rows = run.read_rows()
    assert [row["iteration"] for row in rows] == list(range(1, done + 2))
    assert [row["env_steps"] for row in rows] == [16 * 255 * i for i in range(1, done + 2)]
    assert all(0 < row["padding_share"] < 1 for row in rows)
    assert all(row["seconds"] > 0 and row["steps_per_second"] > 0 for row in rows)
    assert run.read_rows("baseline.csv")[-1]["env_steps"] == rows[-1]["env_steps"]
    assert json.loads((run.path / "evaluation.json").read_text())["episodes"] >= 5


def test_a_resumed_run_keeps_its_arguments(tmp_path):
    run = RunDir(tmp_path / "run")
    started, _ = parse(["--env", "RepeatFirstEasy", "--seed", "7", "--run-dir", str(run.path)])
    run.create(vars(started))
    resumed, same = parse(["--resume", str(run.path), "--stop-timesteps", "5"])
    assert (resumed.env, resumed.seed, resumed.stop_timesteps) == ("RepeatFirstEasy", 7, 5)
    assert same.path == run.path


def test_the_default_run_has_the_settings_of_its_published_results():
    args, run = parse([])
    assert run.path.name == "RepeatPreviousEasy-deep-seed0"
    settings = common_settings(args)
    assert settings["max_seq_len"] == 64
    assert not {"hyperparameters", "fragment"} & settings.keys()
    assert model_settings(args) == {"compile": "auto"}
    changed = common_settings(parse(["--max-seq-len", "32"])[0])
    assert changed == settings | {"max_seq_len": 32}


def test_another_environment_has_settings_of_its_own_and_says_so():
    args, run = parse(["--env", "RepeatPreviousHard"])
    assert (args.memory, run.path.name) == ("gtrxl", "RepeatPreviousHard-gtrxl-seed0")
    settings = common_settings(args)
    assert (settings["max_seq_len"], settings["fragment"]) == (156, 310)
    assert settings["hyperparameters"]["gamma"] == 0.5
    assert model_settings(args)["memory_inference"] == 72
    assert "gamma 0.5" in settings_text(args)
    assert "Recommended memory: gtrxl; this run has gtrxl." in settings_text(args)
    args, _ = parse(["--env", "RepeatPreviousHard", "--memory", "gru", "--max-seq-len", "64"])
    assert args.memory == "gru"
    assert common_settings(args)["max_seq_len"] == 64
    assert "fragment" not in common_settings(args)


def test_resume_without_a_run(tmp_path, capsys):
    with pytest.raises(SystemExit):
        parse(["--resume", str(tmp_path)])
    assert "Start one without `--resume`" in capsys.readouterr().err


def test_the_first_signal_asks_and_the_second_one_interrupts(capsys):
    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)]
    try:
        stop = StopRequest(Console())
        stop.install()
        signal.raise_signal(signal.SIGINT)
        assert stop.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
    finally:
        for number, handler in zip((signal.SIGINT, signal.SIGTERM), before, strict=True):
            signal.signal(number, handler)
    assert "Stopping after this iteration" in capsys.readouterr().out


def test_stop_criteria():
    args, _ = parse(["--stop-iters", "9", "--stop-timesteps", "90"])
    row = {"iteration": 1, "env_steps": 10, "episodes": 100, "return_mean": 0.9}
    assert stopped_by(row, args) == "reward"
    # One lucky episode is no mean return.
    assert stopped_by({**row, "episodes": 1}, args) is None
    assert stopped_by({**row, "return_mean": float("nan")}, args) is None
    assert stopped_by({**row, "episodes": 0, "env_steps": 90}, args) == "timesteps"
    assert stopped_by({**row, "episodes": 0, "iteration": 9}, args) == "iterations"


def test_an_unknown_environment():
    with pytest.raises(ValueError, match="RepeatPreviousEasy"):
        make_env({"name": "RepeatPrevious"})


def test_hard_environments_are_there():
    assert {"RepeatPreviousEasy", "CountRecallHard", "PositionOnlyPendulumEasy"} <= ENVS.keys()


@pytest.mark.ray
@pytest.mark.parametrize("env", ["RepeatPreviousEasy", "PositionOnlyPendulumEasy"])
def test_the_baseline_has_equal_size(env):
    settings = {"num_envs_per_env_runner": 1}
    algo = build_config(env, "linear", model={"compile": False}, **settings).build_algo()
    size = count_parameters(algo)
    algo.stop()
    baseline = build_config(env, "mlp", model=mlp_of_size(size, env), **settings).build_algo()
    assert count_parameters(baseline) == pytest.approx(size, rel=0.02)
    baseline.stop()


@pytest.mark.ray
@pytest.mark.parametrize("memory", MEMORIES)
def test_every_memory_trains(memory):
    small = {"train_batch_size_per_learner": 126, "minibatch_size": 64, "num_epochs": 1}
    algo = build_config(
        "AutoencodeEasy", memory, num_envs_per_env_runner=2, hyperparameters=small
    ).build_algo()
    algo.train()
    result = algo.train()  # its rows start from states
    algo.stop()
    assert math.isfinite(result["learners"]["default_policy"]["total_loss"])
    row = metrics_row(result, {"env_steps": 0, "seconds": 0.0}, 1.0)
    for measured in ("padding_share", "state_norm_mean", "largest_gradient"):
        assert math.isfinite(row[measured]) == (memory in OURS)
