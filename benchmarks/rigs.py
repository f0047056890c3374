"""PPO on POPGym, taken apart: sampling, learner connector and update as functions to measure."""

import logging
import pickle
import warnings
from collections.abc import Callable
from typing import Any, cast

import ray
import torch
from popgym.envs.repeat_previous import RepeatPreviousEasy
from ray.rllib.algorithms.ppo import PPOConfig
from ray.rllib.connectors.env_to_module import FlattenObservations
from ray.rllib.core.columns import Columns
from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.core.rl_module.rl_module import RLModuleSpec
from ray.rllib.env.multi_agent_env import make_multi_agent
from ray.rllib.utils.metrics import NUM_ENV_STEPS_SAMPLED_LIFETIME
from ray.tune.registry import register_env

from benchmarks.harness import check, timed
from connectors import connect
from rlmodules import MemoryConfig, MemoryRLModule, POPGymLinearAttentionConfig

MAX_SEQ_LEN = 64
NUM_ENVS = 16
# POPGym's memory, with a state of 240 numbers, behind the encoder and heads of the other configs.
POPGYM = POPGymLinearAttentionConfig(
    max_seq_len=MAX_SEQ_LEN,
    hidden_size=256,
    positions="none",
    fcnet_hiddens=[64],
    fcnet_activation="relu",
    fcnet_norm=False,
    head_fcnet_hiddens=[],
    compile=False,
)
HYPERPARAMETERS = {
    "lr": 1e-3,
    "num_epochs": 8,
    "minibatch_size": 1024,
    "use_kl_loss": False,
    "grad_clip": 0.5,
    "vf_clip_param": 1e6,
}

register_env("RepeatPreviousEasy", lambda _: RepeatPreviousEasy())
register_env("RepeatPreviousEasyAgents", make_multi_agent(lambda _: RepeatPreviousEasy()))


class Rig:
    """One algorithm, everything in this process.

    Args:
        config: What `use_memory`, `use_rllib_model` or one of those that call them returned.
    """

    def __init__(self, config: PPOConfig):
        start_ray()
        # Without types: RLlib declares most of these attributes as optional.
        self.algo: Any = config.build_algo()
        self.runner: Any = self.algo.env_runner
        self.learner: Any = self.algo.learner_group._learner
        # The only one: several agents share it.
        self.module_id = next(iter(self.learner.module.keys()))
        self.module: Any = self.learner.module[self.module_id].unwrapped()

    @property
    def _sampling_module(self) -> Any:
        module = self.runner.module
        several = isinstance(module, MultiRLModule)
        return (module[self.module_id] if several else module).unwrapped()

    @property
    def num_parameters(self) -> int:
        """Parameters that are trained."""
        return sum(p.numel() for p in self.module.parameters())

    def sample(self) -> list[Any]:
        """One fragment of every environment, continuing where the last one ended."""
        return self.runner.sample()

    def record_sample(self) -> "Recorded":
        """The second fragment after a reset, with fixed seeds for environments and actions.

        Some of its pieces start in the middle of an episode, as most do in training.
        """
        torch.manual_seed(0)
        steps = self.algo.config.train_batch_size_per_learner
        self.runner.sample(num_timesteps=steps, force_reset=True)
        return Recorded(self.runner.sample())

    def train_batch(self, episodes: list[Any]) -> dict[str, Any]:
        """What the learner connector makes of episodes, which it changes."""
        batch = self.learner._learner_connector(
            rl_module=self.learner.module,
            batch={},
            episodes=episodes,
            shared_data={},
            metrics=self.learner.metrics,
        )
        return batch[self.module_id]

    def update(self, episodes: list[Any]) -> None:
        """The Learner's part of an iteration, learner connector included."""
        config = self.algo.config
        self.algo.learner_group.update(
            episodes=episodes,
            timesteps={NUM_ENV_STEPS_SAMPLED_LIFETIME: 0},
            num_epochs=config.num_epochs,
            minibatch_size=config.minibatch_size,
            shuffle_batch_per_epoch=config.shuffle_batch_per_epoch,
        )

    def iterate(self) -> None:
        """One whole iteration."""
        self.algo.train()

    def set_epochs(self, num_epochs: int) -> None:
        """Changes how often an iteration passes over its data."""
        config = self.algo.config
        config._is_frozen = False
        config.training(num_epochs=num_epochs)
        config.freeze()

    def check_log_probs(self, batch: dict[str, Any]) -> None:
        """Compares the Learner's log-probabilities of a train batch with the recorded ones.

        Raises:
            CorrectnessError: If one of a valid step differs by more than 1e-5.
        """
        with torch.no_grad():
            outputs = self.module.forward_train(batch)
        dist_class = self.module.get_train_action_dist_cls()
        dist = dist_class.from_logits(outputs[Columns.ACTION_DIST_INPUTS])
        difference = dist.logp(batch[Columns.ACTIONS]) - batch[Columns.ACTION_LOGP]
        error = difference[batch[Columns.LOSS_MASK]].abs().max().item()
        check(error <= 1e-5, f"log-probabilities differ from the recorded ones by {error:.1e}")

    def copy_weights(self, other: "Rig") -> None:
        """Takes over the other rig's weights, for training and for sampling."""
        self.module.load_state_dict(other.module.state_dict())
        self._sampling_module.load_state_dict(other._sampling_module.state_dict())

    def stop(self) -> None:
        """Frees the algorithm."""
        self.algo.stop()


class Recorded:
    """Episodes that can be consumed again and again: the learner connector changes its input."""

    def __init__(self, episodes: list[Any]):
        self._pickle = pickle.dumps(episodes, protocol=pickle.HIGHEST_PROTOCOL)

    @property
    def num_bytes(self) -> int:
        """Size of the pickled episodes, as an EnvRunner in another process would send them."""
        return len(self._pickle)

    def episodes(self) -> list[Any]:
        """A fresh copy."""
        return pickle.loads(self._pickle)

    def timed(
        self, function: Callable[[list[Any]], Any], device: str = "cpu"
    ) -> Callable[[], float]:
        """A function that returns how long `function` takes on a copy, without the copying."""

        def run() -> float:
            episodes = self.episodes()
            return timed(lambda: function(episodes), device)()

        return run


def memory_config(
    module_class: type[MemoryRLModule],
    model_config: MemoryConfig,
    *,
    connected: bool,
    fragment: int = 256,
    device: str = "cpu",
    num_agents: int = 1,
    **hyperparameters: Any,
) -> PPOConfig:
    """PPO with a module of ours, on our connectors or on RLlib's.

    With several agents these share the module, in so many environments fewer.
    """
    config = ppo_config(fragment=fragment, device=device, **hyperparameters)
    if num_agents > 1:
        num_envs = NUM_ENVS // num_agents
        config.environment("RepeatPreviousEasyAgents", env_config={"num_agents": num_agents})
        config.env_runners(num_envs_per_env_runner=num_envs)
        # RLlib counts steps of the environment in both.
        batch_size = fragment * num_envs
        config.training(train_batch_size_per_learner=batch_size, minibatch_size=batch_size)
        config.multi_agent(policies={"shared"}, policy_mapping_fn=_shared_module)
    use_memory(config, module_class, model_config)
    if connected:
        connect(config, pack_rows=False)  # the same rows on both sides
    return config


def rllib_lstm_config(
    *, lstm_cell_size: int = 256, fragment: int = 256, device: str = "cpu", **hyperparameters: Any
) -> PPOConfig:
    """PPO with RLlib's LSTM, on RLlib's connectors."""
    config = ppo_config(fragment=fragment, device=device, **hyperparameters)
    return use_rllib_model(
        config, use_lstm=True, lstm_cell_size=lstm_cell_size, max_seq_len=MAX_SEQ_LEN
    )


def use_memory(
    config: PPOConfig, module_class: type[MemoryRLModule], model_config: MemoryConfig
) -> PPOConfig:
    """Gives a config a module of ours."""
    # RLlib's annotation of `model_config` names no dataclass but its own.
    spec = RLModuleSpec(module_class=module_class, model_config=cast(Any, model_config))
    return config.rl_module(rl_module_spec=spec)


def use_rllib_model(config: PPOConfig, *, images: bool = False, **model_config: Any) -> PPOConfig:
    """Gives a config RLlib's own module, with settings of `DefaultModelConfig`."""
    if not images:
        # RLlib's own encoders take images and flat vectors only.
        config.env_runners(env_to_module_connector=lambda *_: FlattenObservations())
    return config.rl_module(model_config=DefaultModelConfig(**model_config))


def _shared_module(agent_id: Any, episode: Any, **kwargs: Any) -> str:
    # No lambda: it is pickled with the episodes.
    return "shared"


def ppo_config(
    *,
    env: str | Callable[..., Any] = "RepeatPreviousEasy",
    env_config: dict[str, Any] | None = None,
    num_envs: int = NUM_ENVS,
    fragment: int = 256,
    device: str = "cpu",
    **hyperparameters: Any,
) -> PPOConfig:
    """PPO in one process, without a module of its own yet; an iteration takes one sample."""
    config = PPOConfig()
    config.environment(env, env_config=env_config or {})
    config.env_runners(
        num_env_runners=0, num_envs_per_env_runner=num_envs, rollout_fragment_length=fragment
    )
    config.learners(num_learners=0, num_gpus_per_learner=1 if device == "cuda" else 0)
    config.training(
        train_batch_size_per_learner=fragment * num_envs, **{**HYPERPARAMETERS, **hyperparameters}
    )
    config.debugging(seed=0, log_level="ERROR")
    return config


def start_ray(num_cpus: int | None = None) -> None:
    """Starts Ray on this machine without its messages, with all CPUs if not told how many."""
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    warnings.filterwarnings("ignore", category=UserWarning, module="gymnasium")
    for name in ("ray", "ray.rllib", "ray.tune"):
        logging.getLogger(name).setLevel(logging.ERROR)
    if not ray.is_initialized():
        ray.init(
            num_cpus=num_cpus,
            include_dashboard=False,
            log_to_driver=False,
            logging_level=logging.ERROR,
        )
