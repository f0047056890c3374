"""APPO's Learner for modules with memory."""

from __future__ import annotations

from ray.rllib.algorithms.appo.torch.appo_torch_learner import APPOTorchLearner

from connectors.learners.impala import MemoryIMPALATorchLearner


class MemoryAPPOTorchLearner(MemoryIMPALATorchLearner, APPOTorchLearner):
    """APPO's Learner for modules with memory, set by `connect`: as IMPALA's."""
