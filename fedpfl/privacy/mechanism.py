"""Clipping and noise."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from fedpfl.ground import tree
from fedpfl.ground.tree import Tree
from fedpfl.privacy.secret import Secret


class UpdateNorms(NamedTuple):
    """Tell of a cohort's updates how long they are, `[cohort]`, and which are longer than the
    bound.
    """

    norms: Tensor
    clipped: Tensor


def clip_uploads(
    uploads: Tree, reference: Tree, clip: Tensor, scale: float = 1.0
) -> tuple[Tree, UpdateNorms]:
    """Return uploads whose updates are at most `clip` long, and how long they were. An upload that
    is short enough stays as it is, bit for bit, at scale 1.

    uploads: stacked, `[cohort, ...]`. reference: what everybody knows an upload would be without
    training; an update is the difference, its length the L2 norm over all entries. scale: of the
    updates that are returned.
    """
    updates = tree.map(torch.sub, uploads, reference)
    squares = [leaf.double().flatten(1).square().sum(1) for leaf in tree.leaves(updates)]
    norms = torch.stack(squares).sum(0).sqrt()
    limit = clip.double().to(norms.device).expand_as(norms)
    # What is not finite has no length; it must not reach the mean, where it would tell on its
    # client.
    sound = norms.isfinite()
    factors = torch.where(sound, scale * (limit / norms).clamp(max=1.0), 0.0)
    kept = norms <= limit

    def shortened(upload: Tensor, known: Tensor, update: Tensor) -> Tensor:
        shape = -1, *[1] * (upload.dim() - 1)
        update = torch.where(sound.view(shape), update, 0.0)
        shorter = known + factors.to(upload.dtype).view(shape) * update
        return torch.where(kept.view(shape), upload, shorter) if scale == 1.0 else shorter

    return tree.map(shortened, uploads, reference, updates), UpdateNorms(norms, ~kept)


def draw_noise(like: Tree, deviation: float, secret: Secret, number: int) -> Tree:
    """Return independent Gaussian numbers of a round, in the form of `like`.

    deviation: their standard deviation. number: of the round.
    """

    def draw(place: int, leaf: Tensor) -> Tensor:
        drawn = torch.from_numpy(secret.draw_normal(leaf.numel(), "noise", number, place))
        return tree.send((deviation * drawn).to(leaf.dtype).view(leaf.shape), leaf.device)

    return tree.rebuild(like, [draw(*numbered) for numbered in enumerate(tree.leaves(like))])
