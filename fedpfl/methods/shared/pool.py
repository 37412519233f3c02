"""Clients with models of their own, which the server offers to others."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.batch import Shard
from fedpfl.methods.shared.method import Method
from fedpfl.models import Bound


@dataclass(frozen=True)
class ModelPool(Method):
    """Keep a model and its BatchNorm statistics on each client; nothing is averaged.

    The server notes whose models there are, in `pool` `[clients]`, and the rounds that it has
    played. A method's field `pool` says whether these are models of the last round alone.
    """

    pool = "all"

    def buffers(self):
        """Keep BatchNorm statistics with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Begin with nobody's model at the server."""
        device = tree.leaves(params)[0].device
        nobody = torch.zeros(parts.clients, dtype=torch.bool, device=device)
        return {"pool": nobody, "played": torch.zeros((), dtype=torch.int64, device=device)}, {
            "model": params
        }

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Note whose models there are."""
        pool = server["pool"].clone() if self.pool == "all" else torch.zeros_like(server["pool"])
        return {
            "pool": pool.index_fill(0, clients["number"], True),
            "played": server["played"] + 1,
        }, clients

    def personal(self, server, client):
        """Return the client's own model."""
        return client["model"]


def validation_loss(net: Bound, model: Tree, statistics: Tree, shard: Shard) -> Tensor:
    """Return the mean cross-entropy of a model on a client's held-out samples, float64."""
    still = net.still({"main": statistics})
    with torch.no_grad():
        losses = [
            batch.losses(still(model, batch.x)).double().sum()
            for batch in shard.validation.chunks()
        ]
    return torch.stack(losses).sum() / len(shard.validation.y)


def gain_per_distance(gain: Tensor, model: Tree, old: Tree) -> Tensor:
    """Return `gain` over |model - old|; 0 for a model that does not differ, or diverged."""
    apart = tree.squared_distance(
        tree.map(Tensor.double, model), tree.map(Tensor.double, old)
    ).sqrt()
    return torch.where(apart > 0, gain / apart, 0.0).nan_to_num(0.0, 0.0, 0.0)


def choose_candidates(
    pool: Tensor, affinity: Tensor, own: int, count: int, rate: float, generator: torch.Generator
) -> list[int]:
    """Return up to `count` numbers of the clients in `pool` `[clients]` but `own`, by FedFomo's
    rule.

    Each is, with probability `rate`, any, else the one of largest `affinity` `[clients]` that is
    left, by lot among equals.
    """
    left, chosen = pool.clone(), list[int]()
    left[own] = False
    while len(chosen) < count and left.any():
        draw, lots = torch.rand((), generator=generator), torch.rand(len(pool), generator=generator)
        best = left if draw < rate else left & (affinity == affinity[left].max())
        chosen.append(int(torch.where(best, lots, -1.0).argmax()))
        left[chosen[-1]] = False
    return chosen
