"""Fed-ISIC2019 of FLamby (Ogier du Terrail et al. 2022): 23,247 skin lesions of six centers."""

from __future__ import annotations

from fedpfl.data.datasets.shared.images import Side, read_images
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import (
    Source,
    check_md5,
    explain_read_errors,
    find_folder,
    not_as_published,
    read_cached,
)

PLACE = (
    "fed_isic2019/ with ISIC_2019_Training_Input_preprocessed/ and train_test_split, as FLamby's"
    " scripts write it (https://github.com/owkin/FLamby)"
)
MD5 = "f65e84dcd1e6b69edf55960899b22d81"  # of train_test_split
CENTERS = (
    *("bcn", "ham_vidir_molemax", "ham_vidir_modern", "ham_rosendahl", "msk", "ham_vienna_dias"),
)
LESIONS = ("MEL", "NV", "BCC", "AK", "BKL", "DF", "VASC", "SCC")


def fed_isic2019(source: Source, size: Side = 64) -> Raw:
    """Read uint8 `[3, size, size]`, the training, then the test images; groups are the centers."""
    import pandas as pd

    root = find_folder(source, PLACE, "fed_isic2019", "ISIC_2019")
    notes = root / "train_test_split"
    check_md5(notes, (MD5,))
    with explain_read_errors(notes, not_as_published):
        table = pd.read_csv(notes).sort_values("fold", ascending=False, kind="stable")
        labels, centers = table["target"].to_numpy(int), table["center"].to_numpy(int)
        test_from = int((table["fold"] == "train").sum())
        folder = root / "ISIC_2019_Training_Input_preprocessed"
        paths = [folder / f"{name}.jpg" for name in table["image"]]
    raw = read_cached(
        source,
        [*paths, notes],
        lambda: Raw(read_images(paths, size), labels, centers, CENTERS, test_from),
        size,
    )
    return raw._replace(class_names=LESIONS)
