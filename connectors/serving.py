"""Serves a trained agent with Ray Serve: JSON over HTTP, a recurrent state for each session."""

from __future__ import annotations

import asyncio
import json
import math
import zlib
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from connectors.checkpoints import load_parts
from connectors.json_values import action_to_json, observation_from_json
from connectors.policy import MemoryPolicy
from connectors.sessions import RequestError, Sessions

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

# Bytes of a request. An image of 210 x 160 x 3 takes half a megabyte.
_MAX_BODY = 8 * 2**20
_MAX_NAME = 256
# Modules that see rewards see them as float32.
_MAX_REWARD = float(np.finfo(np.float32).max)
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
        self._space = parts.observation_space
        self._sessions = Sessions(MemoryPolicy(parts, explore=explore, seed=seed), **limits)

    async def answer(self, verb: str, *args: Any) -> tuple[int, str]:
        try:
            return 200, await getattr(self, f"_{verb}")(*args)
        except RequestError as error:
            return error.status, json.dumps({"error": str(error)})

    async def _reset(self, session: str) -> str:
        self._sessions.reset(session)
        return json.dumps({"session": session})

    async def _act(self, session: str, observation: Any, reward: float) -> str:
        try:
            conformed = observation_from_json(observation, self._space)
        except ValueError as error:
            raise RequestError(422, str(error)) from error
        return action_to_json(await self._sessions.act(session, conformed, reward))

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
                Route("/reset", self._reset, methods=["POST"]),
                Route("/act", self._act, methods=["POST"]),
                Route("/end", self._end, methods=["POST"]),
                Route("/health", self._health),
                Route("/stats", self._stats),
            ],
            exception_handlers={RequestError: _refuse, HTTPException: _refuse},
        )

    async def _reset(self, request: Request) -> Response:
        fields = await _fields(request, {"session"})
        return await self._forward(_name(fields), "reset")

    async def _act(self, request: Request) -> Response:
        fields = await _fields(request, {"session", "observation"}, {"reward"})
        return await self._forward(_name(fields), "act", fields["observation"], _reward(fields))

    async def _end(self, request: Request) -> Response:
        fields = await _fields(request, {"session"})
        return await self._forward(_name(fields), "end")

    async def _forward(self, session: str, verb: str, *args: Any) -> Response:
        index = zlib.crc32(session.encode(errors="surrogatepass")) % len(self._ask)
        try:
            status, body = await self._ask[index](verb, session, *args)
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
                asyncio.gather(*(_awaited(ask("stats")) for ask in self._ask)), _HEALTH_TIMEOUT
            )
        except (TimeoutError, RayError, RayServeException) as error:
            raise RequestError(503, f"Not all {len(self._ask)} replicas answer.") from error


async def _awaited(answer: Awaitable[tuple[int, str]]) -> tuple[int, str]:
    """`gather` takes no awaitable that is neither coroutine nor future, as Serve's are."""
    return await answer


def _json(status: int, body: str) -> Response:
    return Response(body, status, media_type="application/json")


async def _refuse(request: Request, error: Exception) -> Response:
    if isinstance(error, HTTPException):
        return _json(error.status_code, json.dumps({"error": error.detail}))
    status = error.status if isinstance(error, RequestError) else 500
    return _json(status, json.dumps({"error": str(error)}))


async def _fields(
    request: Request, required: set[str], optional: frozenset[str] | set[str] = frozenset()
) -> dict[str, Any]:
    """The fields of a request's JSON object."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > _MAX_BODY:
            raise RequestError(413, f"The body has more than {_MAX_BODY} bytes.")
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"The body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(422, f"The body is a {type(fields).__name__}, but must be an object.")
    missing, unknown = required - fields.keys(), fields.keys() - required - optional
    if missing or unknown:
        raise RequestError(
            422,
            f"The body has the fields {sorted(fields)}, but must have {sorted(required)}"
            + (f", and may have {sorted(optional)}." if optional else "."),
        )
    return fields


def _no_constant(text: str) -> None:
    raise RequestError(400, f"The body holds {text}, which is not JSON, nor any use as a number.")


def _name(fields: dict[str, Any]) -> str:
    name = fields["session"]
    if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME:
        raise RequestError(
            422, f"`session` is {name!r:.80}, but must be a string of 1 to {_MAX_NAME} characters."
        )
    return name


def _reward(fields: dict[str, Any]) -> float:
    reward = fields.get("reward", 0.0)
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if not is_number or not abs(reward) <= _MAX_REWARD:
        raise RequestError(422, f"`reward` is {reward!r:.80}, but must be a finite number.")
    return float(reward)


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
        ValueError: if a setting is out of its range, or there is no checkpoint of one agent.

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
    load_parts(checkpoint)  # Serve would not say what is wrong with it
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
    options: dict[str, Any] = {
        # No session acts twice at once, so more never wait in a replica.
        "max_ongoing_requests": max_sessions,
        "logging_config": {"enable_access_log": False},
    }
    ingress = serve.deployment(serve.ingress()(_Ingress)).options(**options, name="policy")
    if num_replicas == 1:
        return ingress.bind(settings[0], [])
    replica = serve.deployment(_Replica).options(**options)
    handles = [
        replica.options(name=f"policy-{index}").bind(**each) for index, each in enumerate(settings)
    ]
    return ingress.options(ray_actor_options={"num_cpus": 0}).bind(None, handles)


def from_settings(settings: dict[str, Any]) -> serve.Application:
    """`serve_policy` for `serve run connectors.serving:from_settings checkpoint=...` and configs.

    Args:
        settings: The arguments of `serve_policy`; numbers may be strings.
    """
    return validate_call(serve_policy)(**settings)
