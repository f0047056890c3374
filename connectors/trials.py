"""Which trial an episode is of: noted where episodes are sampled, read where they are used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from ray.rllib.env.single_agent_episode import SingleAgentEpisode

TRIAL = "trial"
"""Key of an episode's `custom_data` that holds its `Trial`, as a list in files."""


class Trial(NamedTuple):
    """A series of episodes over which states are kept, and an episode's place in it.

    Attributes:
        id_: The same for all its episodes.
        number: Which of them it is, from 0 on.
        episodes: How many a whole trial has.
    """

    id_: str
    number: int
    episodes: int


def trial_of(episode: Any) -> Trial | None:
    """Of an episode of one agent or of several; None if none is recorded."""
    recorded = episode.custom_data.get(TRIAL)
    return None if recorded is None else Trial(*recorded)


def previous_episodes(
    episodes: Sequence[SingleAgentEpisode], episodes_per_trial: int
) -> list[int | None]:
    """Position of the episode whose last state each episode starts from; None: the initial state.

    Args:
        episodes: Of the agents of a module, those of a trial in order.
        episodes_per_trial: See `connect`.

    Raises:
        ValueError: if trials were not recorded, or are of another length.
    """
    if episodes_per_trial == 1:
        return [None] * len(episodes)
    latest: dict[tuple[str, Any], int] = {}
    previous: list[int | None] = []
    for position, episode in enumerate(episodes):
        trial = trial_of(episode)
        if trial is None or trial.episodes != episodes_per_trial:
            recorded = "no trials" if trial is None else f"trials of {trial.episodes} episodes"
            raise ValueError(
                f"`episodes_per_trial` is {episodes_per_trial}, but the episodes were recorded in "
                f"{recorded}: which of them followed one another has to be known. Record with "
                f"`connect(config, episodes_per_trial={episodes_per_trial})`, or train with the "
                "number that they were recorded with."
            )
        key = (trial.id_, episode.agent_id)
        previous.append(latest.get(key))
        latest[key] = position
    return previous
