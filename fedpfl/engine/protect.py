"""Uploads as the server of a private run sees them: clipped, with noise, by a trusted party."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedpfl.engine.state import State
from fedpfl.ground import tree
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tree import Entries, Tree
from fedpfl.methods import Method
from fedpfl.privacy import Account, SampleAccount, Secret, clip_uploads, draw_noise


class UploadError(FedpflError):
    """Say that an attack, a defence or a private run cannot deal with uploads.

    Attributes:
        reason: `unknown` if the upload without training is, `nothing` if there is no upload,
            `marked` if it is more than numbers.
    """

    def __init__(self, message: str, reason: str):
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True)
class ProtectedUploads:
    """Hold uploads with a mean that the server may see.

    Attributes:
        uploads: Stacked, `[cohort, ...]`.
        state: `State.privacy` after the round.
        metrics: Columns by client, `[cohort]`.
    """

    uploads: Tree
    state: dict[str, Tensor]
    metrics: dict[str, Tensor]


def make_privacy_state(
    account: Account | SampleAccount | None, device: torch.device
) -> dict[str, Tensor]:
    """Return `State.privacy` before round 1: the clipping bound where it adapts."""
    if not isinstance(account, Account) or account.privacy.quantile is None:
        return {}
    return {"clip": torch.tensor(account.privacy.clip, dtype=torch.float64, device=device)}


def protect_uploads(
    account: Account,
    method: Method,
    state: State,
    uploads: Tree | None,
    secret: Secret,
) -> ProtectedUploads:
    """Clip a cohort's uploads and shift each by the same noise, which their mean has.

    Args:
        account: How private the run is.
        method: Its upload without training is the centre of clipping.
        state: The state before the round.
        uploads: Stacked uploads `[cohort, ...]`. None for an empty Poisson cohort: then that
            of one client without an update.
        secret: Source of the round's noise.
    """
    privacy = account.privacy
    round_number = state.round + 1
    initial = state.rows.initial
    statistics = {**state.server_buffers, **initial["buffers"]}
    center = untrained_upload(method, state.server, initial["client"], statistics)
    device = tree.leaves(center)[0].device
    if uploads is None:
        uploads = tree.stack([center])
        present = 0
    else:
        present = len(tree.leaves(uploads)[0])

    # ---- Clip
    clip = state.privacy.get("clip")
    if clip is None:
        clip = torch.tensor(privacy.clip_length, dtype=torch.float64, device=device)
    # The mean divides by how many are expected, all of whom come but to a Poisson cohort and at
    # nodes: how many came would tell on them.
    expected = account.cohort
    uploads, bound = clip_uploads(uploads, center, clip, present / expected)

    # ---- Add noise
    if account.noise:
        deviation = account.noise * float(clip) / expected
        round_noise = draw_noise(center, deviation, secret, round_number)
        uploads = tree.map(torch.add, uploads, round_noise)

    # ---- Move the bound towards the quantile of the norms
    metrics = {"clipped_share": bound.clipped.double(), "update_norm": bound.norms}
    privacy_state = state.privacy
    if privacy.quantile is not None:
        metrics["clip"] = clip.expand_as(bound.norms)
        unclipped = torch.zeros((), dtype=torch.float64, device=device)
        if present:
            unclipped = (~bound.clipped).double().sum()
        # Andrew et al. (2021): shifted by a half, so that one client moves it by 1/2 only.
        centered = unclipped - present / 2
        count_noise = account.count_noise * float(secret.draw_normal(1, "count", round_number)[0])
        unclipped_share = (centered + count_noise) / account.cohort + 0.5
        factor = torch.exp(-privacy.rate * (unclipped_share - privacy.quantile))
        privacy_state = {"clip": clip * factor}
    return ProtectedUploads(uploads=uploads, state=privacy_state, metrics=metrics)


def untrained_upload(
    method: Method,
    server: Tree,
    client: Entries,
    statistics: Tree,
    choice: str = "privacy=client",
) -> Tree:
    """Make the upload of a first-time client that does not train.

    Args:
        method: Makes the upload.
        server: The server's tree.
        client: A client's initial state.
        statistics: BatchNorm statistics by model role.
        choice: What asks for it, for messages.

    Raises:
        UploadError: An upload holds more than what training moves.
    """
    # ---- The facts of a client that never took part
    device = tree.leaves({"server": server, **client})[0].device
    no = torch.zeros((), dtype=torch.bool, device=device)
    facts = {
        "participated": no,
        "trained": no,
        "newcomer": no,
        "number": no.long(),
        "statistics": statistics,
    }

    # ---- Its hooks, with the model that it starts from for the one that it has trained
    name = type(method).__name__
    try:
        client_state = {**method.prepare(server, {**client, **facts}), **facts}
        start = method._begin(server, client_state)
        upload = method.finish(server, client_state, start, start)[0]
    except KeyError as error:
        raise UploadError(
            f"{choice}: what clients of {name} send up holds more than what training moves "
            f"({error.args[0]} is found out from their samples), and nobody knows what an upload "
            "without training would be",
            reason="unknown",
        ) from None
    require_numbers(upload, choice, name)
    return upload


def require_numbers(upload: Tree, choice: str, name: str) -> None:
    """Raise UploadError for an upload that cannot be averaged entry by entry.

    Args:
        upload: Of one client, or stacked.
        choice: What asks for it, for messages.
        name: Of the method, for messages.
    """
    leaves = tree.leaves(upload)
    if not leaves:
        raise UploadError(
            f"{choice}: clients of {name} send nothing up, so that there is nothing to protect",
            reason="nothing",
        )
    is_marked = isinstance(upload, tuple) or any(
        isinstance(part, tuple) for part in upload.values()
    )
    if is_marked or not all(leaf.is_floating_point() for leaf in leaves):
        raise UploadError(
            f"{choice}: clients of {name} send up more than numbers that can be averaged",
            reason="marked",
        )
