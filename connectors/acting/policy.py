"""A trained agent that acts, outside of RLlib's EnvRunners."""

from __future__ import annotations

import contextlib
import copy
import sys
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tree
from ray.rllib.core.columns import Columns
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils.numpy import convert_to_numpy
from ray.rllib.utils.spaces.space_utils import unbatch

from connectors.acting.loading import ActingParts, load_parts
from connectors.acting.observations import check_finite, check_states, conform
from connectors.validation import initial_state, row_length

# Steps that a client's episode holds at least once it has taken them: connectors such as RLlib's
# frame stacking read some of them. It holds no more than twice as many.
_LOOKBACK = 32


@dataclass
class _Client:
    """What is known of one client.

    Attributes:
        episode: Its latest steps, as connectors want to see them.
        state: The recurrent state after its last step; empty for a module without memory.
        action: Its last action, as the module gave it; None before the first.
    """

    episode: SingleAgentEpisode
    state: Any
    action: Any = None


class MemoryPolicy:
    """Acts with a trained module, and keeps a recurrent state for each client.

    Computes what the EnvRunner did: the same connectors around the same module. Statistics of
    `MeanStdFilter`s stay as they were saved. Works on CPUs, without a running Ray.

    A client is one episode at a time: a robot, a user's session, a sub-environment.

    Args:
        parts: What `from_checkpoint` loads.
        explore: Whether to sample actions as in training; else the best ones are taken.
        seed: Makes sampled actions repeatable, whatever else draws random numbers.

    Example:
        ```python
        from connectors import MemoryPolicy


        def drive(path, env):
            policy = MemoryPolicy.from_checkpoint(path)
            observation, _ = env.reset()
            done = False
            while not done:
                action = policy.act(observation)
                observation, _, terminated, truncated, _ = env.step(action)
                done = terminated or truncated
            policy.reset()
        ```
    """

    def __init__(self, parts: ActingParts, *, explore: bool = False, seed: int | None = None):
        self._parts = parts
        self._module: Any = parts.module
        self._module.eval()
        self._explore = explore
        self._random = None if seed is None else torch.Generator().manual_seed(seed).get_state()
        self._has_memory = row_length(parts.module) is not None
        self._lookback = max(parts.lookback, _LOOKBACK)
        self._clients: dict[Hashable, _Client] = {}

    @classmethod
    def from_checkpoint(
        cls, path: str | Path, *, explore: bool = False, seed: int | None = None
    ) -> MemoryPolicy:
        """Loads a policy from a checkpoint, without building the Algorithm.

        Args:
            path: An Algorithm's checkpoint. Or a module's, which knows no connectors:
                observations then go to the module as they are, and actions in `Box` spaces are
                unsquashed to the bounds of the space, as by RLlib's default.
            explore: See the class.
            seed: See the class.

        Raises:
            ValueError: if there is no such checkpoint at `path`, or one of several agents.
        """
        return cls(load_parts(path), explore=explore, seed=seed)

    def act(self, observation: Any, *, reward: float = 0.0, client: Hashable = None) -> Any:
        """The action of one client.

        Args:
            observation: The environment's latest observation, without batch or time axis.
            reward: The reward that came with it. Only connectors such as
                `AddPreviousActionsRewards` use it.
            client: Whose observation it is.

        Returns:
            The action, ready for the environment.

        Raises:
            ValueError: if the observation does not fit the space that the agent was trained with,
                or holds numbers that are not finite where the module reads it. After this or any
                other error the client is as before.
        """
        return self.act_batch({client: observation}, rewards={client: reward})[client]

    def act_batch(
        self,
        observations: Mapping[Hashable, Any],
        *,
        rewards: Mapping[Hashable, float] | None = None,
    ) -> dict[Hashable, Any]:
        """The actions of several clients, in one pass of the module.

        Args:
            observations: By client. Clients that are not in it wait.
            rewards: By client; 0 for those that are not in it.

        Returns:
            Actions by client, ready for the environment.

        Raises:
            ValueError: as `act`. After this or any other error no client has acted.
        """
        if not observations:
            return {}
        space = self._parts.observation_space
        conformed = {id_: conform(value, space) for id_, value in observations.items()}
        # Copies: they take the clients' places once all has gone well.
        clients = {id_: self._observe(id_, conformed[id_], rewards or {}) for id_ in conformed}
        with torch.no_grad(), self._random_numbers():
            outputs = self._pass(clients)
            # An EnvRunner records the former and sends the latter.
            actions = outputs[Columns.ACTIONS]
            for client, action in zip(clients.values(), unbatch(actions), strict=True):
                client.action = action
            formatted = copy.deepcopy(unbatch(outputs.get(Columns.ACTIONS_FOR_ENV, actions)))
        self._clients.update(clients)
        return dict(zip(clients, formatted, strict=True))

    def reset(self, client: Hashable = None) -> None:
        """Ends a client's episode; its next one starts from the initial state."""
        self._clients.pop(client, None)

    def state(self, client: Hashable = None) -> dict[str, Any]:
        """All that is known of a client, as a tree of numpy arrays and plain values.

        Raises:
            ValueError: if the client has not acted since its last reset.
        """
        if client not in self._clients:
            raise ValueError(
                f"`client` is {client!r}, which has not acted since its last `reset`, so that "
                f"there is no state. Those with a state: {list(self._clients)}."
            )
        known = self._clients[client]
        return copy.deepcopy(
            {
                "episode": known.episode.get_state(),
                "state": convert_to_numpy(known.state),
                "action": known.action,
            }
        )

    def restore(self, client: Hashable, state: dict[str, Any]) -> None:
        """Lets a client go on from what `state` returned, in this process or another."""
        state = copy.deepcopy(state)
        self._clients[client] = _Client(
            SingleAgentEpisode.from_state(state["episode"]),
            tree.map_structure(torch.as_tensor, state["state"]),
            state["action"],
        )

    def _observe(
        self, id_: Hashable, observation: Any, rewards: Mapping[Hashable, float]
    ) -> _Client:
        """A copy of the client that has seen the observation."""
        known = self._clients.get(id_)
        if known is None:
            episode = SingleAgentEpisode(
                observation_space=self._parts.observation_space,
                action_space=self._parts.action_space,
            )
            episode.add_env_reset(observation)
            return _Client(episode, initial_state(self._module) if self._has_memory else {})
        if len(known.episode) >= self._lookback:
            episode = known.episode.cut(len_lookback_buffer=self._lookback)
        else:
            episode = _copy_episode(known.episode)
        episode.add_env_step(observation, known.action, float(rewards.get(id_, 0.0)))
        return _Client(episode, known.state)

    def _pass(self, clients: dict[Hashable, _Client]) -> dict[str, Any]:
        """Runs the pipelines and the module; gives the clients their next states."""
        # `BuildModuleBatch` keeps a `STATE_IN` that it is given. What the pieces share from step
        # to step is therefore not needed beyond this one.
        batch: dict[str, Any] = {}
        if self._has_memory:
            batch[Columns.STATE_IN] = tree.map_structure(
                lambda *leaves: torch.stack(leaves), *(client.state for client in clients.values())
            )
        common: dict[str, Any] = {
            "rl_module": self._module,
            "episodes": [client.episode for client in clients.values()],
            "explore": self._explore,
            "shared_data": {},
        }
        batch = self._parts.env_to_module(batch=batch, **common)
        check_finite(batch[Columns.OBS], list(clients))
        if self._explore:
            # Schedules, such as that of DQN's epsilon, are at their end.
            outputs = self._module.forward_exploration(batch, t=sys.maxsize)
        else:
            outputs = self._module.forward_inference(batch)
        if self._has_memory:
            check_states(outputs[Columns.STATE_OUT], list(clients))
            for row, client in enumerate(clients.values()):
                client.state = tree.map_structure(
                    lambda leaf, row=row: leaf[row].clone(), outputs[Columns.STATE_OUT]
                )
        return self._parts.module_to_env(batch=outputs, **common)

    @contextlib.contextmanager
    def _random_numbers(self) -> Iterator[None]:
        """Draws from the policy's own random numbers; from torch's where it has no seed."""
        if self._random is None:
            yield
            return
        with torch.random.fork_rng(devices=[]):
            torch.set_rng_state(self._random)
            yield
            self._random = torch.get_rng_state()


def _copy_episode(episode: SingleAgentEpisode) -> SingleAgentEpisode:
    """A copy that shares the steps; what is added to it or set in it is not in the original."""
    copied = copy.copy(episode)
    for name in ("observations", "infos", "actions", "rewards"):
        buffer = copy.copy(getattr(episode, name))
        buffer.data = list(buffer.data)
        setattr(copied, name, buffer)
    # Ray 2.60 has no public way to set it; its `cut` does the same. A test fails if it is renamed.
    copied._custom_data = copy.deepcopy(episode.custom_data)
    return copied
