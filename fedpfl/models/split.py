"""Which parameters are head, body and normalisation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from torch import nn

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.models import wiring
from fedpfl.models.wiring import NORMALISATION, Wiring


def _unknown() -> Wiring:
    raise ValueError("the network's wiring is not known")


@dataclass(frozen=True)
class Parts:
    """Parameter names of a network, by role; those that are frozen are none.

    layers: from input to output; a layer is a convolution, linear map or embedding with the
    normalisation behind it.
    batch_norm: those of `normalisation` that belong to layers with statistics over the batch.
    head_name: the layer that answers the classes. linear_weight: its weight, where it is a linear
    layer.
    unclear: why it is not known which layer that is, as a line for the user; "" where it is known.
    seed: what the initial values were drawn from, for methods that need more of them.
    sample: the shape of a sample; () where nobody has said it. clients: of the federation,
        newcomers apart; rounds: of the whole run; 0 where nobody has said them. statistics:
        BatchNorm's running ones, as every model has them at first; {} for networks without.
    pairs: how many low-rank ones an adapted layer has (adapter=lora); 0 without.
    """

    layers: tuple[tuple[str, ...], ...]
    head_entries: tuple[str, ...]
    normalisation: tuple[str, ...]
    batch_norm: tuple[str, ...]
    head_name: str = ""
    linear_weight: str = ""
    unclear: str = ""
    seed: int = 0
    sample: tuple[int, ...] = ()
    classes: int = 0
    clients: int = 0
    rounds: int = 0
    pairs: int = 0
    statistics: Tree = field(default_factory=dict, compare=False, repr=False)
    wire: Callable[[], Wiring] = field(default=_unknown, compare=False, repr=False)

    @property
    def wiring(self) -> Wiring:
        """Return which hidden neurons each entry belongs to, worked out when first asked for.

        Raises ValueError for networks that it is not known of.
        """
        return self.wire()

    @property
    def head_layer(self) -> str:
        """Return the name of the layer that answers the classes. Raises FedpflError where that is
        not clear.
        """
        if self.unclear:
            raise FedpflError(self.unclear)
        return self.head_name

    @property
    def head(self) -> tuple[str, ...]:
        """Return the parameters of the head. Raises FedpflError where it is not clear which layer
        that is.
        """
        if self.unclear:
            raise FedpflError(self.unclear)
        return self.head_entries

    @property
    def head_weight(self) -> str:
        """Return the weight `[classes, features]` of a linear head. Raises FedpflError for a head
        of another kind.
        """
        if not self.linear_weight:
            raise FedpflError(
                "the method computes with the weight [classes, features] of a linear head, and "
                "this network's head, "
                f"{self.head_layer}, is none; use a network that ends in a linear layer, or "
                "another method"
            )
        return self.linear_weight

    @property
    def body(self) -> tuple[str, ...]:
        """Return everything below the head."""
        head = self.head
        return tuple(name for layer in self.layers for name in layer if name not in head)


def find_parts(
    module: nn.Module,
    head_layer: str | None = None,
    order: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    **facts: Any,
) -> Parts:
    """Split by module. facts: `unclear`, `classes`, `seed` and what follows it.

    head_layer: the layer that answers the classes; by default the last linear one.
    order: layers from input to output; by default, and before these, in the order in which they
    were declared.
    aliases: further names of shared parameters, whose first names alone are entries.
    """
    aliases = aliases or {}
    layers: list[list[str]] = []
    normalisation: list[str] = []
    batch_norm: list[str] = []
    last_linear, last_width = "", 0
    for prefix, child in sorted(module.named_modules(), key=lambda item: _position(item[0], order)):
        trained = [
            name for name, leaf in child.named_parameters(recurse=False) if leaf.requires_grad
        ]
        names = [f"{prefix}.{name}" if prefix else name for name in trained]
        names = [name for name in names if name not in aliases]
        if isinstance(child, nn.Linear) and (names or _is_parametrised(child)):
            last_linear, last_width = prefix, child.out_features
        if not names:
            continue
        if layers and (isinstance(child, NORMALISATION) or ".parametrizations." in f"{prefix}."):
            layers[-1].extend(
                names
            )  # a parametrised layer keeps what it trains in a module below it
        else:
            layers.append(names)
        if isinstance(child, NORMALISATION):
            normalisation.extend(names)
        if isinstance(child, nn.modules.batchnorm._NormBase):
            batch_norm.extend(names)

    name = last_linear if head_layer is None else head_layer
    below = f"{name}." if name else ""
    entries = [entry for layer in layers for entry in layer]
    shared = [
        first_name
        for alias, first_name in aliases.items()
        if alias == name or alias.startswith(below)
    ]
    head = tuple(
        entry for entry in entries if entry == name or entry.startswith(below) or entry in shared
    )
    if head_layer is not None:
        layers.sort(
            key=lambda layer: bool(head) and set(layer) <= set(head)
        )  # the head's come last
    linear_weight = ""
    if any(
        prefix == name and isinstance(child, nn.Linear) for prefix, child in module.named_modules()
    ):
        weight = aliases.get(f"{below}weight", f"{below}weight")
        linear_weight = weight if weight in head else ""
    facts["classes"] = facts.get("classes") or last_width
    facts["pairs"] = max(getattr(layer, "pairs", 0) for layer in module.modules())
    wire = cache(partial(wiring.trace_wiring, module))
    return Parts(
        layers=tuple(map(tuple, layers)),
        head_entries=head,
        normalisation=tuple(normalisation),
        batch_norm=tuple(batch_norm),
        head_name=name,
        linear_weight=linear_weight,
        **facts,
        wire=wire,
    )


def _position(layer: str, order: Sequence[str]) -> int:
    """Return a layer's place in the order; what a parametrised layer trains stands with it."""
    layer = layer.partition(".parametrizations")[0]
    return order.index(layer) if layer in order else -1


def _is_parametrised(layer: nn.Module) -> bool:
    return hasattr(layer, "parametrizations")
