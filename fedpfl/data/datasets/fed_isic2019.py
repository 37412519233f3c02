"""Fed-ISIC2019 of FLamby (Ogier du Terrail et al. 2022): 23,247 skin lesions of six centers."""

from __future__ import annotations

import numpy as np

from fedpfl.data.datasets.shared import source as sources
from fedpfl.data.datasets.shared.images import Side, read_listed
from fedpfl.data.datasets.shared.samples import Raw

PLACE = (
    "fed_isic2019/ with ISIC_2019_Training_Input_preprocessed/ and train_test_split, as FLamby's"
    " scripts write it (https://github.com/owkin/FLamby)"
)
MD5 = "f65e84dcd1e6b69edf55960899b22d81"  # of train_test_split
CENTERS = ("bcn", *(f"ham_{name}" for name in ("vidir_molemax", "vidir_modern", "rosendahl")))
CENTERS += ("msk", "ham_vienna_dias")
LESIONS = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")


def fed_isic2019(source: sources.Source, size: Side = 64) -> Raw:
    """Read uint8 `[3, size, size]`, the training, then the test images; groups are the centers."""
    import pandas as pd

    root = sources.find_folder(source, PLACE, "fed_isic2019", "ISIC_2019")
    notes = root / "train_test_split"
    sources.check_md5(notes, (MD5,))
    with sources.explain_read_errors(notes, sources.not_as_published):
        table = pd.read_csv(notes).sort_values("fold", ascending=False, kind="stable")
        labels, centers = table[["target", "center"]].to_numpy(int).T
        test_from = int((table["fold"] == "train").sum())
        folder = root / "ISIC_2019_Training_Input_preprocessed"
        paths = [folder / f"{name}.jpg" for name in table["image"]]
    raw = Raw(np.empty(0), labels, centers, CENTERS, test_from, LESIONS)
    return read_listed(source, raw, paths, size)
