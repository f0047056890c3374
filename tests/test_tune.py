"""Search spaces, and population based training: real runs of Tune."""

import dataclasses
import functools
import json
from pathlib import Path

import numpy as np
import pytest
from ray import tune
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.rl_module import RLModule, RLModuleSpec
from ray.tune.schedulers import PopulationBasedTraining

from connectors import MemoryPolicy, MemoryPPOTorchLearner, connect
from rlmodules import DeepLinearAttentionConfig, DeepLinearAttentionRLModule
from tests.envs import RandomObservations

pytestmark = [
    pytest.mark.ray,
    pytest.mark.slow,
    # Tune warns about its own defaults.
    pytest.mark.filterwarnings("ignore"),
]

MODULE = "default_policy"


def spec(**settings):
    small = {"max_seq_len": 8, "d_model": 8, "num_heads": 2, "head_dim": 4, "compile": False}
    return RLModuleSpec(
        module_class=DeepLinearAttentionRLModule,
        model_config=DeepLinearAttentionConfig(**{**small, **settings}),
    )


class Recording(MemoryPPOTorchLearner):
    """Logs how far the first update's log-probabilities are from those of the rollout."""

    def compute_loss_for_module(self, *, module_id, config, batch, fwd_out):
        dist_class = self.module[module_id].unwrapped().get_train_action_dist_cls()
        dist = dist_class.from_logits(fwd_out[Columns.ACTION_DIST_INPUTS].detach())
        difference = dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
        error = difference[batch[Columns.LOSS_MASK]].abs().max().item()
        self.metrics.log_value((module_id, "error"), error, reduce="max")
        self.metrics.log_value((module_id, "used_lr"), self.learning_rate(), reduce="max")
        return super().compute_loss_for_module(
            module_id=module_id, config=config, batch=batch, fwd_out=fwd_out
        )

    def learning_rate(self):
        ((_, optimizer),) = self.get_optimizers_for_module(MODULE)
        return optimizer.param_groups[0]["lr"]


def ppo():
    return (
        PPOConfig()
        .environment(RandomObservations)
        .env_runners(num_env_runners=0, num_envs_per_env_runner=2)
        .learners(num_learners=0, learner_class=Recording)
        .training(train_batch_size_per_learner=64, minibatch_size=64, num_epochs=1)
        .rl_module(rl_module_spec=spec())
        .debugging(log_sys_usage=False)
    )


def fit(config, tmp_path, *, iterations, **settings):
    tuner = tune.Tuner(
        "PPO",
        param_space=config,
        tune_config=tune.TuneConfig(**settings),
        run_config=tune.RunConfig(
            storage_path=str(tmp_path),
            stop={"training_iteration": iterations},
            checkpoint_config=tune.CheckpointConfig(checkpoint_frequency=1),
            verbose=0,
        ),
    )
    results = tuner.fit()
    assert not results.errors
    return results


def test_a_search_over_module_and_learning_rate(tmp_path):
    config = connect(ppo().training(lr=tune.loguniform(1e-4, 1e-2)))
    specs = [spec(num_layers=1), spec(num_layers=2, max_seq_len=16)]
    config.rl_module(rl_module_spec=tune.grid_search(specs))
    results = fit(config, tmp_path, iterations=1)
    found = {}
    for result in results:
        path = f"{result.checkpoint.path}/learner_group/learner/rl_module/{MODULE}"
        settings = RLModule.from_checkpoint(path).memory_config
        found[settings.num_layers] = settings.max_seq_len
        learner = result.metrics["learners"][MODULE]
        assert learner["error"] < 1e-5
        assert 1e-4 <= learner["used_lr"] <= 1e-2
        assert learner["used_lr"] == pytest.approx(result.config["lr"])
        MemoryPolicy.from_checkpoint(result.checkpoint.path).act(np.zeros(3, np.float32))
    assert found == {1: 8, 2: 16}
    assert len({result.config["lr"] for result in results}) == 2


def test_trials_are_told_apart_by_the_models_settings(tmp_path):
    """In folders, in result columns, and among TensorBoard's hyperparameters."""
    model_config = {**dataclasses.asdict(spec().model_config), "num_layers": None, "decay": False}
    model_config["num_layers"] = tune.grid_search([1, 2])
    del model_config["vf_share_layers"]
    config = ppo().rl_module(rl_module_spec=None, model_config=model_config)
    config._rl_module_spec = None
    results = fit(connect(config), tmp_path, iterations=1)
    column = "config/_model_config/num_layers"
    frame = results.get_dataframe()
    assert sorted(frame[column]) == [1, 2]
    for result in results:
        num_layers = result.config["_model_config"]["num_layers"]
        assert f"num_layers={num_layers}" in result.path
        path = f"{result.checkpoint.path}/learner_group/learner/rl_module/{MODULE}"
        settings = RLModule.from_checkpoint(path).memory_config
        assert (settings.num_layers, settings.decay, settings.vf_share_layers) == (
            num_layers, False, True
        )  # fmt: skip
        assert result.metrics["learners"][MODULE]["error"] < 1e-5
        (events,) = Path(result.path).glob("events.out.tfevents.*")
        assert b"_model_config/num_layers" in events.read_bytes()


def digest(algorithm):
    weights = algorithm.learner_group.get_weights()[MODULE]
    return float(sum(np.abs(value).sum(dtype=np.float64) for value in weights.values()))


def log(folder, algorithm, event):
    with (folder / "events.jsonl").open("a") as file:
        entry = {
            "event": event,
            "trial": algorithm.logdir,
            "weights": digest(algorithm),
            "iteration": algorithm.training_iteration,
        }
        file.write(json.dumps(entry) + "\n")


def score(*, algorithm, result, folder, **kwargs):
    # The trial that starts with the higher learning rate stays the better one.
    result["score"] = algorithm.config.lr
    log(folder, algorithm, "trained")


def loaded(*, algorithm, folder, **kwargs):
    log(folder, algorithm, "loaded")


def test_population_based_training(tmp_path):
    """The worse trial goes on from the better one's weights, with a learning rate of its own."""
    config = ppo().callbacks(
        on_train_result=functools.partial(score, folder=tmp_path),
        on_checkpoint_loaded=functools.partial(loaded, folder=tmp_path),
    )
    config.training(lr=tune.grid_search([1e-4, 1e-2]), entropy_coeff=0.01)
    results = fit(
        connect(config),
        tmp_path,
        iterations=3,
        metric="score",
        mode="max",
        scheduler=PopulationBasedTraining(
            time_attr="training_iteration",
            perturbation_interval=1,
            quantile_fraction=0.5,
            resample_probability=0.0,
            hyperparam_mutations={
                "lr": tune.loguniform(1e-4, 1e-2),
                "entropy_coeff": tune.uniform(0.0, 0.1),
            },
            synch=True,
        ),
    )
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    trained = {e["weights"]: e["trial"] for e in events if e["event"] == "trained"}
    exploits = [e for e in events if e["event"] == "loaded" and trained[e["weights"]] != e["trial"]]
    assert exploits
    for result in results:
        learner = result.metrics["learners"][MODULE]
        assert learner["error"] < 1e-5
        assert learner["used_lr"] == pytest.approx(result.config["lr"])
    assert {result.config["lr"] for result in results}.isdisjoint({1e-4})
