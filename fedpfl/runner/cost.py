"""The costs of sub-models of each width."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from fedpfl.methods.shared import neurons
from fedpfl.methods.shared.submodel import Submodel
from fedpfl.models import Net
from fedpfl.models.shapes import sample_kind


def count_submodel_costs(
    method: Submodel, net: Net, shape: tuple[int, ...]
) -> list[dict[str, float]]:
    """Return a row for each sub-model and one for the full network, the widest last.

    Args:
        method: with the widths.
        net: the full network.
        shape: of a sample.

    Returns:
        `width`, the share of every hidden layer's neurons; `entries`, its parameters; `values`,
        numbers that its layers with parameters make of one sample.
    """
    layer_outputs = _count_outputs(net.copy_module(), shape)
    plan = neurons.build_plan(net.params, net.parts)
    rows = []
    for width in sorted({*method.widths, 1.0}):
        width_tensor = torch.tensor(width, dtype=torch.float64)
        active = neurons.prefix_neurons(plan, width_tensor, method.rounding)
        masks = neurons.entry_masks(plan, active, net.params)
        values = 0
        for name, layer, outputs in layer_outputs:
            # An embedding's neurons are columns of its weight, those of other layers rows.
            axis = "columns" if isinstance(layer, nn.Embedding) else "rows"
            active_neurons = active[plan[axis][f"{name}.weight"]]
            # Each neuron makes equally many numbers: pixels of its channel, or steps of a text.
            values += outputs // len(active_neurons) * int(active_neurons.sum())
        entries = sum(int(mask.sum()) for mask in masks.values())
        rows.append({"width": width, "entries": entries, "values": values})
    return rows


def _count_outputs(module: nn.Module, shape: tuple[int, ...]) -> list[tuple[str, nn.Module, int]]:
    """Return layers with weights, and how many numbers each makes of one sample."""
    names = {layer: name for name, layer in module.named_modules()}
    layer_outputs = []

    def count(layer: nn.Module, _: tuple[Tensor, ...], outputs: Tensor) -> None:
        layer_outputs.append((names[layer], layer, outputs.numel()))

    for layer in module.modules():
        if layer._parameters.get("weight") is not None:
            layer.register_forward_hook(count)
    dtype = torch.int64 if sample_kind(shape) == "token ids" else torch.float32
    with torch.no_grad():
        module.eval().to("cpu")(torch.zeros((1, *shape), dtype=dtype))
    return layer_outputs
