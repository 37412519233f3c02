"""Prototypes on their way: one vector for each class that a client has, and a server that learns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Generator, Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Masked, Tree
from fedpfl.methods.shared.gaussian import class_means


def average_by_class(z: Tensor, y: Tensor, zeros: Tensor) -> dict[str, Tensor]:
    """Return the mean rows of `z` by class, `zeros` for absent ones, and flags."""
    is_present = torch.bincount(y, minlength=len(zeros)) > 0
    return {"mean": class_means(z, y, zeros, min_samples=1), "present": is_present}


def mask_absent(client: dict[str, Tree]) -> Masked:
    """Return the upload of a client's prototypes, without the classes that it lacks."""
    mask = client["present"][:, None].expand_as(client["mean"])
    return Masked({"mean": client["mean"]}, {"mean": mask})


def flags_of_present(uploads: Masked) -> Tensor:
    """Return a flag for each client's class, `[clients, classes]`."""
    return uploads.mask["mean"][:, :, 0]


def fit_to_uploads(
    method: Any,
    loss: Callable[[Tree, Tensor, Tensor], Tensor],
    values: Tree,
    uploads: Masked,
    generator: Generator,
) -> Tree:
    """Train values of the server on all uploaded prototypes by SGD, in random order.

    Args:
        method: has `server_epochs`, `server_batch` and `server_lr`.
        loss: of values, prototypes `[batch, features]` and their classes.
        values: the trained ones.
        uploads: prototypes, stacked and masked.
        generator: of the round.
    """
    is_present = flags_of_present(uploads)
    z = uploads.values["mean"][is_present]
    y = is_present.nonzero()[:, 1]
    leaves = [leaf.clone().requires_grad_() for leaf in tree.leaves(values)]
    fitted = tree.rebuild(values, leaves)
    optimizer = torch.optim.SGD(leaves, lr=method.server_lr)
    for _ in range(method.server_epochs):
        order = torch.randperm(len(y), generator=generator)
        for rows in tree.send(order, y.device).split(method.server_batch):
            # No prototypes at all are one empty minibatch.
            if len(rows):
                optimizer.zero_grad()
                with torch.enable_grad():
                    loss(fitted, z[rows], y[rows]).backward()
                optimizer.step()
    return tree.map(torch.detach, fitted)
