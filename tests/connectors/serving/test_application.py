"""A real Ray Serve on loopback: actions equal those of a policy a session, refusals, lost replicas.

Two replicas behind the ingress, unless a test says so; the example's test covers one replica.
"""

import asyncio
import importlib
import io
import json
import re
import socket
import sys
import time
import types
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import ray
from ray import serve

from connectors import MemoryPolicy
from connectors.serving.application import _Replica, from_settings, serve_policy
from tests.connectors.acting.test_policy import with_previous

pytestmark = pytest.mark.ray

GOOD = {"position": [0.5, -0.5], "mode": 1}


@pytest.fixture(scope="module")
def checkpoint(_ray_session, tmp_path_factory):
    algorithm = with_previous().build_algo()
    algorithm.train()
    path = algorithm.save_to_path(str(tmp_path_factory.mktemp("served")))
    algorithm.stop()
    return path


@pytest.fixture(scope="module")
def address(_ray_session):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    yield f"http://127.0.0.1:{port}"
    serve.shutdown()


@pytest.fixture(scope="module")
def served(address, checkpoint):
    """Limits that a test can reach; sessions of the tests share them."""
    serve.run(serve_policy(checkpoint, num_replicas=2, max_sessions=40, max_batch_size=16))
    return address


class Client:
    def __init__(self, http):
        self._http = http

    async def __call__(self, verb, body=None):
        """Status and document; bodies that are bytes go out as they are."""
        if body is None:
            request = self._http.get(f"/{verb}")
        else:
            data = io.BytesIO(body) if isinstance(body, bytes) else json.dumps(body)
            request = self._http.post(f"/{verb}", data=data)
        async with request as response:
            return response.status, await response.json()


def talk(address, conversation, *, connections=64):
    """Runs a coroutine function with a client."""

    async def run():
        connector = aiohttp.TCPConnector(limit=connections)
        timeout = aiohttp.ClientTimeout(total=None)
        async with aiohttp.ClientSession(address, connector=connector, timeout=timeout) as http:
            return await conversation(Client(http))

    return asyncio.run(run())


def episode(seed, num_steps):
    """Observations and rewards."""
    rng = np.random.default_rng(seed)
    return [
        (
            {
                "position": rng.normal(size=2, scale=10).astype(np.float32).tolist(),
                "mode": int(rng.integers(3)),
            },
            float(rng.normal()),
        )
        for _ in range(num_steps)
    ]


def alone(policy, steps):
    actions = [policy.act(observation, reward=reward) for observation, reward in steps]
    policy.reset()
    return actions


async def play(client, name, steps):
    status, answer = await client("reset", {"session": name})
    assert (status, answer) == (200, {"session": name})
    actions = []
    for observation, reward in steps:
        request = {"session": name, "observation": observation, "reward": reward}
        status, answer = await client("act", request)
        assert status == 200, answer
        actions.append(answer["action"])
        await asyncio.sleep(0)
    return actions


def compare(checkpoint, address, names, num_steps, **settings):
    """Two episodes a session, the first one given up midway, all sessions at once."""
    episodes = {
        name: [episode(2 * i, num_steps // 2), episode(2 * i + 1, num_steps)]
        for i, name in enumerate(names)
    }

    async def both(client, name):
        return [await play(client, name, steps) for steps in episodes[name]]

    async def all_sessions(client):
        return await asyncio.gather(*(both(client, name) for name in names))

    actions = talk(address, all_sessions, **settings)
    policy = MemoryPolicy.from_checkpoint(checkpoint)
    for name, two in zip(names, actions, strict=True):
        for steps, ours in zip(episodes[name], two, strict=True):
            np.testing.assert_allclose(ours, alone(policy, steps), rtol=1e-4, atol=1e-4)
    assert len({json.dumps(two) for two in actions}) == len(names)


def test_each_session_acts_as_if_alone(served, checkpoint):
    names = [f"session {i}" for i in range(50)]

    async def before(client):
        return (await client("stats"))[1]

    async def after(client):
        stats = (await client("stats"))[1]
        for name in names:
            assert await client("end", {"session": name}) == (200, {"session": name})
        return stats

    first = talk(served, before)
    compare(checkpoint, served, names, num_steps=6)
    last = talk(served, after)
    assert last["sessions"] == 50
    assert last["steps"] - first["steps"] == 50 * 9
    assert last["passes"] - first["passes"] < 50 * 9


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "The body is not JSON"),
        (b"\xff", 400, "The body is not JSON"),
        (b"[" * 100_000, 400, "The body is not JSON"),
        (b'{"session": "a", "observation": NaN}', 400, "The body holds NaN"),
        (b" " * (8 * 2**20 + 1), 413, "more than 8388608 bytes"),
        ([], 422, "The body is a list"),
        ({"session": "a"}, 422, "must have ['observation', 'session']"),
        ({"session": "a", "observation": GOOD, "rewards": 1}, 422, "may have ['agent', 'reward']"),
        ({"session": "a", "observation": GOOD, "agent": 1}, 422, "`agent` is 1"),
        ({"session": "a", "observation": GOOD, "agent": "b"}, 422, "is that of one agent"),
        ({"session": 7, "observation": GOOD}, 422, "`session` is 7"),
        ({"session": "", "observation": GOOD}, 422, "`session` is ''"),
        ({"session": "x" * 257, "observation": GOOD}, 422, "1 to 256 characters"),
        ({"session": "a", "observation": GOOD, "reward": "1"}, 422, "`reward` is '1'"),
        ({"session": "a", "observation": GOOD, "reward": True}, 422, "`reward` is True"),
        ({"session": "a", "observation": GOOD, "reward": 10**400}, 422, "`reward` is 1000"),
        ({"session": "a", "observation": {}}, 422, "must be a dict with the keys"),
        ({"session": "a", "observation": {**GOOD, "mode": 3}}, 422, "observation['mode']"),
        (
            {"session": "a", "observation": {**GOOD, "position": [0, 1e300]}},
            422,
            "observation['position']` holds numbers that are not finite",
        ),
        ({"session": "\ud800", "observation": GOOD}, 404, "Call `reset`"),
        ({"session": "never reset", "observation": GOOD}, 404, "Call `reset`"),
    ],
)
def test_bad_requests_change_nothing(served, checkpoint, body, status, message):
    """Between two acts of the session that they name, and together with the second one."""
    steps = episode(0, 2)
    acts = [{"session": "a", "observation": o, "reward": r} for o, r in steps]

    async def conversation(client):
        await client("reset", {"session": "a"})
        _, first = await client("act", acts[0])
        refused, (_, second) = await asyncio.gather(client("act", body), client("act", acts[1]))
        await client("end", {"session": "a"})
        return refused, [first["action"], second["action"]]

    refused, actions = talk(served, conversation)
    assert refused[0] == status
    assert message in refused[1]["error"]
    expected = alone(MemoryPolicy.from_checkpoint(checkpoint), steps)
    np.testing.assert_allclose(actions, expected, rtol=1e-4, atol=1e-4)


def test_other_refusals(served):
    async def conversation(client):
        for verb in ("act", "end"):
            body = {"session": "gone"} | ({"observation": GOOD} if verb == "act" else {})
            assert (await client(verb, body))[0] == 404
        await client("reset", {"session": "gone"})
        assert (await client("end", {"session": "gone"}))[0] == 200
        assert (await client("act", {"session": "gone", "observation": GOOD}))[0] == 404
        assert (await client("act"))[0] == 405
        assert (await client("reset", {"session": "a", "seed": 1}))[0] == 422
        assert (await client("nothing"))[0] == 404
        assert await client("health") == (200, {"replicas": 2})

        # One connection each, so that requests overtake each other: some meet an act in flight.
        await client("reset", {"session": "busy"})
        act = {"session": "busy", "observation": GOOD}
        answers = await asyncio.gather(*(client("act", act) for _ in range(30)))
        assert {status for status, _ in answers} == {200, 409}
        assert all("one at a time" in a["error"] for status, a in answers if status == 409)
        await client("end", {"session": "busy"})

        answers = [await client("reset", {"session": str(i)}) for i in range(120)]
        full = [answer for status, answer in answers if status == 429]
        assert len(full) == 120 - 2 * 40
        assert "as many as `max_sessions` allows" in full[0]["error"]
        for i in range(120):
            await client("end", {"session": str(i)})
        assert (await client("stats"))[1]["sessions"] == 0

    talk(served, conversation)


def test_the_requests_of_the_docs(served):
    """The lines that start with `curl`, in their order."""
    page = Path(__file__).parents[3] / "docs" / "how-to" / "serving.md"
    lines = re.findall(r"^curl localhost:8000/(\w+) -d '(.*)'$", page.read_text(), re.MULTILINE)
    assert [verb for verb, _ in lines] == ["reset", "act", "act", "end"]

    async def conversation(client):
        return [await client(verb, body.encode()) for verb, body in lines]

    answers = talk(served, conversation)
    assert [status for status, _ in answers] == [200] * 4
    assert np.shape(answers[1][1]["action"]) == (2,)
    assert answers[1] != answers[2]


@pytest.mark.slow
def test_thousands_of_sessions_and_a_replica_that_dies(address, checkpoint):
    names = [f"session {i}" for i in range(3000)]
    serve.run(serve_policy(checkpoint, num_replicas=2))
    compare(checkpoint, address, names, num_steps=4, connections=200)

    (name,) = [
        actor
        for actor in ray.util.list_named_actors(all_namespaces=True)
        if "#policy-0#" in actor["name"]
    ]
    ray.kill(ray.get_actor(name["name"], namespace=name["namespace"]))

    async def conversation(client):
        end = time.monotonic() + 120
        stats = (200, {"sessions": len(names)})
        while stats[0] != 200 or stats[1]["sessions"] == len(names):
            assert time.monotonic() < end
            await asyncio.sleep(0.5)
            stats = await client("stats")
        act = {"observation": GOOD}
        answers = [await client("act", {"session": name, **act}) for name in names[:200]]
        lost = [name for name, (status, _) in zip(names, answers, strict=False) if status == 404]
        assert {status for status, _ in answers} == {200, 404}
        assert 50 < len(lost) < 150
        for name in lost:
            assert (await client("reset", {"session": name}))[0] == 200
            assert (await client("act", {"session": name, **act}))[0] == 200

    talk(address, conversation)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"max_sessions": 0}, "`max_sessions` is 0"),
        ({"num_replicas": 1.5}, "`num_replicas` is 1.5"),
        ({"max_batch_size": -1}, "`max_batch_size` is -1"),
        ({"session_ttl_s": 0}, "`session_ttl_s` is 0"),
        ({"session_ttl_s": float("nan")}, "`session_ttl_s` is nan"),
        ({}, "`path` is '/nowhere', where there is no checkpoint"),
    ],
)
def test_settings(settings, message):
    with pytest.raises(ValueError, match=message):
        serve_policy("/nowhere", **settings)


def test_settings_of_a_config(checkpoint):
    """Those of a command line are strings."""
    assert isinstance(
        from_settings({"checkpoint": checkpoint, "num_replicas": "2", "explore": "true"}),
        serve.Application,
    )
    with pytest.raises(ValueError, match="`max_sessions` is 0"):
        from_settings({"checkpoint": "here", "max_sessions": "0"})
    with pytest.raises(ValueError, match="max_session\n"):
        from_settings({"checkpoint": "here", "max_session": "1"})


def test_replicas_of_one_deployment_are_refused(monkeypatch, checkpoint):
    context = types.SimpleNamespace(world_size=2)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    with pytest.raises(RuntimeError, match="`num_replicas` is 2 in the Serve config"):
        _Replica(checkpoint, explore=False, seed=None)


def test_without_serve(monkeypatch):
    """`connectors` does not need it."""
    for module in ("connectors.serving", "connectors.serving.application"):
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "starlette.applications", None)
    with pytest.raises(ImportError, match="Install the extra `serve`"):
        importlib.import_module("connectors.serving")
    assert "serving" not in importlib.import_module("connectors").__all__
