"""Trained modules as files for devices that have neither Ray nor this package."""

from __future__ import annotations

import contextlib
import json
import logging
import warnings
from collections.abc import Iterator
from os import PathLike
from typing import Any

import torch
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor
from torch.export import ExportedProgram
from torch.fx import GraphModule

from rlmodules.export.step_model import StepModel
from rlmodules.modules.checkpoints import load_module

FORMAT_VERSION = 1
METADATA_FILE = "metadata.json"
# The lowest that PyTorch's exporter has operators for, so that older runtimes read the file too.
OPSET = 18


def export_onnx(module: TorchRLModule | str | PathLike[str], path: str | PathLike[str]) -> None:
    """Writes one greedy step of a module with memory as an ONNX file.

    Inputs and outputs have a batch axis of any size and no time axis; states are among them. See
    [their names](../how-to/export.md#inputs-and-outputs). The file's `metadata_props` hold them
    with shapes and dtypes, as JSON. The module stays as it is, and its device doesn't matter.

    Args:
        module: A module with a state, this package's or another. Or the folder of a checkpoint: a
            module's, or an Algorithm's with one module.
        path: Where to write.

    Raises:
        ImportError: If a package of the extra `export` is missing.
        TypeError: If `module` is no `TorchRLModule`.
        ValueError: If it has no state, or cannot be exported; or there is no such checkpoint.

    Example:
        ```python
        from rlmodules import export_onnx


        def export(checkpoint):
            export_onnx(checkpoint, "policy.onnx")
        ```
    """
    try:
        import onnx
        import onnxscript  # noqa: F401 - torch needs it
    except ImportError as error:
        raise ImportError(
            f"`export_onnx` needs the package {error.name!r}, which is missing. Install the extra "
            "`export`: pip install 'rllib-memory[export]'."
        ) from error
    step = _step_model(module)
    program, inputs, outputs = _trace(step)
    with _explained(step), _quiet():
        exported: Any = torch.onnx.export(
            program,
            dynamo=True,
            opset_version=OPSET,
            input_names=list(inputs),
            output_names=list(outputs),
            dynamic_shapes=({name: {0: "batch"} for name in inputs},),
            verbose=False,
        )
    proto = exported.model_proto
    graph = proto.graph
    # What PyTorch notes on each makes up most of a small file.
    for part in (*graph.node, *graph.value_info, *graph.initializer, *graph.input, *graph.output):
        part.ClearField("metadata_props")
    metadata = _metadata(step, inputs, outputs)
    onnx.helper.set_model_props(proto, {k: json.dumps(v) for k, v in metadata.items()})
    onnx.checker.check_model(proto, full_check=True)
    onnx.save(proto, path)


def export_torch(module: TorchRLModule | str | PathLike[str], path: str | PathLike[str]) -> None:
    """Writes one greedy step of a module with memory as a file that PyTorch runs alone.

    `torch.export.load(path).module()` maps a dict of tensors to a dict of tensors, with the names
    that `export_onnx` gives. The file holds `metadata.json`. The module stays as it is.

    Args:
        module: A module with a state, this package's or another. Or the folder of a checkpoint: a
            module's, or an Algorithm's with one module.
        path: Where to write, a name that ends in `.pt2`.

    Raises:
        TypeError: If `module` is no `TorchRLModule`.
        ValueError: If it has no state, or cannot be exported; or there is no such checkpoint.
    """
    step = _step_model(module)
    program, inputs, outputs = _trace(step)
    metadata = json.dumps(_metadata(step, inputs, outputs))
    torch.export.save(program, path, extra_files={METADATA_FILE: metadata})


def _step_model(module: TorchRLModule | str | PathLike[str]) -> StepModel:
    return StepModel(load_module(module) if isinstance(module, str | PathLike) else module)


def _trace(step: StepModel) -> tuple[ExportedProgram, dict[str, Tensor], dict[str, Tensor]]:
    """The step as a graph, with examples of its inputs and outputs."""
    with _explained(step), _quiet(), torch.no_grad():
        inputs = step.example()
        shapes = {name: {0: torch.export.Dim("batch")} for name in inputs}
        outputs = step(inputs)
        program = torch.export.export(step, (inputs,), dynamic_shapes=(shapes,))
    # PyTorch's notes on where nodes come from: half of a small file, and paths of this machine.
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, GraphModule) else ():
            for origin in ("stack_trace", "nn_module_stack", "torch_fn", "from_node"):
                node.meta.pop(origin, None)
    return program, inputs, outputs


def _metadata(
    step: StepModel, inputs: dict[str, Tensor], outputs: dict[str, Tensor]
) -> dict[str, Any]:
    """What a client needs to know; shapes are those of one row."""

    def describe(tensors: dict[str, Tensor]) -> dict[str, Any]:
        return {
            name: {"shape": list(x.shape[1:]), "dtype": str(x.dtype).removeprefix("torch.")}
            for name, x in tensors.items()
        }

    return {
        "format_version": FORMAT_VERSION,
        "observation_space": str(step.module.observation_space),
        "action_space": str(step.module.action_space),
        "inputs": describe(inputs),
        "outputs": describe(outputs),
    }


@contextlib.contextmanager
def _explained(step: StepModel) -> Iterator[None]:
    """Says what is wrong with a module that PyTorch fails on."""
    try:
        yield
    except Exception as error:
        raise ValueError(
            f"`{type(step.module).__name__}` cannot be exported, PyTorch says above why. Its "
            "`forward_inference` must compute tensors from tensors, for any batch size, and must "
            "not decide by their values what to compute."
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hides the warnings that PyTorch's exporters give about themselves."""
    logger = logging.getLogger("torch.onnx")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        logger.setLevel(level)
