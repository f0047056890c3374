"""One pass of the pipelines and modules for all clients that act."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Iterable
from typing import Any

import numpy as np
import tree
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.core.columns import Columns

from connectors.acting.clients import Client
from connectors.acting.loading import ActingParts
from connectors.acting.observations import check_finite, check_states
from connectors.agents import acting_agents, batch_key
from connectors.snapshots import copy_rows
from connectors.validation import initial_state, row_length


class Passes:
    """Runs what stands between observations and actions as an EnvRunner does.

    Args:
        parts: What a checkpoint says about it.
        explore: Whether to sample actions.
    """

    def __init__(self, parts: ActingParts, *, explore: bool):
        self._parts = parts
        self._module: Any = parts.module
        self._explore = explore
        # By module; None where it has no memory.
        self._first_states: dict[str, Any] = {}
        modules: dict[str, Any] = parts.modules
        for module_id, module in modules.items():
            module.eval()
            if row_length(module) is None:
                self._first_states[module_id] = None
                continue
            first = initial_state(module, "cpu")
            self._first_states[module_id] = tree.map_structure(np.asarray, first)

    def run(self, clients: dict[Hashable, Client]) -> dict[str, Any]:
        """Runs the pipelines and the modules; gives the clients their next states.

        Args:
            clients: Each with the latest observations in its episode.

        Returns:
            What the module-to-env pipeline does.

        Raises:
            ValueError: if a number that a module reads, or a state, is not finite.
        """
        names, known = list(clients), list(clients.values())
        episodes = [client.episode for client in known]
        acting = acting_agents(episodes)
        # `BuildModuleBatch` keeps a `STATE_IN` that it is given. What the pieces share from step
        # to step is therefore not needed beyond this one.
        states = {
            batch_key(agent): [known[i].states.get(agent_id, self._first_states[module_id])]
            for module_id, rows in acting.items()
            if self._first_states[module_id] is not None
            for (i, agent_id), agent in rows
        }
        whose = {
            module_id: [names[i] if id_ is None else (names[i], id_) for (i, id_), _ in rows]
            for module_id, rows in acting.items()
        }
        common: dict[str, Any] = {
            "rl_module": self._module,
            "episodes": episodes,
            "explore": self._explore,
            "shared_data": {},
        }
        given = {Columns.STATE_IN: states} if states else {}
        batch = self._parts.env_to_module(batch=given, **common)
        for module_id, columns in self._by_module(batch):
            check_finite(columns[Columns.OBS], whose[module_id])
        if self._explore:
            # Schedules, such as that of DQN's epsilon, are at their end.
            outputs = self._module.forward_exploration(batch, t=sys.maxsize)
        else:
            outputs = self._module.forward_inference(batch)
        for module_id, columns in self._by_module(outputs):
            if self._first_states[module_id] is None:
                continue
            check_states(columns[Columns.STATE_OUT], whose[module_id])
            latest = copy_rows(columns[Columns.STATE_OUT], range(len(whose[module_id])))
            for ((i, agent_id), _), state in zip(acting[module_id], latest, strict=True):
                known[i].states[agent_id] = state
        return self._parts.module_to_env(batch=outputs, **common)

    def _by_module(self, columns: dict[str, Any]) -> Iterable[tuple[str, Any]]:
        return columns.items() if self._parts.is_multi_agent else [(DEFAULT_MODULE_ID, columns)]
