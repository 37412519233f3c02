"""FLUTE: personal heads, which the server and a regulariser push towards an even spread of the client's classes."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor
from torch.func import grad, vmap

from fedpfl import tree
from fedpfl.methods.base import Batch, Method, Phase, Shard, mean_cross_entropy
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class FLUTE(Method):
    """FLUTE (Liu, Shen and Yang, ICML 2024, arXiv:2406.04596), its version for deep networks.

    NC(W, u) = | W W^T / |W W^T|  -  (C - 1)^-1/2 (I - 1 1^T / C) u u^T |, Frobenius norms, the last product element by
    element; u marks the client's classes. A client trains its head on CE + l1 NC + l2 |W|^2, then everything on that
    + l3 |Z|^2, Z being the batch's features (summed over the batch). Bodies are averaged; on the uploaded heads the
    server makes one gradient step of length server_lr on their mean NC and gives each back to its client.

    rep_epochs: the last of the local epochs, which train everything. l1, l2, l3: of the official code, which was run
        with batches of 10 and 64 or 128 features; l3 is stronger with more of both.
    variant: `as_published`: FL-bench's, and so FedOBP's tables': features are detached, so the body stays at its
        initial values for ever.
    A client that was never sampled has the initial head. In the head phase the body's BatchNorm statistics stay.
    """

    l1: float = 0.25
    l2: float = 0.0025
    l3: float = 0.0005
    server_lr: float = 0.5
    rep_epochs: int = 1
    variant: Literal["paper", "as_published"] = "paper"

    def __post_init__(self) -> None:
        for field in ("l1", "l2", "l3", "server_lr"):
            self.check(0 <= getattr(self, field) < math.inf, field, "0 or more")
        self.check(self.rep_epochs >= 0, "rep_epochs", "0 or more")
        self.check(self.variant in ("paper", "as_published"), "variant", "paper or as_published")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """The server keeps the body."""
        return {name: params[name] for name in parts.body}, {"head": {name: params[name] for name in parts.head}}

    def survey(self, net: Bound, shard: Shard, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """Which classes there are."""
        return {"present": torch.bincount(shard.data.y, minlength=len(_weight(mine["head"]))) > 0}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The latest body under the client's head."""
        return {**server, **mine["head"]}

    def send(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The body, and the head's weight, which the server has changed."""
        return {"body": server, "weight": _weight(mine["head"])}

    def phases(self, server: Tree, mine: dict[str, Tree], params: Tree, epochs: int) -> list[Phase]:
        """The head, then everything."""
        head = {name: name in mine["head"] for name in params}
        last = min(epochs, self.rep_epochs)
        everything = head if self.variant == "as_published" else None
        return [Phase(epochs - last, head, loss=self.head_loss), Phase(last, everything)]

    def head_loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy on the frozen body's features, and the head's regularisers."""
        return mean_cross_entropy(net.still()(params, batch.x), batch) + self._regularisers(params, mine)

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """And the size of the features."""
        if not self.l3:
            return mean_cross_entropy(net(params, batch.x), batch) + self._regularisers(params, mine)
        logits, z = net.features(params, batch.x)
        sizes = z.square().sum(1)
        size = sizes.sum() if batch.weight is None else (sizes * batch.weight).sum()
        return mean_cross_entropy(logits, batch) + self._regularisers(params, mine) + self.l3 * size

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """Everything goes up; the head is kept, until the server's reply."""
        head = {name: end[name] for name in mine["head"]}
        upload = {"body": {name: end[name] for name in server}, "head": head, "present": mine["present"]}
        return upload, {"head": head}

    def merge(self, server: Tree, uploads: Tree, weight: Tensor) -> Tree:
        """The bodies' mean."""
        return tree.mean(uploads["body"], weight)

    def settle(self, server: Tree, uploads: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """The server's step on each weight; biases are as they came."""
        if not self.server_lr:
            return mine
        weights = _weight(uploads["head"])
        slopes = vmap(grad(collapse))(weights, uploads["present"])
        moved = weights - self.server_lr / len(weights) * slopes
        name = next(iter(uploads["head"]))
        return {"head": {**uploads["head"], name: moved}}

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """As at the start of a round."""
        return self.start(server, mine)

    def _regularisers(self, params: Tree, mine: dict[str, Tree]) -> Tensor | float:
        weight = params[next(iter(mine["head"]))]
        total: Tensor | float = 0.0
        if self.l1:
            total = total + self.l1 * collapse(weight, mine["present"])
        if self.l2:
            total = total + self.l2 * weight.square().sum()
        return total


def collapse(weight: Tensor, present: Tensor) -> Tensor:
    """NC(W, u) of a head's weight `[classes, features]` and its client's classes `[classes]`, bool."""
    classes = len(weight)
    with torch.autocast(weight.device.type, enabled=False):
        gram = weight @ weight.T
    target = (torch.eye(classes, device=weight.device) - 1 / classes) * (present[:, None] & present)
    return _norm(gram / _norm(gram).clamp(min=1e-30) - target / max(1, classes - 1) ** 0.5)


def _norm(matrix: Tensor) -> Tensor:
    """Frobenius; where it is zero, its gradient counts as zero."""
    square = matrix.square().sum()
    return torch.where(square > 0, torch.where(square > 0, square, 1.0).sqrt(), 0.0)


def _weight(head: Tree) -> Tensor:
    return next(iter(head.values()))
