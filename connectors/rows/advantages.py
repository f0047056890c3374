"""Advantages and value targets from rows."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import gymnasium as gym
import numpy as np
import torch
import tree
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.apis.value_function_api import ValueFunctionAPI
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.evaluation.postprocessing import Postprocessing
from ray.rllib.utils.annotations import override

from connectors.agents import agents_by_module
from connectors.collectives import sum_over_learners
from connectors.rows.columns import Placement
from connectors.rows.later_columns import PLACEMENTS
from connectors.rows.layout import Layout, RowLayout
from connectors.rows.values import values_of_batch
from connectors.validation import device_of


class ComputeAdvantages(ConnectorV2):
    """Generalised advantage estimation, in place of RLlib's `GeneralAdvantageEstimation`.

    Value targets are RLlib's. What differs: values are computed in eval mode, without gradient and
    in blocks of rows; advantages are standardised over the steps that are trained on, those of all
    Learners, where RLlib counts the appended bootstrap steps too and each Learner for itself; the
    values stay in the batch; all three columns are 0 on bootstrap steps and padding; rows that hold
    nothing but a bootstrap step have done their work, and are dropped.

    Args:
        input_observation_space: See `ConnectorV2`.
        input_action_space: See `ConnectorV2`.
        config: The algorithm's config: each module has its own `gamma` and `lambda_` there, set in
            `algorithm_config_overrides_per_module`. RLlib takes the same ones for all.

    References:
        Schulman et al. 2016, https://arxiv.org/abs/1506.02438, eq. 16.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        config: Any,
    ):
        super().__init__(input_observation_space, input_action_space)
        self.config = config

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        return (self.input_observation_space, self.input_action_space), {"config": self.config}

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        rl_module: MultiRLModule,
        batch: dict[str, Any],
        episodes: list[Any],
        explore: bool | None = None,
        shared_data: dict | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Adds `ADVANTAGES`, `VALUE_TARGETS` and the values, `VF_PREDS`, to each module's batch."""
        agents = agents_by_module(episodes)
        placements: dict[str, Placement] = (shared_data or {}).get(PLACEMENTS, {})
        results: dict[str, _Steps] = {}
        for module_id, module_batch in batch.items():
            if module_id not in rl_module:
                continue
            module = rl_module[module_id].unwrapped()
            if not isinstance(module, ValueFunctionAPI):
                continue
            lengths = [len(episode) for episode in agents[module_id]]
            settings = self.config.get_config_for_module(module_id)
            placement = placements.get(module_id)
            rows = placement.rows if placement is not None else None
            results[module_id] = self._compute(module, module_batch, lengths, rows, settings)
        moments = _moments(results, rl_module)
        for module_id, steps in results.items():
            mean, std = moments[module_id]
            for column, data in (
                (Postprocessing.ADVANTAGES, (steps.advantages - mean) / max(1e-4, std)),
                (Postprocessing.VALUE_TARGETS, steps.targets),
                (Columns.VF_PREDS, steps.values),
            ):
                data = np.where(steps.trained, data, 0.0).astype(np.float32)
                rows = data if steps.layout is None else steps.layout.pad(data)
                batch[module_id][column] = torch.from_numpy(rows).to(steps.device)
            if steps.layout is not None:
                trained = np.any(steps.layout.pad(steps.trained), axis=1)
                batch[module_id] = _keep_rows(batch[module_id], trained)
        return batch

    def _compute(
        self,
        module: ValueFunctionAPI,
        batch: dict[str, Any],
        lengths: list[int],
        rows: Layout | None,
        settings: Any,
    ) -> _Steps:
        """Values, targets and advantages of a module's steps, one after the other."""
        values = values_of_batch(module, batch)
        # RLlib's own pieces leave no layout behind.
        layout = (rows or RowLayout(lengths, int(values.shape[1]))) if values.ndim == 2 else None

        def steps(column: torch.Tensor) -> np.ndarray:
            column = column.detach().cpu()
            # numpy knows no bfloat16, which autocast may leave.
            array = (column.float() if column.is_floating_point() else column).numpy()
            return array if layout is None else layout.unpad(array)

        values_of_steps = steps(values)
        trained = (
            steps(batch[Columns.LOSS_MASK]).astype(bool)
            if Columns.LOSS_MASK in batch
            else np.ones(len(values_of_steps), dtype=bool)
        )
        targets = value_targets(
            values=values_of_steps,
            rewards=steps(batch[Columns.REWARDS]),
            terminateds=steps(batch[Columns.TERMINATEDS]),
            truncateds=steps(batch[Columns.TRUNCATEDS]),
            gamma=settings.gamma,
            lambda_=settings.lambda_,
        )
        return _Steps(layout, trained, values_of_steps, targets, values.device)


@dataclass(frozen=True)
class _Steps:
    """A module's steps, concatenated: `(N,)` arrays."""

    layout: Layout | None
    trained: np.ndarray
    values: np.ndarray
    targets: np.ndarray
    device: torch.device

    @cached_property
    def advantages(self) -> np.ndarray:
        return self.targets - self.values


def _keep_rows(batch: dict[str, Any], kept: np.ndarray) -> dict[str, Any]:
    """The batch without rows that no one is trained on, unless there are no others."""
    # Where a user's piece asks for infos, no one knows how they are laid out.
    if kept.all() or not kept.any() or Columns.INFOS in batch:
        return batch
    return tree.map_structure(lambda column: column[kept], batch)


def _moments(
    results: dict[str, _Steps], rl_module: MultiRLModule
) -> dict[str, tuple[float, float]]:
    """Mean and standard deviation of each module's advantages, over the steps of all Learners.

    With moments of their own, Learners would weigh the same step differently.
    """
    names = list(rl_module.keys())
    sums = np.zeros((len(names), 3))
    for row, name in zip(sums, names, strict=True):
        if name in results:
            kept = results[name].advantages[results[name].trained].astype(np.float64)
            row[:] = len(kept), kept.sum(), (kept**2).sum()
    # A Learner that has no steps of a module takes part all the same.
    sums = sum_over_learners(sums, device_of(rl_module[names[0]].unwrapped()))
    counts = sums[:, 0].clip(min=1)
    means = sums[:, 1] / counts
    stds = np.sqrt((sums[:, 2] / counts - means**2).clip(min=0))
    return dict(zip(names, zip(means.tolist(), stds.tolist(), strict=True), strict=True))


def value_targets(
    *,
    values: np.ndarray,
    rewards: np.ndarray,
    terminateds: np.ndarray,
    truncateds: np.ndarray,
    gamma: float,
    lambda_: float,
) -> np.ndarray:
    """GAE value targets of concatenated episode chunks, each with its bootstrap step at the end.

    The same numbers as RLlib's `compute_value_targets`, on all steps but the bootstrap ones.

    Args:
        values: `(N,)` value of each step's observation.
        rewards: `(N,)`.
        terminateds: `(N,)` bool: no observation follows this step.
        truncateds: `(N,)` bool: the next step is the chunk's bootstrap step.
        gamma: Discount factor.
        lambda_: GAE's lambda.

    Returns:
        `(N,)` float32.
    """
    continues = 1.0 - terminateds
    next_values = np.append(values[1:], 0.0)
    residuals = rewards + gamma * continues * next_values - values
    decays = gamma * lambda_ * (continues * (1.0 - truncateds))
    # Plain floats: a numpy operation a step costs ten times as much.
    advantages = []
    running = 0.0
    for residual, decay in zip(residuals[::-1].tolist(), decays[::-1].tolist(), strict=True):
        running = residual + decay * running
        advantages.append(running)
    return (np.array(advantages[::-1], dtype=np.float32) + values).astype(np.float32)
