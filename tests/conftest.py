"""What all tests share: seeds, NaN in uninitialised memory, one Ray a test process, one
browser."""

import inspect
import os
import shutil
import sys

# Before Ray or matplotlib are imported, and inherited by the processes that Ray starts.
os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("MPLBACKEND", "Agg")
# Test processes run side by side, one a core. More threads would wait for one another.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# By default Ray's processes yield to all others: a test that waits for one would wait for the other
# test process, too.
os.environ.setdefault("RAY_worker_niceness", "0")

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings

settings.register_profile(
    "tests", deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("tests")


def pytest_configure() -> None:
    """Names the modules of files that `inspect` would look for in vain.

    RLlib 2.60's connectors walk the call stack when they are built, with source lines and modules,
    of which they use none. For each frame whose file belongs to no module, such as those of
    pytest-xdist's processes, `inspect` then searches all of the thousands of modules: nearly half
    of the time of these tests.
    """
    frame = sys._getframe()
    files = {"<string>"}
    while frame := frame.f_back:
        files.add(frame.f_code.co_filename)
    known = {getattr(module, "__file__", None) for module in sys.modules.values()}
    for file in files - known:
        inspect.modulesbyfile.setdefault(file, "__main__")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skips tests marked `gpu` on a machine without one, saying so."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))


@pytest.fixture(autouse=True)
def _seeds() -> None:
    np.random.seed(0)  # noqa: NPY002 - RLlib's connectors and replay buffers draw from it
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _nan_in_uninitialised_memory(request: pytest.FixtureRequest):
    """Fills what `torch.empty` returns with NaN, so that a read before a write shows.

    Only torch's deterministic mode does that. It forbids a few CUDA operations and is pointless
    where Ray's processes do the work, so tests marked `gpu` or `ray` run without it.
    """
    if request.node.get_closest_marker("gpu") or request.node.get_closest_marker("ray"):
        yield
        return
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def _ray_session():
    import ray

    # Eight logical CPUs also on a two-core machine: two algorithms with two EnvRunners and a
    # Learner each must be placed, not be fast.
    ray.init(num_cpus=8, include_dashboard=False, log_to_driver=False, configure_logging=False)
    yield
    ray.shutdown()


@pytest.fixture(autouse=True)
def _ray(request: pytest.FixtureRequest) -> None:
    """Starts Ray once, for the first test that is marked `ray`."""
    if request.node.get_closest_marker("ray"):
        request.getfixturevalue("_ray_session")


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory):
    """The system's Chromium with an empty profile, one for all tests marked `site`."""
    from selenium import webdriver

    chromium = shutil.which("chromium") or shutil.which("google-chrome")
    chromedriver = shutil.which("chromedriver")
    if chromium is None or chromedriver is None:
        pytest.skip("needs chromium and chromedriver: apt-get install chromium chromium-driver")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    quiet = ("background-networking", "component-update", "sync", "gpu", "quic")
    for argument in ("headless", "no-sandbox", "no-first-run", *(f"disable-{x}" for x in quiet)):
        options.add_argument(f"--{argument}")
    options.add_argument(f"--user-data-dir={tmp_path_factory.mktemp('profile')}")
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(chromedriver))
    yield driver
    driver.quit()
