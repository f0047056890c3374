"""Recorded episodes on their way to the Learner."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import tree
from ray.data import DataIterator
from ray.rllib.env import INPUT_ENV_SPACES
from ray.rllib.env.single_agent_episode import SingleAgentEpisode
from ray.rllib.env.utils.infinite_lookback_buffer import InfiniteLookbackBuffer
from ray.rllib.offline.offline_data import OfflineData
from ray.rllib.utils.annotations import override
from ray.rllib.utils.spaces.space_utils import get_base_struct_from_space

from connectors.offline.actions import is_sampled, normalize_actions, script_action_struct
from connectors.offline.joining import join_parts
from connectors.offline.several_agents import AGENTS, ModuleOf, episode_from, module_mapping
from connectors.offline.trials import join_trials


class RecordedEpisodes(OfflineData):
    """Deals recorded episodes out to the Learners, as they are.

    RLlib turns them into train batches in processes of their own, whose module keeps the weights
    of the first iteration. States and values computed there would be those of an untrained policy.
    And with several Learners it splits the data, into parts that end at different times: the first
    one to end its part waits for the others, which wait for its gradients.
    """

    # RLlib sets it behind the constructor.
    spaces: dict[str, Any]
    module_spec: Any
    _trials: Iterator[list[Any]] | None = None

    @override(OfflineData)
    def sample(
        self,
        num_samples: int,
        return_iterator: bool = False,
        num_shards: int = 1,
        module_state: dict[str, Any] | None = None,
    ) -> list[list[list[Any]]]:
        """What each Learner trains on in an iteration: a list of whole episodes an update.

        So also where RLlib asks for a batch or for iterators: our Learner takes it for both.
        """
        if self._trials is None:
            # One row is one episode.
            batch_size = self.config.input_read_batch_size or 1
            self._trials = read_trials(
                self.data.iterator(),
                script_actions=self._script_actions(),
                module_of=module_mapping(self.config),
                batch_size=batch_size,
                **self.iter_batches_kwargs,
            )
        num_updates: Any = self.config.dataset_num_iters_per_learner
        updates = [deal(self._trials, max(1, num_shards), num_samples) for _ in range(num_updates)]
        return [list(hands) for hands in zip(*updates, strict=True)]

    def _script_actions(self) -> Any:
        if not self.config.is_multi_agent:
            return script_action_struct(self.config, self.spaces[INPUT_ENV_SPACES][1])
        specs = self.module_spec.rl_module_specs
        return {id_: script_action_struct(self.config, s.action_space) for id_, s in specs.items()}


def deal(trials: Iterator[list[Any]], num_learners: int, num_steps: int) -> list[list[Any]]:
    """Deals trials until each Learner has `num_steps` or more: the next to who has the fewest.

    Args:
        trials: Lists of episodes that stay together, most often of one.
        num_learners: How many hands.
        num_steps: What each needs.

    Returns:
        A list of episodes a Learner.
    """
    hands: list[list[Any]] = [[] for _ in range(num_learners)]
    steps = [0] * num_learners
    while min(steps) < num_steps:
        learner = steps.index(min(steps))
        trial = next(trials)
        hands[learner] += trial
        steps[learner] += sum(map(len, trial))
    return hands


def read_trials(
    iterator: DataIterator,
    *,
    script_actions: Any = None,
    module_of: ModuleOf | None = None,
    **kwargs: Any,
) -> Iterator[list[Any]]:
    """Reads and decodes recorded episodes, again and again, each once a pass.

    Parts of an episode that was cut where samples ended are joined again, and so are the episodes
    of a trial. Module outputs are left out: no offline Learner needs those of the policy that
    recorded.

    Args:
        iterator: Over rows as RLlib records episodes.
        script_actions: See `script_action_struct`. With several agents a dict of them, by module.
        module_of: See `module_mapping`.
        kwargs: For `DataIterator.iter_batches`.

    Returns:
        Trials, as lists of episodes. What was recorded without is a trial of one.

    Raises:
        ValueError: if there are none, if one lacks steps or episodes, or if they are of one agent
            where several were expected, or of several.
    """
    kwargs = {"script_actions": script_actions, "module_of": module_of, **kwargs}
    while True:
        empty = True
        for trial in read_once(iterator, **kwargs):
            empty = False
            yield trial
        if empty:
            raise ValueError(
                "`input_` holds no episodes. Point it to files recorded with "
                "`config.offline_data(output=..., output_write_episodes=True)`."
            )


def read_once(
    iterator: DataIterator,
    *,
    script_actions: Any = None,
    module_of: ModuleOf | None = None,
    **kwargs: Any,
) -> Iterator[list[Any]]:
    """The same in one pass."""
    rows = (row for batch in iterator.iter_batches(**kwargs) for row in batch["item"])
    return join_trials(join_parts(_decode(row, script_actions, module_of) for row in rows))


def read_episodes(iterator: DataIterator, **kwargs: Any) -> Iterator[Any]:
    """The episodes of `read_trials`, one after the other."""
    for trial in read_trials(iterator, **kwargs):
        yield from trial


def _decode(row: bytes, script_actions: Any, module_of: ModuleOf | None) -> Any:
    # Here, as RLlib does it: Ray does not install `msgpack_numpy`.
    import msgpack
    import msgpack_numpy

    state = msgpack.unpackb(row, object_hook=msgpack_numpy.decode)
    if (AGENTS in state) != (module_of is not None):
        recorded = "several agents" if AGENTS in state else "one agent"
        raise ValueError(
            f"Recorded episode {state['id_']} is one of {recorded}, which the config is not for: "
            "it has `policies` where there are several agents, and none where there is one. Set "
            "`config.multi_agent(...)` as for the recording, or read other files."
        )
    if module_of is None:
        return _restore(state, script_actions)
    structs = script_actions or {}
    return episode_from(state, lambda agent, id_: _restore(agent, structs.get(id_)), module_of)


def _restore(state: dict[str, Any], script_actions: Any) -> SingleAgentEpisode:
    episode = SingleAgentEpisode.from_state({**state, "extra_model_outputs": None})
    _restore_tuples(episode.observations)
    _restore_tuples(episode.actions)
    episode.to_numpy()
    if script_actions is not None and not is_sampled(state):
        normalize_actions(episode, script_actions)
    return episode


def _restore_tuples(buffer: InfiniteLookbackBuffer) -> None:
    """Makes tuples of lists again, which is how msgpack returns both."""
    struct = None if buffer.space is None else get_base_struct_from_space(buffer.space)
    if not tree.is_nested(struct):
        return
    if buffer.finalized:
        buffer.data = tree.unflatten_as(struct, tree.flatten(buffer.data))
        return
    buffer.data = [tree.unflatten_as(struct, tree.flatten(item)) for item in buffer.data]
