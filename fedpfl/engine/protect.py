"""What of a cohort's uploads the server sees under privacy: as if a trusted party had clipped them
and added noise.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Tree
from fedpfl.methods import Method
from fedpfl.privacy import Account, Secret, noise, protected


class ProtectedUploads(NamedTuple):
    """Hold uploads whose mean is what the server may see, how they were made, and what is noted of
    each client.

    state: `State.privacy` after the round. metrics: `[cohort]`.
    """

    uploads: Tree
    state: dict[str, Tensor]
    metrics: dict[str, Tensor]


def make_privacy_state(account: Account | None, device: torch.device) -> dict[str, Tensor]:
    """Return `State.privacy` before round 1: the bound on updates where it moves."""
    if account is None or account.privacy.quantile is None:
        return {}
    return {"clip": torch.tensor(account.privacy.clip, dtype=torch.float64, device=device)}


def protect_uploads(
    account: Account,
    method: Method,
    state: tuple[Tree, dict[str, Tree], Tree],
    own: dict[str, Tensor],
    uploads: Tree | None,
    secret: Secret,
    number: int,
) -> ProtectedUploads:
    """Protect the uploads of a cohort `[cohort, ...]`. Each is shifted by the same noise, so that
    their mean is, too.

    state: the server's state, a client's initial one, and statistics, as `reference` takes them.
    own: State.privacy.
    uploads: None where nobody was drawn, as Poisson's rule may have it: then of one client that
    changes nothing.
    secret: from which the noise of round `number` is drawn.
    """
    privacy, known = account.privacy, untrained_upload(method, *state)
    device, present = tree.leaves(known)[0].device, 0
    if uploads is None:
        uploads = tree.stack([known])
    else:
        present = len(tree.leaves(uploads)[0])
    at_first = math.inf if privacy.clip is None else privacy.clip
    clip = own.get("clip", torch.tensor(at_first, dtype=torch.float64, device=device))
    # Poisson's mean divides by how many are expected: how many came would tell on them.
    divisor = present if privacy.sampling == "fixed" else account.cohort
    uploads, bound = protected(uploads, known, clip, present / divisor)
    if account.noise:
        deviation = account.noise * float(clip) / divisor
        uploads = tree.map(torch.add, uploads, noise(known, deviation, secret, number))
    metrics = {"clipped_share": bound.clipped.double(), "update_norm": bound.norms}
    if privacy.quantile is not None:
        metrics["clip"] = clip.expand_as(bound.norms)
        short = (
            (~bound.clipped).double().sum()
            if present
            else torch.zeros((), dtype=torch.float64, device=device)
        )
        centred = short - present / 2
        spread = account.count_noise * float(secret.draw_normal(1, "count", number)[0])
        share = (centred + spread) / account.cohort + 0.5
        own = {"clip": clip * torch.exp(-privacy.rate * (share - privacy.quantile))}
    return ProtectedUploads(uploads, own, metrics)


def untrained_upload(
    method: Method, server: Tree, client: dict[str, Tree], statistics: Tree
) -> Tree:
    """Return what a client that never took part would upload if it did not train: whoever knows the
    server knows it.

    client: a client's initial state. Raises FedpflError where an upload holds more than what
    training moves.
    """
    device = tree.leaves({"server": server, **client})[0].device
    no = torch.zeros((), dtype=torch.bool, device=device)
    facts = {
        "participated": no,
        "trained": no,
        "newcomer": no,
        "number": no.long(),
        "statistics": statistics,
    }
    name = type(method).__name__
    try:
        entered = {**method.prepare(server, {**client, **facts}), **facts}
        start = method._begin(server, entered)
        upload = method.finish(server, entered, start, start)[0]
    except KeyError as error:
        raise FedpflError(
            f"privacy=client: what clients of {name} send up holds more than what training moves ({error.args[0]} is "
            "found out from their samples), and nobody knows what an upload without training would be"
        ) from None
    leaves = tree.leaves(upload)
    if not leaves:
        raise FedpflError(
            f"privacy=client: clients of {name} send nothing up, so that there is nothing to protect"
        )
    if any(isinstance(part, tuple) for part in (upload, *upload.values())) or not all(
        leaf.is_floating_point() for leaf in leaves
    ):
        raise FedpflError(
            f"privacy=client: clients of {name} send up more than numbers that can be averaged"
        )
    return upload
