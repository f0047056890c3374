"""Several agents over HTTP, through the application alone: each request names its agent."""

import asyncio
import json
import types

import numpy as np
import pytest
from ray import serve

from connectors import MemoryPolicy
from connectors.serving.application import _Ingress, serve_policy
from tests.test_multi_agent import ppo

pytestmark = pytest.mark.ray


@pytest.fixture(scope="module")
def checkpoint(_ray_session, tmp_path_factory):
    algorithm = ppo().build_algo()
    path = algorithm.save_to_path(str(tmp_path_factory.mktemp("served")))
    algorithm.stop()
    return path


@pytest.fixture
def app(checkpoint, monkeypatch):
    """What Serve runs, its replica in this process."""
    context = types.SimpleNamespace(world_size=1)
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    settings = {"explore": False, "seed": None, "max_sessions": 9, "ttl_s": 9, "max_batch_size": 9}
    return _Ingress({"checkpoint": checkpoint, **settings}, []).__serve_build_asgi_app__()


async def post(app, verb, **fields):
    """Status and document."""
    answers = []
    scope = {"type": "http", "method": "POST", "path": f"/{verb}", "headers": []}
    request = {"type": "http.request", "body": json.dumps(fields).encode()}

    async def receive():
        return request

    async def send(message):
        answers.append(message)

    await app({**scope, "query_string": b""}, receive, send)
    return answers[0]["status"], json.loads(answers[1]["body"])


OBSERVATIONS = np.random.default_rng(0).uniform(-1, 1, (12, 3)).tolist()


def test_each_agent_acts_as_if_its_game_were_alone(app, checkpoint):
    """Two games at once; in one of them an agent starts anew."""
    policy = MemoryPolicy.from_checkpoint(checkpoint)
    games = {"one": ["a0", "a1", "a2"], "two": ["a1", "a3"]}

    async def play():
        for name in games:
            assert await post(app, "reset", session=name) == (200, {"session": name})
        for t, seen in enumerate(OBSERVATIONS):
            if t == 6:
                answer = await post(app, "reset", session="one", agent="a1")
                assert answer == (200, {"session": "one"})
                policy.reset("one", agent="a1")
            who = [(name, agent) for name, agents in games.items() for agent in agents]
            answers = await asyncio.gather(
                *(post(app, "act", session=n, agent=a, observation=seen) for n, a in who)
            )
            for (name, agent), answer in zip(who, answers, strict=True):
                expected = int(policy.act(seen, client=name, agent=agent))
                assert answer == (200, {"action": expected})

    asyncio.run(play())


@pytest.mark.parametrize(
    ("fields", "status", "message"),
    [
        ({"agent": "b"}, 422, "`agent` is 'b', but the checkpoint is that of several. Name the"),
        ({}, 422, "`agent` is missing, but the checkpoint is that of several"),
        ({"agent": "a0", "observation": [0]}, 422, "`observation` has shape (1,)"),
        ({"agent": "a0", "session": "gone"}, 404, "Call `reset`"),
    ],
)
def test_refusals(app, fields, status, message):
    """They change nothing: the session may go on."""
    good = {"session": "s", "agent": "a0", "observation": OBSERVATIONS[0]}

    async def ask():
        await post(app, "reset", session="s")
        bad = {key: value for key, value in {**good, "agent": None, **fields}.items() if value}
        answer, document = await post(app, "act", **bad)
        assert answer == status
        assert message in document["error"]
        assert (await post(app, "act", **good))[0] == 200

    asyncio.run(ask())


def test_resets_of_nobody(app):
    async def ask():
        assert (await post(app, "reset", session="gone", agent="a0"))[0] == 404
        await post(app, "reset", session="s")
        assert (await post(app, "reset", session="s", agent="b"))[0] == 422
        assert (await post(app, "reset", session="s", agent="a0"))[0] == 200

    asyncio.run(ask())


def test_a_module_that_is_not_there(checkpoint, monkeypatch):
    """Found before anything is served."""
    monkeypatch.setattr("tests.test_multi_agent.module_of", lambda *_, **__: "gone")
    with pytest.raises(ValueError, match="the module 'gone', but the checkpoint has"):
        serve_policy(checkpoint)
