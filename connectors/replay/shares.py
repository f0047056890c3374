"""One Learner's part of what a buffer samples, which RLlib hands over in one piece."""

from __future__ import annotations

from typing import Any


class LearnerShare:
    """The slices that one of several Learners is to train on.

    RLlib deals episodes out to Learners by their lengths, and cuts one that fits nowhere. A slice
    must not be cut: its second part would have no warm-up, and a row less to train on. All shares
    have the same length, 1, so RLlib gives each Learner one. `ReplayLearnerMixin` unpacks it.

    Args:
        episodes: The slices.
    """

    def __init__(self, episodes: list[Any]):
        self.episodes = episodes

    def __len__(self) -> int:
        return 1


def unpacked(episodes: list[Any]) -> list[Any]:
    """The episodes, those of shares in place of the shares."""
    return [
        episode
        for item in episodes
        for episode in (item.episodes if isinstance(item, LearnerShare) else [item])
    ]
