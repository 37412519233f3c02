"""Camelyon17 of WILDS (Koh et al. 2021): 455,954 patches of lymph nodes from five hospitals."""

from __future__ import annotations

from fedpfl.data.datasets.shared.images import Side, read_images
from fedpfl.data.datasets.shared.samples import Raw, number_groups
from fedpfl.data.datasets.shared.source import (
    Source,
    explain_read_errors,
    find_folder,
    not_as_published,
    read_cached,
    require_count,
)

PLACE = "camelyon17_v1.0/ with metadata.csv and patches/ (https://wilds.stanford.edu)"
SIZE = 455_954
UNITS = ("patient", "slide")


def camelyon17(source: Source, size: Side = 32, together: str | None = None) -> Raw:
    """Read uint8 `[3, size, size]` (published: 96), class 1 with a tumour; groups: the hospitals.

    Patches of one slide look alike: together, `patient` or `slide`, keeps them in one split.
    """
    import pandas as pd

    root = find_folder(source, PLACE, "camelyon17_v1.0")
    notes = root / "metadata.csv"
    with explain_read_errors(notes, not_as_published):
        # Zeros before the numbers of patients are part of names of files.
        table = pd.read_csv(notes, index_col=0, dtype={"patient": str})
        require_count(notes, "patches", len(table), SIZE)
        folders = "patient_" + table["patient"] + "_node_" + table["node"].astype(str)
        corners = "x_" + table["x_coord"].astype(str) + "_y_" + table["y_coord"].astype(str)
        paths = [
            root / "patches" / name
            for name in folders + "/patch_" + folders + "_" + corners + ".png"
        ]
        labels = table["tumor"].to_numpy()
        groups, hospitals = number_groups(table["center"])
    raw = read_cached(
        source,
        [*paths, notes],
        lambda: Raw(read_images(paths, size), labels, groups, hospitals),
        size,
    )
    return raw._replace(units=number_groups(table[together])[0]) if together in UNITS else raw
