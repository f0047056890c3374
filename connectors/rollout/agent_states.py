"""What is known of an agent between two steps, and the rows that it fills."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from typing import cast

from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env.single_agent_episode import SingleAgentEpisode

from connectors.agents import Row
from connectors.rollout.batched_states import State
from connectors.rollout.references import forget_lookback
from connectors.snapshots import StateSnapshot, copy_rows


@dataclass(slots=True, eq=False)
class Agent:
    """An agent in an episode.

    Attributes:
        id_: Of its episode. The chunk may be called otherwise once a Learner has seen it.
        row: Where it is.
        module: What acts for it.
        row_length: Steps of a row of this module.
        episode: Its episode's present chunk.
        t: The step that `state` precedes: the coming one as soon as it has acted.
        state: What it remembers; None for the initial state.
        is_initial: Whether that is the state which each episode starts from.
        is_acting: Whether its module's pass has begun and not ended.
        before: The state before its last step, while its environment has yet to answer.
        snapshot: Of the row that it is filling.
    """

    id_: str
    row: Row
    module: RLModule
    row_length: int
    episode: SingleAgentEpisode
    t: int
    state: State | None
    is_initial: bool
    is_acting: bool = False
    before: State | None = None
    snapshot: StateSnapshot | None = None


def starts_row(agent: Agent) -> bool:
    """Whether a row starts at the step that the agent's state precedes."""
    return (agent.t - agent.episode.t_started) % agent.row_length == 0


def finish_rows(agents: list[Agent]) -> None:
    """Has the agents' snapshots end with their present states."""

    def batch_of(agent: Agent) -> int:
        return id(cast("State", agent.state)[0])

    for _, group in groupby(sorted(agents, key=batch_of), batch_of):
        full = list(group)
        known = [cast("State", agent.state) for agent in full]
        states = copy_rows(known[0][0], [row for _, row in known])
        for agent, state in zip(full, states, strict=True):
            cast("StateSnapshot", agent.snapshot).finish(agent.t, state)


def follow_cut(agent: Agent, chunk: SingleAgentEpisode) -> None:
    """Starts a new row for an agent whose episode was cut while it waits.

    RLlib keeps the action of such an agent for the chunk behind the cut, where its step is the
    first one.
    """
    agent.episode = chunk
    t, recorded = chunk.t_started, cast("StateSnapshot", agent.snapshot)
    if recorded.t == t:
        return
    states, row = cast("State", agent.before)
    (state,) = copy_rows(states, [row])
    # What RLlib keeps for the waiting step is a reference to this snapshot.
    recorded.finish(t, state)
    agent.snapshot = StateSnapshot(t, state)
    forget_lookback(chunk, agent.snapshot)
