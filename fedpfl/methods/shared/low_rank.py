"""Low-rank pairs of clients with different ranks, and products of pairs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Agreed, Tree
from fedpfl.methods.shared.method import Method, Phase, pick_row

RANK_AXIS = {("A", 3): 1, ("B", 3): 2, ("A", 4): 0, ("B", 4): 1}
"""The axis of the rank, by factor and dimensions: 4 are a convolution's."""
RESIDUE = ".lora_residue"


@dataclass(frozen=True)
class RankedPairs(Method):
    """Let each client hold as much of the server's low-rank pairs as its rank allows.

    The server's pairs have the largest rank. A client of rank r has the first r rows of A and
    columns of B; at full size, where the rest is zero, never moves and never travels. So masks
    stand in `download`, `phases` and `finish` here, and a method says by `aggregate` alone what
    becomes of the uploads. All other entries, such as the head, are averaged. A residue lies
    beside the model in the server's state; it travels whole and does not train.

    All clients have one model, each as much of it as its rank allows.
    """

    pairs: ClassVar[int] = 1
    takes_ranks: ClassVar[bool] = True
    mixes_samples = ""
    server_sees = "each upload"

    def init(self, params, parts):
        """Give the server the model, its residue, and all clients' ranks."""
        residue = {name: leaf for name, leaf in params.items() if name.endswith(RESIDUE)}
        model = tree.drop(params, residue)
        names = list_pairs(model).values()
        largest = max((rank_of(name, model[name]) for name, _ in names), default=0)
        # One entry stands for all clients.
        ranks = torch.tensor(parts.ranks or (largest,), device=tree.leaves(params)[0].device)
        return {"model": model, "residue": residue, "ranks": ranks}, {}

    def prepare(self, server, client):
        """Add which entries the client's rank holds."""
        return {**client, "held": hold_first(server["model"], self._rank(server, client))}

    def _rank(self, server, client):
        """Return the client's rank."""
        ranks = server["ranks"]
        return pick_row(ranks, client["number"].clamp(max=len(ranks) - 1))

    def download(self, server, client):
        """Send the entries that the client's rank holds, and the residue."""
        return {"model": Agreed(server["model"], client["held"]), "residue": server["residue"]}

    def start(self, received, client):
        """Return the model beside the residue."""
        return {**received["model"], **received["residue"]}

    def phases(self, server, client, params, epochs):
        """Move the entries that the client's rank holds."""
        mask = {name: client["held"].get(name, False) for name in params}
        return [Phase(epochs, mask)]

    def finish(self, server, client, start, params):
        """Send up the entries that the client's rank holds."""
        held = client["held"]
        return {"model": Agreed(tree.select(params, held), held)}, client


def list_pairs(model: Tree) -> dict[str, tuple[str, str]]:
    """Return the names of A and B of each adapted layer."""
    layers = [name.removesuffix(".lora_A") for name in model if name.endswith(".lora_A")]
    return {layer: (f"{layer}.lora_A", f"{layer}.lora_B") for layer in layers}


def rank_axis(name: str, leaf: Tensor) -> int:
    """Return the axis of a factor's rank."""
    return RANK_AXIS[name[-1], leaf.dim()]


def rank_of(name: str, leaf: Tensor) -> int:
    """Return the rank of a factor."""
    return leaf.shape[rank_axis(name, leaf)]


def hold_first(model: Tree, rank: Tensor) -> Tree:
    """Mask all but the first `rank` places of each pair."""
    held = {}
    for name, leaf in model.items():
        held[name] = torch.ones_like(leaf, dtype=torch.bool)
        if name.endswith((".lora_A", ".lora_B")):
            axis = rank_axis(name, leaf)
            places = torch.arange(leaf.shape[axis], device=leaf.device)
            shape = [1] * leaf.dim()
            shape[axis] = -1
            held[name] = held[name] & (places < rank).view(shape)
    return held


def as_matrices(factor: Tensor) -> Tensor:
    """Return clients' factors as matrices `[clients, chosen, ...]`, also those of a convolution."""
    # As if it were the only chosen part of a layer.
    return factor.flatten(2).unsqueeze(1) if factor.dim() == 5 else factor


def stack_pairs(a: Tensor, b: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Stack clients' pairs to one; its product is their weighted sum.

    It is float64.

    Args:
        a: `[clients, chosen, rank, inputs]`, or of a convolution.
        b: `[clients, chosen, rows, rank]`, or of a convolution.
        weight: `[clients]`, or of each place of the rank `[clients, rank]`.
    """
    a, b = as_matrices(a), as_matrices(b)
    weighted_b = b.double() * weight.double().view(len(weight), 1, 1, -1)
    # The clients' ranks one after another, in the same order on both sides.
    stacked_a = a.double().movedim(0, 1).flatten(1, 2)
    stacked_b = weighted_b.permute(1, 2, 0, 3).flatten(2)
    return stacked_a, stacked_b


def multiply_pairs(a: Tensor, b: Tensor, weight: Tensor) -> Tensor:
    """Return the weighted sum of products B A of stacked pairs, float64 `[chosen, rows, inputs]`."""
    stacked_a, stacked_b = stack_pairs(a, b, weight)
    return stacked_b @ stacked_a


def multiply_pair(a: Tensor, b: Tensor) -> Tensor:
    """Return the product B A of one pair, float64 `[chosen, rows, inputs]`."""
    return multiply_pairs(a.unsqueeze(0), b.unsqueeze(0), a.new_ones(1))


def product_norms(a: Tensor, b: Tensor) -> Tensor:
    """Return the Frobenius norm of each client's B A, float64 `[clients]`."""
    a, b = (as_matrices(factor).double() for factor in (a, b))
    # |B A|^2 is the sum of (B'B) * (A A'), which are as small as the rank.
    squares = (b.mT @ b) * (a @ a.mT)
    return squares.flatten(1).sum(1).clamp(min=0).sqrt()


def compress_pair(a: Tensor, b: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """Return factors of the nearest matrix of a rank to b a, float32: A_g = V', B_g = U S."""
    # b a = q (left right^T) p^T, and only the small middle needs an SVD.
    q, left = torch.linalg.qr(b)
    p, right = torch.linalg.qr(a.mT)
    # All singular values go into B_g, so that A_g has orthonormal rows.
    u, s, v = torch.linalg.svd(left @ right.mT, full_matrices=False)
    a = v[..., :rank, :] @ p.mT
    b = q @ (u * s.unsqueeze(-2))[..., :rank]
    # Algorithms choose signs as they like; here the largest entry of each row is positive.
    largest = a.abs().argmax(-1, keepdim=True)
    sign = a.gather(-1, largest).sign()
    return (a * sign).float(), (b * sign.mT).float()


def draw_factor(leaf: Tensor, generator: Generator) -> Tensor:
    """Draw another A as torch initialises a layer: within 1 / sqrt(inputs)."""
    row = leaf[0] if leaf.dim() == 4 else leaf[0, 0]
    bound = row.numel() ** -0.5
    # On the CPU, where a method's generator is.
    values = torch.empty(leaf.shape).uniform_(-bound, bound, generator=generator)
    return values.to(leaf)
