"""Clients that share their critical entries with those alone whose critical entries are alike: FedCAC, FedPURIN."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import AtLeast, Between
from fedpfl.ground.tree import Tree
from fedpfl.methods.shared.method import Method


@dataclass(frozen=True)
class Critical(Method, ABC):
    """After training, the entries of a tensor with the highest scores are critical: the mask m_i of the client.

    O_ij = 1 - |m_i - m_j| / (2 |m_i|) says how alike two clients are (0 where m_i is empty). In round t client i
    collaborates with those j for whom O_ij reaches O_avg + t / beta (O_max - O_avg), mean and maximum over all ordered
    pairs; after round beta, with nobody, unless all overlaps are equal. Its next critical entries are the plain mean
    over itself and its collaborators, the others come from the server's mean by samples.
    With a part of the clients in a round, the pairs are those of its cohort, and a client that returns takes the
    latest mean where it is not critical.
    A client is evaluated by its model right after local training; one that was never sampled, by the initial model.

    tau: share of the critical entries, floor(tau n) of the n of a tensor.
    beta: the round until which there are collaborators.
    cutoff: scores up to it are as good as zero: not critical, as long as the tensor has higher ones; -1: off.
    BatchNorm statistics stay with the client.
    """

    tau: Annotated[float, Between(0, 1)] = 0.5
    beta: Annotated[int, AtLeast(1)] = 100
    cutoff: Annotated[float, AtLeast(0)] | Literal[-1] = 1e-10

    def _shared(self, params, parts):
        """Return the tensors that travel and are scored."""
        return params

    @abstractmethod
    def _scores(self, client, start, end):
        """Return how critical each entry is."""

    def buffers(self):
        """Keep the statistics with the client."""
        return {"main": "local"}

    def init(self, params, parts):
        """Make nothing critical."""
        shared, device = self._shared(params, parts), tree.leaves(params)[0].device
        zero = torch.zeros((), dtype=torch.int64, device=device)
        client = {"model": params, "own": shared, "mask": tree.full_like(shared, False), "partners": zero}
        return {"model": shared, "round": zero}, client

    def start(self, received, client):
        """Return the reply where the client was critical, the mean elsewhere; what does not travel is its own."""
        return {**client["model"], **tree.where(client["mask"], client["own"], received)}

    def finish(self, server, client, start, end):
        """Return the shared tensors and what is critical in them."""
        mask = self._critical(client, start, end)
        own = tree.named(end, mask)
        return {"model": own, "mask": mask}, {**client, "model": end, "own": own, "mask": mask}

    def aggregate(self, server, clients, uploads, weight):
        """Average over everybody, and for each client over itself and its collaborators."""
        models, played = uploads["model"], server["round"] + 1
        together = collaborators(overlaps(clients["mask"]), int(played), self.beta)
        members = together.sum(1)
        own = tree.stack([tree.mean(models, share) for share in together / members.unsqueeze(1)])
        server = {"model": tree.mean(models, weight), "round": played}
        return server, {**clients, "own": own, "partners": members - 1}

    def personal(self, server, client):
        """Return the model as it was after the client's last training."""
        return client["model"]

    def masks(self, server, client):
        """Return the critical entries."""
        return client["mask"]

    def metrics(self, server, client):
        """Return the share of critical entries and the number of collaborators after the last participation."""
        return {"critical_share": tree.flat(client["mask"]).double().mean(), "collaborators": client["partners"]}

    def _critical(self, client, start, end):
        names = client["mask"]
        scores = self._scores(client, tree.named(start, names), tree.named(end, names))
        return tree.map(lambda leaf: highest(leaf, self.tau, self.cutoff), scores)


def alone(client: dict[str, Tree]) -> Tree:
    """Select the critical entries of a client without collaborators: its own values stand, nothing comes down."""
    return tree.map(lambda leaf: leaf & (client["partners"] == 0), client["mask"])


def highest(score: Tensor, tau: float, cutoff: float = -1.0) -> Tensor:
    """Select the floor(tau n) highest scores and those equal to the last of them.

    If this last one is not above `cutoff`: all that are; if there are none, as above.
    """
    values = score.flatten()
    count = math.floor(tau * len(values) + 1e-9)  # so that 0.29 * 100 counts as 29
    if count == 0:
        return torch.zeros_like(score, dtype=torch.bool)
    least = values.kthvalue(len(values) - count + 1).values
    above = torch.where(values > cutoff, values, torch.inf).amin()
    least = torch.where((least <= cutoff) & above.isfinite(), above, least)
    return score >= least


def overlaps(masks: Tree) -> Tensor:
    """Return O `[clients, clients]`, float64, of stacked masks: |m_i - m_j| counts as n_i + n_j - 2 (m_i and m_j)."""
    flat = [leaf.flatten(1).float() for leaf in tree.leaves(masks)]
    both = torch.stack([(leaf @ leaf.T).double() for leaf in flat]).sum(0)  # whole numbers, exact below 2^24 a tensor
    own, other = both.diagonal().unsqueeze(1), both.diagonal()
    return torch.where(own > 0, 1 - (own + other - 2 * both) / (2 * own), 0.0)


def collaborators(overlap: Tensor, played: int, beta: int) -> Tensor:
    """Tell whether client i takes the mean over client j too, bool `[clients, clients]`; over itself it always does.

    The threshold is counted down from the maximum, O_max - (1 - t / beta) (O_max - O_avg): exactly O_max at t = beta
    and where all overlaps are equal.
    """
    myself = torch.eye(len(overlap), dtype=torch.bool, device=overlap.device)
    if len(overlap) == 1:
        return myself
    pairs = overlap[~myself]
    gap = (pairs.amax() - pairs).mean()
    return (overlap >= pairs.amax() - (1 - played / beta) * gap) | myself
