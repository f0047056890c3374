"""One step of a trained module as a function of tensors: nothing hidden, no time axis."""

from __future__ import annotations

import copy
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space
from torch import Tensor, nn

from rlmodules.modules.base import BaseMemoryRLModule

RESET = "reset"
STATE_IN = "state_in"
STATE_OUT = "state_out"


class StepModel(nn.Module):
    """Takes a step of a module with memory, greedily: a dict of tensors to a dict of tensors.

    All have a leading batch axis and no time axis. Keys of nested parts are joined by dots.

    | in | |
    |---|---|
    | `obs`, `obs.<key>` | a leaf of the observation, in the dtype of its space |
    | `reset (B,)` bool | whether an episode starts: its row's state is then the initial one |
    | `state_in.<key>` | a leaf of the state, of any value where `reset` is True |

    | out | |
    |---|---|
    | `action`, `action.<key>` | a leaf of the best action, `Box` actions unsquashed to bounds |
    | `action_dist_inputs` | logits, or means and log standard deviations; none in DQN |
    | `state_out.<key>` | the next step's `state_in.<key>` |

    Args:
        module: An RLModule with a state. It is copied.

    Raises:
        TypeError: If it is no `TorchRLModule`.
        ValueError: If it has no state, or two leaves would get the same name.
    """

    def __init__(self, module: TorchRLModule):
        super().__init__()
        if not isinstance(module, TorchRLModule):
            raise TypeError(
                f"`module` is a {type(module).__name__}, but must be a TorchRLModule. Give "
                "`algo.get_module()`, or what `RLModule.from_checkpoint` loads from a module's own "
                "folder. Of several agents' modules give one."
            )
        if not module.is_stateful():
            raise ValueError(
                f"`module` is a {type(module).__name__} without a state, but what is exported here "
                "carries one from step to step. Export it as any other network, with "
                "`torch.onnx.export` or `torch.export`."
            )
        ours = isinstance(module, BaseMemoryRLModule)
        acting = module.acting_copy() if ours else copy.deepcopy(module)
        self.module: Any = acting.cpu().eval().requires_grad_(False)
        self._obs_spaces = get_base_struct_from_space(acting.observation_space)
        self._action_spaces = get_base_struct_from_space(acting.action_space)
        self._obs_names = _names("obs", self._obs_spaces)
        self._action_names = _names("action", self._action_spaces)
        state = self.module.get_initial_state()
        self._state_in, self._state_out = _names(STATE_IN, state), _names(STATE_OUT, state)

    def example(self, num_rows: int = 2) -> dict[str, Tensor]:
        """Inputs of the right shapes and dtypes, zeros but for `reset`."""
        names = [*self._obs_names, RESET, *self._state_in]
        spaces = tree.flatten(self._obs_spaces)
        leaves = [torch.as_tensor(np.zeros(space.shape, space.dtype)) for space in spaces]
        leaves += [torch.tensor(True), *map(torch.zeros_like, self._initial_state())]
        return {
            name: leaf.expand(num_rows, *leaf.shape).clone()
            for name, leaf in zip(names, leaves, strict=True)
        }

    def forward(self, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Takes a step."""
        obs = [inputs[name].unsqueeze(1) for name in self._obs_names]
        state = [
            torch.where(_like(inputs[RESET], inputs[name]), first, inputs[name])
            for name, first in zip(self._state_in, self._initial_state(), strict=True)
        ]
        outputs = self.module.forward_inference(
            {
                Columns.OBS: tree.unflatten_as(self._obs_spaces, obs),
                Columns.STATE_IN: tree.unflatten_as(self.module.get_initial_state(), state),
            }
        )
        actions = zip(
            tree.flatten(self._best_action(outputs)),
            tree.flatten(self._action_spaces),
            strict=True,
        )
        leaves = [_for_environment(action.squeeze(1), space) for action, space in actions]
        step = dict(zip(self._action_names, leaves, strict=True))
        if Columns.ACTION_DIST_INPUTS in outputs:
            step[Columns.ACTION_DIST_INPUTS] = outputs[Columns.ACTION_DIST_INPUTS].squeeze(1)
        state_out = tree.flatten(outputs[Columns.STATE_OUT])
        return step | dict(zip(self._state_out, state_out, strict=True))

    def _initial_state(self) -> list[Tensor]:
        return [torch.as_tensor(leaf) for leaf in tree.flatten(self.module.get_initial_state())]

    def _best_action(self, outputs: dict[str, Any]) -> Any:
        """What RLlib's `GetActions` takes without exploration."""
        if Columns.ACTIONS in outputs:
            return outputs[Columns.ACTIONS]
        dist_class = self.module.get_inference_action_dist_cls()
        dist = dist_class.from_logits(outputs[Columns.ACTION_DIST_INPUTS])
        return dist.to_deterministic().sample()


def _for_environment(action: Tensor, space: gym.Space) -> Tensor:
    """Unsquashes an action, as RLlib's `unsquash_action` does with numpy arrays, float16 too."""
    dtype = torch.as_tensor(np.zeros((), space.dtype)).dtype
    if not (isinstance(space, gym.spaces.Box) and dtype.is_floating_point and space.is_bounded()):
        return action.to(dtype)
    low, high = torch.as_tensor(space.low), torch.as_tensor(space.high)
    if dtype == torch.float16:
        low, high = low.float(), high.float()
    return (low + (action + 1.0) * (high - low) / 2.0).clamp(low, high).to(dtype)


def _like(flags: Tensor, x: Tensor) -> Tensor:
    """Flags `(B,)` with as many axes as `x (B, ...)`."""
    return flags.view(-1, *[1] * (x.dim() - 1))


def _names(prefix: str, structure: Any) -> list[str]:
    """A name for each leaf, in the order of `tree.flatten`."""
    paths = [path for path, _ in tree.flatten_with_path(structure)]
    names = [".".join([prefix, *map(str, path)]) for path in paths]
    if len(set(names)) < len(names):
        raise ValueError(
            f"The keys of `{prefix}` give {names}, of which two are equal: nested keys are joined "
            "by dots. Rename those that have dots in them."
        )
    return names
