"""Clients with networks of different kinds, which have the form of their heads in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedpfl.ground.casting import Checked
from fedpfl.ground.checks import checked_arguments
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
    assign: Literal["cycle", "random", "device"] | dict[str, str] = "cycle"
    shares: tuple[Positive, ...] | None = None
    common: str | dict[str, Any] | None = None

    def __post_init__(self) -> None:
        """Check each network's own keys too."""
        super().__post_init__()
        self.check(bool(self.kinds), "kinds", "one network or more")
        is_by_order = self.assign in ("random", "device")
        has_shares = self.shares is None or (is_by_order and len(self.shares) == len(self.kinds))
        self.check(has_shares, "shares", "a number for each kind, beside assign=random or device")
        _ = [*self.networks, self.common_network]

    @property
    def networks(self) -> list[tuple[str, Record]]:
        """Return name and options of each kind."""
        return [_read_network(kind, f"kinds[{i}]") for i, kind in enumerate(self.kinds)]

    @property
    def common_network(self) -> tuple[str, Record] | None:
        """Return name and options of the network that clients have in common, if any."""
        return None if self.common is None else _read_network(self.common, "common")

    @property
    def labels(self) -> list[str]:
        """Return a word for each kind, with its number where a name is there twice."""
        names = [name for name, _ in self.networks]
        return [
            name if names.count(name) == 1 else f"{name}_{kind}" for kind, name in enumerate(names)
        ]

    def assign_kinds(
        self, clients: int, seed: int, speeds: Sequence[float], names: Sequence[str]
    ) -> list[int]:
        """Return the kind of each client of the partition.

        Args:
            clients: How many there are, newcomers among them.
            seed: Of assign=random.
            speeds: Of the clients' devices, for assign=device: the slowest have the first kind.
            names: Of clients, for an assignment by name; () where they are numbers alone.

        Raises:
            FedpflError: A client or kind is unknown, or has no counterpart.
        """
        count = len(self.kinds)
        if isinstance(self.assign, dict):
            return self._assign_by_name([*names] or [*map(str, range(clients))], self.assign)
        if self.assign == "cycle":
            return [client % count for client in range(clients)]
        if self.assign == "random":
            order = torch.randperm(clients, generator=torch.Generator().manual_seed(seed))
        elif speeds:
            order = torch.tensor(speeds, dtype=torch.float64).argsort(stable=True)
        else:
            raise FedpflError("model.assign=device goes by clients' devices; use system=simulated")
        ends = torch.tensor(self.shares or [1.0] * count, dtype=torch.float64).cumsum(0)
        places = order.argsort()
        return torch.bucketize(places, (clients * ends / ends[-1]).round(), right=True).tolist()

    def _assign_by_name(self, names: list[str], label_by_name: Mapping[str, str]) -> list[int]:
        """Return the kinds of named clients."""
        labels = self.labels
        for name, label in label_by_name.items():
            if name not in names:
                raise FedpflError(f"model.assign: {choices_text(names, name)}")
            if label not in labels:
                raise FedpflError(f"model.assign.{name} must be {choices_text(labels, label)}")
        if missing := [name for name in names if name not in label_by_name]:
            raise FedpflError(f"model.assign names no kind for client {missing[0]}; add it")
        return [labels.index(label_by_name[name]) for name in names]


def _read_network(choice: str | dict[str, Any], key: str) -> tuple[str, Record]:
    """Return a network's name and checked options. Raises FedpflError."""
    path = f"model.{key}"
    options = {"name": choice} if isinstance(choice, str) else dict(choice)
    name = options.pop("name", None)
    names = sorted({*MODELS} - {"mixed"})
    if name not in names:
        raise FedpflError(f"{path}.name must be {choices_text(names, name)}")
    head = {"head": options.pop("head")} if "head" in options else {}
    return name, {**checked_arguments(MODELS[name], options, path, ("shape", "classes")), **head}


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
        nets: By kind.
        kinds: Of clients.
    """

    def __init__(self, nets: Sequence[Net], kinds: Sequence[int] = ()):
        first = nets[0]
        super().__init__(first.module, first.traits, first.name, first.common, **first.facts)
        self._nets = tuple(nets)
        self.kinds = kinds

    @property
    def nets(self) -> tuple[Net, ...]:
        """Return the network of each kind."""
        return self._nets

    def with_facts(self, **facts: Any) -> Net:
        """See Net."""
        return MixedNet([net.with_facts(**facts) for net in self._nets], self.kinds)

    def to(self, device: torch.device) -> Net:
        """See Net."""
        return MixedNet([net.to(device) for net in self._nets], self.kinds)

    def with_kinds(self, kinds: Sequence[int]) -> Net:
        """See Net."""
        return MixedNet(self._nets, kinds)


def build_mixed(mixed: Mixed, build: Callable[..., Net]) -> Net:
    """Build the networks of all kinds, and the one that clients have in common.

    Args:
        mixed: Their names and options.
        build: `build_network` with all but these.

    Raises:
        FedpflError: A network has no linear head at its end, or the common one has side effects.
    """
    # ---- Step 1: the kinds, with heads of one form.
    nets: list[Net] = []
    features = mixed.features
    for (name, options), label in zip(mixed.networks, mixed.labels, strict=True):
        net = build(name, **options)
        features = features or _require_head(net).in_features
        nets.append(_make_kind(net, features, label))

    # ---- Step 2: the common network.
    common: Net | None = None
    if mixed.common_network:
        name, options = mixed.common_network
        common = build(name, **options)
        if common.buffers or common.fixed or common.traits.draws or common.traits.recomputes:
            raise FedpflError(
                f"model.common={name} must be a plain network, without buffers (BatchNorm), frozen"
                " parameters and draws; take another, such as mlp or lenet5"
            )

    # ---- Step 3: each knows all, as `Method.init` is told.
    params = tuple(net.params for net in nets)
    nets = [
        net.with_common(common).with_facts(kind=kind, kinds=params) for kind, net in enumerate(nets)
    ]
    return MixedNet(nets) if len(nets) > 1 else nets[0]


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


def _make_kind(net: Net, features: int, label: str) -> Net:
    """Return a network as a kind, with features of a given width."""
    head = _require_head(net)
    facts = net.facts

    # ---- Step 1: the module, with its head beside the body.
    body = net.copy_module()
    parent, _, name = net.parts.head_layer.rpartition(".")
    head = body.get_submodule(net.parts.head_layer)
    setattr(body.get_submodule(parent), name, nn.Identity())
    with explain_errors(net.name), seeded_process(facts["seed"]), torch.no_grad():
        module = Kind(body, head, features)
        check_logits(module, facts["sample"], facts["classes"])

    # ---- Step 2: what is known of the network, under its new names.
    traits = net.traits
    order = [f"body.{layer}" for layer in facts.get("order", ())]
    return Net(
        module,
        replace(
            traits,
            moving=frozenset(f"body.{buffer}" for buffer in traits.moving),
            constant=frozenset(f"body.{buffer}" for buffer in traits.constant),
        ),
        label,
        seed=facts["seed"],
        sample=facts["sample"],
        classes=facts["classes"],
        head_layer="head",
        order=(*order, "head") if order else (),
    )
