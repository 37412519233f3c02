"""FlexLoRA: the mean of clients' products B A, cut anew to each rank by its singular values."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.methods.shared.low_rank import (
    RankedPairs,
    compress_pair,
    list_pairs,
    rank_of,
    stack_pairs,
)

EMPTY = 1e-6
"""A singular value below this share of the largest is rounding: float32 has been averaged."""


@dataclass(frozen=True)
class FlexLoRA(RankedPairs):
    """FlexLoRA (Bai et al., NeurIPS 2024, arXiv:2402.11505), with `adapter=lora`.

    The server forms sum_k a_k B_k A_k of each adapted layer, for any ranks of clients, and
    decomposes it: B = U S, A = V', by falling singular values, with the largest entry of each row
    of A positive. A client of rank r receives the first r columns and rows, the nearest matrix of
    its rank. The head is averaged; there is one model, each as much of it as its rank allows.

    Where there are fewer singular values than ranks, B is 0 and A as it was before, so that the
    place can be trained; the authors keep the vectors that the algorithm leaves there. Their scale is 16 / rank
    of each client; here all have alpha / the largest rank. They decay the rate of steps.
    """

    server_sees = "each upload"

    def aggregate(self, server, clients, net, uploads, weight, generator):
        """Average, but for pairs: decompose the mean of their products."""
        values = tree.unmask_received(uploads["model"])
        model = tree.mean(values, weight)
        for name_a, name_b in list_pairs(model).values():
            # Where training diverged, as the mean tells, there are no factors of the product.
            if not (values[name_a].isfinite().all() and values[name_b].isfinite().all()):
                continue
            shares = self._shares(uploads["model"].mask[name_b], weight)
            a, b = stack_pairs(values[name_a], values[name_b], shares)
            old_a = server["model"][name_a]
            a, b = compress_pair(a, b, rank_of(name_a, old_a))
            is_empty = _find_empty(b)
            a = torch.where(is_empty.mT, old_a.reshape(a.shape), a)
            b = torch.where(is_empty, 0.0, b)
            model[name_a] = a.reshape(old_a.shape)
            model[name_b] = b.reshape(model[name_b].shape)
        return {**server, "model": model}, clients

    def _shares(self, held: Tensor, weight: Tensor) -> Tensor:
        """Return clients' shares, `[clients]`, or those at each place `[clients, rank]`."""
        return weight


def _find_empty(b: Tensor) -> Tensor:
    """Return the columns of B without a singular value, bool `[chosen, 1, rank]`."""
    lengths = b.norm(dim=-2, keepdim=True)
    return lengths <= EMPTY * lengths.amax(-1, keepdim=True)
