"""Clients with networks of different kinds, which have the form of their heads in common."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.ground.casting import Checked
from fedpfl.ground.checks import checked_arguments
from fedpfl.ground.dealing import Assign
from fedpfl.ground.errors import FedpflError, choices_text
from fedpfl.ground.ranges import Count, Positive
from fedpfl.ground.records import Record
from fedpfl.ground.seeding import seeded_process
from fedpfl.models.net import Net
from fedpfl.models.registry import MODELS, check_logits, explain_errors


@dataclass(frozen=True)
class Mixed(Checked):
    """Name the clients' networks; see conf/model/mixed.yaml."""

    kinds: tuple[str | dict[str, Any], ...] = ("mlp", "cnn4", "resnet8")
    features: Count | None = None
    assign: Assign = "cycle"
    shares: tuple[Positive, ...] | None = None
    common: str | dict[str, Any] | None = None
    # Keys of one network; each kind has its own.
    weights: None = None
    head: None = None
    overlap: Literal[False] = False

    def __post_init__(self) -> None:
        """Check each network's own keys too."""
        super().__post_init__()
        self.check(bool(self.kinds), "kinds", "one network or more")
        has_shares = self.assign in ("random", "device") and len(self.shares or ()) == len(
            self.kinds
        )
        is_allowed = self.shares is None or has_shares
        self.check(is_allowed, "shares", "a number for each kind, beside assign=random or device")
        _ = [*self.networks, self.common and _read_network(self.common, "common")]

    @property
    def networks(self) -> list[tuple[str, Record]]:
        """Return name and options of each kind."""
        return [_read_network(kind, f"kinds[{i}]") for i, kind in enumerate(self.kinds)]

    @property
    def labels(self) -> list[str]:
        """Return a word for each kind, with its number where a name is there twice."""
        names = [name for name, _ in self.networks]
        return [f"{name}_{i}" if names.count(name) > 1 else name for i, name in enumerate(names)]


def _read_network(choice: str | dict[str, Any], key: str) -> tuple[str, Record]:
    """Return a network's name and checked options. Raises FedpflError."""
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = options.pop("name", None)
    names = sorted({*MODELS} - {"mixed"})
    if name not in names:
        raise FedpflError(f"model.{key}.name must be {choices_text(names, name)}")
    head = {"head": options.pop("head")} if "head" in options else {}
    checked = checked_arguments(MODELS[name], options, f"model.{key}", ("shape", "classes"))
    return name, {**checked, **head}


class Kind(nn.Module):
    """A network with a head of the width that all kinds have.

    Features of another width are averaged over as many neighbours as it takes (adaptive pooling).

    Attributes:
        body: The network without its head.
        pool: That average, as a map that never trains; nothing where the width fits.
        head: The classifier; the network's own where the width fits.
    """

    def __init__(self, body: nn.Module, head: nn.Linear, features: int):
        super().__init__()
        width = head.in_features
        self.body = body
        self.pool: nn.Module = nn.Identity()
        if width != features:
            # A product, as the gradient of torch's own pooling is not reproducible on a GPU.
            self.pool = nn.Linear(width, features, bias=False).requires_grad_(False)
            self.pool.weight.copy_(F.adaptive_avg_pool1d(torch.eye(width), features).T)
            head = nn.Linear(features, head.out_features, bias=head.bias is not None)
        self.head = head

    def forward(self, x: Tensor) -> Tensor:
        """Samples `[batch, ...]` to logits `[batch, classes]`."""
        return self.head(self.pool(self.body(x)))


class MixedNet(Net):
    """The networks of all kinds; by itself it is the first one.

    Attributes:
        kinds: Of clients.
    """

    def __init__(self, nets: Sequence[Net], kinds: Sequence[int] = ()):
        first = nets[0]
        super().__init__(first.module, first.traits, first.name, first.common, **first.facts)
        self._kind_nets = tuple(nets)
        self.kinds = kinds

    def copy(self) -> Net:
        """See Net."""
        return MixedNet([net.copy() for net in self.nets], self.kinds)


def build_kinds(mixed: Mixed, build: Callable[..., Net]) -> list[Net]:
    """Build the network of each kind, beside the one that clients have in common.

    Args:
        mixed: Their names and options.
        build: `build_network` with all but these.

    Raises:
        FedpflError: A network has no linear head at its end, or the common one has side effects.
    """
    # ---- Step 1: the common network.
    common: Net | None = None
    if mixed.common:
        name, options = _read_network(mixed.common, "common")
        common = build(name, **options)
        _ = _require_head(common)  # methods read its input
        if common.buffers or common.fixed or common.traits.draws or common.traits.recomputes:
            raise FedpflError(
                f"model.common={name} must be a plain network, without buffers (BatchNorm), frozen"
                " parameters and draws; take another, such as mlp or lenet5"
            )

    # ---- Step 2: the kinds, with heads of one form. Each knows all, as `Method.init` is told.
    nets: list[Net] = []
    features = mixed.features
    for (name, options), label in zip(mixed.networks, mixed.labels, strict=True):
        net = build(name, **options)
        features = features or _require_head(net).in_features
        nets.append(_make_kind(net, features, label, common))
    params = tuple(net.params for net in nets)
    return [net.with_facts(kind=kind, kinds=params) for kind, net in enumerate(nets)]


def _require_head(net: Net) -> nn.Linear:
    """Return the head of a network. Raises FedpflError unless it is linear and at the end."""
    head = net.head
    weight = f"{net.parts.head_layer}.weight"
    is_own = net.parts.linear_weight in ("", weight)
    if not isinstance(head, nn.Linear) or not is_own or not net.parts.is_linear_end:
        raise FedpflError(
            f"model={net.name} cannot be a kind of model=mixed: its head must be a linear layer"
            " with nothing behind it, as heads of all kinds have one form"
        )
    return head


def _make_kind(net: Net, features: int, label: str, common: Net | None) -> Net:
    """Return a network as a kind, with features of a given width."""
    facts = net.facts
    # ---- Step 1: the module, with its head beside the body.
    head = _require_head(net)
    parent, _, name = net.parts.head_layer.rpartition(".")
    setattr(net.module.get_submodule(parent), name, nn.Identity())
    with explain_errors(net.name), seeded_process(facts["seed"]), torch.no_grad():
        module = Kind(net.module, head, features)
        check_logits(module, facts["sample"], facts["classes"])

    # ---- Step 2: the facts about the network, under its new names.
    def rename(names: Iterable[str]) -> list[str]:
        return [f"body.{name}" for name in names]

    moving, constant = (frozenset(rename(n)) for n in (net.traits.moving, net.traits.constant))
    traits = replace(net.traits, moving=moving, constant=constant)
    # Layers that are not in the order come first.
    order = (*rename(facts.get("order", ())), "head")
    return Net(module, traits, label, common, **{**facts, "head_layer": "head", "order": order})
