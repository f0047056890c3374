"""What a module costs: parameters, states, arithmetic. Numbers only, for any RLModule."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis import (
    InferenceOnlyAPI,
    QNetAPI,
    TargetNetworkAPI,
    ValueFunctionAPI,
)
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from rlmodules.modules.base import MemoryCore


def parameters(module: Any) -> dict[str, Any]:
    """Numbers of parameters: in all, of an EnvRunner's copy, and of each part.

    Cores count as two parts, encoder and memory. Target networks are not among them.
    """
    parts: dict[str, int] = {}
    inference_only = 0
    has_inference_copy = issubclass(type(module), InferenceOnlyAPI)
    training_only = module.get_non_inference_attributes() if has_inference_copy else []
    for name, layers in _layers(module).items():
        numbers = {part: sum(x.numel() for x in layer) for part, layer in layers.items()}
        parts.update(numbers)
        if name not in training_only:
            inference_only += sum(numbers.values())
    return {"total": sum(parts.values()), "inference_only": inference_only, "parts": parts}


def _layers(module: Any) -> dict[str, dict[str, Any]]:
    """By attribute of the module: the names of its parts and their parameters."""
    if not isinstance(module, nn.Module):
        return {}  # RLlib's random policies, for example
    layers: dict[str, dict[str, Any]] = {}
    for name, child in module.named_children():
        if isinstance(child, MemoryCore):
            parts = {"encoder": child.encoder, "memory": child.memory}
            layers[name] = {f"{name}.{part}": x.parameters() for part, x in parts.items()}
        else:
            layers[name] = {name: child.parameters()}
    for name, parameter in module.named_parameters(recurse=False):
        layers[name] = {name: [parameter]}
    return layers


def state(module: Any) -> dict[str, Any]:
    """The leaves of the recurrent state of one row: names, shapes, sizes. Empty without memory."""
    leaves = []
    if module.is_stateful():
        for path, value in tree.flatten_with_path(module.get_initial_state()):
            leaf = torch.as_tensor(value)
            leaves.append(
                {
                    "name": ".".join(map(str, path)),
                    "shape": list(leaf.shape),
                    "dtype": str(leaf.dtype).removeprefix("torch."),
                    "numbers": leaf.numel(),
                    "bytes": leaf.nbytes,
                }
            )
    return {
        "leaves": leaves,
        "numbers": sum(leaf["numbers"] for leaf in leaves),
        "bytes": sum(leaf["bytes"] for leaf in leaves),
    }


def flops(module: Any, max_seq_len: int | None) -> dict[str, int]:
    """Floating-point operations per step of matrix products and convolutions, two a multiply-add.

    Counted by PyTorch on real passes over one row. Element-wise operations are not counted.

    Args:
        module: The module. One of DQN or SAC gets target networks.
        max_seq_len: Steps of a training row; None without memory.

    Returns:
        `rollout`: of a step in the rollout. `training`: of a step of a row in one forward and
        backward pass, losses not included.
    """
    kind = type(module)
    if issubclass(kind, QNetAPI) and issubclass(kind, TargetNetworkAPI):
        module.make_target_networks()
    # PyTorch counts no products inside oneDNN's LSTM, and none that are compiled.
    onednn: Any = torch.backends.mkldnn
    unfused = onednn.flags(enabled=False, allow_tf32=None, fp32_precision=None)
    with unfused, torch.compiler.set_stance("force_eager"):
        with FlopCounterMode(display=False) as rollout, torch.no_grad():
            module.forward_inference(_batch(module, None if max_seq_len is None else 1))
        with FlopCounterMode(display=False) as training:
            batch = _batch(module, max_seq_len)
            outputs = dict(module.forward_train(batch))
            if issubclass(kind, ValueFunctionAPI):
                embeddings = outputs.get(Columns.EMBEDDINGS)
                outputs["values"] = module.compute_values(batch, embeddings=embeddings)
            losses = [leaf.sum() for leaf in tree.flatten(outputs) if _has_gradient(leaf)]
            torch.stack(losses).sum().backward()
    module.zero_grad()
    return {
        "rollout": rollout.get_total_flops(),
        "training": math.ceil(training.get_total_flops() / (max_seq_len or 1)),
    }


def _has_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.requires_grad


def _batch(module: Any, num_steps: int | None) -> dict[str, Any]:
    """One row of `num_steps` steps with a time axis, or a step without one."""
    shape = (1,) if num_steps is None else (1, num_steps)

    def repeated(space: Any) -> Any:
        return tree.map_structure(
            lambda leaf: torch.as_tensor(np.broadcast_to(leaf, shape + np.shape(leaf)).copy()),
            space.sample(),
        )

    batch = {
        Columns.OBS: repeated(module.observation_space),
        Columns.ACTIONS: repeated(module.action_space),
    }
    if num_steps is not None:
        batch[Columns.STATE_IN] = tree.map_structure(
            lambda leaf: torch.as_tensor(leaf)[None], module.get_initial_state()
        )
    return batch
