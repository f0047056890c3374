"""What Learners exchange beside gradients: the only collective of this package, and its thread.

Each of several Learners is a process, and torch wants all of them to call the same collectives of a
process group in the same order. RLlib reduces gradients on torch's default group, and so do we: our
calls have to come from the thread that reduces gradients, in Ray 2.60

- in PPO, DQN, SAC, BC and MARWIL: the actor's main thread. It calls `update`, in which connectors
  build the batch and torch's DDP reduces gradients in the backward pass.
- in IMPALA and APPO: the Learner's `_LearnerThread`. `update`, called in the main thread, runs the
  connectors and puts the batch into a queue (APPO's gives batches back in random order, each
  Learner in another one). The thread takes a batch and calls `Learner.update` on it, which reduces
  gradients; after every `broadcast_interval` batches it waits at a barrier of the same group.

So a connector may exchange something in the first kind only. What stands in or behind
`Learner._create_iterator_if_necessary` runs in the right thread in both, once an update.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import distributed


def sum_over_learners(values: np.ndarray, device: str) -> np.ndarray:
    """The sum of all Learners' `values`; with a single Learner these themselves.

    Args:
        values: Numbers, of equal shape and dtype on all Learners.
        device: Of the Learner's module: NCCL exchanges what lies on GPUs only.
    """
    if not distributed.is_initialized():
        return values
    shared = torch.tensor(values, device=device)
    distributed.all_reduce(shared)
    return shared.cpu().numpy()
