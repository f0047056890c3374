"""Exports a trained agent to two files and plays it from each: the returns must be the same.

What it shows
-------------
- `export_onnx` and `export_torch`, given a checkpoint's module.
- What a client does with such a file: `reset` where an episode starts, and each step's states back
  as the next one's. Episodes run side by side, one row of the batch each.
- `MemoryPolicy`, which plays the same episodes from the checkpoint.

How to run it
-------------
    python -m examples.train_popgym             # leaves a checkpoint in runs/
    python -m examples.export_policy            # of the run that was saved last
    python -m examples.export_policy runs/RepeatPreviousEasy-deep-seed0/checkpoints/000014

Checkpoints are those of `examples.train_popgym` with one of this package's memories. The files,
`policy.onnx` and `policy.pt2`, go to the run's directory. The exit code is 1 if returns differ.

Results to expect
-----------------
The default run of `examples.train_popgym` scores a mean return of 0.97 in all three ways.
`policy.onnx` has 329 KiB, `policy.pt2` 533 KiB. The command takes ten seconds.
"""

import argparse
import json
import logging
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
import onnxruntime
import torch

from connectors import MemoryPolicy
from examples.popgym_setup import make_env
from examples.run_dir import RunDir, newest_checkpoint
from rlmodules import export_onnx, export_torch
from rlmodules.modules.checkpoints import load_module

Arrays = dict[str, np.ndarray]
# From the observations of all episodes, and where one starts, to their actions.
Act = Callable[[list[Any], np.ndarray], Any]


class FileClient:
    """Acts with an exported file.

    Args:
        run: The file as a function from named inputs to named outputs.
        inputs: Shapes and dtypes of the inputs, as the file's metadata tell.
    """

    def __init__(self, run: Callable[[Arrays], Arrays], inputs: dict[str, Any]):
        self._run = run
        self._inputs = inputs
        self._state: Arrays = {}

    def act(self, observations: list[Any], reset: np.ndarray) -> np.ndarray:
        """The best actions."""
        inputs = stack("obs", observations) | {"reset": reset} | self._state
        for name, about in self._inputs.items():
            # Before the first step there are no states yet. With `reset` any will do.
            missing = np.zeros((len(reset), *about["shape"]))
            inputs[name] = inputs.get(name, missing).astype(about["dtype"])
        outputs = self._run(inputs)
        self._state = {
            name.replace("state_out", "state_in"): x
            for name, x in outputs.items()
            if name.startswith("state_out.")
        }
        return outputs["action"]


def onnx_client(path: Path) -> FileClient:
    """Acts with an ONNX file."""
    session = onnxruntime.InferenceSession(path)
    names = [output.name for output in session.get_outputs()]
    metadata = {entry.key: entry.value for entry in onnx.load(path).metadata_props}

    def run(inputs: Arrays) -> Arrays:
        return dict(zip(names, cast(Any, session.run(None, inputs)), strict=True))

    return FileClient(run, json.loads(metadata["inputs"]))


def torch_client(path: Path) -> FileClient:
    """Acts with a file that PyTorch runs."""
    files = {"metadata.json": ""}
    module = torch.export.load(path, extra_files=files).module()

    def run(inputs: Arrays) -> Arrays:
        outputs = module({name: torch.as_tensor(x) for name, x in inputs.items()})
        return {name: x.numpy() for name, x in outputs.items()}

    return FileClient(run, json.loads(files["metadata.json"])["inputs"])


def act_from(policy: MemoryPolicy) -> Act:
    """Acts with a policy, one client an episode."""

    def act(observations: list[Any], reset: np.ndarray) -> list[Any]:
        for client in np.flatnonzero(reset):
            policy.reset(client)
        return list(policy.act_batch(dict(enumerate(observations))).values())

    return act


def stack(name: str, observations: Sequence[Any]) -> Arrays:
    """Observations as a batch, parts of nested ones by the names that exported files give them."""
    first = observations[0]
    if not isinstance(first, (dict, tuple)):
        return {name: np.stack(observations)}
    keys = list(first) if isinstance(first, dict) else range(len(first))
    parts = [stack(f"{name}.{key}", [whole[key] for whole in observations]) for key in keys]
    return {part: x for batch in parts for part, x in batch.items()}


def play(act: Act, env: str, num_episodes: int) -> np.ndarray:
    """Returns of as many episodes, with the seeds 0, 1, 2 and so on, side by side."""
    envs = [make_env({"name": env}) for _ in range(num_episodes)]
    observations = [each.reset(seed=seed)[0] for seed, each in enumerate(envs)]
    returns, over = np.zeros(num_episodes), np.zeros(num_episodes, bool)
    reset = np.ones(num_episodes, bool)
    while not over.all():
        actions = act(observations, reset)
        reset = np.zeros(num_episodes, bool)
        # Episodes that are over stay in the batch, with what they saw last.
        for i in np.flatnonzero(~over):
            observations[i], reward, terminated, truncated, _ = envs[i].step(actions[i])
            returns[i] += float(reward)
            over[i] = terminated or truncated
    return returns


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the example.

    Returns:
        0, or 1 if the returns differ.
    """
    parser = argparse.ArgumentParser(
        prog="python -m examples.export_policy",
        description="Exports a trained agent, and plays it from the files and the checkpoint.",
    )
    parser.add_argument(
        "checkpoint", nargs="?", type=Path, help="default: the last one of all runs in runs/"
    )
    parser.add_argument("--num-episodes", type=int, default=100)
    args = parser.parse_args(argv)
    # RLlib's warnings about its own constructors.
    logging.getLogger("ray").setLevel(logging.ERROR)
    checkpoint = args.checkpoint or newest_checkpoint(Path("runs").glob("*/"))
    if checkpoint is None:
        parser.error("no checkpoint in runs/. Train one: python -m examples.train_popgym")
    folder = checkpoint.absolute().parents[1]
    env = RunDir(folder).settings()["env"]
    module: Any = load_module(checkpoint)
    if module.observation_space != make_env({"name": env}).observation_space:
        parser.error(
            f"the module in {checkpoint} does not see the observations of {env} as they are, but "
            "behind connectors, which a client would have to apply"
        )

    files = folder / "policy.onnx", folder / "policy.pt2"
    export_onnx(module, files[0])
    export_torch(module, files[1])
    for file in files:
        print(f"{file}: {file.stat().st_size / 1024:.0f} KiB")

    ways: dict[str, Act] = {
        "policy.onnx": onnx_client(files[0]).act,
        "policy.pt2": torch_client(files[1]).act,
        "MemoryPolicy": act_from(MemoryPolicy.from_checkpoint(checkpoint)),
    }
    returns = {name: play(act, env, args.num_episodes) for name, act in ways.items()}
    print(f"mean return of {args.num_episodes} episodes of {env}")
    for name, values in returns.items():
        print(f"  {name:14}{values.mean():.4f}")
    # Continuous actions differ in their last digits.
    expected = returns["MemoryPolicy"]
    return 0 if all(np.allclose(x, expected, atol=1e-3) for x in returns.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
