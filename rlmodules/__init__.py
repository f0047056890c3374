"""RLModules with memory for RLlib's new API stack.

`kernels` and `memories` compute over time and need PyTorch alone; `networks` and `modules` make
RLModules of them; `contract` proves, `export` deploys, `tools` describes, `old_stack` converts.
Nothing here imports `connectors`, the command line aside.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rlmodules.contract.memory import check_memory
    from rlmodules.contract.module import check_module
    from rlmodules.export.files import export_onnx, export_torch
    from rlmodules.memories import (
        DeepLinearAttentionConfig,
        FFMConfig,
        GatedDeltaConfig,
        GRUConfig,
        GTrXLConfig,
        LinearAttentionConfig,
        LRUConfig,
        LSTMConfig,
        MemoryConfig,
        MinGRUConfig,
        MixedConfig,
        POPGymLinearAttentionConfig,
        StackConfig,
        WindowAttentionConfig,
    )
    from rlmodules.modules.actor_critic import MemoryRLModule
    from rlmodules.modules.named import (
        DeepLinearAttentionRLModule,
        GTrXLRLModule,
        LinearAttentionRLModule,
    )
    from rlmodules.modules.q_learning import MemoryQRLModule
    from rlmodules.modules.sac import MemorySACRLModule
    from rlmodules.old_stack.gtrxl import load_legacy_weights

# Where each public name is. They are imported at first use: `rlmodules.memories` leaves Ray out.
_HOMES = {
    "DeepLinearAttentionConfig": "memories",
    "DeepLinearAttentionRLModule": "modules.named",
    "FFMConfig": "memories",
    "GRUConfig": "memories",
    "GTrXLConfig": "memories",
    "GTrXLRLModule": "modules.named",
    "GatedDeltaConfig": "memories",
    "LRUConfig": "memories",
    "LSTMConfig": "memories",
    "LinearAttentionConfig": "memories",
    "LinearAttentionRLModule": "modules.named",
    "MemoryConfig": "memories",
    "MemoryQRLModule": "modules.q_learning",
    "MemoryRLModule": "modules.actor_critic",
    "MemorySACRLModule": "modules.sac",
    "MinGRUConfig": "memories",
    "MixedConfig": "memories",
    "POPGymLinearAttentionConfig": "memories",
    "StackConfig": "memories",
    "WindowAttentionConfig": "memories",
    "check_memory": "contract.memory",
    "check_module": "contract.module",
    "export_onnx": "export.files",
    "export_torch": "export.files",
    "load_legacy_weights": "old_stack.gtrxl",
}

__all__ = [
    "DeepLinearAttentionConfig",
    "DeepLinearAttentionRLModule",
    "FFMConfig",
    "GRUConfig",
    "GTrXLConfig",
    "GTrXLRLModule",
    "GatedDeltaConfig",
    "LRUConfig",
    "LSTMConfig",
    "LinearAttentionConfig",
    "LinearAttentionRLModule",
    "MemoryConfig",
    "MemoryQRLModule",
    "MemoryRLModule",
    "MemorySACRLModule",
    "MinGRUConfig",
    "MixedConfig",
    "POPGymLinearAttentionConfig",
    "StackConfig",
    "WindowAttentionConfig",
    "check_memory",
    "check_module",
    "export_onnx",
    "export_torch",
    "load_legacy_weights",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
