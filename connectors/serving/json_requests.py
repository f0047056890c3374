"""JSON in requests and answers: what a served agent reads, and what it refuses."""

from __future__ import annotations

import json
from typing import Any

import gymnasium as gym
import numpy as np

from connectors.acting.observations import as_dtype, conform
from connectors.serving.sessions import RequestError

# What can be asked about a session: the fields of such a request, and those it may have.
VERBS = {
    "reset": ({"session"}, {"agent"}),
    "act": ({"session", "observation"}, {"agent", "reward"}),
    "end": ({"session"}, set()),
}
_MAX_NAME = 256
# Modules that see rewards see them as float32.
_MAX_REWARD = float(np.finfo(np.float32).max)


def fields_from_json(verb: str, body: bytes) -> dict[str, Any]:
    """The fields of a request, checked but for the observation.

    Raises:
        RequestError: 400 if the body is not JSON, 422 if it is no object with the fields of
            `verb`, or one of them is not what it must be.
    """
    try:
        fields = json.loads(body, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"The body is not JSON: {error}") from error
    if not isinstance(fields, dict):
        raise RequestError(422, f"The body is a {type(fields).__name__}, but must be an object.")
    required, optional = VERBS[verb]
    if not required <= fields.keys() <= required | optional:
        raise RequestError(
            422,
            f"The body has the fields {sorted(fields)}, but must have {sorted(required)}"
            + (f", and may have {sorted(optional)}." if optional else "."),
        )
    for field in ("session", "agent"):
        name = fields.get(field, "-")
        if not isinstance(name, str) or not 1 <= len(name) <= _MAX_NAME:
            raise RequestError(
                422,
                f"`{field}` is {name!r:.80}, but must be a string of 1 to {_MAX_NAME} characters.",
            )
    reward = fields.get("reward", 0.0)
    is_number = isinstance(reward, int | float) and not isinstance(reward, bool)
    if not is_number or not abs(reward) <= _MAX_REWARD:
        raise RequestError(422, f"`reward` is {reward!r:.80}, but must be a finite number.")
    return fields


def _no_constant(text: str) -> None:
    raise RequestError(400, f"The body holds {text}, which is not JSON, nor any use as a number.")


def observation_from_json(value: Any, space: gym.Space) -> Any:
    """An observation of a space, from what a JSON document says.

    Arrays are nested lists, discrete values integers, `Dict` spaces objects, `Tuple` spaces lists.

    Args:
        value: What `json.loads` returned.
        space: The environment's observation space.

    Raises:
        ValueError: if it does not fit the space, or holds numbers that are not finite or do not
            fit the dtype.
    """
    return conform(_with_dtypes(value, space, "observation"), space)


def action_to_json(action: Any) -> str:
    """An action of the environment as JSON, in the same form as observations."""
    return json.dumps({"action": action}, default=lambda leaf: leaf.tolist(), allow_nan=False)


def _with_dtypes(value: Any, space: gym.Space, name: str) -> Any:
    """Casts numbers as far as the structure fits; `conform` says where it does not."""
    if isinstance(space, gym.spaces.Dict) and isinstance(value, dict):
        # Keys of JSON are strings, those of a space need not be.
        children = {str(key): (key, child) for key, child in space.spaces.items()}
        parts = {}
        for text, part in value.items():
            key, child = children.get(text, (text, None))
            parts[key] = part if child is None else _with_dtypes(part, child, f"{name}[{key!r}]")
        return parts
    if isinstance(space, gym.spaces.Tuple) and isinstance(value, list):
        children = [*space.spaces, *[None] * (len(value) - len(space.spaces))]
        return [
            part if child is None else _with_dtypes(part, child, f"{name}[{i}]")
            for i, (part, child) in enumerate(zip(value, children, strict=False))
        ]
    return value if space.dtype is None else _with_dtype(value, space.dtype, name)


def _with_dtype(value: Any, dtype: np.dtype, name: str) -> Any:
    try:
        array = np.asarray(value)
    except ValueError:
        return value  # nested lists of unequal lengths
    if array.dtype.kind not in "biuf":
        return value
    # JSON's integers have no width. `conform` judges by dtype and would refuse them.
    result = as_dtype(array, dtype, name)
    if not np.isfinite(result).all():
        raise ValueError(
            f"`{name}` holds numbers that are not finite in {dtype}. One of them would stay in the "
            "memory until the end of the episode."
        )
    return array if array.dtype.kind == "f" else result
