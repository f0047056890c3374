"""What the two EnvRunner pipelines share from step to step."""

from __future__ import annotations

from typing import Any, cast

import numpy as np
import torch
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from connectors.agents import Row, agent_at, live_ids
from connectors.snapshots import StateSnapshot, copy_rows
from connectors.state_bank import StateBank
from connectors.validation import row_length

_KEY = "rllib_memory_rollout"


class RolloutMemory:
    """What is known of the agents of one module.

    Attributes:
        module: The module.
        row_length: Its `max_seq_len`, None if it has no memory.
        rows: The agents of the coming (or running) pass, in the batch's order.
        state_in: Tree of batched tensors that this pass starts from.
    """

    __slots__ = (
        "_bank",
        "_heirs",
        "_latest",
        "_snapshots",
        "_trials",
        "_waiting",
        "module",
        "row_length",
        "rows",
        "state_in",
    )

    def __init__(self, module: RLModule, *, trials: bool = False):
        self.module = module
        self._trials = trials
        self.row_length = row_length(module)
        if isinstance(module, torch.nn.Module):
            # RLlib sets this mode for each pass anyway, and back: a walk over all submodules that
            # it leaves out if there is nothing to set back.
            module.eval()
        self.rows: list[Row] = []
        self.state_in: Any = None
        self.forget()

    def forget(self) -> None:
        """Forgets all states: the environments went on without the module."""
        self._bank = StateBank(self.module)
        # By ID of the agent's episode: the snapshot of the row that the agent is filling.
        self._snapshots: dict[str, StateSnapshot] = {}
        # Same key: agents that have acted at timestep t and whose environment has yet to answer.
        self._waiting: dict[str, tuple[Row, SingleAgentEpisode, int]] = {}
        # In trials: the agent's latest episode, and whether a pass was run after its end.
        self._latest: dict[Row, tuple[str, bool]] = {}
        self._heirs: dict[int, tuple[str, bool]] = {}

    def end_trial(self, position: int) -> None:
        """Has the next episode of a sub-environment start from the initial state."""
        for row in [row for row in self._latest if row[0] == position]:
            del self._latest[row]

    def follow_cuts(self, episodes: list[Any]) -> None:
        """Starts new rows for agents whose episode was cut while they wait.

        RLlib keeps the action of such an agent for the chunk behind the cut, where its step is the
        first one.
        """
        cut: list[str] = []
        for id_, (row, agent, t) in list(self._waiting.items()):
            present = agent_at(row, episodes)
            if present is agent:
                continue
            if present is None or present.id_ != id_:
                del self._waiting[id_]
                self._snapshots.pop(id_, None)
                continue
            self._waiting[id_] = (row, present, t)
            if self._snapshots[id_].t != t:
                cut.append(id_)
        if not cut:
            return
        for id_, state in zip(cut, self._bank.states_before(cut), strict=True):
            _, agent, t = self._waiting[id_]
            # What RLlib keeps for the waiting step is a reference to this snapshot.
            self._snapshots[id_].finish(t, state)
            self._snapshots[id_] = StateSnapshot(t, state)
            _forget_lookback(agent, self._snapshots[id_])

    def finish_rows(self) -> None:
        """Fills the `end_state` of the rows that the last step has completed."""
        waiting, self._waiting = self._waiting, {}
        full: dict[str, StateSnapshot] = {}
        for id_, entry in waiting.items():
            _, agent, t = entry
            if agent.t == t:
                self._waiting[id_] = entry
                continue
            if self._starts_row(agent):
                full[id_] = self._snapshots[id_]
            if agent.is_done:
                del self._snapshots[id_]
        if full:
            # Needed even if the agent is done: its bootstrap step starts from this state.
            states = self._bank.states_after(list(full))
            for (id_, snapshot), state in zip(full.items(), states, strict=True):
                snapshot.finish(waiting[id_][1].t, state)

    def next_states(
        self,
        module_id: str,
        agents: list[SingleAgentEpisode],
        episodes: list[Any],
        device: str,
    ) -> Any:
        """The states that the coming pass starts from, a row an agent of `rows`."""
        if self._trials:
            self._find_heirs(agents)
        return self._bank.take(
            [agent.id_ for agent in agents],
            [row for row, agent in enumerate(agents) if agent.t == 0],
            lambda: {*live_ids(episodes, module_id), *(id_ for id_, _ in self._latest.values())},
            device,
            heirs=self._heirs,
        )

    def _find_heirs(self, agents: list[SingleAgentEpisode]) -> None:
        """Finds the agents that go on with the state of their last episode."""
        self._heirs = {}
        for i, (row, agent) in enumerate(zip(self.rows, agents, strict=True)):
            latest = self._latest.get(row)
            if agent.t == 0 and latest is not None and latest[0] != agent.id_:
                self._heirs[i] = latest
            # RLlib runs a single agent's module once more after the episode's end.
            self._latest[row] = (agent.id_, agent.is_done)

    def record(self, agents: list[SingleAgentEpisode], state_out: Any) -> np.ndarray:
        """Keeps what the pass has led to; opens a snapshot for each step that is a row's first.

        Args:
            agents: The episodes of the agents of `rows`.
            state_out: Tree of batched tensors.

        Returns:
            `(B,)` objects, for each agent its row's snapshot.
        """
        references = np.empty(len(agents), dtype=object)
        rows: list[int] = []
        for row, agent in enumerate(agents):
            # An episode without a reset observation only waits for its environment to reset.
            if not agent.is_reset:
                continue
            id_, t = agent.id_, agent.t
            snapshot = self._snapshots.get(id_)
            if snapshot is None or self._starts_row(agent):
                state = None if snapshot is None else snapshot.state_at(t)
                snapshot = StateSnapshot(t, state)
                self._snapshots[id_] = snapshot
                if state is None and (t > 0 or row in self._heirs):
                    rows.append(row)
                if t > 0 and t == agent.t_started:
                    _forget_lookback(agent, snapshot)
            references[row] = snapshot
            self._waiting[id_] = (self.rows[row], agent, t)
        if rows:
            for row, state in zip(rows, copy_rows(self.state_in, rows), strict=True):
                references[row].state = state
        self._bank.put(self.state_in, state_out)
        return references

    def _starts_row(self, agent: SingleAgentEpisode) -> bool:
        return (agent.t - agent.t_started) % cast("int", self.row_length) == 0


class Rollout:
    """The memories of all modules of an EnvRunner; RLlib drops it when it resets environments.

    Args:
        episodes_per_trial: Episodes over which a sub-environment's agents keep their states.

    Attributes:
        memories: By module ID.
        acted: Whether the modules have acted on the last batch that was built.
    """

    __slots__ = ("_episodes_per_trial", "_trials", "acted", "memories")

    def __init__(self, episodes_per_trial: int = 1):
        self.memories: dict[str, RolloutMemory] = {}
        self.acted = True
        self._episodes_per_trial = episodes_per_trial
        # By position of the sub-environment: its present episode, and which of the trial it is.
        self._trials: dict[int, tuple[str, int]] = {}

    def memory(self, module_id: str, module: RLModule) -> RolloutMemory:
        """The memory of a module; a new one for a new module."""
        memory = self.memories.get(module_id)
        if memory is None or memory.module is not module:
            trials = self._episodes_per_trial > 1
            memory = self.memories[module_id] = RolloutMemory(module, trials=trials)
        return memory

    def advance(self, episodes: list[Any]) -> None:
        """Takes note of the environments' answers to the last actions."""
        memories = self._with_state()
        if not self.acted:
            at_random = any(memory.rows for memory in self.memories.values())
            for memory in memories:
                if at_random:
                    memory.forget()
                else:
                    memory.follow_cuts(episodes)
        for memory in memories:
            memory.finish_rows()
        for memory in self.memories.values():
            memory.rows = []
        self.acted = False
        if self._episodes_per_trial > 1:
            self._count_episodes(episodes)

    def follow_cuts(self, episodes: list[Any]) -> None:
        """See `RolloutMemory.follow_cuts`."""
        for memory in self._with_state():
            memory.follow_cuts(episodes)

    def _count_episodes(self, episodes: list[Any]) -> None:
        for position, episode in enumerate(episodes):
            id_, number = self._trials.get(position, (episode.id_, 0))
            if id_ != episode.id_:
                number = (number + 1) % self._episodes_per_trial
                if number == 0:
                    for memory in self._with_state():
                        memory.end_trial(position)
            self._trials[position] = (episode.id_, number)

    def _with_state(self) -> list[RolloutMemory]:
        return [memory for memory in self.memories.values() if memory.row_length is not None]


def rollout_of(shared_data: dict[str, Any] | None, episodes_per_trial: int = 1) -> Rollout:
    """What is kept in the runner's `shared_data`."""
    if shared_data is None:
        return Rollout()
    rollout = shared_data.get(_KEY)
    if rollout is None:
        rollout = shared_data[_KEY] = Rollout(episodes_per_trial)
    return rollout


def _forget_lookback(episode: SingleAgentEpisode, snapshot: StateSnapshot) -> None:
    """Lets go of the states before a cut, which would be pickled again and are never used."""
    lookback = episode.extra_model_outputs.get(Columns.STATE_OUT)
    if lookback is not None and lookback.lookback:
        episode.set_extra_model_outputs(
            key=Columns.STATE_OUT,
            new_data=[snapshot] * lookback.lookback,
            at_indices=list(range(-lookback.lookback, 0)),
            neg_index_as_lookback=True,
        )
