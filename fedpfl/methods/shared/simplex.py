"""A simplex of heads: points in it, and where its clients' centres lie (FLOCO, arXiv:2403.03333)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree

SCALES = (1e-4, 1.0, 1000)  # tried for z: from, to, how many
NEAREST = 1e-4  # distances below this count as this


def params_at(params: Tree, alpha: Tensor) -> Tree:
    """Return the network's parameters at one point of the simplex."""
    heads = tree.map(lambda ends: (alpha.view(-1, 1, 1) * ends).sum(0), params["endpoints"])
    return {**params["shared"], **heads}


def client_centres(points: Tensor, count: int) -> Tensor:
    """Turn points `[clients, n]`, float64, into points of the simplex `[clients, count]` that lie
    apart.

    They are the projected principal components, at that scale z at which their Riesz energy is
    least.
    """
    kappa, best, least = principal_components(points, count), None, torch.inf
    clients = len(points)
    for scales in torch.linspace(*SCALES, dtype=points.dtype, device=points.device).split(
        1 + 2**21 // clients**2
    ):
        beta = project_to_simplex(kappa, scales.view(-1, 1, 1))
        beta = beta / beta.sum(-1, keepdim=True)
        distance = torch.cdist(beta, beta, compute_mode="donot_use_mm_for_euclid_dist").clamp(
            min=NEAREST
        )
        distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        energy = distance.pow(-2).sum((1, 2)).div(max(1, clients * (clients - 1))).log()
        place = int(energy.argmin())
        if best is None or float(energy[place]) < least:
            best, least = beta[place], float(energy[place])
    assert best is not None
    return best


def principal_components(points: Tensor, count: int) -> Tensor:
    """Return the first principal components of points `[clients, n]`: `[clients, count]`, zero
    beyond their rank.
    """
    u, scale, axes = torch.linalg.svd(points - points.mean(0), full_matrices=False)
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    scores = u * scale * torch.where(largest < 0, -1.0, 1.0).squeeze(1).to(u)
    scores = scores[:, :count]
    return torch.cat([scores, scores.new_zeros(len(scores), count - scores.shape[1])], 1)


def project_to_simplex(points: Tensor, total: Tensor | float = 1.0) -> Tensor:
    """Return the nearest points with no negative coordinate and the sum `total`, along the last
    axis.
    """
    points = points - points.amax(-1, keepdim=True)  # which changes nothing but the rounding
    falling = points.sort(-1, descending=True).values
    excess = falling.cumsum(-1) - total
    ranks = torch.arange(1, points.shape[-1] + 1, device=points.device)
    support = (falling - excess / ranks > 0).sum(-1, keepdim=True)
    return (points - excess.gather(-1, support - 1) / support).clamp(min=0)


def draw_endpoint(like: Tensor, seed: int, number: int) -> Tensor:
    """Draw one endpoint, Xavier normal, from a generator of its number: the first ones of many are
    those of few.
    """
    generator = torch.Generator().manual_seed((1_000_003 * seed + number) % 2**63)
    return torch.nn.init.xavier_normal_(torch.empty(like.shape), generator=generator).to(like)
