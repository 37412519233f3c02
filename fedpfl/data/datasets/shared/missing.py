"""Fill values that are absent, by statistics of the training samples of all clients."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import numpy as np
from torch import Tensor

from fedpfl.data.datasets.shared.sums import scale_channels, sum_channels

if TYPE_CHECKING:
    from fedpfl.data.datasets.shared.samples import Samples

Missing = Literal["refuse", "mean", "median", "mode", "indicator"]
"""What stands in the place of an absent value; indicator: the mean, beside a feature that says so."""
BY_MEAN = ("mean", "indicator")
"""Rules that the sums of scaling suffice for."""


def name_indicator(column: str) -> str:
    """Name the feature that is 1 where a column has no value."""
    return f"{column} is missing"


def measure_fill(samples: Samples, index: Tensor, mean: tuple[float, ...]) -> tuple[float, ...]:
    """Measure what fills each channel or feature: (), where nothing may be absent.

    Of equally frequent values the smallest is the mode.

    Args:
        samples: The data set.
        index: The training samples.
        mean: By which samples are scaled, empty where they are not.

    Raises:
        FedpflError: A feature has no value in any of them.
    """
    if not samples.missing or (mean and samples.missing in BY_MEAN):
        return mean if samples.missing else ()
    means, _ = scale_channels(sum_channels(samples.x, index), False, samples.feature_names)
    if samples.missing in BY_MEAN:
        return means
    fill: list[float] = []
    for channel in samples.x[index.to(samples.x.device)].unbind(1):
        values = channel.flatten().cpu().double().numpy()
        values = values[~np.isnan(values)]
        if samples.missing == "median":
            fill.append(float(np.median(values)))
        else:
            distinct, counts = np.unique(values, return_counts=True)
            fill.append(float(distinct[counts.argmax()]))
    return tuple(fill)
