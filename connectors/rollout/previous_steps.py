"""The previous action and reward as inputs of the module."""

from __future__ import annotations

from typing import Any

import gymnasium as gym
import numpy as np
from gymnasium.spaces.utils import flatdim, flatten
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.utils.annotations import override

OBSERVATIONS = "observations"
PREVIOUS_ACTION = "previous_action"
PREVIOUS_REWARD = "previous_reward"


class AddPreviousActionsRewards(ConnectorV2):
    """Adds the action and the reward of the step before to each observation.

    The action is flattened, discrete parts as one-hot vectors and continuous ones as sampled,
    before clipping or unsquashing. At the first step of an episode both are 0, which no one-hot
    vector is.

    A `Dict` observation gets two keys more, `"previous_action"` and `"previous_reward"`; any other
    becomes a `Dict` with itself under `"observations"`. The new observation is written into the
    episode, so the Learner sees what the EnvRunner saw.

    An env-to-module connector. RLlib's `PrevActionsPrevRewards` serves `Discrete` actions only, and
    on Ray 2.60 their one-hot vectors have one axis more than its space says.

    Args:
        input_observation_space: See `ConnectorV2`.
        input_action_space: See `ConnectorV2`.
        multi_agent: Whether the spaces are `Dict`s with one space an agent.

    Example:
        ```python
        from ray.rllib.algorithms.ppo import PPOConfig

        from connectors import AddPreviousActionsRewards

        config = PPOConfig().env_runners(
            env_to_module_connector=lambda env, spaces, device: AddPreviousActionsRewards()
        )
        ```

    Raises:
        ValueError: if the observation space is a `Dict` that has one of the two keys already.
    """

    def __init__(
        self,
        input_observation_space: gym.Space | None = None,
        input_action_space: gym.Space | None = None,
        *,
        multi_agent: bool = False,
    ):
        # Setting the spaces needs it.
        self._multi_agent = multi_agent
        super().__init__(input_observation_space, input_action_space)

    @override(ConnectorV2)
    def get_ctor_args_and_kwargs(self) -> tuple[tuple, dict[str, Any]]:
        kwargs = {"multi_agent": self._multi_agent}
        return (self.input_observation_space, self.input_action_space), kwargs

    @override(ConnectorV2)
    def recompute_output_observation_space(
        self, input_observation_space: gym.Space, input_action_space: gym.Space
    ) -> gym.Space:
        observation_spaces: Any = input_observation_space
        action_spaces: Any = input_action_space
        if not self._multi_agent:
            return _extend_space(observation_spaces, action_spaces)
        return gym.spaces.Dict(
            {
                agent_id: _extend_space(space, action_spaces[agent_id])
                for agent_id, space in observation_spaces.items()
            }
        )

    @override(ConnectorV2)
    def __call__(
        self,
        *,
        rl_module: RLModule,
        batch: dict[str, Any],
        episodes: list[Any],
        explore: bool | None = None,
        shared_data: dict | None = None,
        **kwargs: Any,
    ) -> dict[str, Any]:
        """Rewrites the latest observation of each episode; the batch stays as it is."""
        for episode in self.single_agent_episode_iterator(episodes):
            action_space: Any = self.input_action_space
            observation_space: Any = self.observation_space
            if self._multi_agent:
                action_space = action_space[episode.agent_id]
                observation_space = observation_space[episode.agent_id]
            if episode.t == 0:
                action = np.zeros(flatdim(action_space), np.float32)
                reward = 0.0
            else:
                flat: Any = flatten(action_space, episode.get_actions(-1))
                action = flat.astype(np.float32)
                reward = episode.get_rewards(-1)
            observation = episode.get_observations(-1)
            if not isinstance(observation, dict):
                observation = {OBSERVATIONS: observation}
            episode.set_observations(
                at_indices=-1,
                new_data={
                    **observation,
                    PREVIOUS_ACTION: action,
                    PREVIOUS_REWARD: np.array([reward], np.float32),
                },
            )
            # What the episode now holds; RLlib's pieces read it from there.
            episode.observation_space = observation_space
        return batch


def _extend_space(observation_space: gym.Space, action_space: gym.Space) -> gym.spaces.Dict:
    if isinstance(observation_space, gym.spaces.Dict):
        parts = dict(observation_space.spaces)
    else:
        parts = {OBSERVATIONS: observation_space}
    taken = sorted(parts.keys() & {PREVIOUS_ACTION, PREVIOUS_REWARD})
    if taken:
        raise ValueError(
            f"`AddPreviousActionsRewards` adds {taken} to observations, but the space "
            f"{observation_space} has them already. Add the connector once, or rename the keys in "
            "the environment."
        )
    unbounded = {"low": -np.inf, "high": np.inf, "dtype": np.float32}
    parts[PREVIOUS_ACTION] = gym.spaces.Box(shape=(flatdim(action_space),), **unbounded)
    parts[PREVIOUS_REWARD] = gym.spaces.Box(shape=(1,), **unbounded)
    return gym.spaces.Dict(parts)
