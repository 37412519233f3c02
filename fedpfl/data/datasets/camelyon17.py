"""Camelyon17 of WILDS (Koh et al. 2021): 455,954 patches of lymph nodes from five hospitals."""

from __future__ import annotations

import numpy as np

from fedpfl.data.datasets.shared import source as sources
from fedpfl.data.datasets.shared.images import Side, read_listed
from fedpfl.data.datasets.shared.samples import Raw, number_groups

PLACE = "camelyon17_v1.0/ with metadata.csv and patches/ (https://wilds.stanford.edu)"
SIZE = 455_954
UNITS = ("patient", "slide")


def camelyon17(source: sources.Source, size: Side = 32, together: str | None = None) -> Raw:
    """Read uint8 `[3, size, size]` (published: 96), class 1 with a tumour; groups: the hospitals.

    Patches of one slide look alike: together, `patient` or `slide`, keeps them in one split.
    """
    import pandas as pd

    root = sources.find_folder(source, PLACE, "camelyon17_v1.0")
    notes = root / "metadata.csv"
    with sources.explain_read_errors(notes, sources.not_as_published):
        # As texts: zeros before the numbers of patients are part of names of files.
        table = pd.read_csv(notes, index_col=0, dtype=str)
        sources.require_count(notes, "patches", len(table), SIZE)
        folders = "patient_" + table["patient"] + "_node_" + table["node"]
        names = folders + "/patch_" + folders + "_x_" + table["x_coord"] + "_y_" + table["y_coord"]
        units = number_groups(table[together])[0] if together in UNITS else None
        labels = table["tumor"].to_numpy(int)
        raw = Raw(np.empty(0), labels, *number_groups(table["center"]), units=units)
    return read_listed(source, raw, [root / "patches" / f"{name}.png" for name in names], size)
