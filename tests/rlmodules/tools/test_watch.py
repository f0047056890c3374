"""`python -m rlmodules watch`: what it reads of runs that go on, what it serves, and its page."""

import json
import shutil
import socket
import threading
import urllib.error
import urllib.request

import pytest
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import WebDriverWait
from typer.testing import CliRunner

from rlmodules.tools.cli import app
from rlmodules.tools.runs import read
from rlmodules.tools.watch import Watched, WatchServer

HEADER = "iteration,env_steps,seconds,return_mean,steps_per_second,padding_share,entropy\n"


def csv_run(folder, *rows):
    folder.mkdir(parents=True)
    (folder / "metrics.csv").write_text(HEADER + "".join(row + "\n" for row in rows))
    return folder


def tune_result(steps, seconds, mean_return, **learners):
    return {
        "num_env_steps_sampled_lifetime": steps,
        "time_total_s": seconds,
        "env_runners": {
            "episode_return_mean": mean_return,
            "p": {"memory": {"state_norm_mean": {"h": 1.0, "c": 2.0}}},
        },
        "learners": learners,
        "config": {"entropy": 0.01},
    }


def tune_run(folder, *results):
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(result) + "\n" for result in results)
    (folder / "result.json").write_text(lines)
    return folder


def charts_by_title(watched):
    shown = watched.charts()
    return shown["runs"], {chart["title"]: chart["lines"] for chart in shown["charts"]}


def test_what_is_drawn_of_both_kinds_of_runs(tmp_path):
    csv_run(tmp_path / "runs" / "deep", "1,100,2,nan,50,0.25,1.5", "2,200,6,0.5,25,0.25,1.25")
    tune_run(
        tmp_path / "tune" / "trial",
        tune_result(100, 4.0, float("nan"), p={"entropy": 1.0}),
        tune_result(300, 5.0, 1.0, p={"entropy": 0.5, "total_loss": 2.0}, q={"entropy": 0.25}),
    )
    runs, charts = charts_by_title(Watched([tmp_path / "runs", tmp_path / "tune"]))
    assert runs == ["runs/deep", "tune/trial"]
    assert list(charts) == [
        "mean return", "environment steps a second", "norm of states", "padding share", "entropy"
    ]  # fmt: skip
    csv_return, tune_return = charts["mean return"]
    assert csv_return == {"run": 0, "column": "return_mean", "steps": [200], "values": [0.5]}
    assert (tune_return["steps"], tune_return["values"]) == ([300], [1.0])
    assert [line["values"] for line in charts["environment steps a second"]] == [
        [50, 25],
        [25, 200],
    ]
    assert {line["column"]: line["values"] for line in charts["entropy"]} == {
        "entropy": [1.5, 1.25], "learners/p/entropy": [1.0, 0.5], "learners/q/entropy": [0.25]
    }  # fmt: skip
    assert [line["column"][-1] for line in charts["norm of states"]] == ["h", "c"]


def test_of_steps_that_were_taken_twice_the_later_ones_count(tmp_path):
    """A run that was resumed from the checkpoint at 200; the process had died while it wrote."""
    run = tune_run(tmp_path / "run", *(tune_result(100 * i, i, float(i)) for i in (1, 2, 3)))
    with (run / "result.json").open("a") as file:
        file.write('{"num_env_')
        for steps, seconds in ((250, 2.5), (260, 3.0), (400, 4.0)):
            file.write(json.dumps(tune_result(steps, seconds, -1.0)) + "\n")
        file.write('{"num_env_')
    table = read(run / "result.json")
    assert list(table.index) == [100, 200, 260, 400]
    assert list(table["env_runners/episode_return_mean"]) == [1, 2, -1, -1]


def test_files_that_grow_and_runs_that_begin(tmp_path):
    first = csv_run(tmp_path / "first", "1,100,2,0.5,50,0.25,1.5")
    watched = Watched([tmp_path])
    with (first / "metrics.csv").open("a") as file:
        file.write("2,200,4,0.75,50,0.25,1.25\n3,300,6,0.")
    csv_run(tmp_path / "second")
    runs, charts = charts_by_title(watched)
    assert runs == ["first", "second"]
    (line,) = charts["mean return"]
    assert (line["steps"], line["values"]) == ([100, 200], [0.5, 0.75])


def test_long_runs_are_thinned_out(tmp_path):
    run = csv_run(tmp_path / "run", *(f"{i},{i},{i},{i},1,0,1" for i in range(1, 5001)))
    runs, charts = charts_by_title(Watched([run]))
    (line,) = charts["mean return"]
    assert runs == ["run"]
    assert 500 <= len(line["steps"]) < 1000
    assert line["steps"][-1] == 5000


@pytest.fixture
def served(tmp_path):
    """The folder of a run, and the address of the page that watches it."""
    run = csv_run(tmp_path / "run", "1,100,2,0.5,50,0.25,1.5", "2,200,4,0.75,50,0.25,1.25")
    with WatchServer([run], port=0) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield run, f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()


def get(address):
    with urllib.request.urlopen(address, timeout=10) as answer:
        return answer.read().decode()


def test_what_is_served(served):
    run, address = served
    assert "<title>Runs</title>" in get(address)
    assert json.loads(get(address + "data")) == Watched([run]).charts()
    with pytest.raises(urllib.error.HTTPError, match="404"):
        get(address + "metrics.csv")
    shutil.move(run, run.with_name("elsewhere"))
    assert "where no run has written" in json.loads(get(address + "data"))["error"]


@pytest.mark.site
def test_the_page_goes_on_with_the_run(served, browser):
    run, address = served
    browser.get_log("browser")
    browser.get(address)

    def points():
        lines = browser.find_elements(By.CSS_SELECTOR, "figure:first-child polyline")
        return [len(line.get_attribute("points").split()) for line in lines]

    WebDriverWait(browser, 20).until(lambda _: points() == [2])
    with (run / "metrics.csv").open("a") as file:
        file.write("3,300,6,1.0,50,0.25,1.0\n")
    WebDriverWait(browser, 20).until(lambda _: points() == [3])
    assert browser.title == "run"
    captions = [element.text for element in browser.find_elements(By.TAG_NAME, "figcaption")]
    assert captions == ["mean return", "environment steps a second", "padding share", "entropy"]
    assert browser.find_element(By.CLASS_NAME, "told").text == "300 steps: 1"
    assert browser.get_log("browser") == []


def test_what_cannot_be_watched(tmp_path):
    def refused(*args):
        result = CliRunner().invoke(app, ["watch", *map(str, args)], catch_exceptions=False)
        assert result.exit_code == 2
        return " ".join(result.stderr.split())

    assert "where no run has written metrics.csv or result.json" in refused(tmp_path)
    run = csv_run(tmp_path / "run", "1,100,2,0.5,50,0.25,1.5")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert f"`--port` is {port}, where no server can listen" in refused(run, "--port", port)
    assert "Missing argument" in refused()
