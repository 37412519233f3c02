"""Aggregates that take the mean's place and bear arbitrary uploads of some clients.

All count clients alike: how many samples a client has is its word alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Generator, Tensor

from fedpfl.ground.casting import Checked
from fedpfl.ground.ranges import Count, NonNegative, Positive, WholeNumber


@dataclass(frozen=True)
class Defence(Checked, ABC):
    """Aggregate the uploads of a turn in a robust way."""

    is_centered: ClassVar[bool] = False
    """Whether `combine_rows` is about updates, the uploads less those without training."""

    @property
    def least_clients(self) -> int:
        """Return the least number of uploads for the defence's promise."""
        return 1

    @abstractmethod
    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """Return the aggregate `[entries]` of uploads.

        Args:
            rows: `[clients, entries]`.
            generator: Of the round, on the CPU.
        """


@dataclass(frozen=True)
class Median(Defence):
    """Take each entry's median (Yin et al., ICML 2018)."""

    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """See Defence."""
        return find_median(rows)


@dataclass(frozen=True)
class _Counting(Defence):
    """Bear `f` hostile uploads."""

    f: WholeNumber = 1

    rule: ClassVar[tuple[int, int]]
    """a and b, where `a f + b` uploads are the least."""

    @property
    def least_clients(self) -> int:
        """See Defence."""
        factor, summand = self.rule
        return factor * self.f + summand


@dataclass(frozen=True)
class TrimmedMean(_Counting):
    """Average each entry without its `f` largest and `f` smallest values (Yin et al., 2018)."""

    rule = (2, 1)

    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """See Defence."""
        # Of f hostile values in an entry each is cut off, or lies between two honest ones.
        return rows.sort(0).values[self.f : len(rows) - self.f].mean(0)


@dataclass(frozen=True)
class Krum(_Counting):
    """Take the upload that lies nearest to its neighbours (Blanchard et al., NeurIPS 2017)."""

    rule = (2, 3)

    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """See Defence."""
        return rows[rank_rows(square_distances(rows), self.f)[0]]


@dataclass(frozen=True)
class MultiKrum(_Counting):
    """Average the `n - f` uploads with the best Krum scores."""

    rule = (2, 3)

    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """See Defence."""
        order = rank_rows(square_distances(rows), self.f)
        return rows[order[: len(rows) - self.f]].mean(0)


@dataclass(frozen=True)
class Bulyan(_Counting):
    """Choose by Krum again and again, then trim (El Mhamdi et al., ICML 2018)."""

    rule = (4, 3)

    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """See Defence."""
        # ---- Step 1: n - 2f uploads, each Krum's choice among those that remain.
        distances = square_distances(rows)
        remaining = list(range(len(rows)))
        selected: list[int] = []
        while len(selected) < len(rows) - 2 * self.f:
            # Distances among those that remain: a chosen one is no neighbour any more.
            index = torch.tensor(remaining, device=rows.device)
            order = rank_rows(distances[index][:, index], self.f)
            selected.append(remaining.pop(int(order[0])))

        # ---- Step 2: of these the values nearest to each entry's median.
        # In the order of clients: sums must not depend on the order of choice.
        candidates = rows[torch.tensor(sorted(selected), device=rows.device)]
        offsets = candidates - find_median(candidates)
        order = offsets.abs().sort(dim=0, stable=True).indices
        return candidates.gather(0, order[: len(selected) - 2 * self.f]).mean(0)


@dataclass(frozen=True)
class GeometricMedian(Defence):
    """Take the point of least summed distance, by Weiszfeld's steps (Pillutla et al., 2022)."""

    steps: Count = 32
    smoothing: Positive = 1e-6

    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """See Defence."""
        # From the median on, as the mean may be anywhere.
        point = find_median(rows)
        for _ in range(self.steps):
            # Weiszfeld: weights 1 / distance, bounded where the point lies on a row.
            distances = (rows - point).norm(dim=1).clamp(min=self.smoothing)
            shares = 1 / distances / (1 / distances).sum()
            point = shares @ rows
        return point


@dataclass(frozen=True)
class CenteredClipping(Defence):
    """Average updates clipped around the last model (Karimireddy et al., ICML 2021)."""

    radius: Positive | None = None
    steps: Count = 1

    is_centered = True

    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """See Defence."""
        # Rows are updates, so that the last model lies at zero.
        center = torch.zeros_like(rows[0])
        for _ in range(self.steps):
            center = center + clip_rows(rows - center, self.radius).mean(0)
        return center


@dataclass(frozen=True)
class NormBound(Defence):
    """Average clipped updates and add noise (Sun et al., 2019)."""

    radius: Positive | None = None
    deviation: NonNegative = 0.001

    is_centered = True

    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """See Defence."""
        mean = clip_rows(rows, self.radius).mean(0)
        # Drawn on the host, so that every device has the same noise.
        noise = torch.randn(mean.shape, generator=generator)
        return mean + self.deviation * noise.to(mean)


@dataclass(frozen=True)
class Flame(Defence):
    """Average clipped updates of one direction, with noise (FLAME, Nguyen et al., 2022)."""

    noise: NonNegative = 0.001

    is_centered = True

    def combine_rows(self, rows: Tensor, generator: Generator) -> Tensor:
        """See Defence."""
        # ---- Step 1: the majority with similar directions.
        is_kept = find_majority(rows)

        # ---- Step 2: all are clipped to the median of lengths, the same that scales the noise.
        radius = float(find_median(rows.double().norm(dim=1)))
        mean = clip_rows(rows, radius)[is_kept].mean(0)
        noise = torch.randn(mean.shape, generator=generator)
        return mean + self.noise * radius * noise.to(mean)


def find_majority(rows: Tensor) -> Tensor:
    """Flag the rows, `[rows]`, that share a direction with more than half of them.

    HDBSCAN clusters them by cosine; where it finds no such cluster, all rows count.
    """
    from sklearn.cluster import HDBSCAN  # a second to load

    if len(rows) < 3:
        return torch.ones(len(rows), dtype=torch.bool, device=rows.device)
    directions = torch.nn.functional.normalize(rows.double(), dim=1)
    distances = (1 - directions @ directions.T).clamp(min=0).fill_diagonal_(0)
    # A row without a direction, such as one that is not finite, is far from all.
    distances = distances.nan_to_num(nan=2.0)
    clustering = HDBSCAN(
        min_cluster_size=len(rows) // 2 + 1,
        min_samples=1,
        metric="precomputed",
        allow_single_cluster=True,
        copy=True,
    )
    labels = clustering.fit_predict(distances.cpu().numpy())
    is_clustered = torch.from_numpy(labels >= 0).to(rows.device)
    return is_clustered if bool(is_clustered.any()) else ~is_clustered


def find_median(rows: Tensor) -> Tensor:
    """Return each entry's median over rows, the middle of two where they are even."""
    # torch's median takes the lower of two middle values.
    ordered = rows.sort(0).values
    middle = len(rows) // 2
    return (ordered[middle] + ordered[(len(rows) - 1) // 2]) / 2


def square_distances(rows: Tensor) -> Tensor:
    """Return squared distances between rows, `[rows, rows]`, in float64."""
    # Row by row: all differences together would take n times the uploads' memory.
    return torch.stack([(rows - row).double().square().sum(1) for row in rows])


def rank_rows(distances: Tensor, hostile: int) -> Tensor:
    """Return the order in which Krum prefers rows, `[rows]`.

    It goes by the summed squared distances to the `n - f - 2` nearest.
    """
    neighbours = max(1, len(distances) - hostile - 2)
    ordered = distances.sort(1).values
    # The first is the row itself, at distance 0.
    scores = ordered[:, 1 : neighbours + 1].sum(1)
    # Two that are each other's one neighbour tie; the distance to all must decide, not the order.
    order = ordered.sum(1).sort(stable=True).indices
    return order[scores[order].sort(stable=True).indices]


def clip_rows(rows: Tensor, radius: float | None) -> Tensor:
    """Return rows shortened to a length, by default their median length."""
    # In float64: the square of a hostile length may overflow a float32.
    lengths = rows.double().norm(dim=1)
    limit = find_median(lengths) if radius is None else radius
    factors = (limit / lengths.clamp(min=torch.finfo(torch.float64).tiny)).clamp(max=1.0)
    return rows * factors.to(rows.dtype)[:, None]


def no_defence() -> None:
    """Leave the mean as it is."""


DEFENCES: dict[str, Callable[..., Defence | None]] = {
    "mean": no_defence,
    "median": Median,
    "trimmed_mean": TrimmedMean,
    "krum": Krum,
    "multi_krum": MultiKrum,
    "bulyan": Bulyan,
    "geometric_median": GeometricMedian,
    "centered_clipping": CenteredClipping,
    "norm_bound": NormBound,
    "flame": Flame,
}
