"""Memory maps as PNG and as one HTML file that needs nothing else."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.colors import ListedColormap
from matplotlib.figure import Figure

from rlmodules.tools.memory_map import Layer, MemoryMap

_TEMPLATE = Path(__file__).with_name("memory_map.html")
_PANEL = 2.2  # inches
_SIGNS = ListedColormap(["tab:blue", "tab:red"])
# What is written stands out from white and from black: such pictures have no ground of their own.
EITHER_GROUND: Any = {
    f"{part}color": "#808080" for part in ("text.", "axes.label", "axes.edge", "xtick.", "ytick.")
}


@matplotlib.rc_context(EITHER_GROUND)
def draw_png(memory_map: MemoryMap, path: Path, *, title: str) -> None:
    """Draws a panel for each layer and head, each with a colour scale of its own.

    The smaller a weight, the more its cell shows of the ground, white or black.
    """
    layers = memory_map.layers
    num_heads = max(len(layer.heads) for layer in layers)
    # Not pyplot: no backend is chosen, no window opened.
    figure = Figure(
        figsize=(_PANEL * num_heads + 0.6, _PANEL * len(layers) + 0.8), layout="constrained"
    )
    panels = figure.subplots(len(layers), num_heads, squeeze=False, sharex=True, sharey=True)
    for row, layer in zip(panels, layers, strict=True):
        row[0].set_ylabel(f"{layer.name}\nstep")
        for panel in row[len(layer.heads) :]:
            panel.set_axis_off()
        for head, (panel, weights) in enumerate(zip(row, layer.heads, strict=False)):
            largest = np.abs(weights).max()
            shares = np.abs(weights) / (largest or 1.0)
            panel.imshow(weights > 0, cmap=_SIGNS, vmin=0, vmax=1, alpha=shares)
            panel.set_title(f"{_label(layer, head)}, up to {largest:.2g}", fontsize="small")
    for panel in panels[-1]:
        panel.set_xlabel("takes from step")
    figure.suptitle(title)
    figure.savefig(path, dpi=100, transparent=True)


def draw_html(memory_map: MemoryMap, path: Path, *, title: str) -> None:
    """Writes the same as a page that tells weight, actions and rewards of what is pointed at."""
    data = {
        "title": title,
        "layers": [
            {
                "name": layer.name,
                "kind": layer.kind,
                "labels": [_label(layer, head) for head in range(len(layer.heads))],
                "heads": [_rows(weights) for weights in layer.heads],
            }
            for layer in memory_map.layers
        ],
        "actions": [str(_plain(action)) for action in memory_map.actions],
        "rewards": [round(reward, 4) for reward in memory_map.rewards],
    }
    # No text of the data can end the script that it stands in.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    path.write_text(_TEMPLATE.read_text(encoding="utf-8").replace("DATA", text), encoding="utf-8")


def _label(layer: Layer, head: int) -> str:
    return f"head {head}" if layer.kind == "weights" else "gradient"


def _rows(weights: np.ndarray) -> list[list[float]]:
    """The lower triangle, row by row, in three digits of the largest weight."""
    digits = 3 - int(np.floor(np.log10(np.abs(weights).max() or 1.0)))
    return [np.round(row[: t + 1].astype(float), digits).tolist() for t, row in enumerate(weights)]


def _plain(action: Any) -> Any:
    """An action as people read it."""
    if isinstance(action, dict):
        return {key: _plain(value) for key, value in action.items()}
    if isinstance(action, tuple):
        return tuple(_plain(value) for value in action)
    return np.asarray(action).round(3).tolist()
