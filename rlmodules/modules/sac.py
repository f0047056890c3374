"""Policy and Q-functions around a memory, for SAC."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Self

import gymnasium as gym
import torch
from gymnasium import spaces
from ray.rllib.algorithms.sac.sac_learner import QF_PREDS, QF_TARGET_NEXT, QF_TWIN_PREDS
from ray.rllib.core.columns import Columns
from ray.rllib.core.learner.utils import make_target_network
from ray.rllib.core.rl_module.apis import InferenceOnlyAPI, QNetAPI, TargetNetworkAPI
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.core.rl_module.torch import TorchRLModule
from ray.rllib.utils.annotations import override
from torch import Tensor, nn
from torch.func import functional_call

from rlmodules.memories.config import MemoryConfig
from rlmodules.modules.base import ACTOR, CRITIC, BaseMemoryRLModule
from rlmodules.modules.batches import check_rows, module_inputs
from rlmodules.networks.distributions import SquashedGaussian, action_dist_class
from rlmodules.networks.heads import ActionValueHead, DiscreteActionValueHead, PolicyHead


class MemorySACRLModule(BaseMemoryRLModule, QNetAPI, TargetNetworkAPI):
    """A policy and Q-functions with memory, for SAC. Training needs `connectors.connect`.

    The config says which memory, as for `MemoryRLModule`, whose batches these are. Actions are
    those of a one-dimensional `Box` with bounds, or `Discrete` ones.

    A Q-function is a head on the features of a memory over observations, where the action joins:
    `Q(memory(observations), action)`. It has a hidden layer even where `head_fcnet_hiddens` is
    empty. For `Discrete` actions it gives a value for each, and the losses take means over all of
    them in place of a sampled one. Twin Q-functions are two heads on one memory. The target
    networks are a copy of memory and heads, and start each row from the states of the memory they
    copy.

    With `vf_share_layers` this is the policy's memory too, and the loss of the Q-functions alone
    trains it: the policy's head takes its features as they are. Otherwise the policy has a memory
    of its own, which its own loss trains.

    Replayed rows start from the states that the rollout had. So EnvRunners run the memory of the
    Q-functions as well: for free where it is shared, else for twice the time and state. Rebuilding
    its states in training would take a pass over the whole episode before each row, or lose what
    came before the row. A memory of its own for each twin, as RLlib's encoders are, would add a
    third to each step and two passes to each update.

    The networks have RLlib's names: `qf_encoder` is the Q-functions' memory with its encoder,
    `pi_encoder` the policy's own.

    Raises:
        ValueError: From the constructor, if the config or a space is not supported.

    References:
        Haarnoja et al. 2018, https://arxiv.org/abs/1812.05905.
        Christodoulou 2019, https://arxiv.org/abs/1910.07207: `Discrete` actions.
        Ni et al. 2022, https://arxiv.org/abs/2110.05038: twin heads on one memory, apart from the
        policy's.

    Example:
        ```python
        from ray.rllib.algorithms.sac import SACConfig
        from ray.rllib.core.rl_module.rl_module import RLModuleSpec

        from connectors import connect
        from rlmodules import DeepLinearAttentionConfig, MemorySACRLModule

        config = SACConfig().environment("Pendulum-v1")
        config.rl_module(
            rl_module_spec=RLModuleSpec(
                module_class=MemorySACRLModule,
                model_config=DeepLinearAttentionConfig(max_seq_len=20),
            )
        )
        connect(config)
        ```
    """

    @override(BaseMemoryRLModule)
    def build(self, config: MemoryConfig) -> None:
        """Builds the memories, the policy head and the Q heads."""
        space = self.action_space
        _check_action_space(space)
        self._discrete = isinstance(space, spaces.Discrete)
        self.action_dist_cls = action_dist_class(space) if self._discrete else SquashedGaussian
        self.twin_q = self.model_config.get("twin_q", True)
        self.qf_encoder = self.build_core(config)
        if not config.vf_share_layers:
            self.pi_encoder = self.build_core(config)
        width = self.qf_encoder.memory.output_dim
        head = (config.head_fcnet_hiddens, config.head_fcnet_activation)
        self.pi = PolicyHead(
            width,
            space,
            *head,
            free_log_std=config.free_log_std,
            log_std_clip=config.log_std_clip_param,
        )
        self.qf = _build_q_head(width, space, *head)
        if self.twin_q:
            self.qf_twin = _build_q_head(width, space, *head)

    # States.

    @override(RLModule)
    def get_initial_state(self) -> dict:
        """The state before an episode's first step: tensors without a batch axis."""
        if self.memory_config.vf_share_layers:
            return self.qf_encoder.memory.initial_state()
        return {
            ACTOR: self.pi_encoder.memory.initial_state(),
            CRITIC: self.qf_encoder.memory.initial_state(),
        }

    # Forward passes.

    @override(TorchRLModule)
    def _forward(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """Action distribution inputs `(B, T, n)` and the states after the last valid steps."""
        obs, state, *masks = module_inputs(batch)
        if self.memory_config.vf_share_layers:
            features, state = self.qf_encoder(obs, state, *masks)
        else:
            features, actor_state = self.pi_encoder(obs, state[ACTOR], *masks)
            _, critic_state = self.qf_encoder(obs, state[CRITIC], *masks)
            state = {ACTOR: actor_state, CRITIC: critic_state}
        dist_inputs = self.masked(self.pi(features), obs)
        return {Columns.ACTION_DIST_INPUTS: dist_inputs, Columns.STATE_OUT: state}

    @override(TorchRLModule)
    def _forward_train(self, batch: Mapping[str, Any], **kwargs: Any) -> dict[str, Any]:
        """What SAC's losses are made of, under RLlib's names, `(B, T)` each.

        A row holds an observation more than steps, so one pass serves a step and the one after it:
        the columns of next observations are those of the slot behind. They mean nothing in a row's
        last slot. What is named a sample is a mean over all actions where they are `Discrete`:
        the losses are linear in it. Each loss has gradients for its own networks only, so the sum
        of all has the right ones.

        Raises:
            ValueError: If the batch is that of RLlib's own connectors.
        """
        check_rows(batch)
        self.compile_cores()
        obs, state, valid, resets = module_inputs(batch)
        critic_state = self._critic_state(state)
        features = self.qf_encoder(obs, critic_state, valid, resets)[0]
        if self.memory_config.vf_share_layers:
            dist_inputs = self.pi(features.detach())
        else:
            dist_inputs = self.pi(self.pi_encoder(obs, state[ACTOR], valid, resets)[0])
        dist_inputs = self.masked(dist_inputs, obs)
        actions = batch[Columns.ACTIONS]
        if valid is not None:
            # Whatever stands in the padding, even a NaN must not reach the heads' gradients.
            actions = actions.where(valid if self._discrete else valid[..., None], 0)

        frozen = [partial(_call_frozen, qf) for qf in self._qfs()]
        logp, q = self._under_policy(dist_inputs, frozen, features.detach())
        outputs = {
            Columns.ACTION_DIST_INPUTS: dist_inputs,
            QF_PREDS: self.qf(features, actions),
            "logp_resampled": logp,
            "q_curr": q,
        }
        if self.twin_q:
            outputs[QF_TWIN_PREDS] = self.qf_twin(features, actions)
        with torch.no_grad():
            target_features = self.target_qf_encoder(obs, critic_state, valid, resets)[0]
            next_logp, next_q = self._under_policy(dist_inputs, self._target_qfs(), target_features)
        return {
            **outputs,
            "logp_next_resampled": next_logp.roll(-1, dims=1),
            QF_TARGET_NEXT: next_q.roll(-1, dims=1),
        }

    def _under_policy(
        self, dist_inputs: Tensor, qfs: Sequence[Callable], features: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Log-probability and smallest Q-value `(B, T)` of the policy's actions.

        Of a sampled one in a `Box`, with gradients through the action; their means over all
        `Discrete` ones.
        """
        dist_class: Any = self.get_train_action_dist_cls()
        policy = dist_class.from_logits(dist_inputs)
        if self._discrete:
            values = dist_inputs.softmax(-1) * _smallest(qfs, features)
            return -policy.entropy(), values.sum(-1)
        draw = policy.rsample_and_logp if torch.is_grad_enabled() else policy.sample_and_logp
        actions, logp = draw()
        return logp, _smallest(qfs, features, actions)

    @override(BaseMemoryRLModule)
    def acting_copy(self) -> Self:
        """A copy that acts as this module does, without the Q-functions and their state."""
        acting = super().acting_copy()
        if not self.memory_config.vf_share_layers:
            # Where layers are shared, the policy reads the memory of this name.
            acting.memory_config.vf_share_layers = True
            acting.qf_encoder = acting.pi_encoder
            del acting.pi_encoder
        return acting

    @override(QNetAPI)
    def compute_q_values(self, batch: Mapping[str, Any]) -> Tensor:
        """Q-values `(B, T)` of the batch's actions, the smaller ones of twins."""
        obs, state, *masks = module_inputs(batch)
        features, _ = self.qf_encoder(obs, self._critic_state(state), *masks)
        return _smallest(self._qfs(), features, batch[Columns.ACTIONS])

    def _critic_state(self, state: Any) -> Any:
        return state if self.memory_config.vf_share_layers else state[CRITIC]

    def _qfs(self) -> list[nn.Module]:
        return [self.qf, self.qf_twin] if self.twin_q else [self.qf]

    # Target networks.

    @override(TargetNetworkAPI)
    def make_target_networks(self) -> None:
        """Copies the memory and the heads of the Q-functions."""
        self.target_qf_encoder = make_target_network(self.qf_encoder)
        self.target_qf = make_target_network(self.qf)
        if self.twin_q:
            self.target_qf_twin = make_target_network(self.qf_twin)

    @override(TargetNetworkAPI)
    def get_target_network_pairs(self) -> list[tuple[nn.Module, nn.Module]]:
        """The networks with their targets."""
        pairs = [(self.qf_encoder, self.target_qf_encoder)]
        return pairs + list(zip(self._qfs(), self._target_qfs(), strict=True))

    @override(TargetNetworkAPI)
    def forward_target(self, batch: Mapping[str, Any]) -> Tensor:
        """The target networks' Q-values `(B, T)` of the batch's actions."""
        obs, state, *masks = module_inputs(batch)
        with torch.no_grad():
            features, _ = self.target_qf_encoder(obs, self._critic_state(state), *masks)
            return _smallest(self._target_qfs(), features, batch[Columns.ACTIONS])

    def _target_qfs(self) -> list[nn.Module]:
        return [self.target_qf, self.target_qf_twin] if self.twin_q else [self.target_qf]

    @override(InferenceOnlyAPI)
    def get_non_inference_attributes(self) -> list[str]:
        """What an EnvRunner does without."""
        return ["qf", "qf_twin", "target_qf_encoder", "target_qf", "target_qf_twin"]


def _check_action_space(space: gym.Space) -> None:
    if isinstance(space, spaces.Discrete):
        return
    if not isinstance(space, spaces.Box):
        raise ValueError(
            f"The action space is {space}, but SAC acts in a Box or a Discrete space only. Use PPO "
            "for others."
        )
    if not space.is_bounded():
        raise ValueError(
            f"The action space is {space}, but a squashed action needs bounds to be scaled to. "
            "Give the space finite bounds, or use PPO."
        )


def _build_q_head(width: int, space: gym.Space, *head: Any) -> nn.Module:
    head_class = DiscreteActionValueHead if isinstance(space, spaces.Discrete) else ActionValueHead
    return head_class(width, spaces.flatdim(space), *head)


def _smallest(qfs: Sequence[Callable], *inputs: Tensor) -> Tensor:
    """The smallest of the values that Q-functions give to features and actions."""
    return torch.stack([qf(*inputs) for qf in qfs]).amin(0)


def _call_frozen(qf: nn.Module, *inputs: Tensor) -> Tensor:
    """A Q-function with gradients for the actions, but not for its weights."""
    weights = {name: weight.detach() for name, weight in qf.named_parameters()}
    return functional_call(qf, weights, inputs)
