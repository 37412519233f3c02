"""HetLoRA: factors are padded with zeros, and averaged by the norm of their product."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.ranges import NonNegative, PositiveProportion
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.low_rank import RankedPairs, hold_first, list_pairs, product_norms


@dataclass(frozen=True)
class HetLoRA(RankedPairs):
    """HetLoRA (Cho et al., EMNLP 2024, arXiv:2401.06432), with `adapter=lora`.

    The server pads A_k and B_k with zeros to the largest rank and averages them layer by layer,
    client k counting by the share of |B_k A_k| (Frobenius) among the cohort's. A client of rank r
    receives the first r rows of A and columns of B. The head is averaged by samples. The mean of
    factors is no mean of products.

    weighting: `norm`, the paper's, or `samples`, plain zero padding, which at equal ranks is
        FedAvg.
    gamma: below 1 a client prunes its rank to the whole part of gamma * r, at least 1, for good,
        if training has made the places beyond it smaller: the sum over layers of |A| |B| there.
    lam: how much of that sum is added to the loss where gamma is below 1.

    Of the paper its abstract and summaries could be read, and other people's code for its pruning.
    """

    weighting: Literal["norm", "samples"] = "norm"
    gamma: PositiveProportion = 1.0
    lam: NonNegative = 0.005

    mixes_samples = ""

    @property
    def server_sees(self) -> str:  # type: ignore[override]
        """Return each upload, or clients' states, which have ranks that shrink."""
        return "client states" if self.gamma < 1 else "each upload"

    def init(self, params, parts):
        """Give the client its own rank where it may shrink."""
        server, client = super().init(params, parts)
        if self.gamma < 1:
            client = {"rank": server["ranks"].max()}
        return server, client

    def prepare(self, server, client):
        """Add which entries a client would prune."""
        client = super().prepare(server, client)
        if self.gamma < 1:
            kept = hold_first(server["model"], self._pruned_rank(server, client))
            client["tail"] = tree.map(torch.bitwise_and, client["held"], tree.invert(kept))
        return client

    def _rank(self, server, client):
        """Return the client's rank after all pruning."""
        rank = super()._rank(server, client)
        return torch.minimum(rank, client["rank"]) if self.gamma < 1 else rank

    def _pruned_rank(self, server, client):
        """Return the rank that pruning leaves next."""
        return (self.gamma * self._rank(server, client)).long().clamp(min=1)

    def loss(self, server, client, net, params, batch):
        """Add the size of what may be pruned."""
        loss = super().loss(server, client, net, params, batch)
        return loss + self.lam * _measure_tail(params, client["tail"]) if self.gamma < 1 else loss

    def finish(self, server, client, start, params):
        """Prune the rank if what lies beyond has become smaller."""
        upload, client = super().finish(server, client, start, params)
        if self.gamma < 1:
            tail = client["tail"]
            has_shrunk = _measure_tail(params, tail) < _measure_tail(start, tail)
            old_rank = self._rank(server, client)
            rank = torch.where(has_shrunk, self._pruned_rank(server, client), old_rank)
            upload = {"model": Agreed(params, hold_first(params, rank))}
            client = {**client, "rank": rank}
        return upload, client

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average, pairs by the norms of their products."""
        values = tree.unmask_received(uploads["model"])
        model = tree.mean(values, weight)
        if self.weighting == "norm":
            for names in list_pairs(model).values():
                norms = product_norms(*tree.select(values, names).values())
                # Nothing has moved where all products are 0.
                shares = torch.where(norms.sum() > 0, norms / norms.sum(), weight)
                model |= tree.mean(tree.select(values, names), shares.to(weight))
        return {**server, "model": model}, clients


def _measure_tail(model: Tree, tail: Tree) -> Tensor:
    """Return the sum over layers of |A| |B| at the masked places."""
    norms = tree.map(torch.linalg.vector_norm, tree.apply_mask(model, tail))
    sizes = (norms[name_a] * norms[name_b] for name_a, name_b in list_pairs(model).values())
    return sum(sizes, torch.zeros(()))
