"""Has an algorithm's config replay sequences."""

from __future__ import annotations

import importlib
from typing import Any

from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.utils import force_list, replay_buffers
from ray.rllib.utils.replay_buffers.episode_replay_buffer import EpisodeReplayBuffer
from ray.rllib.utils.replay_buffers.multi_agent_episode_buffer import (
    MultiAgentEpisodeReplayBuffer,
)
from ray.rllib.utils.replay_buffers.prioritized_episode_buffer import (
    PrioritizedEpisodeReplayBuffer,
)

from connectors.replay.buffer import SequenceReplayBuffer
from connectors.setup.module_specs import row_lengths as row_lengths_of
from connectors.setup.search_spaces import is_searched
from connectors.validation import check_replay_lengths

# Entry of `replay_buffer_config` with the class of the buffer.
SEQUENCE_BUFFER = "sequence_buffer"
# RLlib's buffers that have no settings of their own.
_RLLIBS = (EpisodeReplayBuffer, MultiAgentEpisodeReplayBuffer)


def use_sequence_replay(config: Any, row_lengths: Any) -> None:
    """Has the buffer of sequences created with the Algorithm, where the module has a memory.

    It takes the place of RLlib's `EpisodeReplayBuffer`, of the one for several agents, and of the
    prioritised one that is the algorithms' default; `capacity` stays. A `SequenceReplayBuffer` of
    the user's stays too. `create_buffer` makes it: Ray 2.60 refuses other buffers than its own in
    SAC's config, and can't build them in a trial of Tune.

    Args:
        config: A config with a `replay_buffer_config`. It is changed in place.
        row_lengths: `max_seq_len` by module ID; empty if no module has a memory.

    Raises:
        ValueError: if the buffer or a length is not supported, or if a module without memory is to
            be trained beside those with memory.
    """
    if not row_lengths:
        return
    _check_modules(config, row_lengths)
    if not is_searched(config, "burn_in_len"):
        for row_length in row_lengths.values():
            check_replay_lengths(row_length, _burn_in_len(config))

    settings = dict(config.replay_buffer_config)
    kind = _buffer_class(settings.pop(SEQUENCE_BUFFER, settings["type"]))
    if kind in _RLLIBS or _is_default(config, kind, settings):
        kind = SequenceReplayBuffer
        kept = ("capacity", "metrics_num_episodes_for_smoothing", "burn_in_len")
        settings = {key: settings[key] for key in kept if key in settings}
    if not issubclass(kind, SequenceReplayBuffer):
        raise ValueError(
            f"`replay_buffer_config` has the type `{kind.__name__}`, which does not store the "
            "sequences and states that a module with memory needs; they cannot be prioritised. "
            "Use `config.training(replay_buffer_config={'type': "
            "'connectors.SequenceReplayBuffer', 'capacity': 50_000})`."
        )
    config.replay_buffer_config = {
        **settings,
        "type": EpisodeReplayBuffer.__name__,
        SEQUENCE_BUFFER: f"{kind.__module__}.{kind.__qualname__}",
    }
    callbacks = force_list(config.callbacks_on_algorithm_init)
    if create_buffer not in callbacks:
        config.callbacks(on_algorithm_init=[create_buffer, *callbacks])


def create_buffer(*, algorithm: Any, **kwargs: Any) -> None:
    """A callback that gives an Algorithm its buffer of sequences; `connect` sets it."""
    config = algorithm.config
    settings = dict(config.replay_buffer_config)
    del settings["type"]
    kind = _buffer_class(settings.pop(SEQUENCE_BUFFER))
    row_lengths = row_lengths_of(config)
    lengths = {
        "batch_length_T": row_lengths.get(DEFAULT_MODULE_ID, min(row_lengths.values())),
        "burn_in_len": _burn_in_len(config),
        "lookback": config.episode_lookback_horizon,
        "num_learners": config.num_learners or 1,
    }
    if config.is_multi_agent:
        # Which modules there are, and which are trained, may change: the present config says it.
        lengths["row_length_of"] = lambda module_id: _replayed_row_length(algorithm, module_id)
    seed = settings.get("seed") if config.seed is None else config.seed
    algorithm.local_replay_buffer = kind(**{**settings, **lengths, "seed": seed})


def _replayed_row_length(algorithm: Any, module_id: str) -> int | None:
    """`max_seq_len` of a module that may be trained, else None."""
    if not _may_be_trained(algorithm.config, module_id):
        return None
    return row_lengths_of(algorithm.config).get(module_id)


def _may_be_trained(config: Any, module_id: str) -> bool:
    trained = config.policies_to_train
    # A function decides on a batch, in the Learner.
    return trained is None or callable(trained) or module_id in trained


def _check_modules(config: Any, row_lengths: Any) -> None:
    for module_id in config.policies if config.is_multi_agent else ():
        if module_id not in row_lengths and _may_be_trained(config, module_id):
            raise ValueError(
                f"Module `{module_id}` has no memory, but is trained beside modules that have: "
                "their rows are replayed with states, its steps would have to be replayed without. "
                "Give it a memory's config, or leave it out of `config.multi_agent("
                "policies_to_train=[...])`."
            )


def _burn_in_len(config: Any) -> int:
    """DQN's setting; SAC's config of Ray 2.60 has none, and takes it with the buffer's."""
    return getattr(config, "burn_in_len", config.replay_buffer_config.get("burn_in_len", 0))


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
