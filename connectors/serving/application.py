"""Serves a trained agent with Ray Serve: JSON over HTTP, a recurrent state for each session."""

from __future__ import annotations

import asyncio
import functools
import json
import logging
import math
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, cast

from connectors.acting.loading import load_parts
from connectors.acting.policy import MemoryPolicy
from connectors.serving.json_requests import (
    VERBS,
    action_to_json,
    fields_from_json,
    observation_from_json,
)
from connectors.serving.sessions import RequestError, Sessions

try:
    from pydantic import validate_call
    from ray import serve
    from ray.exceptions import RayError
    from ray.serve.exceptions import RayServeException
    from starlette.applications import Starlette
    from starlette.exceptions import HTTPException
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.routing import Route
except ImportError as error:
    raise ImportError(
        "`connectors.serving` needs Ray Serve, which is not installed. Install the extra `serve`: "
        "pip install 'rllib-memory[serve]'."
    ) from error

logger = logging.getLogger(__name__)

# Bytes of a request. An image of 210 x 160 x 3 takes half a megabyte.
_MAX_BODY = 8 * 2**20
# Seconds in which a replica has to say that it is well.
_HEALTH_TIMEOUT = 5.0


class _Replica:
    """One copy of the policy, and the sessions that it serves.

    Answers are pairs of an HTTP status and a body.
    """

    def __init__(self, checkpoint: str, explore: bool, seed: int | None, **limits: Any):
        if serve.get_replica_context().world_size != 1:
            raise RuntimeError(
                f"`num_replicas` is {serve.get_replica_context().world_size} in the Serve config "
                "of this deployment, but Serve would spread the requests of a session over the "
                "replicas. Give `serve_policy` the number, which makes a deployment for each."
            )
        parts = load_parts(checkpoint)
        policy = MemoryPolicy(parts, explore=explore, seed=seed)
        self._space: Any = parts.observation_space
        # As requests name them; empty for one agent without an ID.
        self._agents = {str(agent): agent for agent in policy.agents}
        self._sessions = Sessions(policy, **limits)

    async def answer(self, verb: str, **fields: Any) -> tuple[int, str]:
        try:
            return 200, await getattr(self, f"_{verb}")(**fields)
        except RequestError as error:
            return error.status, json.dumps({"error": str(error)})
        except Exception:
            logger.exception("A request failed.")
            text = f"`{verb}` failed. The replica's log has the reason."
            return 500, json.dumps({"error": text})

    async def _reset(self, session: str, agent: str | None = None) -> str:
        self._sessions.reset(session, None if agent is None else self._agent(agent))
        return json.dumps({"session": session})

    async def _act(
        self, session: str, observation: Any, reward: float = 0.0, agent: str | None = None
    ) -> str:
        who = self._agent(agent)
        space = self._space if who is None else self._space[who]
        try:
            conformed = observation_from_json(observation, space)
        except ValueError as error:
            raise RequestError(422, str(error)) from error
        return action_to_json(await self._sessions.act(session, conformed, reward, who))

    def _agent(self, name: str | None) -> Any:
        """The ID of the agent that a request names; None where there is one."""
        if not self._agents:
            if name is None:
                return None
            raise RequestError(
                422, f"`agent` is {name!r}, but the checkpoint is that of one agent. Leave it out."
            )
        if name not in self._agents:
            given = "missing" if name is None else repr(name)
            raise RequestError(
                422,
                f"`agent` is {given}, but the checkpoint is that of several. Name the one whose "
                f"observation it is, of {list(self._agents)}.",
            )
        return self._agents[name]

    async def _end(self, session: str) -> str:
        self._sessions.end(session)
        return json.dumps({"session": session})

    async def _stats(self) -> str:
        return json.dumps(self._sessions.stats())


class _Ingress:
    """The HTTP side: checks requests, and sends each to the replica of its session.

    Args:
        settings: Those of the replica, where there is only one: it then lives in this process.
        handles: Those of several replicas, in a fixed order.
    """

    def __init__(self, settings: dict[str, Any] | None, handles: list[Any]):
        self._ask: list[Callable[..., Awaitable[tuple[int, str]]]] = [
            handle.answer.remote for handle in handles
        ]
        if settings is not None:
            self._ask = [_Replica(**settings).answer]

    def __serve_build_asgi_app__(self) -> Starlette:
        return Starlette(
            routes=[
                *(
                    Route(f"/{verb}", functools.partial(self._forward, verb), methods=["POST"])
                    for verb in VERBS
                ),
                Route("/health", self._health),
                Route("/stats", self._stats),
            ],
            exception_handlers={RequestError: _refuse, HTTPException: _refuse},
        )

    async def _forward(self, verb: str, request: Request) -> Response:
        fields = fields_from_json(verb, await _body(request))
        session = fields["session"]
        index = zlib.crc32(session.encode(errors="surrogatepass")) % len(self._ask)
        try:
            status, body = await self._ask[index](verb, **fields)
        except (RayError, RayServeException) as error:
            raise RequestError(
                503,
                f"`session` is {session!r}, whose replica {index} does not answer. Once it is "
                "back, its sessions are gone: call `reset`.",
            ) from error
        return _json(status, body)

    async def _health(self, request: Request) -> Response:
        await self._ask_all()
        return _json(200, json.dumps({"replicas": len(self._ask)}))

    async def _stats(self, request: Request) -> Response:
        stats = [json.loads(body) for _, body in await self._ask_all()]
        return _json(200, json.dumps({key: sum(s[key] for s in stats) for key in stats[0]}))

    async def _ask_all(self) -> list[tuple[int, str]]:
        try:
            return await asyncio.wait_for(
                asyncio.gather(*(ask("stats") for ask in self._ask)), _HEALTH_TIMEOUT
            )
        except (TimeoutError, RayError, RayServeException) as error:
            raise RequestError(503, f"Not all {len(self._ask)} replicas answer.") from error


def _json(status: int, body: str) -> Response:
    return Response(body, status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):  # no such path or method
        return _json(error.status_code, json.dumps({"error": error.detail}))
    return _json(cast("RequestError", error).status, json.dumps({"error": str(error)}))


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise RequestError(413, f"The body has more than {_MAX_BODY} bytes.")
    return bytes(body)


def serve_policy(
    checkpoint: str | Path,
    *,
    explore: bool = False,
    seed: int | None = None,
    max_sessions: int = 10_000,
    session_ttl_s: float = 600.0,
    num_replicas: int = 1,
    max_batch_size: int = 128,
) -> serve.Application:
    """An application of Ray Serve that acts with a trained agent, with a state for each session.

    Run it with `serve.run(serve_policy(path))`. Clients speak JSON: `POST /reset`, `/act` and
    `/end`, `GET /health` and `/stats`.

    Args:
        checkpoint: As for `MemoryPolicy.from_checkpoint`. It is read here, to see whether it is
            one, and by each replica.
        explore: Whether to sample actions as in training; else the best ones are taken.
        seed: Seeds the sampled actions of the first replica; those behind it have the next ones.
            Which session draws which number depends on the order of the requests.
        max_sessions: Sessions at a time in one replica. A `reset` beyond that is refused.
        session_ttl_s: Seconds without a request after which a session is dropped.
        num_replicas: Copies of the policy. A session stays with the one that its name falls to.
        max_batch_size: Acts in one pass of the module.

    Raises:
        ValueError: if a setting is out of its range, if there is no checkpoint, or if an agent's
            module is not in it.

    Example:
        ```python
        from ray import serve

        from connectors.serving import serve_policy


        def run(path):
            serve.run(serve_policy(path))
        ```
    """
    for name, value in (
        ("max_sessions", max_sessions),
        ("num_replicas", num_replicas),
        ("max_batch_size", max_batch_size),
    ):
        if not isinstance(value, int) or value < 1:
            raise ValueError(f"`{name}` is {value!r}, but must be an integer of at least 1.")
    if not 0 < session_ttl_s < math.inf:
        raise ValueError(f"`session_ttl_s` is {session_ttl_s!r}, but must be a number above 0.")
    parts = load_parts(checkpoint)  # Serve would not say what is wrong with it
    parts.check_modules(parts.agents)
    settings = [
        {
            "checkpoint": str(Path(checkpoint).expanduser().absolute()),
            "explore": explore,
            "seed": None if seed is None else seed + index,
            "max_sessions": max_sessions,
            "ttl_s": session_ttl_s,
            "max_batch_size": max_batch_size,
        }
        for index in range(num_replicas)
    ]
    # No session acts twice at once, so that no more requests wait for a replica.
    options: dict[str, Any] = {
        "max_ongoing_requests": max_sessions,
        "logging_config": {"enable_access_log": False},
    }
    ingress = serve.deployment(serve.ingress()(_Ingress)).options(**options, name="policy")
    if num_replicas == 1:
        return ingress.bind(settings[0], [])
    replica = serve.deployment(_Replica).options(**options)
    replicas = [
        replica.options(name=f"policy-{index}").bind(**each) for index, each in enumerate(settings)
    ]
    return ingress.options(
        max_ongoing_requests=num_replicas * max_sessions, ray_actor_options={"num_cpus": 0}
    ).bind(None, replicas)


def from_settings(settings: dict[str, Any]) -> serve.Application:
    """`serve_policy` for `serve run connectors.serving:from_settings checkpoint=...` and configs.

    Args:
        settings: The arguments of `serve_policy`; numbers may be strings.
    """
    return validate_call(serve_policy)(**settings)
