"""The loss on recorded episodes, for RLlib's offline evaluation."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

from ray.rllib.connectors.learner import AddNextObservationsFromEpisodesToTrainBatch
from ray.rllib.core import DEFAULT_MODULE_ID
from ray.rllib.offline.offline_evaluation_runner import OfflineEvaluationRunner
from ray.rllib.offline.offline_prelearner import OfflinePreLearner
from ray.rllib.policy.sample_batch import MultiAgentBatch, SampleBatch
from ray.rllib.utils.annotations import override

from connectors.offline.actions import script_action_struct
from connectors.offline.reading import read_once, read_trials
from connectors.offline.several_agents import module_mapping


class PassRecordedRows(OfflinePreLearner):
    """Leaves recorded rows as they are. RLlib makes batches of them, with the first weights."""

    def __init__(self, **kwargs: Any):
        # RLlib's would build a module.
        pass

    @override(OfflinePreLearner)
    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        return batch


class MemoryOfflineEvaluationRunner(OfflineEvaluationRunner):
    """RLlib's runner for the loss on recorded episodes, for modules with memory.

    It makes its batches as our Learner does: of whole episodes, with the weights that it has.
    """

    @override(OfflineEvaluationRunner)
    def _create_batch_iterator(self, **kwargs: Any) -> Iterable[MultiAgentBatch]:
        """Private in Ray 2.60, where batches have no public place; a test fails if renamed."""
        return _EvaluationBatches(self, **kwargs)


class _EvaluationBatches:
    """Batches of one evaluation each time it is iterated over; the next one goes on from there."""

    def __init__(self, runner: MemoryOfflineEvaluationRunner, **kwargs: Any):
        self._config: Any = runner.config
        self._module: Any = runner.module
        space, action_space = self._config.observation_space, self._config.action_space
        module_of = module_mapping(self._config)
        structs = {
            module_id: script_action_struct(self._config, module.action_space)
            for module_id, module in self._module.items()
        }
        kwargs = {
            "script_actions": structs if module_of else structs[DEFAULT_MODULE_ID],
            "module_of": module_of,
            "batch_size": self._config.input_read_batch_size or 1,
            **kwargs,
        }
        self._source = (runner._dataset_iterator, kwargs)
        self._trials = read_trials(runner._dataset_iterator, **kwargs)
        self._pipeline = self._config.build_learner_connector(
            space, action_space, device=runner._device
        )
        self._pipeline.remove(AddNextObservationsFromEpisodesToTrainBatch)

    def __iter__(self) -> Iterator[MultiAgentBatch]:
        num_batches = self._config.dataset_num_iters_per_eval_runner
        iterator, kwargs = self._source
        # Without a number: all episodes once.
        trials = self._trials if num_batches else read_once(iterator, **kwargs)
        lists = _lists_of_steps(trials, self._config.offline_eval_batch_size_per_runner)
        for some in islice(lists, num_batches or None):
            num_steps = sum(map(len, some))
            columns = self._pipeline(
                rl_module=self._module, batch={}, episodes=some, shared_data={}
            )
            batches = {id_: SampleBatch(batch) for id_, batch in columns.items()}
            yield MultiAgentBatch(batches, env_steps=num_steps)


def _lists_of_steps(trials: Iterable[list[Any]], num_steps: int) -> Iterator[list[Any]]:
    """Lists of episodes with so many steps or more; the last one may have fewer."""
    some: list[Any] = []
    for trial in trials:
        some += trial
        if sum(map(len, some)) >= num_steps:
            yield some
            some = []
    if some:
        yield some
