"""A trained agent that acts, outside of RLlib's EnvRunners."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Hashable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from ray.rllib.core.columns import Columns
from ray.rllib.utils.spaces.space_utils import unbatch

from connectors.acting.clients import (
    Client,
    end_agent,
    follow,
    from_state,
    rename,
    start,
    state_of,
)
from connectors.acting.loading import ActingParts, load_parts
from connectors.acting.observations import (
    check_agents,
    conform,
    conform_agents,
    conform_rewards,
)
from connectors.acting.passes import Passes

# Steps that a client's episode holds at least once it has taken them: connectors such as RLlib's
# frame stacking read some of them. It holds no more than twice as many.
_LOOKBACK = 32


class MemoryPolicy:
    """Acts with a trained module, and keeps a recurrent state for each client.

    Computes what the EnvRunner did: the same connectors around the same module. Statistics of
    `MeanStdFilter`s stay as they were saved. Works on CPUs, without a running Ray.

    A client is one episode at a time: a robot, a user's session, a sub-environment. Where several
    agents were trained, it is one game: its observations, rewards and actions are dicts by agent,
    as those of the environment, each agent has a state of its own, and the Algorithm's
    `policy_mapping_fn` says which module acts for it.

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
        self._passes = Passes(parts, explore=explore)
        self._random = None if seed is None else torch.Generator().manual_seed(seed).get_state()
        # Agents may be asked one after the other, each in a step of its own.
        self._lookback = max(parts.lookback, _LOOKBACK) * max(1, len(self.agents))
        self._clients: dict[Hashable, Client] = {}

    @classmethod
    def from_checkpoint(
        cls,
        path: str | Path,
        *,
        explore: bool = False,
        seed: int | None = None,
        policy_mapping_fn: Callable[..., str] | None = None,
    ) -> MemoryPolicy:
        """Loads a policy from a checkpoint, without building the Algorithm.

        Args:
            path: An Algorithm's checkpoint. Or a module's, which knows no connectors:
                observations then go to the module as they are, and actions in `Box` spaces are
                unsquashed to the bounds of the space, as by RLlib's default.
            explore: See the class.
            seed: See the class.
            policy_mapping_fn: Takes the place of the Algorithm's, e.g. for another opponent.

        Raises:
            ValueError: if there is no such checkpoint at `path`, or it has one agent and no use for
                a mapping.
        """
        parts = load_parts(path)
        if policy_mapping_fn is not None:
            if not parts.is_multi_agent:
                raise ValueError(
                    f"`policy_mapping_fn` is given, but the checkpoint at {str(path)!r} is that of "
                    "one agent. Leave it out."
                )
            parts.policy_mapping_fn = policy_mapping_fn
        return cls(parts, explore=explore, seed=seed)

    @property
    def agents(self) -> list[Any]:
        """IDs of the agents that were trained together; empty if there was one without an ID."""
        return self._parts.agents

    def act(
        self,
        observation: Any,
        *,
        reward: Any = 0.0,
        client: Hashable = None,
        agent: Hashable = None,
    ) -> Any:
        """The action of one client.

        Args:
            observation: The environment's latest observation, without batch or time axis. For
                several agents a dict, of those that act.
            reward: The reward that came with it; for several agents a dict. Only connectors such
                as `AddPreviousActionsRewards` use it.
            client: Whose observation it is.
            agent: Of several agents one, whose `observation` and `reward` these are.

        Returns:
            The action, ready for the environment; for several agents, unless `agent` names one, a
            dict.

        Raises:
            ValueError: if the observation does not fit the space that the agent was trained with,
                or holds numbers that are not finite where the module reads it, or if nothing is
                known of the agent or its module. After this or any other error the client is as
                before.
        """
        if agent is not None:
            self._check_several(agent)
            observation, reward = {agent: observation}, {agent: reward}
        actions = self.act_batch({client: observation}, rewards={client: reward})[client]
        return actions if agent is None else actions[agent]

    def act_batch(
        self,
        observations: Mapping[Hashable, Any],
        *,
        rewards: Mapping[Hashable, Any] | None = None,
    ) -> dict[Hashable, Any]:
        """The actions of several clients, in one pass of each module.

        Args:
            observations: By client. Clients that are not in it wait.
            rewards: By client; 0 for those that are not in it.

        Returns:
            Actions by client, ready for the environment.

        Raises:
            ValueError: as `act`. After this or any other error no client has acted.
        """
        conformed = {id_: self._conform(value) for id_, value in observations.items()}
        formatted: dict[Hashable, Any] = {id_: {} for id_, seen in conformed.items() if not seen}
        # Copies: they take the clients' places once all has gone well.
        clients = {
            id_: self._observe(id_, seen, (rewards or {}).get(id_, 0.0))
            for id_, seen in conformed.items()
            if seen
        }
        if not clients:
            return formatted
        with torch.no_grad(), self._random_numbers():
            outputs = self._passes.run(clients)
            # An EnvRunner records the former and sends the latter.
            actions = _by_client(outputs[Columns.ACTIONS])
            for client, action in zip(clients.values(), actions, strict=True):
                client.actions = action if self._parts.is_multi_agent else {None: action}
            for_env = _by_client(outputs.get(Columns.ACTIONS_FOR_ENV, outputs[Columns.ACTIONS]))
            for id_, action in zip(clients, copy.deepcopy(for_env), strict=True):
                several = self._parts.is_multi_agent
                formatted[id_] = {a: action[a] for a in conformed[id_]} if several else action
        self._clients.update(clients)
        return {id_: formatted[id_] for id_ in observations}

    def reset(self, client: Hashable = None, *, agent: Hashable = None) -> None:
        """Ends a client's episode; its next one starts from the initial state.

        Args:
            client: Whose.
            agent: Of several agents the only one whose episode ends; the others go on.

        Raises:
            ValueError: if nothing is known of the agent.
        """
        if agent is None:
            self._clients.pop(client, None)
            return
        self._check_several(agent)
        known = self._clients.get(client)
        if known is None or agent not in known.episode.agent_ids:
            return
        if len(known.episode.agent_ids) == 1:
            del self._clients[client]
        else:
            end_agent(known, agent)

    def state(self, client: Hashable = None) -> dict[str, Any]:
        """All that is known of a client, to be pickled: numpy arrays and plain values.

        Raises:
            ValueError: if the client has not acted since its last reset.
        """
        if client not in self._clients:
            raise ValueError(
                f"`client` is {client!r}, which has not acted since its last `reset`, so that "
                f"there is no state. Those with a state: {list(self._clients)}."
            )
        return state_of(self._clients[client])

    def restore(self, client: Hashable, state: dict[str, Any]) -> None:
        """Lets a client go on from what `state` returned, in this process or another."""
        restored = from_state(self._parts, state)
        taken = {known.episode.id_ for id_, known in self._clients.items() if id_ != client}
        if restored.episode.id_ in taken:
            rename(restored.episode)
        self._clients[client] = restored

    def _check_several(self, agent: Hashable) -> None:
        if not self._parts.is_multi_agent:
            raise ValueError(
                f"`agent` is {agent!r}, but the checkpoint is that of one agent. Leave it out."
            )
        check_agents([agent], self.agents)

    def _conform(self, observation: Any) -> dict[Any, Any]:
        """Observations by agent, None where there is one."""
        space: Any = self._parts.observation_space
        if self._parts.is_multi_agent:
            return conform_agents(observation, space)
        return {None: conform(observation, space)}

    def _observe(self, id_: Hashable, observations: dict[Any, Any], reward: Any) -> Client:
        """A copy of the client that has seen the observations."""
        known, several = self._clients.get(id_), self._parts.is_multi_agent
        rewards = conform_rewards(reward, self.agents) if several else {None: float(reward)}
        if known is None:
            client = start(self._parts, observations)
        else:
            client = follow(known, observations, rewards, self._lookback)
        if several:
            self._parts.check_modules(observations, client.episode)
        return client

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


def _by_client(column: Any) -> list[Any]:
    """Items by client: a batch of one agent's, or a list of dicts by agent."""
    return column if isinstance(column, list) else unbatch(column)
