"""Sessions of a policy that is served: who plays, since when, and one pass for all that wait."""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections import OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from connectors.acting.policy import MemoryPolicy

logger = logging.getLogger(__name__)


class RequestError(Exception):
    """A request that is refused.

    Args:
        status: The HTTP status.
        text: What is wrong with it, for whoever sent it.
    """

    def __init__(self, status: int, text: str):
        super().__init__(text[:1000])  # it may quote the request
        self.status = status


@dataclass(eq=False)
class _Session:
    """One episode of one session; the policy's client."""

    name: str
    last_used: float
    acting: set[Any] = field(default_factory=set)  # agents whose acts are not answered yet
    has_ended: bool = False


class _Waiting(NamedTuple):
    session: _Session
    agent: Any
    observation: Any
    reward: float
    action: asyncio.Future


class Sessions:
    """The sessions of one policy, and their acts in common passes of the module.

    All methods belong to one event loop. Passes run in a thread; acts that arrive meanwhile gather
    for the next one, so a batch is as large as the load is high and nobody waits for others.

    Args:
        policy: Used by nobody else.
        max_sessions: Sessions at a time.
        ttl_s: Seconds without a request after which a session is dropped.
        max_batch_size: Acts in one pass.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        policy: MemoryPolicy,
        *,
        max_sessions: int,
        ttl_s: float,
        max_batch_size: int,
        clock: Callable[[], float] = time.monotonic,
    ):
        self._policy = policy
        self._max_sessions = max_sessions
        self._ttl_s = ttl_s
        self._max_batch_size = max_batch_size
        self._clock = clock
        self._sessions: OrderedDict[str, _Session] = OrderedDict()  # the longest unused one first
        self._waiting: deque[_Waiting] = deque()
        self._passes: asyncio.Task | None = None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="policy")
        self._counts = {"expired": 0, "steps": 0, "passes": 0}

    def reset(self, name: str, agent: Any = None) -> None:
        """Starts a session, or starts it anew.

        Args:
            name: The session.
            agent: Of several agents the only one that starts anew, in a session that exists.

        Raises:
            RequestError: 429 if there is no room for another one; for one agent as `act`.
        """
        if agent is not None:
            session = self._find(name)
            self._check_answered(session, session.acting)
            self._policy.reset(session, agent=agent)
            return
        self._drop_expired()
        if name in self._sessions:
            self._drop(name)
        elif len(self._sessions) >= self._max_sessions:
            oldest = next(iter(self._sessions.values()))
            seconds = max(0.0, oldest.last_used + self._ttl_s - self._clock())
            raise RequestError(
                429,
                f"`session` is {name!r}, but there are {self._max_sessions} sessions already, as "
                f"many as `max_sessions` allows. End one, or wait: the first one that is not used "
                f"expires in {seconds:.0f} s.",
            )
        self._sessions[name] = _Session(name, self._clock())

    async def act(self, name: str, observation: Any, reward: float, agent: Any = None) -> Any:
        """The session's next action.

        A caller that is cancelled in a pass has acted; one that is cancelled before has not.

        Args:
            name: The session.
            observation: One that fits the policy's space.
            reward: The reward that came with it.
            agent: Of several agents the one that acts.

        Raises:
            RequestError: 404 if there is no such session, 409 if it is acting, 500 if the policy
                failed; the session is then as before.
        """
        session = self._find(name)
        self._check_answered(session, session.acting & {agent})
        session.acting.add(agent)
        action = asyncio.get_running_loop().create_future()
        self._waiting.append(_Waiting(session, agent, observation, reward, action))
        if self._passes is None or self._passes.done():
            self._passes = asyncio.create_task(self._run_passes())
        return await action

    def end(self, name: str) -> None:
        """Ends a session.

        Raises:
            RequestError: 404 if there is no such session.
        """
        self._find(name)
        self._drop(name)

    def stats(self) -> dict[str, int]:
        """Sessions at present; those that expired, steps and passes since the start."""
        self._drop_expired()
        return {"sessions": len(self._sessions), **self._counts}

    def _find(self, name: str) -> _Session:
        self._drop_expired()
        session = self._sessions.get(name)
        if session is None:
            raise RequestError(
                404,
                f"`session` is {name!r}, which is not known: it was never reset, has ended, was "
                f"not used for {self._ttl_s:g} s, or was lost with its replica. Call `reset` "
                "first; its memory then starts anew.",
            )
        self._touch(session)
        return session

    def _check_answered(self, session: _Session, acting: set[Any]) -> None:
        if acting:
            whose = "" if acting == {None} else f" of {sorted(map(str, acting))}"
            raise RequestError(
                409,
                f"`session` is {session.name!r}, whose last `act`{whose} has not been answered "
                "yet. Observations of a session, or of each of its agents, have an order: send one "
                "at a time.",
            )

    def _touch(self, session: _Session) -> None:
        session.last_used = self._clock()
        self._sessions.move_to_end(session.name)

    def _drop_expired(self) -> None:
        oldest_allowed = self._clock() - self._ttl_s
        while self._sessions:
            session = next(iter(self._sessions.values()))
            if session.last_used > oldest_allowed or session.acting:
                return
            self._drop(session.name)
            self._counts["expired"] += 1

    def _drop(self, name: str) -> None:
        session = self._sessions.pop(name)
        session.has_ended = True
        if not session.acting:
            self._policy.reset(session)

    async def _run_passes(self) -> None:
        while self._waiting:
            batch = []
            while self._waiting and len(batch) < self._max_batch_size:
                waiting = self._waiting.popleft()
                if waiting.action.cancelled():
                    self._free(waiting)
                else:
                    batch.append(waiting)
            if batch:
                await self._run_pass(batch)

    async def _run_pass(self, batch: list[_Waiting]) -> None:
        observations, rewards = {}, {}
        for session, agent, observation, reward, _ in batch:
            if agent is None:
                observations[session], rewards[session] = observation, reward
            else:
                observations.setdefault(session, {})[agent] = observation
                rewards.setdefault(session, {})[agent] = reward
        act = functools.partial(self._policy.act_batch, observations, rewards=rewards)
        try:
            actions = await asyncio.get_running_loop().run_in_executor(self._thread, act)
        except Exception:
            if len(batch) == 1:
                logger.exception("An act of session %r failed.", batch[0].session.name)
                self._fail(batch[0])
            else:
                # Nobody has acted. One session must not keep the others from it.
                for waiting in batch:
                    await self._run_pass([waiting])
            return
        self._counts["passes"] += 1
        self._counts["steps"] += len(batch)
        for waiting in batch:
            self._free(waiting)
            if not waiting.action.done():
                action = actions[waiting.session]
                waiting.action.set_result(
                    action if waiting.agent is None else action[waiting.agent]
                )

    def _fail(self, waiting: _Waiting) -> None:
        session = waiting.session
        self._free(waiting)
        if not waiting.action.done():
            waiting.action.set_exception(
                RequestError(
                    500,
                    f"`session` is {session.name!r}, which has not acted: the policy failed. The "
                    "session is as before. The replica's log has the reason.",
                )
            )

    def _free(self, waiting: _Waiting) -> None:
        session = waiting.session
        session.acting.discard(waiting.agent)
        if session.has_ended:
            self._policy.reset(session)
        else:
            self._touch(session)
