"""What the two EnvRunner pipelines share from step to step: the states of all agents."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
import torch
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from connectors.agents import Row, agent_at, agents_by_module
from connectors.rollout.agent_states import Agent, finish_rows, follow_cut, starts_row
from connectors.rollout.batched_states import gather
from connectors.rollout.lost_states import rebuild_lost
from connectors.rollout.references import drop_unused_buffer, forget_lookback, prepare_buffer
from connectors.snapshots import StateSnapshot, copy_rows
from connectors.trials import TRIAL, Trial
from connectors.validation import row_length

_KEY = "rllib_memory_rollout"


class Rollout:
    """The states of all agents of an EnvRunner; RLlib drops it when it resets environments.

    A step of the environments is `observe`, and for each module that acts `begin` in front of its
    pass and `end` behind it, with a `settle` between them: RLlib cuts episodes there. Where no
    `end` follows, the environments go on without the module, as with RLlib's random actions: the
    agents start anew. Of other episodes under way the state is found in what they recorded, or
    there is an error.

    While the same agents act in each pass, the output of one is the input of the next as it is.

    Args:
        episodes_per_trial: Episodes over which a sub-environment's agents keep their states.

    Attributes:
        rows: The agents of the running passes, by module and in the batch's order.
    """

    def __init__(self, episodes_per_trial: int = 1):
        self.rows: dict[str, list[Row]] = {}
        self._modules: dict[str, tuple[RLModule, int | None]] = {}
        # By ID of their episodes.
        self._agents: dict[str, Agent] = {}
        # The passes between `begin` and `end`, by module: who acts, from which states, and whether
        # these were given.
        self._passes: dict[str, tuple[list[Agent], Any, bool]] = {}
        # Those that have acted and whose environment has yet to answer.
        self._waiting: list[Agent] = []
        self._episodes_per_trial = episodes_per_trial
        # By position of the sub-environment: its present episode, and the place in its trial.
        self._trials: dict[int, tuple[str, Trial]] = {}
        # Who acted last in a trial, by module, position and agent.
        self._latest: dict[tuple[str, int, Any], Agent] = {}

    def row_length(self, module_id: str, module: RLModule) -> int | None:
        """Steps of a row of a module; None if it has no memory."""
        known = self._modules.get(module_id)
        if known is None or known[0] is not module:
            if isinstance(module, torch.nn.Module):
                # RLlib sets this mode for each pass anyway, and back: a walk over all submodules
                # that it leaves out if there is nothing to set back.
                module.eval()
            known = self._modules[module_id] = (module, row_length(module))
        return known[1]

    def observe(self, episodes: list[Any]) -> None:
        """Takes note of what the environments answered to the last actions."""
        self.rows = {}
        self.settle(episodes)
        if self._episodes_per_trial > 1:
            self._count_episodes(episodes)

    def begin(
        self,
        module_id: str,
        module: RLModule,
        acting: Sequence[tuple[Row, SingleAgentEpisode]],
        episodes: list[Any],
        *,
        device: str,
        given: Any = None,
        obs_given: bool = False,
    ) -> Any:
        """The states that a pass starts from.

        Args:
            module_id: Whose pass.
            module: The module, which has a memory.
            acting: The agents that act, in the batch's order.
            episodes: All episodes of the EnvRunner.
            device: Where the batch is.
            given: The states, where another connector has put them into the batch.
            obs_given: Whether other connectors have put more into it.

        Returns:
            Tree of batched tensors.
        """
        agents, lost = [], []
        for row, episode in acting:
            agent, is_lost = self._find(module_id, module, row, episode)
            agents.append(agent)
            lost += [agent] if is_lost else []
        if given is None and lost:
            self._restore(module, lost, obs_given, device)
        states = given
        if given is None:
            states = gather([agent.state for agent in agents], module, device)
        has_new = any(agent.id_ not in self._agents for agent in agents)
        for position, agent in enumerate(agents):
            agent.state, agent.is_acting = (states, position), True
            agent.is_initial &= given is None
            self._agents[agent.id_] = agent
            if self._episodes_per_trial > 1:
                self._latest[module_id, *agent.row] = agent
        if has_new:
            live = agents_by_module(episodes).values()
            ids = {episode.id_ for chunks in live for episode in chunks}
            self._agents = {id_: agent for id_, agent in self._agents.items() if id_ in ids}
        self._passes[module_id] = agents, states, given is not None
        return states

    def end(self, module_id: str, state_out: Any, episodes: list[Any]) -> np.ndarray | None:
        """Keeps what a pass has led to; opens a snapshot for each step that is a row's first.

        Args:
            module_id: Whose pass.
            state_out: Tree of batched tensors.
            episodes: All episodes of the EnvRunner.

        Returns:
            `(B,)` objects, for each agent its row's snapshot; None if there was no `begin`.
        """
        if module_id not in self._passes:
            return None
        agents, state_in, is_given = self._passes.pop(module_id)
        references = np.empty(len(agents), dtype=object)
        unknown: list[int] = []
        for position, agent in enumerate(agents):
            episode = agent_at(agent.row, episodes)
            # RLlib runs a single agent's module once more after its episode's end.
            if episode is None or episode.id_ != agent.id_:
                continue
            agent.episode = episode
            if agent.snapshot is None or starts_row(agent):
                state = None if agent.snapshot is None else agent.snapshot.state_at(agent.t)
                agent.snapshot = StateSnapshot(agent.t, state)
                if state is None and not agent.is_initial:
                    unknown.append(position)
                if 0 < agent.t == episode.t_started:
                    forget_lookback(episode, agent.snapshot)
            references[position] = agent.snapshot
            if agent.row[1] is None and not is_given:
                prepare_buffer(episode)
            if agent.row[1] is not None:
                agent.before = agent.state
            agent.state, agent.is_initial = (state_out, position), False
            agent.t, agent.is_acting = agent.t + 1, False
            self._waiting.append(agent)
        if unknown:
            for position, state in zip(unknown, copy_rows(state_in, unknown), strict=True):
                references[position].state = state
        return references

    def _find(
        self, module_id: str, module: RLModule, row: Row, episode: SingleAgentEpisode
    ) -> tuple[Agent, bool]:
        """What is known of an agent that acts, and whether that should be more."""
        known = self._agents.get(episode.id_)
        if known is not None and known.t == episode.t and known.module is module:
            known.row = row
            return known, False
        before = self._latest.get((module_id, *row)) if episode.t == 0 else None
        inherited = None if before is None else before.state
        agent = Agent(
            id_=episode.id_,
            row=row,
            module=module,
            row_length=cast("int", self._modules[module_id][1]),
            episode=episode,
            t=episode.t,
            state=inherited,
            is_initial=episode.t == 0 and inherited is None,
        )
        is_anew = known is not None and (known.is_acting or known.module is not module)
        return agent, episode.t > 0 and not is_anew

    def _restore(self, module: RLModule, agents: list[Agent], obs_given: bool, device: str) -> None:
        """Finds lost states in the episodes."""
        if self._episodes_per_trial > 1:
            raise ValueError(
                f"`episodes_per_trial` is {self._episodes_per_trial}, but `shared_data` has no "
                f"state of episode {agents[0].id_}, which is at its step {agents[0].t}. Give both "
                "pipelines the same `shared_data` dict for as long as trials last."
            )
        chunks = [agent.episode for agent in agents]
        states = rebuild_lost(module, chunks, obs_given=obs_given, device=device)
        for position, agent in enumerate(agents):
            agent.state = (states, position)

    def settle(self, episodes: list[Any]) -> None:
        """Finishes rows whose last step was answered; follows waiting agents behind a cut."""
        waiting: list[Agent] = []
        full: list[Agent] = []
        for agent in self._waiting:
            chunk = agent_at(agent.row, episodes)
            is_there = chunk is not None and chunk.id_ == agent.id_
            latest = cast("SingleAgentEpisode", chunk) if is_there else agent.episode
            # A step that was answered before the cut stays in the chunk before it.
            if latest is not agent.episode and latest.t_started < agent.t:
                follow_cut(agent, latest)
            if latest.t < agent.t:
                waiting += [agent] if is_there else []
                continue
            agent.before = None
            drop_unused_buffer(latest)
            if starts_row(agent):
                full.append(agent)
            if latest.is_done and agent.row[1] is not None:
                self._agents.pop(agent.id_, None)
        self._waiting = waiting
        # Needed even if an agent is done: its bootstrap step starts from this state.
        finish_rows(full)

    def _count_episodes(self, episodes: list[Any]) -> None:
        for position, episode in enumerate(episodes):
            id_, trial = self._trials.get(position, (None, None))
            if id_ == episode.id_:
                continue
            number = 0 if trial is None else (trial.number + 1) % self._episodes_per_trial
            if trial is None or number == 0:
                # Called after its first episode.
                trial = Trial(episode.id_, 0, self._episodes_per_trial)
                self._latest = {k: v for k, v in self._latest.items() if k[1] != position}
            trial = trial._replace(number=number)
            self._trials[position] = (episode.id_, trial)
            # For who records; what follows a cut gets a copy.
            episode.custom_data[TRIAL] = list(trial)


def rollout_of(shared_data: dict[str, Any] | None, episodes_per_trial: int = 1) -> Rollout:
    """What is kept in the runner's `shared_data`."""
    if shared_data is None:
        return Rollout()
    rollout = shared_data.get(_KEY)
    if rollout is None:
        rollout = shared_data[_KEY] = Rollout(episodes_per_trial)
    return rollout
