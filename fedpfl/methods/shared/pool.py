"""Private models, which the server offers to other clients."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.batch import Shard
from fedpfl.methods.shared.method import Method, flag
from fedpfl.models import Bound

CHUNK = 16  # clients that the server reads models of together


@dataclass(frozen=True)
class ModelPool(Method):
    """Keep a model and its BatchNorm statistics on each client; nothing is averaged.

    The server notes the clients with models, in `pool` `[clients]`, and the rounds that it has
    played. A method's field `pool` says whether these are models of the last round alone.
    """

    pool = "all"

    def buffers(self):
        """Keep BatchNorm statistics with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Begin without models at the server."""
        no_client = flag(params).repeat(parts.clients)
        return {"pool": no_client, "played": flag(params).long()}, {"model": params}

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Note the clients with models: all so far, or those of this round."""
        if self.pool == "all":
            pool = server["pool"].clone()
        else:
            pool = torch.zeros_like(server["pool"])
        pool = pool.index_fill(0, clients["number"], True)
        return {"pool": pool, "played": server["played"] + 1}, clients

    def personal(self, server, client):
        """Return the client's own model."""
        return client["model"]


def sum_models(
    pool: Tensor,
    clients: Tree,
    read_states: Callable[[Sequence[int]], Tree],
    weigh: Callable[[Tree], Tensor],
    names: Collection[str],
) -> tuple[Tree, Tensor]:
    """Return the pool's weighted sums of models for each client, and its sums of weights.

    Both are float64: the order of the sums hardly matters.

    Args:
        pool: the clients with models, `[clients]`.
        clients: the states of the cohort, stacked.
        read_states: gives the states of any clients, stacked, by their numbers.
        weigh: gives the weights `[cohort, some clients]` of such states.
        names: of the entries to sum up.
    """

    def add(leaf_sum: Tensor, leaf: Tensor) -> Tensor:
        return leaf_sum + torch.tensordot(weight, leaf.double(), 1)

    weight_sum = torch.zeros_like(clients["number"], dtype=torch.float64)
    models = tree.select(clients["model"], names)
    total = tree.map(lambda leaf: torch.zeros_like(leaf, dtype=torch.float64), models)
    numbers = pool.nonzero()[:, 0].tolist()
    for start in range(0, len(numbers), CHUNK):
        states = read_states(numbers[start : start + CHUNK])
        weight = weigh(states)
        weight_sum = weight_sum + weight.sum(1)
        total = tree.map(add, total, tree.select(states["model"], names))
    return total, weight_sum


def validation_loss(net: Bound, model: Tree, statistics: Tree, shard: Shard) -> Tensor:
    """Return the mean cross-entropy of a model on a client's validation samples, float64."""
    still = net.still({"main": statistics})
    losses = []
    with torch.no_grad():
        for batch in shard.validation.chunks():
            logits = still(model, batch.x)
            losses.append(batch.losses(logits).double().sum())
    return torch.stack(losses).sum() / len(shard.validation.y)


def gain_per_distance(gain: Tensor, model: Tree, old: Tree) -> Tensor:
    """Return gain / |model - old|, 0 if the model is the same or diverged."""
    # In float64, as late in training models hardly differ.
    doubled_model = tree.map(Tensor.double, model)
    doubled_old = tree.map(Tensor.double, old)
    distance = tree.squared_distance(doubled_model, doubled_old).sqrt()
    return torch.where(distance > 0, gain / distance, 0.0).nan_to_num(0.0, 0.0, 0.0)


def choose_candidates(
    pool: Tensor,
    affinity: Tensor,
    number: int,
    count: int,
    rate: float,
    generator: torch.Generator,
) -> list[int]:
    """Choose up to `count` models to offer to a client, by FedFomo's rule.

    Args:
        pool: the clients with models, `[clients]`.
        affinity: how much the client gained from each, `[clients]`.
        number: of the client itself, which is not among them.
        count: the most clients.
        rate: the probability that a candidate is any client; else it is the one of largest affinity
            that is left, by lot among equals.
        generator: draws.
    """
    available = pool.clone()
    available[number] = False
    candidates = list[int]()
    while len(candidates) < count and available.any():
        # ---- With probability `rate` any client, else one of largest affinity.
        draw = torch.rand((), generator=generator)
        lots = torch.rand(len(pool), generator=generator)
        if draw < rate:
            eligible = available
        else:
            eligible = available & (affinity == affinity[available].max())
        # ---- By lot among those eligible; all other lots are lower.
        candidate = int(torch.where(eligible, lots, -1.0).argmax())
        candidates.append(candidate)
        available[candidate] = False
    return candidates
