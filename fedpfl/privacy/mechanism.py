"""Clip clients' updates and draw the noise on their sum."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.privacy.secret import Secret


class UpdateNorms(NamedTuple):
    """Hold the lengths of a cohort's updates.

    Attributes:
        norms: The L2 norm of each update, `[cohort]`.
        clipped: Whether each is longer than the bound, `[cohort]`.
    """

    norms: Tensor
    clipped: Tensor


def clip_uploads(
    uploads: Tree, reference: Tree, clip: Tensor, scale: float = 1.0
) -> tuple[Tree, UpdateNorms]:
    """Clip updates to length `clip`, and return the uploads and the updates' lengths.

    An update is the difference of an upload from `reference`, its length the L2 norm over all
    entries. An upload that is short enough stays as it is, bit for bit, at scale 1.

    Args:
        uploads: Stacked, `[cohort, ...]`.
        reference: What everybody knows an upload would be without training.
        clip: The largest length.
        scale: The factor on the updates that are returned.
    """
    # ---- The length of each update, in float64.
    updates = tree.map(torch.sub, uploads, reference)
    squares = [tree.as_matrix(leaf.double()).square().sum(1) for leaf in tree.leaves(updates)]
    norms = torch.stack(squares).sum(0).sqrt()

    # ---- The factor on each: clip / length where it is longer, and `scale`.
    limit = clip.double().to(norms.device).expand_as(norms)
    # An update that is not finite has no length; in the mean it would reveal its client.
    is_finite = norms.isfinite()
    factors = torch.where(is_finite, scale * (limit / norms).clamp(max=1.0), 0.0)
    is_short = norms <= limit

    def clip_leaf(upload: Tensor, reference_leaf: Tensor, update: Tensor) -> Tensor:
        row_shape = (-1, *[1] * (upload.dim() - 1))
        update = torch.where(is_finite.view(row_shape), update, 0.0)
        factor = factors.to(upload.dtype).view(row_shape)
        clipped_upload = reference_leaf + factor * update
        if scale != 1.0:
            return clipped_upload
        # Subtracting the reference and adding it again would round.
        return torch.where(is_short.view(row_shape), upload, clipped_upload)

    clipped_uploads = tree.map(clip_leaf, uploads, reference, updates)
    return clipped_uploads, UpdateNorms(norms=norms, clipped=~is_short)


def draw_noise(like: Tree, deviation: float, secret: Secret, number: int) -> Tree:
    """Draw independent Gaussian numbers in the form of `like`.

    Args:
        like: The tree that gives the form of the noise.
        deviation: The standard deviation.
        secret: The source of random numbers.
        number: The round's number.
    """

    def draw_leaf(index: int, leaf: Tensor) -> Tensor:
        normal = torch.from_numpy(secret.draw_normal(leaf.numel(), "noise", number, index))
        noise = (deviation * normal).to(leaf.dtype).view(leaf.shape)
        return tree.send(noise, leaf.device)

    leaves = [draw_leaf(index, leaf) for index, leaf in enumerate(tree.leaves(like))]
    return tree.rebuild(like, leaves)
