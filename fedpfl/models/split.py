"""Which parameters are head, body and normalisation."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

NORMALISATION = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


@dataclass(frozen=True)
class Parts:
    """Parameter names of a network, by role. `layers` groups weight and bias of one module, from input to output.

    batch_norm: those of `normalisation` that belong to layers with statistics over the batch.
    seed: what the initial values were drawn from, for methods that need more of them.
    """

    layers: tuple[tuple[str, ...], ...]
    head: tuple[str, ...]
    normalisation: tuple[str, ...]
    batch_norm: tuple[str, ...]
    seed: int = 0

    @property
    def body(self) -> tuple[str, ...]:
        """Everything below the head."""
        return tuple(name for layer in self.layers for name in layer if name not in self.head)


def parts(module: nn.Module, seed: int = 0) -> Parts:
    """Split by module: the head is the last linear layer (weight and bias)."""
    layers: list[tuple[str, ...]] = []
    head: tuple[str, ...] = ()
    normalisation: list[str] = []
    batch_norm: list[str] = []
    for prefix, child in module.named_modules():
        names = tuple(f"{prefix}.{name}" if prefix else name for name, _ in child.named_parameters(recurse=False))
        if not names:
            continue
        layers.append(names)
        if isinstance(child, nn.Linear):
            head = names
        if isinstance(child, NORMALISATION):
            normalisation.extend(names)
        if isinstance(child, nn.modules.batchnorm._NormBase):
            batch_norm.extend(names)
    return Parts(tuple(layers), head, tuple(normalisation), tuple(batch_norm), seed)
