"""Which parameters are head, body and normalisation."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Any

from torch import nn

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.models import wiring
from fedpfl.models.wiring import NORMALISATION, Wiring


@dataclass(frozen=True)
class Parts:
    """Parameter names of a network, by role, without frozen ones.

    layers: from input to output; a layer is a convolution, linear map or embedding with the
    normalisation behind it.
    batch_norm: those of `normalisation` that belong to layers with statistics over the batch.
    head_name: the layer that answers the classes. linear_weight: its weight, where it is a linear
    layer. is_linear_end: whether the logits are W z + b of that layer, with nothing behind it.
    unclear: why it is not known which layer that is, as a line for the user; "" where it is known.
    seed: of the initial values, for methods that need more of them.
    sample: the shape of a sample; () where it is unknown. clients: of the federation,
        newcomers apart; rounds: of the whole run; 0 where they are unknown. statistics:
        BatchNorm's running ones, as every model has them at first; {} for networks without.
    kind: of the network, a row of `kinds`: the initial parameters of all kinds, where clients have
        networks of several (model=mixed); () where they have not. common: the initial parameters of
        a network beside it that all clients have alike; {} without. common_head: the entries of
        that network's head, its weight first.
    pairs: how many low-rank ones an adapted layer has (adapter=lora); 0 without. ranks: of each
        client's, newcomers last; () where all have the same.
    wire: traces the wiring.
    """

    layers: tuple[tuple[str, ...], ...]
    head_entries: tuple[str, ...]
    normalisation: tuple[str, ...]
    batch_norm: tuple[str, ...]
    wire: Callable[[], Wiring] = field(compare=False, repr=False)
    head_name: str = ""
    linear_weight: str = ""
    is_linear_end: bool = True
    unclear: str = ""
    seed: int = 0
    sample: tuple[int, ...] = ()
    classes: int = 0
    clients: int = 0
    rounds: int = 0
    pairs: int = 0
    kind: int = 0
    kinds: tuple[Tree, ...] = field(default=(), compare=False, repr=False)
    common: Tree = field(default_factory=dict, compare=False, repr=False)
    common_head: tuple[str, ...] = ()
    ranks: tuple[int, ...] = ()
    statistics: Tree = field(default_factory=dict, compare=False, repr=False)

    @property
    def wiring(self) -> Wiring:
        """Return the hidden neurons of each entry, traced when first asked for.

        Raises:
            ValueError: The network's wiring cannot be traced.
        """
        return self.wire()

    @property
    def head_layer(self) -> str:
        """Return the name of the layer that answers the classes.

        Raises:
            FedpflError: It is not clear which layer that is.
        """
        if self.unclear:
            raise FedpflError(self.unclear)
        return self.head_name

    @property
    def head(self) -> tuple[str, ...]:
        """Return the parameters of the head.

        Raises:
            FedpflError: It is not clear which layer that is.
        """
        if self.unclear:
            raise FedpflError(self.unclear)
        return self.head_entries

    @property
    def head_weight(self) -> str:
        """Return the weight `[classes, features]` of a linear head.

        Raises:
            FedpflError: The head is of another kind.
        """
        if not self.linear_weight:
            raise FedpflError(
                "the method computes with the weight [classes, features] of a linear head, and "
                "this network's head, "
                f"{self.head_layer}, is none; use a network that ends in a linear layer, or "
                "another method"
            )
        return self.linear_weight

    def require_linear_end(self) -> None:
        """Refuse a network if its logits are not W z + b of its head.

        Raises:
            FedpflError: They are computed in another way.
        """
        _ = self.head_weight
        if not self.is_linear_end:
            raise FedpflError(
                "the method computes logits as W z + b of a linear head, and this network's are "
                f"something else than that of {self.head_layer}, which another forward or what "
                "stands behind the layer changes; leave that out, or use another method"
            )

    @property
    def body(self) -> tuple[str, ...]:
        """Return everything below the head."""
        head = self.head
        return tuple(name for layer in self.layers for name in layer if name not in head)


def _find_last_linear(modules: Mapping[str, nn.Module], owners: Collection[str]) -> tuple[str, int]:
    """Return the name of the last linear layer that is trained, and its width."""
    last = ("", 0)
    for name, layer in modules.items():
        is_trained = name in owners or hasattr(layer, "parametrizations")
        if isinstance(layer, nn.Linear) and is_trained:
            last = (name, layer.out_features)
    return last


def find_parts(
    module: nn.Module,
    head_layer: str | None = None,
    order: Sequence[str] = (),
    aliases: Mapping[str, str] | None = None,
    **facts: Any,
) -> Parts:
    """Split a network's parameters by role.

    Args:
        module: The network.
        head_layer: The layer that answers the classes; by default the last linear one.
        order: Layers from input to output; by default, and before these, in the order in which
            they were declared.
        aliases: Further names of shared parameters; their first names alone are entries.
        facts: `unclear`, `classes`, `seed` and what follows it in Parts.
    """
    # ---- Layers in the order of a forward pass where it is known, else as they were made.
    aliases = aliases or {}
    modules = dict(sorted(module.named_modules(), key=lambda item: _position(item[0], order)))
    layers = _group_by_layer(modules, aliases)
    owners = {entry: entry.rpartition(".")[0] for layer in layers for entry in layer}

    def list_entries(kind: Any) -> tuple[str, ...]:
        return tuple(entry for entry, owner in owners.items() if isinstance(modules[owner], kind))

    # ---- The head: the layer's own parameters, and those it shares under their first names.
    name, width = _find_last_linear(modules, {*owners.values()})
    if head_layer is not None:
        name = head_layer
    prefix = f"{name}." if name else ""
    shared = {first for alias, first in aliases.items() if f"{alias}.".startswith(prefix)}
    head = [entry for entry in owners if f"{entry}.".startswith(prefix) or entry in shared]
    if head_layer is not None:
        # The head's layers come last; the sort is stable.
        layers.sort(key=lambda layer: bool(head) and set(layer) <= set(head))

    # ---- Its weight, if it is linear.
    linear_weight = ""
    if isinstance(modules.get(name), nn.Linear):
        weight = aliases.get(f"{prefix}weight", f"{prefix}weight")
        linear_weight = weight if weight in head else ""

    facts["classes"] = facts.get("classes") or width
    facts["pairs"] = max(getattr(layer, "pairs", 0) for layer in module.modules())
    return Parts(
        layers=tuple(map(tuple, layers)),
        head_entries=tuple(head),
        normalisation=list_entries(NORMALISATION),
        batch_norm=list_entries(nn.modules.batchnorm._NormBase),
        head_name=name,
        linear_weight=linear_weight,
        **facts,
        # Traced when it is asked for: few methods need it, and it refuses many networks.
        wire=cache(partial(wiring.trace_wiring, module)),
    )


def _group_by_layer(
    modules: Mapping[str, nn.Module], aliases: Mapping[str, str]
) -> list[list[str]]:
    """Group the names of trainable parameters by layer, normalisation with the layer before it."""
    layers: list[list[str]] = []
    for prefix, child in modules.items():
        names = []
        for parameter_name, leaf in child.named_parameters(recurse=False):
            name = f"{prefix}.{parameter_name}" if prefix else parameter_name
            # Shared ones stand under their first name.
            if leaf.requires_grad and name not in aliases:
                names.append(name)
        # A parametrised layer keeps its trained values in a module below it.
        is_continuation = isinstance(child, NORMALISATION) or ".parametrizations." in f"{prefix}."
        if layers and is_continuation:
            layers[-1].extend(names)
        elif names:
            layers.append(names)
    return layers


def _position(layer: str, order: Sequence[str]) -> int:
    """Return a layer's place in the order; values of a parametrised layer stand with it."""
    layer = layer.partition(".parametrizations")[0]
    # Layers that a forward pass does not show come first, so that none of them is the head.
    return order.index(layer) if layer in order else -1
