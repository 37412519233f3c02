"""Find columns that one site seems to hold in another unit than every other site."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from fedpfl.data.federation import Federation

FACTOR = 4.0
"""Means that differ by less are the sites' own, as where patients are younger."""


def note_units(
    sites: Sequence[str], features: Sequence[str], means: np.ndarray, deviations: np.ndarray
) -> list[str]:
    """Tell of each feature with a site that is far from every other one.

    Args:
        sites: Their names.
        features: Their names.
        means: Of each site and feature, `[sites, features]`; NaN where a site has no value.
        deviations: As means.
    """
    notes: dict[str, str] = {}
    # Values 0 and 1 have no unit, and this deviation.
    is_flag = np.nanmax(np.abs(deviations**2 - means * (1 - means)), 0, initial=0) < 1e-9
    for number, site in enumerate(sites):
        own, others = means[number], np.delete(means, number, 0)
        spread = deviations[number] + np.delete(deviations, number, 0)
        small, large = np.minimum(abs(own), abs(others)), np.maximum(abs(own), abs(others))
        is_far = (small > 0) & (large > FACTOR * small) & (abs(own - others) > spread)
        is_known = ~np.isnan(others)
        is_told = (is_far | ~is_known).all(0) & is_known.any(0) & ~is_flag
        for feature in np.flatnonzero(is_told).tolist():
            known = others[is_known[:, feature], feature]
            range_text = " to ".join({f"{end:.4g}": 0 for end in (known.min(), known.max())})
            notes.setdefault(
                features[feature],
                f"units: column {features[feature]!r} has mean {own[feature]:.4g} at {site}, and "
                f"{range_text} elsewhere; it may be in another unit",
            )
    return [*notes.values()]


def note_units_of(federation: Federation) -> list[str]:
    """Tell the same of the training samples of clients that are sites with tables."""
    features, sites = federation.feature_names, federation.client_names
    if not features or len(sites) < 2 or federation.is_elsewhere:
        return []
    means, deviations = [], []
    for rows in federation.train:
        x = federation.x[rows].double()
        count = (~x.isnan()).sum(0)
        means.append(x.nansum(0) / count)
        deviations.append(((x - means[-1]).square().nansum(0) / count).sqrt())
    moments = (torch.stack(values).cpu().numpy() for values in (means, deviations))
    return note_units(sites, features, *moments)
