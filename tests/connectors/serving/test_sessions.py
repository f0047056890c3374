"""The session table alone: time, bounds, conflicts and cancelled requests; a policy that counts."""

import asyncio
import threading

import pytest

from connectors.serving.sessions import RequestError, Sessions


class Counter:
    """Its action says how often the client has acted, and on what; `gate` holds a pass back."""

    def __init__(self):
        self.clients = {}
        self.batches = []
        self.gate = threading.Event()
        self.gate.set()

    def act_batch(self, observations, *, rewards):
        assert self.gate.wait(10)
        if "poison" in observations.values():
            raise ZeroDivisionError
        self.batches.append(list(observations.values()))
        for client in observations:
            self.clients[client] = self.clients.get(client, 0) + 1
        return {
            client: (self.clients[client], observation, rewards[client])
            for client, observation in observations.items()
        }

    def reset(self, client):
        self.clients.pop(client, None)


class Clock:
    def __init__(self):
        self.now = 1000.0

    def __call__(self):
        return self.now


def make(**limits):
    policy, clock = Counter(), Clock()
    limits = {"max_sessions": 4, "ttl_s": 10.0, "max_batch_size": 3} | limits
    return Sessions(policy, clock=clock, **limits), policy, clock


async def until(condition):
    while not condition():
        await asyncio.sleep(0.001)


def run(test):
    asyncio.run(asyncio.wait_for(test(), 20))


def refused(status, call, *args):
    with pytest.raises(RequestError) as caught:
        call(*args)
    assert caught.value.status == status
    return str(caught.value)


async def refused_act(status, sessions, name):
    with pytest.raises(RequestError) as caught:
        await sessions.act(name, 0, 0.0)
    assert caught.value.status == status
    return str(caught.value)


def test_sessions_are_isolated_and_start_anew():
    async def test():
        sessions, policy, _ = make()
        for name in "ab":
            sessions.reset(name)
        assert await sessions.act("a", "x", 0.5) == (1, "x", 0.5)
        assert await sessions.act("a", "y", 0.0) == (2, "y", 0.0)
        assert await sessions.act("b", "z", 0.0) == (1, "z", 0.0)
        sessions.reset("a")
        assert await sessions.act("a", "x", 0.0) == (1, "x", 0.0)
        sessions.end("a")
        assert "`session` is 'a'" in await refused_act(404, sessions, "a")
        refused(404, sessions.end, "a")
        assert len(policy.clients) == 1
        assert sessions.stats() == {"sessions": 1, "expired": 0, "steps": 4, "passes": 4}

    run(test)


def test_acts_that_wait_share_passes():
    async def test():
        sessions, policy, _ = make(max_sessions=8)
        for name in "abcdefgh":
            sessions.reset(name)
        policy.gate.clear()
        acts = [asyncio.create_task(sessions.act("a", "a", 0.0))]
        await asyncio.sleep(0.01)  # its pass has begun
        acts += [asyncio.create_task(sessions.act(name, name, 0.0)) for name in "bcdefgh"]
        await asyncio.sleep(0.01)
        policy.gate.set()
        assert await asyncio.gather(*acts) == [(1, name, 0.0) for name in "abcdefgh"]
        assert policy.batches == [["a"], ["b", "c", "d"], ["e", "f", "g"], ["h"]]

    run(test)


def test_unused_sessions_expire():
    async def test():
        sessions, policy, clock = make()
        for name in "abc":
            sessions.reset(name)
            await sessions.act(name, 0, 0.0)
        clock.now += 9.0
        await sessions.act("a", 0, 0.0)
        clock.now += 1.0
        assert sessions.stats() == {"sessions": 1, "expired": 2, "steps": 4, "passes": 4}
        assert len(policy.clients) == 1
        assert "not used for 10 s" in await refused_act(404, sessions, "b")
        assert (await sessions.act("a", 0, 0.0))[0] == 3

    run(test)


def test_a_full_table_refuses_and_expired_sessions_make_room():
    async def test():
        sessions, _, clock = make(max_sessions=2)
        sessions.reset("a")
        clock.now += 4.0
        sessions.reset("b")
        assert "expires in 6 s" in refused(429, sessions.reset, "c")
        sessions.reset("b")
        clock.now += 6.0
        sessions.reset("c")
        assert await sessions.act("b", 0, 0.0)
        await refused_act(404, sessions, "a")
        sessions.end("b")
        sessions.reset("d")

    run(test)


def test_two_acts_of_a_session_conflict():
    async def test():
        sessions, policy, _ = make()
        sessions.reset("a")
        policy.gate.clear()
        first = asyncio.create_task(sessions.act("a", "first", 0.0))
        await asyncio.sleep(0)
        await refused_act(409, sessions, "a")
        policy.gate.set()
        assert await first == (1, "first", 0.0)
        assert (await sessions.act("a", "second", 0.0))[0] == 2

    run(test)


class CounterOfAgents(Counter):
    """Says what each agent has seen."""

    def act_batch(self, observations, *, rewards):
        super().act_batch(observations, rewards=rewards)
        return observations

    def reset(self, client, agent=None):
        self.batches.append(agent)


def test_agents_of_a_session():
    """They act in one pass; one at a time has no order, nor a reset before the answer."""

    async def test():
        policy = CounterOfAgents()
        sessions = Sessions(policy, max_sessions=1, ttl_s=10.0, max_batch_size=3)
        sessions.reset("a")
        policy.gate.clear()
        acts = [asyncio.create_task(sessions.act("a", "first", 0.0, "x"))]
        await asyncio.sleep(0.01)  # its pass has begun
        acts += [asyncio.create_task(sessions.act("a", seen, 0.0, seen)) for seen in "yz"]
        await asyncio.sleep(0.01)
        with pytest.raises(RequestError, match=r"last `act` of \['x'\] has not been answered"):
            await sessions.act("a", "second", 0.0, "x")
        assert "of ['x', 'y', 'z'] has not" in refused(409, sessions.reset, "a", "z")
        policy.gate.set()
        assert await asyncio.gather(*acts) == ["first", "y", "z"]
        sessions.reset("a", "z")
        assert policy.batches == [[{"x": "first"}], [{"y": "y", "z": "z"}], "z"]

    run(test)


@pytest.mark.parametrize("verb", ["reset", "end", "expire"])
def test_a_session_that_leaves_in_a_pass(verb):
    """What the pass leaves behind is dropped; a new session of that name does not see it."""

    async def test():
        sessions, policy, clock = make()
        sessions.reset("a")
        policy.gate.clear()
        act = asyncio.create_task(sessions.act("a", "old", 0.0))
        await asyncio.sleep(0.01)
        if verb == "expire":
            clock.now += 100.0
            assert sessions.stats()["sessions"] == 1  # it is in use
            sessions.end("a")
        else:
            getattr(sessions, verb)("a")
        if verb != "reset":
            sessions.reset("a")
        again = asyncio.create_task(sessions.act("a", "new", 0.0))
        await asyncio.sleep(0)
        policy.gate.set()
        assert await act == (1, "old", 0.0)
        assert await again == (1, "new", 0.0)
        assert len(policy.clients) == 1
        sessions.end("a")
        assert not policy.clients

    run(test)


def test_cancelled_requests():
    """In a pass: has acted. Before it: has not. The session goes on in both cases."""

    async def test():
        sessions, policy, _ = make()
        for name in "ab":
            sessions.reset(name)
        policy.gate.clear()
        in_pass = asyncio.create_task(sessions.act("a", 0, 0.0))
        await asyncio.sleep(0.01)
        before = asyncio.create_task(sessions.act("b", 0, 0.0))
        await asyncio.sleep(0.01)
        in_pass.cancel()
        before.cancel()
        await asyncio.sleep(0)
        await refused_act(409, sessions, "a")
        policy.gate.set()
        await until(lambda: sessions._passes.done())
        assert (await sessions.act("a", 0, 0.0))[0] == 2
        assert (await sessions.act("b", 0, 0.0))[0] == 1

    run(test)


def test_a_session_that_fails_keeps_no_other_from_acting(caplog):
    """It has not acted itself, and goes on; the others of its pass have acted once."""

    async def test():
        sessions, policy, _ = make()
        for name in "abc":
            sessions.reset(name)
        await asyncio.gather(sessions.act("a", 0, 0.0), sessions.act("c", 0, 0.0))
        results = await asyncio.gather(
            *(
                sessions.act(name, seen, 0.0)
                for name, seen in {"a": "poison", "b": 1, "c": 2}.items()
            ),
            return_exceptions=True,
        )
        assert results[0].status == 500
        assert results[1:] == [(1, 1, 0.0), (2, 2, 0.0)]
        assert (await sessions.act("a", 3, 0.0)) == (2, 3, 0.0)
        assert sessions.stats()["sessions"] == len(policy.clients) == 3
        assert sessions.stats()["steps"] == 5

    run(test)
    assert "An act of session 'a' failed" in caplog.text
    assert "ZeroDivisionError" in caplog.text


def test_the_event_loop_goes_on_in_a_pass():
    async def test():
        sessions, policy, _ = make()
        sessions.reset("a")
        policy.gate.clear()
        act = asyncio.create_task(sessions.act("a", 0, 0.0))
        await asyncio.sleep(0.01)
        assert sessions.stats()["steps"] == 0
        policy.gate.set()
        await act

    run(test)
