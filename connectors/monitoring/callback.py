"""A callback that logs what memories do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import tree
from ray.rllib.callbacks.callbacks import RLlibCallback
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.annotations import override
from ray.rllib.utils.metrics.metrics_logger import MetricsLogger

from connectors.agents import agents_by_module, modules_by_id
from connectors.monitoring.measures import (
    EPISODE_STARTS_PER_STEP,
    MEMORY,
    STATE_BYTES,
    STORED_BYTES_PER_STEP,
    log_state_norms,
)
from connectors.snapshots import StateSnapshot
from connectors.validation import initial_state


class MemoryMetrics(RLlibCallback):
    """Logs states, rows and gradients of modules with memory, from EnvRunners and Learners.

    `config.callbacks(MemoryMetrics)`, or `config.callbacks([MemoryMetrics, YourCallback])`, next to
    `connect(config)`. In a result, the metrics of a module stand in
    `result["env_runners"][module_id]["memory"]` and `result["learners"][module_id]["memory"]`.
    """

    @override(RLlibCallback)
    def on_algorithm_init(self, *, algorithm: Any, **kwargs: Any) -> None:
        """Has the Learners measure.

        Raises:
            ValueError: if they are not those of `connect`.
        """
        # RLlib calls no callback on a Learner.
        learner_class = algorithm.config.learner_class
        if not hasattr(learner_class, "measures_memory"):
            raise ValueError(
                f"`callbacks` has `{type(self).__name__}`, but the Learner is "
                f"`{learner_class.__name__}`, which measures no memory. Call `connect(config)` "
                "after all other settings, or leave the callback out."
            )
        algorithm.learner_group.foreach_learner(_measure)

    @override(RLlibCallback)
    def on_sample_end(
        self,
        *,
        env_runner: Any,
        metrics_logger: MetricsLogger,
        samples: list[Any],
        **kwargs: Any,
    ) -> None:
        """Logs what the sampled episodes say about the states."""
        groups = {
            module_id: [agent for agent in agents if Columns.STATE_OUT in agent.extra_model_outputs]
            for module_id, agents in agents_by_module(samples).items()
        }
        for module_id, module in modules_by_id(env_runner.module, groups).items():
            agents = groups[module_id]
            num_steps = sum(len(agent) for agent in agents)
            if not num_steps:
                continue
            states = _recorded_states(agents)
            num_starts = sum(agent.t_started == 0 for agent in agents)
            for name, value in (
                (EPISODE_STARTS_PER_STEP, num_starts / num_steps),
                (STATE_BYTES, _num_bytes(initial_state(module, "cpu"))),
                (STORED_BYTES_PER_STEP, _num_bytes(states) / num_steps),
            ):
                metrics_logger.log_value((module_id, MEMORY, name), value, reduce="mean")
            if states:
                stacked = tree.map_structure(
                    lambda *leaves: torch.from_numpy(np.stack(leaves)), *states
                )
                log_state_norms(metrics_logger, module_id, stacked)


def _measure(learner: Any) -> None:
    learner.measures_memory = True


def _num_bytes(states: Any) -> int:
    return sum(leaf.nbytes for leaf in tree.flatten(states))


def _recorded_states(agents: Sequence[SingleAgentEpisode]) -> list[Any]:
    """The states in the snapshots of episodes, each once: row starts, and ends of full rows."""
    snapshots: set[StateSnapshot] = set()
    for agent in agents:
        snapshots.update(agent.get_extra_model_outputs(Columns.STATE_OUT))
    states = [state for snapshot in snapshots for state in (snapshot.state, snapshot.end_state)]
    # A row's end state is the next row's state, the same object.
    return list({id(state): state for state in states if state is not None}.values())
