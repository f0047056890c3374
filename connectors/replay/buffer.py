"""Replaying sequences: a buffer for modules with memory, whatever the off-policy algorithm.

A train batch of replayed sequences holds `[B, T]` rows, `T` being `max_seq_len`. A row is one slice
of an episode: up to `T - 1` steps and the observation after the last of them.

- `OBS [B, T, ...]`: all observations of the slice. The observation after the step in slot `t`
  stands in slot `t + 1` of its row, so there is no `NEXT_OBS`: one pass over the row gives what the
  networks say about both.
- `ACTIONS`, `REWARDS`, `TERMINATEDS`, `TRUNCATEDS [B, T, ...]`: of the steps. `TERMINATEDS` is True
  where the episode ended and nothing follows. `TRUNCATEDS` is True on the last step of any other
  slice; the observation behind it is there to bootstrap from.
- `LOSS_MASK [B, T]`: True on the steps; False on the last observation and on padding.
- `SEQ_LENS (B,)`: observations of each row.
- `STATE_IN`, leaves `(B, ...)`: the state before each row's first step.

A slice may start at any step. The buffer keeps one recorded state a block of steps, and delivers a
slice from a block's beginning on: the steps before the row are its *warm-up*, marked in a column of
their own. `BuildTrainBatch` runs the module over them, without gradient and with the Learner's
weights, to get `STATE_IN`; they stand in no row. With the weights that sampled, this is the very
state of the rollout. Burn-in only makes the warm-up longer: it then starts at least `burn_in_len`
steps before the row.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.utils import force_list
from ray.rllib.utils.annotations import override
from ray.rllib.utils.replay_buffers.base import ReplayBufferInterface
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer

from connectors.agents import agents_by_module
from connectors.replay.blocks import Blocks, Counts, agent_name, steps_of
from connectors.replay.shares import LearnerShare
from connectors.validation import check_replay_lengths

_COUNTS = ("_num_episodes_evicted", "_num_timesteps_added", "sampled_timesteps")


class SequenceReplayBuffer(EpisodeReplayBuffer):
    """Stores episodes in blocks of steps with one recurrent state each; samples slices of them.

    A block holds `batch_length_T` steps, more where fragments end inside it (fewer than twice as
    many), fewer at an episode's end. The oldest block leaves first, so capacity also bounds
    episodes that never end.

    A sampled slice lies around a step that is drawn uniformly, at a place drawn uniformly, and is
    moved inside the episode where it would hang over an end. Short episodes come whole. RLlib's
    buffer draws a slice's first step instead: with slices of L steps an episode's first step is
    then sampled L times less often than others, and what was seen there is hardly learned from.

    Of several agents each one's steps are stored by themselves, under its module. What is counted
    are then steps and episodes of agents, by RLlib's names for those of the environment.

    Args:
        capacity: Steps to store, of each module.
        batch_size_B: Steps that `sample` returns unless told otherwise.
        batch_length_T: Slots T of a row, the module's `max_seq_len`: a slice has up to `T - 1`
            steps.
        burn_in_len: Steps that the module is run over before a row, where the episode has them.
        lookback: Steps before a slice that it brings along at least, where they are stored.
        num_learners: Learners that share a sample.
        row_length_of: Slots of a row by module ID, in place of `batch_length_T`. None for a module
            that is not trained: nothing of it is stored or sampled.
        seed: For what `sample` draws. None: different in each run.
        **kwargs: See `EpisodeReplayBuffer`.

    Raises:
        ValueError: if `batch_length_T` is below 2 or `burn_in_len` below 0.
    """

    def __init__(
        self,
        capacity: int = 50_000,
        *,
        batch_size_B: int = 256,
        batch_length_T: int = 64,
        burn_in_len: int = 0,
        lookback: int = 1,
        num_learners: int = 1,
        row_length_of: Callable[[str], int | None] | None = None,
        seed: int | None = None,
        **kwargs: Any,
    ):
        super().__init__(
            capacity, batch_size_B=batch_size_B, batch_length_T=batch_length_T, **kwargs
        )
        check_replay_lengths(batch_length_T, burn_in_len)
        self.burn_in_len = burn_in_len
        self.lookback = lookback
        self.num_learners = num_learners
        self.row_length_of = row_length_of or (lambda module_id: batch_length_T)
        self.rng = np.random.default_rng(seed)
        self._blocks: dict[str, Blocks] = {}

    @override(EpisodeReplayBuffer)
    def add(self, episodes: list[Any] | Any) -> None:
        """Stores episodes or chunks of them; a chunk goes on where the one before it ended.

        Args:
            episodes: What an EnvRunner sampled. The episodes themselves are not changed.
        """
        given: Any = force_list(episodes)
        counts: dict[str, Counts] = {}
        for module_id, chunks in agents_by_module(given).items():
            blocks = self._blocks_of(module_id)
            if blocks is not None:
                counts[module_id] = blocks.add(chunks)
        names = ("episodes_added", "steps_added", "episodes_evicted", "steps_evicted")
        totals, by_owner = _metrics([f"num_{name}" for name in names], counts)
        self._num_timesteps_added += totals["num_steps_added"]
        self._num_episodes_evicted += totals["num_episodes_evicted"]
        self._update_add_metrics(
            num_episodes_added=totals["num_episodes_added"],
            num_env_steps_added=totals["num_steps_added"],
            num_episodes_evicted=totals["num_episodes_evicted"],
            num_env_steps_evicted=totals["num_steps_evicted"],
            **by_owner,
        )

    def _blocks_of(self, module_id: str) -> Blocks | None:
        """Where a module's steps are stored; None if it is not trained."""
        row_length = self.row_length_of(module_id)
        if row_length is None:
            return None
        if module_id not in self._blocks:
            self._blocks[module_id] = Blocks(self.capacity, row_length, self.burn_in_len, self.rng)
        return self._blocks[module_id]

    @override(EpisodeReplayBuffer)
    def sample(
        self,
        num_items: int | None = None,
        *,
        batch_size_B: int | None = None,
        lookback: int = 1,
        **kwargs: Any,
    ) -> list[Any]:
        """Draws slices until they have enough steps of each module, warm-up not counted.

        Args:
            num_items: Steps of each module to return at least.
            batch_size_B: The same under RLlib's other name.
            lookback: Steps before a slice that it brings along, where they are stored.
            **kwargs: RLlib's other arguments. They do not apply: the buffer knows the length of
                its slices, and Learners compute returns over several steps inside a row.

        Returns:
            Slices, each with its warm-up in front. The column `WARM_UP` is True there. A slice of
            one of several agents is an episode with that agent alone. For several Learners, a
            `LearnerShare` for each, with equally many steps but for the last slice.

        Raises:
            ValueError: if nothing is stored.
        """
        num_items = num_items or batch_size_B or self.batch_size_B
        # RLlib asks for one step; stacked frames need more.
        lookback = max(lookback, self.lookback)
        stored = {
            module_id: blocks
            for module_id in sorted(self._blocks)
            if (blocks := self._blocks_of(module_id)) and blocks.num_steps
        }
        if not stored:
            raise ValueError(
                "The replay buffer is empty: no agent that is trained has finished a step yet. "
                "Set `config.training(num_steps_sampled_before_learning_starts=...)` to a number "
                "of steps after which each of them has."
            )
        num_steps = -(-num_items // self.num_learners)
        shares = [
            {module_id: blocks.draw(num_steps, lookback) for module_id, blocks in stored.items()}
            for _ in range(self.num_learners)
        ]
        self._log_sample(shares)
        parts = [
            [_as_sampled(episode) for slices in share.values() for episode in slices]
            for share in shares
        ]
        return parts[0] if len(parts) == 1 else [LearnerShare(part) for part in parts]

    def _log_sample(self, shares: list[dict[str, list[SingleAgentEpisode]]]) -> None:
        counts: dict[str, Counts] = defaultdict(Counter)
        seen = set()
        for module_id, episode in (
            (module_id, episode)
            for share in shares
            for module_id, slices in share.items()
            for episode in slices
        ):
            agent, count = agent_name(episode), counts[module_id]
            count["num_steps_sampled", agent] += len(steps_of(episode))
            for name, keys in (
                ("num_episodes_per_sample", [episode.id_]),
                ("num_steps_per_sample", [(episode.id_, t) for t in steps_of(episode)]),
            ):
                new = set(keys) - seen
                count[name, agent] += len(new)
                seen |= new
        names = ("num_steps_sampled", "num_episodes_per_sample", "num_steps_per_sample")
        totals, by_owner = _metrics([*names, "num_resamples"], counts)
        self.sampled_timesteps += totals["num_steps_sampled"]
        self._update_sample_metrics(
            num_env_steps_sampled=totals["num_steps_sampled"],
            num_episodes_per_sample=totals["num_episodes_per_sample"],
            num_env_steps_per_sample=totals["num_steps_per_sample"],
            sampled_n_step=None,
            num_resamples=0,
            **by_owner,
            agent_to_sampled_n_step={},
            module_to_sampled_n_step={},
        )

    # What RLlib asks a buffer for.

    @override(EpisodeReplayBuffer)
    def get_num_episodes(self, module_id: str | None = None) -> int:
        """Episodes of which steps are stored."""
        return sum(blocks.num_episodes for blocks in self._selected(module_id))

    @override(EpisodeReplayBuffer)
    def get_num_timesteps(self, module_id: str | None = None) -> int:
        """Steps stored."""
        return sum(blocks.num_steps for blocks in self._selected(module_id))

    def _selected(self, module_id: str | None) -> Iterable[Blocks]:
        if module_id is None:
            return self._blocks.values()
        return [self._blocks[module_id]] if module_id in self._blocks else []

    @override(ReplayBufferInterface)
    def get_state(self) -> dict[str, Any]:
        """What is stored, picklable, with each recurrent state once."""
        return {
            "blocks": {module_id: blocks.get_state() for module_id, blocks in self._blocks.items()},
            "counts": {name: getattr(self, name) for name in _COUNTS},
        }

    @override(ReplayBufferInterface)
    def set_state(self, state: dict[str, Any]) -> None:
        """Restores what `get_state` returned. Episodes that were running are not continued."""
        self._blocks.clear()
        for module_id, blocks_state in state["blocks"].items():
            blocks = self._blocks_of(module_id)
            if blocks is not None:
                blocks.set_state(blocks_state)
        for name, count in state["counts"].items():
            setattr(self, name, count)


def _as_sampled(episode: SingleAgentEpisode) -> SingleAgentEpisode | MultiAgentEpisode:
    """A slice in the form of what EnvRunners sample: one of several agents in an episode."""
    if episode.agent_id is None:
        return episode
    ids: Any = episode
    whole = MultiAgentEpisode(
        ids.multi_agent_episode_id,
        agent_module_ids={ids.agent_id: ids.module_id},
        env_t_started=episode.t_started,
    )
    whole.env_t = episode.t
    whole.is_terminated = episode.is_terminated
    whole.is_truncated = episode.is_truncated
    whole.agent_episodes[episode.agent_id] = episode
    return whole


def _metrics(names: list[str], counts: dict[str, Counts]) -> tuple[dict[str, int], dict[str, Any]]:
    """Counts in all, and RLlib's metrics of buffers: each by agent and by module.

    Args:
        names: What is counted.
        counts: By module ID.
    """
    agents = {agent for count in counts.values() for _, agent in count}
    by_owner: dict[str, Any] = {}
    for name in names:
        by_owner[f"agent_to_{name}"] = {
            agent: sum(count[name, agent] for count in counts.values()) for agent in agents
        }
        by_owner[f"module_to_{name}"] = {
            module_id: sum(count[name, agent] for agent in agents)
            for module_id, count in counts.items()
        }
    return {name: sum(by_owner[f"module_to_{name}"].values()) for name in names}, by_owner
