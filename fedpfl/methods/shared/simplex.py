"""A simplex of heads: its points, and the clients' centres in it (FLOCO, arXiv:2403.03333)."""

from __future__ import annotations

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree

MIN_SCALE = 1e-4  # of those tried for z
MAX_SCALE = 1.0
SCALE_COUNT = 1000
MIN_DISTANCE = 1e-4  # distances below this count as this
PAIRS_AT_ONCE = 2**21  # distances computed together, which bounds the memory


def params_at(params: Tree, alpha: Tensor) -> Tree:
    """Return the network's parameters at one point of the simplex."""
    coordinates = alpha.view(-1, 1, 1)
    heads = tree.map(
        lambda endpoints: (coordinates * endpoints).sum(0),
        params["endpoints"],
    )
    return {**params["shared"], **heads}


def client_centres(points: Tensor, count: int) -> Tensor:
    """Turn points `[clients, n]`, float64, into distant points of the simplex `[clients, count]`.

    They are the projected principal components, at that scale z at which their Riesz energy is
    least.
    """
    kappa = principal_components(points, count)
    best_centres: Tensor | None = None
    least_energy = torch.inf
    clients = len(points)
    ordered_pairs = max(1, clients * (clients - 1))
    all_scales = torch.linspace(
        MIN_SCALE, MAX_SCALE, SCALE_COUNT, dtype=points.dtype, device=points.device
    )
    scales_at_once = 1 + PAIRS_AT_ONCE // clients**2
    for scales in all_scales.split(scales_at_once):
        # ---- Step 1: project the components at each scale z.
        beta = project_to_simplex(kappa, scales.view(-1, 1, 1))
        # At scale z coordinates sum to z, those of centres to 1.
        beta = beta / beta.sum(-1, keepdim=True)

        # ---- Step 2: the Riesz energy of each scale. Clients that coincide cost most.
        # A matrix product could not tell points apart that are this near to each other.
        distance = torch.cdist(beta, beta, compute_mode="donot_use_mm_for_euclid_dist")
        distance = distance.clamp(min=MIN_DISTANCE)
        distance.diagonal(dim1=1, dim2=2).fill_(torch.inf)
        energy = distance.pow(-2).sum((1, 2)).div(ordered_pairs).log()

        # ---- Step 3: keep the centres of least energy.
        row = int(energy.argmin())
        if best_centres is None or float(energy[row]) < least_energy:
            best_centres = beta[row]
            least_energy = float(energy[row])
    assert best_centres is not None
    return best_centres


def principal_components(points: Tensor, count: int) -> Tensor:
    """Return the first principal components of points `[clients, n]`: `[clients, count]`.

    They are zero beyond the points' rank. Signs are such that the largest loading is positive.
    """
    centred = points - points.mean(0)
    u, scale, axes = torch.linalg.svd(centred, full_matrices=False)
    # An axis is as good as its opposite; libraries choose differently, so fix the sign.
    largest = axes.gather(1, axes.abs().argmax(1, keepdim=True))
    sign = torch.where(largest < 0, -1.0, 1.0).squeeze(1).to(u)
    scores = (u * scale * sign)[:, :count]
    # With fewer clients than endpoints the other coordinates are zero.
    missing = scores.new_zeros(len(scores), count - scores.shape[1])
    return torch.cat([scores, missing], 1)


def project_to_simplex(points: Tensor, total: Tensor | float = 1.0) -> Tensor:
    """Return the nearest points with no negative coordinate and the sum `total`.

    Coordinates are along the last axis.
    """
    # A common shift does not change the projection, but for its rounding.
    points = points - points.amax(-1, keepdim=True)
    descending = points.sort(-1, descending=True).values
    # The k largest coordinates stay positive, the rest become 0; all shift by one threshold.
    excess = descending.cumsum(-1) - total
    ranks = torch.arange(1, points.shape[-1] + 1, device=points.device)
    support = (descending - excess / ranks > 0).sum(-1, keepdim=True)
    threshold = excess.gather(-1, support - 1) / support
    return (points - threshold).clamp(min=0)


def draw_endpoint(like: Tensor, seed: int, number: int) -> Tensor:
    """Draw one endpoint, Xavier normal, from a generator of its number.

    So the first endpoints of many are those of few.
    """
    generator = torch.Generator().manual_seed((1_000_003 * seed + number) % 2**63)
    return torch.nn.init.xavier_normal_(torch.empty(like.shape), generator=generator).to(like)
