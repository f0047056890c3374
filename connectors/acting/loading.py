"""What a checkpoint says about acting: the module, the pipelines around it, the spaces."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import gymnasium as gym
from ray.rllib.connectors.connector_pipeline_v2 import ConnectorPipelineV2
from ray.rllib.connectors.connector_v2 import ConnectorV2
from ray.rllib.connectors.env_to_module import EnvToModulePipeline, MeanStdFilter
from ray.rllib.connectors.module_to_env import (
    ListifyDataForVectorEnv,
    ModuleToAgentUnmapping,
    ModuleToEnvPipeline,
    NormalizeAndClipActions,
    UnBatchToIndividualItems,
)
from ray.rllib.core import (
    COMPONENT_ENV_RUNNER,
    COMPONENT_ENV_TO_MODULE_CONNECTOR,
    COMPONENT_MODULE_TO_ENV_CONNECTOR,
    DEFAULT_MODULE_ID,
)
from ray.rllib.core.rl_module.multi_rl_module import MultiRLModule
from ray.rllib.core.rl_module.rl_module import RLModule
from ray.rllib.env import INPUT_ENV_SINGLE_SPACES
from ray.rllib.env.multi_agent_episode import MultiAgentEpisode
from ray.rllib.utils.checkpoints import Checkpointable

from connectors.rollout.build_module_batch import BuildModuleBatch
from connectors.rollout.format_actions import FormatActions
from connectors.rollout.sample_actions import SampleActions
from rlmodules.modules.checkpoints import MODULES, find_checkpoint


@dataclass(kw_only=True)
class ActingParts:
    """Everything between an observation and an action.

    Attributes:
        module: The module; a `MultiRLModule` for several agents.
        env_to_module: From episodes to the module's batch.
        module_to_env: From the module's output to actions.
        observation_space: The environment's; for several agents a `Dict` of theirs.
        action_space: The environment's; for several agents a `Dict` of theirs.
        lookback: Steps before the present one that connectors may read.
        policy_mapping_fn: Which module acts for which of several agents; None if there is one.
    """

    module: RLModule
    env_to_module: ConnectorPipelineV2
    module_to_env: ConnectorPipelineV2
    observation_space: gym.Space
    action_space: gym.Space
    lookback: int = 1
    policy_mapping_fn: Callable[..., str] | None = None

    @property
    def is_multi_agent(self) -> bool:
        """Whether these are the parts of several agents."""
        return self.policy_mapping_fn is not None

    @property
    def modules(self) -> dict[str, RLModule]:
        """The modules by ID."""
        if isinstance(self.module, MultiRLModule):
            return dict(self.module.items())
        return {DEFAULT_MODULE_ID: self.module}

    @property
    def agents(self) -> list[Any]:
        """IDs of several agents; empty if there is one without an ID."""
        spaces: Any = self.observation_space
        return list(spaces) if self.is_multi_agent else []

    def check_modules(
        self, agents: Iterable[Any], episode: MultiAgentEpisode | None = None
    ) -> None:
        """Checks that the modules of several agents are there.

        Args:
            agents: The agents.
            episode: The one that they are in. None: an empty one, as RLlib asks for spaces.

        Raises:
            ValueError: if one is not.
        """
        if episode is None:
            episode = MultiAgentEpisode(agent_to_module_mapping_fn=self.policy_mapping_fn)
        for agent in agents:
            module_id = episode.module_for(agent)
            if module_id not in self.modules:
                raise ValueError(
                    f"`policy_mapping_fn` gives agent {agent!r} the module {module_id!r}, but the "
                    f"checkpoint has {sorted(self.modules)}. Give `MemoryPolicy.from_checkpoint` a "
                    "`policy_mapping_fn` that keeps to these."
                )


def load_parts(path: str | Path) -> ActingParts:
    """Reads an Algorithm's checkpoint, or a module's, without building the Algorithm.

    Raises:
        ValueError: if there is neither at `path`, or several agents were trained from recorded
            episodes alone, which do not tell their spaces.
    """
    path, config = find_checkpoint(path)
    return _module_parts(_load_module(path)) if config is None else _algorithm_parts(path, config)


def _algorithm_parts(path: Path, config: Any) -> ActingParts:
    # An Algorithm without local EnvRunner saves the two pipelines itself.
    pipelines = path / COMPONENT_ENV_RUNNER
    pipelines = pipelines if pipelines.is_dir() else path
    saved = pipelines / COMPONENT_ENV_TO_MODULE_CONNECTOR
    several = config.is_multi_agent
    if several and not saved.is_dir():
        raise ValueError(
            f"`path` is {str(path)!r}, a checkpoint of several agents that were trained without "
            "an environment, so that it does not hold their spaces and connectors. Give the "
            f"folder of one module, {MODULES / '<module ID>'} in it, or train with `environment` "
            "set."
        )
    module = _load_module(path / MODULES / ("" if several else DEFAULT_MODULE_ID))
    if not saved.is_dir():
        # Trained offline, without environment: the module saw the recorded observations.
        return _module_parts(module)
    info = pickle.loads((saved / Checkpointable.CLASS_AND_CTOR_ARGS_FILE_NAME).read_bytes())
    observation_space, action_space = info["ctor_args_and_kwargs"][0]

    # As on RLlib's local EnvRunner beside remote ones, which has spaces but no environment. The
    # saved constructor arguments of the pieces would not do: RLlib records those of the base class
    # where a piece derives from another one.
    spaces = {INPUT_ENV_SINGLE_SPACES: (observation_space, action_space)}
    config.add_default_connectors_to_env_to_module_pipeline = False
    config.add_default_connectors_to_module_to_env_pipeline = False
    env_to_module = cast(
        "ConnectorPipelineV2", config.build_env_to_module_connector(None, spaces, "cpu")
    )
    if not env_to_module[BuildModuleBatch]:
        env_to_module.append(BuildModuleBatch(device="cpu"))
    env_to_module.restore_from_path(saved)
    _freeze_filters(env_to_module)
    module_to_env = cast("ConnectorPipelineV2", config.build_module_to_env_connector(None, spaces))
    if not module_to_env[SampleActions]:
        if several:
            module_to_env.prepend(ModuleToAgentUnmapping())
        module_to_env.prepend(UnBatchToIndividualItems())
        module_to_env.prepend(SampleActions())
        module_to_env.append(
            NormalizeAndClipActions(
                normalize_actions=config.normalize_actions, clip_actions=config.clip_actions
            )
        )
        module_to_env.append(ListifyDataForVectorEnv())
    module_to_env.restore_from_path(pipelines / COMPONENT_MODULE_TO_ENV_CONNECTOR)
    return ActingParts(
        module=module,
        env_to_module=env_to_module,
        module_to_env=module_to_env,
        observation_space=observation_space,
        action_space=action_space,
        lookback=config.episode_lookback_horizon,
        policy_mapping_fn=config.policy_mapping_fn if several else None,
    )


def _module_parts(module: RLModule) -> ActingParts:
    spaces: Any = (module.observation_space, module.action_space)
    actions: list[ConnectorV2] = [
        SampleActions(),
        FormatActions(normalize_actions=True, clip_actions=False),
    ]
    return ActingParts(
        module=module,
        env_to_module=EnvToModulePipeline(*spaces, connectors=[BuildModuleBatch(device="cpu")]),
        module_to_env=ModuleToEnvPipeline(*spaces, connectors=actions),
        observation_space=spaces[0],
        action_space=spaces[1],
    )


def _load_module(path: Path) -> RLModule:
    """A module, or the `MultiRLModule` of several."""
    return cast("RLModule", RLModule.from_checkpoint(path))


def _freeze_filters(pipeline: ConnectorPipelineV2) -> None:
    """Stops the running statistics, so that one client's observations change no other's actions.

    Ray 2.60 takes `update_stats` in the constructor only, which the user's builder calls. A test
    fails if Ray renames the attribute.
    """
    for piece in pipeline.connectors:
        if isinstance(piece, MeanStdFilter):
            piece._update_stats = False
        elif isinstance(piece, ConnectorPipelineV2):
            _freeze_filters(piece)
