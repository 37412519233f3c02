"""What sub-models of each width come to."""

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
    """Count what the sub-model of each width comes to, and the full network: one row each, the
    widest last.

    width: share of every hidden layer's neurons. entries: its parameters. values: numbers that its
    layers with parameters make of one sample of `shape`.
    """
    outputs = _forward(net.copy_module(), shape)
    plan, rows = neurons.build_plan(net.params, net.parts), []
    for width in sorted({*method.widths, 1.0}):
        active = neurons.prefix_neurons(
            plan, torch.tensor(width, dtype=torch.float64), method.rounding
        )
        mask = neurons.entry_masks(plan, active, net.params)
        row = {
            "width": width,
            "entries": sum(int(active_count.sum()) for active_count in mask.values()),
            "values": 0,
        }
        for name, layer, values in outputs:
            active_count = active[
                plan["columns" if isinstance(layer, nn.Embedding) else "rows"][f"{name}.weight"]
            ]
            row["values"] += values // len(active_count) * int(active_count.sum())
        rows.append(row)
    return rows


def _forward(module: nn.Module, shape: tuple[int, ...]) -> list[tuple[str, nn.Module, int]]:
    """Layers with weights, and how many numbers each makes of one sample."""
    module, layer_outputs = module.eval(), []

    def watch(name: str, layer: nn.Module) -> None:
        def seen(_: nn.Module, __: tuple[Tensor, ...], outputs: Tensor) -> None:
            layer_outputs.append((name, layer, outputs.numel()))

        layer.register_forward_hook(seen)

    for name, layer in module.named_modules():
        if layer._parameters.get("weight") is not None:
            watch(name, layer)
    sample = torch.zeros(
        (1, *shape), dtype=torch.int64 if sample_kind(shape) == "token ids" else torch.float32
    )
    with torch.no_grad():
        module.to("cpu")(sample)
    return layer_outputs
