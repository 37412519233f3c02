"""SCAFFOLD: control variates against client drift."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl import tree
from fedpfl.methods.base import Batch, Method, mean_cross_entropy
from fedpfl.models import Bound, Parts
from fedpfl.tree import Tree


@dataclass(frozen=True)
class Scaffold(Method):
    """SCAFFOLD (Karimireddy et al., ICML 2020, arXiv:1910.06378), option II: local steps follow g + c - c_i.

    The client's new control is the mean of its raw stochastic gradients g on the way, which is what option II's
    c_i - c + (x - y) / (T lr) comes to under plain SGD; taken directly it stays so with momentum. The paper has
    none: local.momentum=0. Averages are uniform over the cohort, without which c would not be the mean of the c_i.

    clients: how many there are in all, K. server_lr: eta_g.
    """

    clients: int
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        self.check(self.clients >= 1, "clients", "1 or more")
        self.check(self.server_lr > 0, "server_lr", "a positive number")

    def init(self, params: Tree, parts: Parts) -> tuple[Tree, dict[str, Tree]]:
        """All controls are zero."""
        zeros = tree.full_like(params, 0.0)
        return {"model": params, "control": zeros}, {"control": zeros}

    def prepare(self, server: Tree, mine: dict[str, Tree]) -> dict[str, Tree]:
        """A sum of gradients and their number, for this round."""
        zeros = tree.full_like(mine["control"], 0.0)
        return {**mine, "sum": zeros, "steps": tree.leaves(zeros)[0].new_zeros(())}

    def start(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The global model."""
        return server["model"]

    def loss(self, net: Bound, params: Tree, batch: Batch, server: Tree, mine: dict[str, Tree]) -> Tensor:
        """Cross-entropy and a linear term whose gradient is c - c_i."""
        terms = tree.map(lambda p, c, own: ((c - own) * p).sum(), params, server["control"], mine["control"])
        return mean_cross_entropy(net(params, batch.x), batch) + sum(tree.leaves(terms))

    def observe(
        self, params: Tree, grads: Tree, loss: Tensor, batch: Batch, server: Tree, mine: dict[str, Tree]
    ) -> dict[str, Tree]:
        """Add up the raw gradients."""
        raw = tree.map(lambda g, c, own: g - (c - own), grads, server["control"], mine["control"])
        return {**mine, "sum": tree.map(torch.add, mine["sum"], raw), "steps": mine["steps"] + 1}

    def finish(self, server: Tree, mine: dict[str, Tree], start: Tree, end: Tree) -> tuple[Tree, dict[str, Tree]]:
        """The changes of model and control go up; a client without a step keeps its control."""
        mean = tree.map(lambda total: total / mine["steps"].clamp(min=1), mine["sum"])
        control = tree.where(mine["steps"] > 0, mean, mine["control"])
        changes = {
            "model": tree.map(torch.sub, end, start),
            "control": tree.map(torch.sub, control, mine["control"]),
        }
        return changes, {"control": control}

    def merge(self, server: Tree, uploads: Tree, weight: Tensor) -> Tree:
        """X + eta_g mean(dy), c + m / K mean(dc)."""
        share = torch.full_like(weight, 1 / len(weight))
        mean = tree.mean(uploads, share)
        part = len(weight) / self.clients
        return {
            "model": tree.map(lambda x, change: x + self.server_lr * change, server["model"], mean["model"]),
            "control": tree.map(lambda c, change: c + part * change, server["control"], mean["control"]),
        }

    def personal(self, server: Tree, mine: dict[str, Tree]) -> Tree:
        """The global model."""
        return server["model"]
