"""Recorded episodes, put together to the trials that they were played in."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any
from uuid import uuid4

from connectors.trials import TRIAL, trial_of


def join_trials(episodes: Iterable[Any]) -> Iterator[list[Any]]:
    """The episodes of each trial in order; one that is of no trial by itself.

    A trial comes out as soon as all of its episodes are there, and one that was not played to its
    end comes last. In what comes out each trial has an ID of its own, also where a pass over the
    files comes up with it again.

    Raises:
        ValueError: if an episode is missing in front of another one.
    """
    waiting: dict[str, dict[int, Any]] = {}
    for episode in episodes:
        trial = trial_of(episode)
        if trial is None:
            yield [episode]
            continue
        found = waiting.setdefault(trial.id_, {})
        found[trial.number] = episode
        if len(found) == trial.episodes:
            yield _in_order(waiting.pop(trial.id_))
    while waiting:
        yield _in_order(waiting.pop(next(iter(waiting))))


def _in_order(found: dict[int, Any]) -> list[Any]:
    missing = sorted(set(range(max(found))) - found.keys())
    id_ = uuid4().hex
    for episode in found.values():
        trial: Any = trial_of(episode)
        if missing:
            raise ValueError(
                f"Recorded trial {trial.id_} lacks its episodes {missing}, counted from 0. They "
                "are needed for the policy's states in those that follow. Point `input_` to all "
                "files of the recording, or take the trial's other episodes out of them."
            )
        for each in (episode, *getattr(episode, "agent_episodes", {}).values()):
            each.custom_data[TRIAL] = trial._replace(id_=id_)
    return [found[number] for number in sorted(found)]
