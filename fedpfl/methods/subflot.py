"""SubFLOT: sub-models that the server cuts out and puts back by optimal transport of neurons."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.methods import neurons, transport
from fedpfl.methods.base import Batch, flag
from fedpfl.methods.submodel import Assign, Cut, assigned, padded
from fedpfl.methods.transport import Mode
from fedpfl.models import Bound, Parts
from fedpfl.tree import Agreed, Tree


@dataclass(frozen=True)
class SubFLOT(Cut):
    """SubFLOT (Jiang, He, Chen and Sun, CVPR 2026, arXiv:2604.06631).

    A client of pruning rate rho has a network with (1 - rho) M of the M neurons of each hidden layer, halves rounded
    up, at least one. H is the one that it uploaded last. ALIGN(a -> b) gives a the neurons of b: layer by layer, with
    inputs moved as the layer before was, neurons are matched by the Euclidean distance of their weights and bias.
    otp (extraction): the client starts from W~ = alpha ALIGN(global -> H) + (1 - alpha) H.
    sar (training): SGD on the cross-entropy + lam rho |W - W~|^2.
    ota (aggregation): entry by entry the mean, by samples, of ALIGN(W -> global) over the clients whose neurons reach
        it; entries that none reaches keep their values.

    The paper has no public code. Ours are: the matching one to one, the bias among a neuron's features, layers of one
    residual stream matched at the first that writes to it, whom entries without coverage fall to, and how it begins: a
    client that comes for the first time has no H and gets the entries between some neurons of the global model.

    rates: the pruning rates. assign: drawn for each client, `random`, or as many clients of each in order, `blocks`.
    mode: of matching: `one` to one, or `balanced`, the paper's formula read literally, in which the neurons of the
        larger side mix in those of the smaller. Of equal widths both are the same permutation.
        Networks that descend from one initial model keep their neurons apart, so one to one mostly finds the client's
        own positions; balanced mixtures shrink weights.
    initial: which neurons a client begins with: a `random` choice or the first ones (`prefix`). Its network is kept at
        their positions of a full-sized one.
    otp, sar, ota: False leaves a part out (the paper's ablation).
    positions: which take the place of a transport that is left out: the client's `own`, or the `first` ones of every
        layer, as if nobody remembered which neurons the client has; how the paper's ablation goes is not known.
    Steps need 2 lr lam rho < 1. BatchNorm statistics stay with the client's neurons and are not transported; a global
    model, which nobody is judged by, has none.
    Clients are judged by what they trained last, before the first time by the initial model.
    """

    rates: tuple[float, ...] = (0.0, 0.25, 0.5, 0.75)
    assign: Assign = "random"
    alpha: float = 0.5
    lam: float = 1.0
    mode: Mode = "one"
    initial: Literal["random", "prefix"] = "random"
    otp: bool = True
    sar: bool = True
    ota: bool = True
    positions: Literal["own", "first"] = "own"

    vectorises: ClassVar[bool] = False

    def __post_init__(self) -> None:
        self.check(len(self.rates) > 0, "rates", "at least one rate")
        self.check(all(0 <= rate < 1 for rate in self.rates), "rates", "at least 0 and below 1")
        self.check(self.assign in ("blocks", "random"), "assign", "blocks or random")
        self.check(0 <= self.alpha <= 1, "alpha", "between 0 and 1")
        self.check(0 <= self.lam < float("inf"), "lam", "0 or more")
        self.check(self.mode in ("one", "balanced"), "mode", "one or balanced")
        self.check(self.initial in ("random", "prefix"), "initial", "random or prefix")
        self.check(self.positions in ("own", "first"), "positions", "own or first")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """A rate, neurons and a history for the client, who has none yet."""
        server, mine = super().init(params, parts)
        rate = torch.zeros((), dtype=torch.float64, device=tree.leaves(params)[0].device)
        own = torch.ones_like(server["plan"]["group"], dtype=torch.bool)
        server["writers"] = transport.writers(params, parts)
        return server, {**mine, "rate": rate, "own": own, "joined": flag(params)}

    def endow(self, generator: torch.Generator, clients: int) -> dict[str, Tree]:
        """The clients' rates."""
        return {"rate": assigned(self.rates, self.assign, generator, clients)}

    @staticmethod
    def draw(generator: torch.Generator, server: Tree) -> dict[str, Tree]:
        """A lot for each neuron, for the first choice."""
        return {"lot": torch.rand(len(server["plan"]["group"]), generator=generator)}

    def active(self, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """The client's own neurons."""
        return _with_always(mine["own"])

    def prepare(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """The client's neurons, and W~."""
        joined = bool(mine["joined"])
        ready = super().prepare(server, mine if joined else {**mine, "own": self._choice(server, mine)})
        received = padded(server["model"], ready["mask"])
        if joined:
            received = self._extracted(server, ready, received)
        return {**ready, "received": received}

    def _choice(self, server: Tree, mine: dict[str, Tree]) -> Tensor:
        plan, width = server["plan"], 1 - mine["rate"]
        if self.initial == "prefix":
            return neurons.prefix(plan, width, "round")[:-1]
        return neurons.top(plan, width, mine["lot"], "round")[:-1]

    def _extracted(self, server: Tree, mine: dict[str, Tree], received: Tree) -> Tree:
        """W~. `received`: the global model at the client's own positions."""
        history, plan = mine["model"], server["plan"]
        if self.otp and self.alpha:
            small = transport.dense(plan, mine["active"], history)
            found, _ = transport.align(plan, server["writers"], server["model"], small, self.mode)
            received = transport.grown(found, mine["mask"])
        elif self.positions == "first":
            first = transport.dense(plan, neurons.leading(plan, mine["active"]), server["model"])
            received = transport.grown(first, mine["mask"])
        return tree.map(lambda own, new: torch.lerp(own, new, self.alpha), history, received)

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """W~."""
        return mine["received"]

    def send(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """W~, a dense network."""
        return Agreed(mine["received"], mine["mask"])

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy, and the pull to W~, stronger for smaller networks."""
        loss = super().loss(net, params, batch, server, mine)
        if self.sar and self.lam:
            loss = loss + self.lam * mine["rate"].to(loss.dtype) * tree.squared_distance(params, mine["received"])
        return loss

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The dense network goes up; where its neurons stand, the server knows."""
        kept = {name: value for name, value in mine.items() if name != "received"}
        upload, kept = super().finish(server, {**kept, "joined": ~flag(end)}, start, end)
        return {**upload, "own": Agreed(mine["own"], torch.zeros_like(mine["own"]))}, kept

    def merge(self, server: Tree, uploads: Tree, weight: Tensor) -> Tree:
        """The mean of what has been moved to the global model's neurons."""
        if not self.ota and self.positions == "own":
            return super().merge(server, uploads, weight)
        plan, model, found = server["plan"], server["model"], []
        for row, own in enumerate(uploads["own"].values):
            active = _with_always(own)
            small = transport.dense(plan, active, tree.take(uploads["model"].values, row))
            if self.ota:
                found.append(transport.align(plan, server["writers"], small, model, self.mode))
            else:
                mask = neurons.entries(plan, neurons.leading(plan, active), model)
                found.append((transport.grown(small, mask), mask))
        aligned, covered = (tree.stack(side) for side in zip(*found, strict=True))
        return {**server, "model": tree.masked_mean(model, aligned, covered, weight)}


def _with_always(own: Tensor) -> Tensor:
    return torch.cat([own, torch.ones_like(own[:1])])
