"""Has an algorithm's config replay sequences."""

from __future__ import annotations

import importlib
from functools import partial
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils import force_list, replay_buffers
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import (
    PrioritizedEpisodeReplayBuffer,
)

from connectors.replay import SequenceReplayBuffer
from connectors.validation import check_replay_lengths


def use_sequence_replay(config: Any, row_lengths: Any, burn_in_len: int = 0) -> None:
    """Sets the buffer of sequences, where the module has a memory.

    It takes the place of RLlib's `EpisodeReplayBuffer`, and of the prioritised one that is the
    algorithms' default; `capacity` stays. A `SequenceReplayBuffer` of the user's stays too.

    Args:
        config: A config with a `replay_buffer_config`. It is changed in place.
        row_lengths: `max_seq_len` by module ID; empty if no module has a memory.
        burn_in_len: Steps to read before each row.

    Raises:
        ValueError: if the buffer, a length, several agents or several Learners are not supported.
    """
    if not row_lengths:
        return
    if config.is_multi_agent:
        raise ValueError(
            "Sequences can be replayed for one agent only, but the config has several. Train one "
            "agent, or use an algorithm without a replay buffer, such as PPO."
        )
    if (config.num_learners or 0) > 1:
        raise ValueError(
            f"`num_learners` is {config.num_learners}, but must be 0 or 1 to replay sequences: "
            "RLlib would cut replayed sequences to share them out. Set "
            "`config.learners(num_learners=0)`, or 1 for a Learner in a process of its own."
        )
    check_replay_lengths(row_lengths[DEFAULT_MODULE_ID], burn_in_len)

    settings = dict(config.replay_buffer_config)
    kind = _buffer_class(settings.pop("type"))
    if kind is EpisodeReplayBuffer or _is_default(config, kind, settings):
        kind = SequenceReplayBuffer
        kept = ("capacity", "metrics_num_episodes_for_smoothing")
        settings = {key: settings[key] for key in kept if key in settings}
    if not issubclass(kind, SequenceReplayBuffer):
        raise ValueError(
            f"`replay_buffer_config` has the type `{kind.__name__}`, which does not store the "
            "sequences and states that a module with memory needs; they cannot be prioritised. "
            "Use `config.training(replay_buffer_config={'type': "
            "'connectors.SequenceReplayBuffer', 'capacity': 50_000})`."
        )
    config.training(
        replay_buffer_config={
            **settings,
            # Ray 2.60 takes the name of a class only.
            "type": f"{kind.__module__}.{kind.__qualname__}",
            "batch_length_T": row_lengths[DEFAULT_MODULE_ID],
            "burn_in_len": burn_in_len,
            "lookback": config.episode_lookback_horizon,
            "seed": settings.get("seed") if config.seed is None else config.seed,
        }
    )


def use_sequence_replay_in_sac(config: Any, row_lengths: Any) -> None:
    """Same as `use_sequence_replay`, but the buffer is created when RLlib has set up the Algorithm.

    SAC's config of Ray 2.60 refuses all buffers but four of RLlib's, by their names. It has no
    setting for burn-in: that of the buffer counts.

    Args:
        config: A SAC config. It is changed in place.
        row_lengths: `max_seq_len` by module ID; empty if no module has a memory.

    Raises:
        ValueError: as `use_sequence_replay` does.
    """
    if not row_lengths:
        return
    callbacks = force_list(config.callbacks_on_algorithm_init)
    for callback in callbacks:
        if isinstance(callback, partial) and callback.func is create_buffer:
            # From an earlier call, which hid the type.
            config.replay_buffer_config["type"] = callback.args[0]
            callbacks = [other for other in callbacks if other is not callback]
    burn_in_len = config.replay_buffer_config.get("burn_in_len", 0)
    use_sequence_replay(config, row_lengths, burn_in_len)
    create = partial(create_buffer, config.replay_buffer_config["type"])
    config.callbacks(on_algorithm_init=[create, *callbacks])
    config.replay_buffer_config["type"] = EpisodeReplayBuffer.__name__


def create_buffer(kind: str, *, algorithm: Any, **kwargs: Any) -> None:
    """Replaces an Algorithm's buffer by one of another class with the same settings."""
    settings = dict(algorithm.config.replay_buffer_config)
    del settings["type"]
    algorithm.local_replay_buffer = _buffer_class(kind)(**settings)


def _buffer_class(kind: Any) -> type:
    """The class that a buffer's `type` names."""
    if isinstance(kind, type):
        return kind
    module, _, name = str(kind).rpartition(".")
    return getattr(importlib.import_module(module or replay_buffers.__name__), name)


def _is_default(config: Any, kind: type, settings: dict[str, Any]) -> bool:
    """Whether the prioritised buffer is there because nobody chose another."""
    default = type(config)().replay_buffer_config
    return kind is PrioritizedEpisodeReplayBuffer and all(
        settings.get(key) == default.get(key) for key in ("alpha", "beta")
    )
