"""Weights of RLlib's old GTrXL, for `GTrXLRLModule`."""

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlmodules.modules.named import GTrXLRLModule

# Our name in a unit -> the old name in the unit's first (attention) or second (feed-forward) layer.
_ATTENTION = {
    "attention_norm.weight": "_layer._input_layernorm.weight",
    "attention_norm.bias": "_layer._input_layernorm.bias",
    "qkv.weight": "_layer._qkv_layer._model.0.weight",
    "content_bias": "_layer._uvar",
    "position_bias": "_layer._vvar",
    "positions.weight": "_layer._pos_proj._model.0.weight",
    "out.weight": "_layer._linear_layer._model.0.weight",
}
_FEEDFORWARD = {
    "feedforward.0.weight": "_layer.0.weight",
    "feedforward.0.bias": "_layer.0.bias",
    "feedforward.1.weight": "_layer.1._model.0.weight",
    "feedforward.3.weight": "_layer.2._model.0.weight",
}
_GATE = "_fan_in_layer."
# Follows from the widths.
_IGNORED = "_rel_pos_embedding.inverse_freq"


def load_legacy_weights(module: GTrXLRLModule, weights: Mapping[str, Any]) -> None:
    """Loads the weights of an old-stack attention model, all or none.

    The module needs the old model's sizes: `d_model=attention_dim`,
    `num_layers=attention_num_transformer_units`, `num_heads`, `head_dim` and
    `feedforward_dim=attention_position_wise_mlp_dim`; `fcnet_hiddens` and `fcnet_activation` as
    before for a model of `use_attention`, and `fcnet_hiddens=[]` for a bare `GTrXLNet`.

    Both compute the same where the old model is right: on the first step of a chunk with a full
    memory. Elsewhere it attends to slots from before the episode, or to more steps in training than
    in the rollout. A bare `GTrXLNet` also puts a ReLU on its logits, which ours doesn't have.

    Args:
        module: Where to.
        weights: `model.state_dict()` or `policy.get_weights()` of the old model.

    Raises:
        ValueError: If the weights are not those of such a model, or don't fit the module.
    """
    rest = {
        name.removeprefix("gtrxl."): torch.as_tensor(np.asarray(value))
        for name, value in weights.items()
        if not name.endswith(_IGNORED)
    }
    try:
        state = _convert(module, rest)
    except KeyError as error:
        raise ValueError(
            f"The weights hold no {error}, which an old GTrXL of this module's size has. Pass the "
            "`state_dict()` of a model with `use_attention`, or of a `GTrXLNet`, and build the "
            "module with its number of units and of `fcnet_hiddens`."
        ) from None
    if rest:
        raise ValueError(
            f"The weights hold {sorted(rest)}, which this module has no place for. Build it with "
            "the old model's number of units and of `fcnet_hiddens`."
        )
    module.set_state({name: value.cpu().numpy() for name, value in state.items()})


def _convert(module: GTrXLRLModule, rest: dict[str, Tensor]) -> dict[str, Tensor]:
    """The module's state; takes what it uses out of `rest`."""
    state = {}

    def take_linear(ours: str, theirs: str) -> None:
        for kind in ("weight", "bias"):
            state[f"{ours}.{kind}"] = rest.pop(f"{theirs}._model.0.{kind}")

    encoder: Any = module.core.encoder
    layers = encoder.mlp.named_children()
    linear = [name for name, layer in layers if isinstance(layer, nn.Linear)]
    for depth, name in enumerate(linear):
        take_linear(f"core.encoder.mlp.{name}", f"_hidden_layers.{depth}")
    take_linear("core.memory.project", "linear_layer")
    for unit in range(module.model_config["num_layers"]):
        ours = f"core.memory.units.{unit}"
        for old_layer, names, gate in (
            (f"attention_layers.{2 * unit}", _ATTENTION, "attention_gate"),
            (f"attention_layers.{2 * unit + 1}", _FEEDFORWARD, "feedforward_gate"),
        ):
            for name, old_name in names.items():
                state[f"{ours}.{name}"] = rest.pop(f"{old_layer}.{old_name}")
            state |= _take_gate(f"{ours}.{gate}", f"{old_layer}.{_GATE}", rest)
    wrapped = "_logits_branch._model.0.weight" in rest
    take_linear("policy_head.net.0", "_logits_branch" if wrapped else "logits")
    take_linear("value_head.net.0", "_value_branch" if wrapped else "values_out")
    return state


def _take_gate(ours: str, theirs: str, rest: dict[str, Tensor]) -> dict[str, Tensor]:
    """The old gate multiplies from the right, with one matrix a product."""

    def take(*names: str) -> Tensor:
        return torch.cat([rest.pop(f"{theirs}_{name}").T for name in names])

    return {
        f"{ours}.of_output.weight": take("w_r", "w_z", "w_h"),
        f"{ours}.of_input.weight": take("u_r", "u_z"),
        f"{ours}.of_reset_input.weight": take("u_h"),
        f"{ours}.bias": rest.pop(f"{theirs}_bias_z"),
    }
