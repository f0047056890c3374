"""Observations and actions in JSON, for every kind of space."""

import json
import re
from pathlib import Path

import gymnasium as gym
import numpy as np
import pytest
import tree

from connectors.serving.json_requests import action_to_json, fields_from_json, observation_from_json

S = gym.spaces
SPACES = [
    S.Box(-1.0, 1.0, (3,), np.float32),
    S.Box(-1.0, 1.0, (), np.float64),
    S.Box(0, 255, (4, 3, 2), np.uint8),
    S.Box(-5, 5, (2,), np.int16),
    S.Discrete(5),
    S.Discrete(5, start=-2),
    S.MultiDiscrete([3, 4]),
    S.MultiBinary(4),
    S.Tuple([S.Discrete(2), S.Box(0, 1, (2,)), S.Tuple([S.MultiBinary(2)])]),
    S.Dict({"a": S.Box(0, 1, (2,)), "b": S.Dict({"c": S.Discrete(3)})}),
    S.Dict({0: S.Discrete(2), 1: S.Discrete(3)}),
]


@pytest.mark.parametrize("space", SPACES, ids=str)
def test_round_trip(space):
    """What goes out as an action comes in as an observation: same structure, dtype and bits."""
    space.seed(0)
    for _ in range(5):
        sample = space.sample()
        document = json.loads(action_to_json(sample))["action"]
        back = observation_from_json(document, space)
        tree.assert_same_structure(back, sample, check_types=False)
        for ours, theirs in zip(tree.flatten(back), tree.flatten(sample), strict=True):
            assert np.asarray(ours).dtype == np.asarray(theirs).dtype
            np.testing.assert_array_equal(ours, theirs)


NESTED = S.Dict({"a": S.Tuple([S.Box(-1, 1, (2,)), S.Discrete(3)])})
BYTES = S.Box(0, 255, (2,), np.uint8)
FLOATS = S.Box(-1, 1, (2,))


@pytest.mark.parametrize(
    ("space", "value", "message"),
    [
        (FLOATS, [0.0], r"`observation` has shape \(1,\)"),
        (FLOATS, [[0.0], [1.0, 2.0]], "has shape"),
        (FLOATS, {"a": 1}, "has shape"),
        (FLOATS, None, "has shape"),
        (FLOATS, ["0", "1"], "has dtype"),
        (FLOATS, [0.0, None], "has dtype object"),
        (FLOATS, [0.0, 10**400], "has dtype object"),
        (FLOATS, [0.0, float("inf")], "not finite in float32"),
        (FLOATS, [0.0, 1e300], "not finite in float32"),
        (BYTES, [0, 256], "`observation` holds integers beyond those of uint8"),
        (BYTES, [0, -1], "beyond those of uint8"),
        (BYTES, [0.0, 1.0], "has dtype float64"),
        (S.Discrete(3), 3, "not in the space"),
        (S.Discrete(3), 1.0, "has dtype float64"),
        (S.Discrete(3), "1", "has dtype"),
        (S.MultiBinary(2), [0, 256], "beyond those of int8"),
        (NESTED, [], "must be a dict with the keys"),
        (NESTED, {"a": [[0, 0], 1], "b": 2}, "must be a dict with the keys"),
        (NESTED, {"a": [[0, 0]]}, "must be a tuple of 2 parts"),
        (NESTED, {"a": [[0, 0], 1, 2]}, "must be a tuple of 2 parts"),
        (NESTED, {"a": 1}, "must be a tuple of 2 parts"),
        (NESTED, {"a": [[0, 1e300], 1]}, r"`observation\['a'\]\[0\]` holds numbers that are not"),
        (S.Dict({0: S.Discrete(2)}), {"1": 0}, "must be a dict with the keys"),
    ],
)
def test_what_does_not_fit(space, value, message):
    with pytest.raises(ValueError, match=message):
        observation_from_json(value, space)


def test_an_action_that_is_not_finite_is_no_json():
    with pytest.raises(ValueError, match="not JSON compliant"):
        action_to_json(np.float32("nan"))


def test_the_requests_of_several_agents_in_the_docs():
    """The lines that start with `curl` have the fields that they may have."""
    page = Path(__file__).parents[3] / "docs" / "how-to" / "multi-agent.md"
    lines = re.findall(r"^curl localhost:8000/(\w+) -d '(.*)'$", page.read_text(), re.MULTILINE)
    agents = [fields_from_json(verb, body.encode()).get("agent") for verb, body in lines]
    assert agents == [None, "hider", "left", "left", None]
