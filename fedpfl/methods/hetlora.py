"""HetLoRA: factors are padded with zeros, and averaged by the norm of their product."""

from dataclasses import dataclass
from typing import Literal

import torch

from fedpfl.ground import tree
from fedpfl.methods.shared.low_rank import RankedPairs, list_pairs, product_norms


@dataclass(frozen=True)
class HetLoRA(RankedPairs):
    """HetLoRA (Cho et al., EMNLP 2024, arXiv:2401.06432), with `adapter=lora`.

    The server pads A_k and B_k with zeros to the largest rank and averages them layer by layer,
    client k counting by the share of |B_k A_k| (Frobenius) among the cohort's. A client of rank r
    receives the first r rows of A and columns of B. The head is averaged by samples. The mean of
    factors is no mean of products.

    weighting: `norm`, the paper's, or `samples`, plain zero padding, which at equal ranks is
        FedAvg.

    Of the paper its abstract and summaries could be read. Its self-pruning of ranks, for which a
    client's last rows are pulled to zero, is not here.
    """

    weighting: Literal["norm", "samples"] = "norm"

    server_sees = "each upload"

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
