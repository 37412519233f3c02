"""Attacks on what attackers send up: formulas on the uploads of a turn, a row each."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from statistics import NormalDist
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Generator, Tensor

from fedpfl.ground.ranges import NonNegative, Positive
from fedpfl.robust.attack import Attack
from fedpfl.robust.defence import square_distances
from fedpfl.robust.poison import Backdoor


class Uploads(NamedTuple):
    """Hold the uploads of a turn if all clients were honest.

    Attributes:
        rows: `[clients, entries]`; of an attack that `is_centered`, minus the upload without
            training would be.
        hostile: Whether each client attacks, bool `[clients]`.
        weights: The share of each client in a mean, `[clients]`.
        generator: Of the round, on the CPU.
    """

    rows: Tensor
    hostile: Tensor
    weights: Tensor
    generator: Generator

    def find_known(self, knowledge: str) -> Tensor:
        """Return the rows that attackers know, `[some clients, entries]`.

        They are the fellows', or those of honest clients where there are any.
        """
        is_honest = ~self.hostile
        # Their own uploads are about to be replaced.
        if knowledge == "all" and bool(is_honest.any()):
            return self.rows[is_honest]
        return self.rows[self.hostile]


@dataclass(frozen=True)
class UploadAttack(Attack, ABC):
    """Replace attackers' uploads."""

    is_centered: ClassVar[bool] = False
    """Whether `forge_rows` is about updates, the uploads less those without training."""

    @abstractmethod
    def forge_rows(self, uploads: Uploads) -> Tensor:
        """Forge the attackers' uploads, `[attackers, entries]` or one row for all."""


@dataclass(frozen=True)
class SignFlip(UploadAttack):
    """Send the update's opposite, scaled (Li et al., AAAI 2019)."""

    scale: Positive = 4.0

    is_centered = True

    def forge_rows(self, uploads: Uploads) -> Tensor:
        """See UploadAttack."""
        return -self.scale * uploads.rows[uploads.hostile]


@dataclass(frozen=True)
class Noise(UploadAttack):
    """Send Gaussian noise in the update's stead."""

    deviation: Positive = 0.1

    is_centered = True

    def forge_rows(self, uploads: Uploads) -> Tensor:
        """See UploadAttack."""
        like = uploads.rows[uploads.hostile]
        # Drawn on the host, so that every device has the same noise.
        noise = torch.randn(like.shape, generator=uploads.generator)
        return self.deviation * noise.to(like)


@dataclass(frozen=True)
class Replacement(Backdoor, UploadAttack):
    """Train on a backdoor and replace the server's model (Bagdasaryan et al., AISTATS 2020).

    With no `scale` an update is divided by the attackers' share of samples, so that the mean is
    theirs as far as updates of the honest cancel out.
    """

    scale: Positive | None = None

    is_centered = True

    def forge_rows(self, uploads: Uploads) -> Tensor:
        """See UploadAttack."""
        # The whole cohort's: a single upload of weight w moves the mean by w times its update.
        scale = self.scale or 1 / uploads.weights[uploads.hostile].sum()
        return scale * uploads.rows[uploads.hostile]


@dataclass(frozen=True)
class LittleIsEnough(UploadAttack):
    """Send mean - z deviations, which hides in the spread (Baruch et al., NeurIPS 2019)."""

    z: NonNegative | None = 1.5
    knowledge: Literal["all", "fellows"] = "all"

    def forge_rows(self, uploads: Uploads) -> Tensor:
        """See UploadAttack."""
        rows = uploads.find_known(self.knowledge)
        z = self.z
        if z is None:
            z = find_largest_z(
                len(uploads.hostile),
                int(uploads.hostile.sum()),
            )
        return rows.mean(0) - z * rows.std(0, correction=0)


def find_largest_z(clients: int, attackers: int) -> float:
    """Return the z with which a majority lies on attackers' side, 0 if none does."""
    # s = n // 2 + 1 - m honest clients must lie farther out than the forgery.
    supporters = clients // 2 + 1 - attackers
    share = (clients - attackers - supporters) / max(1, clients - attackers)
    return max(0.0, NormalDist().inv_cdf(share)) if 0 < share < 1 else 0.0


@dataclass(frozen=True)
class _Hidden(UploadAttack):
    """Go as far from the mean as distances allow (Shejwalkar and Houmansadr, NDSS 2021)."""

    direction: Literal["std", "unit", "sign"] = "std"
    knowledge: Literal["all", "fellows"] = "all"

    is_centered = True

    def forge_rows(self, uploads: Uploads) -> Tensor:
        """See UploadAttack."""
        rows = uploads.find_known(self.knowledge)
        mean = rows.mean(0)
        if self.direction == "std":
            direction = -rows.std(0, correction=0)
        elif self.direction == "sign":
            direction = -mean.sign()
        else:
            direction = -mean / mean.norm().clamp(min=torch.finfo(mean.dtype).tiny)
        # All uploads agree: any step would stand out.
        if not bool(direction.any()):
            return mean
        # In float64: the roots are differences of nearly equal squares.
        return mean + self.find_step(rows.double(), mean.double(), direction.double()) * direction

    @abstractmethod
    def find_step(self, rows: Tensor, mean: Tensor, direction: Tensor) -> float:
        """Return the longest step from the mean in a direction that stays among the rows."""


@dataclass(frozen=True)
class MinMax(_Hidden):
    """Stay as near to each upload as the two are that are farthest apart."""

    def find_step(self, rows: Tensor, mean: Tensor, direction: Tensor) -> float:
        """See _Hidden."""
        radius = square_distances(rows).max()
        offsets = mean - rows
        # |offset + step direction|^2 = radius, for each row the larger root.
        slope = offsets @ direction
        square = direction.square().sum()
        excess = offsets.square().sum(1) - radius
        roots = (-slope + (slope.square() - square * excess).clamp(min=0).sqrt()) / square
        return float(roots.min())


@dataclass(frozen=True)
class MinSum(_Hidden):
    """Stay as near to all uploads together as the farthest one is."""

    def find_step(self, rows: Tensor, mean: Tensor, direction: Tensor) -> float:
        """See _Hidden."""
        bound = square_distances(rows).sum(1).max()
        # The offsets from the mean add up to nothing, so that only the step's square is left.
        excess = bound - (rows - mean).square().sum()
        return math.sqrt(float(excess / (len(rows) * direction.square().sum())))


@dataclass(frozen=True)
class InnerProduct(UploadAttack):
    """Send the opposite of the mean update, scaled (Xie, Koyejo and Gupta, UAI 2019)."""

    scale: Positive = 1.0
    knowledge: Literal["all", "fellows"] = "all"

    is_centered = True

    def forge_rows(self, uploads: Uploads) -> Tensor:
        """See UploadAttack."""
        return -self.scale * uploads.find_known(self.knowledge).mean(0)
