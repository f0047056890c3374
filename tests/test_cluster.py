"""Three nodes, of which two die: training goes on, or resumes; states and checkpoints stay right.

The nodes and the training are started by the commands of `docs/how-to/gpus-and-clusters.md`.
"""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import ray
from ray.cluster_utils import Cluster
from ray.scripts.scripts import start

import examples
import rlmodules
import tests
from connectors import connect
from examples import cluster as example
from examples.run_dir import RunDir
from tests.test_learner_group import assert_equal_everywhere, of_all_learners, ppo
from tests.test_parity import RecordingLearner

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "how-to" / "gpus-and-clusters.md"
ITERATION = re.compile(r"iteration +(\d+) +([\d,]+) steps .* EnvRunners (\d)")

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    # Ray's nodes leave sockets open in the process that starts them.
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]


def commands(name):
    """Those of the page's shell blocks that begin with this, as lists of words."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    lines = [shlex.split(line, comments=True) for block in blocks for line in block.splitlines()]
    return [line for line in lines if line[: len(name)] == name]


def node_arguments(command):
    """What Ray's own parser reads from a `ray start`, for nodes that share a machine."""
    options = start.make_context("start", command[2:]).params
    return {"num_cpus": options["num_cpus"], "resources": json.loads(options["resources"])}


class Nodes:
    """The page's three nodes."""

    def __init__(self):
        first, *others = [node_arguments(line) for line in commands(["ray", "start"])]
        self.cluster = Cluster(
            initialize_head=True, head_node_args={**first, "include_dashboard": False}
        )
        self.arguments = dict(zip(("second", "third"), others, strict=True))
        self.nodes = {}
        for name in self.arguments:
            self.start(name)

    def start(self, name):
        self.nodes[name] = self.cluster.add_node(**self.arguments[name])

    def kill(self, name):
        self.cluster.remove_node(self.nodes.pop(name), allow_graceful=False)


@pytest.fixture
def nodes(_ray_session, monkeypatch):
    # Sockets' paths must be short; and other scripts of this machine must not find the cluster.
    folder = tempfile.mkdtemp(prefix="ray")
    monkeypatch.setenv("RAY_TMPDIR", folder)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    nodes = Nodes()
    yield nodes
    nodes.cluster.shutdown()
    shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def training(nodes, command, folder):
    """A process on the first node, in an empty folder; the other nodes do not see the package."""
    empty = folder / "empty"
    empty.mkdir(exist_ok=True)
    env = {**os.environ, "PYTHONPATH": str(ROOT), "RAY_ADDRESS": nodes.cluster.address}
    with (folder / "errors.txt").open("w") as errors:
        process = subprocess.Popen(
            [sys.executable, *command],
            cwd=empty,
            env=env,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        try:
            yield process
        finally:
            process.kill()
            process.wait()


def iterations(process, reports=None):
    """Number, steps and EnvRunners of each iteration, as they are printed; and the reports."""
    for line in process.stdout:
        if line.startswith("{"):
            reports.append(json.loads(line))
        if match := ITERATION.match(line):
            yield [int(value.replace(",", "")) for value in match.groups()]


def until_env_runners(rows, number):
    """The rest of the training until so many EnvRunners are healthy."""
    passed = []
    for row in rows:
        passed.append(row)
        if row[2] == number:
            return passed
    raise AssertionError(f"It ended before there were {number} EnvRunners: {passed}")


def test_the_commands_of_the_page(nodes, tmp_path):
    ((_, *command),) = commands(["python", "-m", "examples.cluster"])
    command = [word.replace("/mnt/shared", str(tmp_path)) for word in command]
    storage = RunDir(Path(command[command.index("--storage") + 1]))

    with training(nodes, [*command, "--stop-reward", "2"], tmp_path) as process:
        rows = iterations(process)
        until_env_runners(rows, 2)
        nodes.kill("third")
        goes_on = until_env_runners(rows, 1)
        goes_on.append(next(rows))
        nodes.start("third")
        goes_on += until_env_runners(rows, 2)
        nodes.kill("second")
        last = [*goes_on, *rows][-1]
        assert process.wait() != 0
    assert "Error" in (tmp_path / "errors.txt").read_text()
    checkpoint = storage.last_checkpoint()
    assert int(checkpoint.name) == last[0]

    nodes.start("second")
    stop = ["--stop-iters", str(last[0] + 2)]
    with training(nodes, [*command, *stop], tmp_path) as process:
        assert process.stdout.readline().split() == ["from", str(checkpoint)]
        resumed = list(iterations(process))
        assert process.wait() in (0, 1)
    assert resumed[0][0] == last[0] + 1
    assert resumed[0][1] > last[1]
    assert resumed[0][2] == 2


def report(*, algorithm, result, **kwargs):
    """Prints what the processes know, in the words of `json`."""
    runners = algorithm.env_runner_group.foreach_env_runner(
        lambda _: rlmodules.__file__, local_env_runner=False
    )
    learners = of_all_learners(
        algorithm,
        lambda learner: (rlmodules.__file__, learner.errors, learner.errors_without_state),
    )
    assert_equal_everywhere(algorithm)
    print(json.dumps({"runners": runners, "learners": learners}), flush=True)  # noqa: T201


def watched_training():
    """The example's training with recording Learners, in episodes and rows of other lengths."""
    args = example.parse()
    # Processes on other nodes unpickle functions and classes of these, too.
    modules = [*example.RUNTIME_ENV["py_modules"], examples, tests]
    ray.init(args.address, runtime_env={"py_modules": modules}, log_to_driver=False)
    config = ppo(2, num_epochs=1, minibatch_size=60).learners(learner_class=RecordingLearner)
    config.env_runners(num_env_runners=2).callbacks(on_train_result=report)
    example.train(connect(example.place(config, args)), args)


def test_states_are_right_in_every_iteration(nodes, tmp_path):
    command = ["-c", "from tests.test_cluster import watched_training; watched_training()"]
    command += ["--storage", str(tmp_path / "run"), "--stop-reward", "inf"]
    reports = []
    with training(nodes, command, tmp_path) as process:
        rows = iterations(process, reports)
        until_env_runners(rows, 2)
        nodes.kill("third")
        until_env_runners(rows, 1)
        nodes.start("third")
        until_env_runners(rows, 2)
        last, *_ = [next(rows) for _ in range(3)][-1]
    assert len(reports) == last
    for number, found in enumerate(reports, 1):
        places = [*found["runners"], *(place for place, _, _ in found["learners"])]
        assert all("py_modules_files" in place for place in places), places
        for _, errors, errors_without_state in found["learners"]:
            assert len(errors) == number
            assert max(errors) <= 1e-5
            assert number == 1 or max(errors_without_state) > 1e-4
