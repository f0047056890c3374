"""Check of a whole module: what it computes in training is what it computed in the rollout."""

import copy

import numpy as np
import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.torch import TorchRLModule
from torch import Tensor

from rlmodules.contract.case import ROWS, TOLERANCES, difference

STEPS = 13


def check_module(module: TorchRLModule, *, seed: int = 0) -> None:
    """Checks that single steps of a module with memory compute what a row in training does.

    Steps of `forward_exploration` and `forward_inference`, each from the state that the step before
    returned, have the action distributions of `forward_train` over rows `(B, T)` with padding, and
    the values of `compute_values`. For modules of PPO, APPO, IMPALA and MARWIL, RLlib's own
    included.

    Args:
        module: The module, as `RLModuleSpec.build` returns it. It is not changed.
        seed: Seed of the observations.

    Raises:
        AssertionError: If there is a difference. The message names it, the row and the step.
        ValueError: If the module has no memory or no value function, or is inference-only.
    """
    trains = isinstance(module, ValueFunctionAPI) and not module.inference_only
    if not (module.is_stateful() and trains):
        raise ValueError(
            f"{type(module).__name__} can't be checked: only a module with a state and with "
            "`compute_values` can, of PPO for instance, and not an inference-only one. Build it "
            "with `RLModuleSpec.build`."
        )
    module = copy.deepcopy(module).to("cpu")
    obs = _observations(module, seed)
    state = tree.map_structure(
        lambda x: torch.as_tensor(x).expand(ROWS, *np.shape(x)), module.get_initial_state()
    )
    seq_lens = torch.tensor([STEPS, STEPS // 2, 1])
    with torch.no_grad():
        # A row rarely starts an episode: its state is that after some steps.
        start = module.forward_inference({Columns.OBS: obs, Columns.STATE_IN: state})
        batch = {Columns.OBS: obs, Columns.STATE_IN: start[Columns.STATE_OUT]}
        padded = {**batch, Columns.SEQ_LENS: seq_lens}
        row = {
            "action distribution": module.forward_train(padded)[Columns.ACTION_DIST_INPUTS],
            "value": module.compute_values(padded),
        }
        for method in ("forward_exploration", "forward_inference"):
            steps = _rollout(module, method, batch)
            for name, expected in row.items():
                _compare(module, name, method, steps[name], expected, seq_lens)


def _observations(module: TorchRLModule, seed: int) -> dict:
    """Random observations, leaves `(B, T, ...)`."""
    space = copy.deepcopy(module.observation_space)
    space.seed(seed)
    samples = [space.sample() for _ in range(ROWS * STEPS)]
    return tree.map_structure(
        lambda *x: torch.as_tensor(np.stack(x).reshape(ROWS, STEPS, *np.shape(x[0]))), *samples
    )


def _rollout(module: TorchRLModule, method: str, batch: dict) -> dict[str, Tensor]:
    """Action distributions and values of single steps, joined to rows."""
    state, outputs = batch[Columns.STATE_IN], {"action distribution": [], "value": []}
    for t in range(STEPS):
        step = {
            Columns.OBS: tree.map_structure(lambda x, t=t: x[:, t : t + 1], batch[Columns.OBS]),
            Columns.STATE_IN: state,
        }
        out = getattr(module, method)(step)
        outputs["action distribution"].append(out[Columns.ACTION_DIST_INPUTS])
        outputs["value"].append(module.compute_values(step))
        state = out[Columns.STATE_OUT]
    return {name: torch.cat(values, 1) for name, values in outputs.items()}


def _compare(
    module: TorchRLModule,
    name: str,
    method: str,
    actual: Tensor,
    expected: Tensor,
    seq_lens: Tensor,
) -> None:
    for b, length in enumerate(seq_lens.tolist()):
        parts = actual[b : b + 1, :length], expected[b : b + 1, :length]
        if found := difference(*parts, TOLERANCES[torch.float32], row=b, over_time=True):
            raise AssertionError(
                f"{type(module).__name__} computes another {name} step by step with `{method}` "
                f"than in a row with `forward_train`: it {found}. Does each step start from the "
                f"state that it is given, and nothing else? ({ROWS} rows of {seq_lens.tolist()} "
                "valid steps)"
            )
