"""The table of how each space is encoded says what the encoder does."""

import re
from pathlib import Path

import numpy as np
import pytest
from gymnasium import spaces

from rlmodules.networks.encoders import ObservationEncoder

PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "inputs.md"
ROW = re.compile(r"^\| (.+) \| `(\w+\(.*\))` \| (.+) \| (\d+) \|$", re.MULTILINE)
ROWS = ROW.findall(PAGE.read_text())
SETTING = re.compile(r"`(\w+)=(\S+)`")


@pytest.mark.parametrize(("kind", "example", "becomes", "inputs"), ROWS)
def test_row(kind, example, becomes, inputs):
    space = eval(example, {"np": np, **vars(spaces)})
    settings = {name: eval(value) for name, value in SETTING.findall(kind)}
    one_hot = settings.pop("one_hot_max_values", 0)
    encoder = ObservationEncoder(space, [], None, model_config=settings, one_hot_max_values=one_hot)
    assert encoder.input_dim == int(inputs)


def test_every_space_has_a_row():
    assert {name for row in ROWS for name in re.findall(r"`(\w+)`", row[0])} == {
        "Box", "Discrete", "MultiDiscrete", "MultiBinary", "Dict", "Tuple"
    }  # fmt: skip
