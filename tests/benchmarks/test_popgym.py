"""The campaign over POPGym: what it trains, what it keeps, what it makes of it."""

import argparse
import json
import math

import pytest
import ray
from rich.console import Console

from benchmarks import popgym, popgym_pictures
from benchmarks.popgym_runs import Run, Trial, append, current, load
from benchmarks.popgym_scores import aggregate, interval, steps_of_peer, summary
from benchmarks.popgym_table import print_table

TASK = "RepeatPreviousMedium"
MACHINE = {"cpu": "one", "device": "cpu", "threads": 1}


def run_of(trial, returns=(0.1, 0.5), solved=False, max_steps=20_000, **changes):
    values = {
        "trial": trial,
        "settings": popgym.settings_of(trial),
        "max_steps": max_steps,
        "steps": [10_000 * (i + 1) for i in range(len(returns))],
        "returns": list(returns),
        "solved": solved,
        "seconds": 10.0,
        "parameters": 72_000,
        "machine": MACHINE,
    }
    return Run(**{**values, **changes})


def trial_of(memory="gtrxl", seed=0, task=TASK, lr=None):
    (first, *_) = popgym.plan([task], [memory], 1, None if lr is None else [lr])
    return Trial(first.task, first.memory, seed, first.lr)


def test_all_tasks_with_one_seed_come_before_a_second():
    found = popgym.plan(["RepeatFirstEasy", TASK], ["deep", "gtrxl"], 2)
    assert [(t.seed, t.task, t.memory) for t in found[:4]] == [
        (0, "RepeatFirstEasy", "deep"), (0, "RepeatFirstEasy", "gtrxl"), (0, TASK, "deep"),
        (0, TASK, "gtrxl"),
    ]  # fmt: skip
    assert [t.seed for t in found] == [0] * 4 + [1] * 4
    assert [t.lr for t in popgym.plan([TASK], ["deep"], 1, [1e-4, 1e-3])] == [1e-4, 1e-3]


def test_runs_come_back_from_the_file_as_they_were(tmp_path):
    path = tmp_path / "results" / "popgym.jsonl"
    assert load(path) == []
    runs = [run_of(trial_of(seed=seed)) for seed in range(2)]
    for one in runs:
        append(path, one)
    assert [(r.trial, r.returns) for r in load(path)] == [(r.trial, r.returns) for r in runs]
    assert popgym.missing([r.trial for r in runs], load(path), 20_000) == []


@pytest.mark.parametrize("kept", [1, 60, -1])
def test_a_line_cut_off_by_a_kill_is_no_run_and_harms_no_other(tmp_path, kept):
    path = tmp_path / "popgym.jsonl"
    first, second, third = (run_of(trial_of(seed=seed)) for seed in range(3))
    append(path, first)
    whole = path.read_bytes()
    append(path, second)
    line = path.read_bytes()[len(whole) :]
    path.write_bytes(whole + line[:kept])
    assert [r.trial.seed for r in load(path)] == [0]
    append(path, third)
    assert [r.trial.seed for r in load(path)] == [0, 2]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_trial_is_made_again_if_longer_or_with_other_settings():
    trial = trial_of()
    short, solved = run_of(trial), run_of(trial, solved=True)
    other = run_of(trial, settings={**popgym.settings_of(trial), "max_seq_len": 3})
    assert popgym.missing([trial], [short], 20_000) == []
    assert popgym.missing([trial], [short], 30_000) == [trial]
    assert popgym.missing([trial], [solved], 30_000) == []
    assert popgym.missing([trial], [other], 20_000) == [trial]
    longer = run_of(trial, returns=(0.1, 0.2, 0.3), max_steps=30_000)
    assert current([short, longer, other], popgym.settings_of) == [longer]


class FabricatedAlgorithm:
    """Trains a fabricated curve, 30,000 steps and 120 episodes an iteration."""

    def __init__(self, returns):
        self.returns = iter(returns)
        self.steps = 0

    def build_algo(self):
        return self

    def train(self):
        self.steps += 30_000
        runners = {"num_episodes": 120, "episode_return_mean": next(self.returns)}
        return {"env_runners": runners, "num_env_steps_sampled_lifetime": self.steps}

    def get_weights(self):
        return {"default_policy": {}}

    def stop(self):
        pass


def train_fabricated(monkeypatch, returns, max_steps):
    monkeypatch.setattr(popgym, "start_ray", lambda: None)
    monkeypatch.setattr(popgym, "build_config", lambda *_, **__: FabricatedAlgorithm(returns))
    *before, last = popgym.train(trial_of(), max_steps)
    assert all(progressed.run is None for progressed in before)
    assert last.run is not None
    return last.run


def test_a_run_ends_when_its_task_is_solved_over_enough_episodes(monkeypatch):
    run = train_fabricated(monkeypatch, [1.0, 0.5, 0.9, 1.0, 0.99, 0.0], 10**6)
    # The first one is over 120 episodes only, the others over 240.
    assert run.returns == [0.75, 0.7, 0.95, 0.995]
    assert run.steps == [60_000, 90_000, 120_000, 150_000]
    assert run.solved
    assert run.best == 0.995
    assert run.steps_to(0.9) == 120_000
    assert run.steps_to(1.0) == math.inf


def test_a_run_ends_at_its_last_step(monkeypatch):
    run = train_fabricated(monkeypatch, [0.0, 0.2, 0.4, 0.4], 80_000)
    assert (run.steps, run.returns, run.solved) == ([60_000, 90_000], [0.1, 0.3], False)


def test_one_iteration_is_a_point_however_few_its_episodes(monkeypatch):
    assert train_fabricated(monkeypatch, [0.2], 10).returns == [0.2]


def test_a_mean_has_an_interval_where_there_are_several_seeds():
    assert interval([0.5]) is None
    assert interval([0.5, 0.5]) == [0.5, 0.5]
    # Mean 2, standard error 1 / sqrt(3), Student's t with two degrees of freedom: 4.303.
    assert interval([1.0, 2.0, 3.0]) == pytest.approx(
        [2 - 4.303 / 3**0.5, 2 + 4.303 / 3**0.5], 1e-3
    )


def test_a_summary_counts_seeds_that_never_reached_the_published_return():
    won, late, lost = (
        run_of(trial_of(seed=0), returns=(0.2, 0.8), solved=True),
        run_of(trial_of(seed=1), returns=(0.2, 0.3, 0.9)),
        run_of(trial_of(seed=2), returns=(0.2, 0.4)),
    )
    (record,) = summary([won, late, lost], [TASK], ["gtrxl"])
    assert (record["goal"], record["steps_to_goal"], record["censored"]) == (0.789, 30_000, 1)
    assert record["return"] == pytest.approx(0.7)
    assert (record["seeds"], record["solved"], record["max_steps"]) == ([0, 1, 2], 1, 30_000)
    (record,) = summary([lost], [TASK], ["gtrxl"])
    assert (record["steps_to_goal"], record["censored"], record["interval"]) == (None, 1, None)


def test_without_a_published_return_steps_are_counted_to_that_of_rllibs_lstm():
    task = "BattleshipEasy"
    peer = run_of(trial_of("rllib-lstm", task=task), returns=(-0.4, -0.2))
    ours = run_of(trial_of("deep", task=task), returns=(-0.2, 0.1))
    (record,) = summary([ours], [task], ["deep"])
    assert record["goal"] is None
    first, second = summary([ours, peer], [task], ["deep", "rllib-lstm"])
    assert (first["memory"], first["goal"], first["steps_to_goal"]) == ("deep", -0.2, 10_000)
    assert second["steps_to_goal"] == 20_000


def test_steps_to_what_rllibs_lstm_comes_to_are_counted_where_it_learns():
    learned, solved, lost = "RepeatFirstEasy", "PositionOnlyCartPoleEasy", "HigherLowerEasy"

    def runs(task, peer, mlp, **ours):
        named = {"rllib-lstm": peer, "mlp": mlp, **ours}
        return [run_of(trial_of(name, task=task), returns) for name, returns in named.items()]

    found = [
        *runs(learned, (0.1, 0.4), (0.0, 0.0), gru=(0.1, 0.6), deep=(0.5, 0.1)),
        # Ours was ended at 0.99, so it can't come to more.
        *runs(solved, (0.5, 0.994), (0.2, 0.2), gru=(0.99, 0.99)),
        *runs(lost, (0.5, 0.5), (0.46, 0.46), gru=(0.5, 0.5)),
    ]
    tasks = [learned, solved, lost]
    assert steps_of_peer(found, tasks) == [
        {"task": learned, "goal": 0.4, "theirs": 20_000, "memory": "deep", "ours": 10_000},
        {"task": solved, "goal": 0.99, "theirs": 20_000, "memory": "gru", "ours": 10_000},
    ]
    below = runs(learned, (0.1, 0.4), (0.0, 0.0), gru=(0.1, 0.3))
    (record,) = steps_of_peer(below, tasks)
    assert (record["memory"], record["ours"]) == (None, None)


def test_memories_are_compared_on_the_tasks_that_all_of_them_ran():
    runs = [
        run_of(trial_of(memory, seed, task), returns=(value,))
        for memory, task, seed, value in (
            ("gtrxl", TASK, 0, 0.2), ("gtrxl", TASK, 1, 0.4), ("gtrxl", "RepeatFirstEasy", 0, 1.0),
            ("gru", TASK, 0, 0.1), ("gru", "RepeatFirstEasy", 0, 0.5),
            ("gru", "CountRecallEasy", 0, 0),
        )
    ]  # fmt: skip
    common, means = aggregate(runs, ["gtrxl", "gru", "mlp"])
    assert common == ["RepeatFirstEasy", TASK]
    assert means["gtrxl"] == pytest.approx((0.65, 0.6, 0.7))
    assert means["gru"] == pytest.approx((0.3, 0.3, 0.3))
    assert aggregate([], ["gru"]) == ([], {})
    other = run_of(trial_of("gru", task="CountRecallEasy"))
    assert aggregate([runs[0], other], ["gtrxl", "gru"]) == ([], {})


def test_the_table_marks_what_is_censored_and_pictures_are_drawn(tmp_path):
    runs = [
        run_of(trial_of("gtrxl", 0), returns=(0.2, 0.9)),
        run_of(trial_of("gtrxl", 1), returns=(0.2, 0.8)),
        run_of(trial_of("gtrxl", 2), returns=(0.2, 0.3)),
        run_of(trial_of("gru", 0), returns=(-0.4, -0.3)),
    ]
    console = Console(width=160, record=True)
    print_table(summary(runs, [TASK], ["gtrxl", "gru"]), console)
    text = console.export_text()
    assert "20,000 (1 of 3 never)" in text
    assert "> 20,000" in text
    assert "0.667 (-0.13 to 1.47)" in text
    popgym_pictures.draw(runs, tmp_path / "images")
    names = ["popgym-RepeatPrevious.png", "popgym-memories.png"]
    assert sorted(path.name for path in (tmp_path / "images").iterdir()) == names


def options(tmp_path, *more):
    parser = argparse.ArgumentParser()
    popgym.add_arguments(parser)
    files = ["--results", str(tmp_path / "popgym.jsonl"), "--pictures", str(tmp_path / "images")]
    return parser.parse_args([*files, *more])


def test_a_summary_trains_nothing(tmp_path):
    append(tmp_path / "popgym.jsonl", run_of(trial_of()))
    append(tmp_path / "popgym.jsonl", run_of(trial_of(lr=1e-2)))
    (record,) = popgym.run(options(tmp_path, "--summary", "--levels", "Medium"))
    assert (record["case"], record["lr"]) == (f"{TASK} gtrxl", 5e-4)
    assert popgym.run(options(tmp_path, "--summary", "--levels", "Easy")) == []
    rates = popgym.run(options(tmp_path, "--summary", "--rates", "1e-2"))
    assert [record["lr"] for record in rates] == [5e-4, 1e-2]


@pytest.fixture
def local_ray():
    if not ray.is_initialized():
        popgym.start_ray(2)


@pytest.mark.slow
@pytest.mark.ray
def test_a_campaign_goes_on_where_it_was_stopped_and_makes_no_run_twice(tmp_path, local_ray):
    path = tmp_path / "popgym.jsonl"
    trials = [trial_of(seed=seed) for seed in range(2)]
    runs = {trial: run_of(trial) for trial in trials}

    # Without names of this module, which Ray's processes cannot import.
    def fabricated(fails, progressed_class, runs):
        def train(trial, max_steps):
            if trial.seed == fails:
                raise ValueError("a fault")
            yield progressed_class(10, 0.1)
            yield progressed_class(20, 0.5, runs[trial])

        return train

    def carry_out(fails=None):
        train = fabricated(fails, popgym.Progressed, runs)
        return popgym.carry_out(trials, 20_000, 2, path, train)

    assert carry_out(fails=1) == [trials[1]]
    assert [r.trial.seed for r in load(path)] == [0]
    assert carry_out() == []
    assert [r.trial.seed for r in load(path)] == [0, 1]
    before = path.read_bytes()
    assert carry_out() == []
    assert path.read_bytes() == before


@pytest.mark.ray
@pytest.mark.parametrize("memory", ["linear", "mlp"])
def test_a_run_of_the_package_itself(memory, local_ray):
    trial = trial_of(memory, task="MineSweeperEasy")
    *_, last = popgym.train(trial, 300)
    assert last.run is not None
    assert last.run.steps == [last.steps]
    assert last.run.is_enough(popgym.settings_of(trial), 300)
    assert -1 <= last.run.best <= 1
    assert not last.run.solved
