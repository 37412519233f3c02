"""CIFAR-10-C: CIFAR-10's test images under corruptions."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import (
    Source,
    check_md5,
    explain_read_errors,
    unpacked_folder,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Between

# Addresses and sums of Zenodo record 2535967; those of the single files as in torch-uncertainty
URL = "https://zenodo.org/records/2535967/files/CIFAR-10-C.tar?download=1"
TAR_MD5 = "56bf5dcef84df0e2308c6dcbcbbd8499"
MD5 = {
    "gaussian_noise": "ecaf8b9a2399ffeda7680934c33405fd",
    "shot_noise": "3a7239bb118894f013d9bf1984be7f11",
    "impulse_noise": "2090e01c83519ec51427e65116af6b1a",
    "defocus_blur": "7d1322666342a0702b1957e92f6254bc",
    "glass_blur": "7361fb4019269e02dbf6925f083e8629",
    "motion_blur": "fffa5f852ff7ad299cfe8a7643f090f4",
    "zoom_blur": "6ea8e63f1c5cdee1517533840641641b",
    "snow": "bb238de8555123da9c282dea23bd6e55",
    "frost": "31f6ab3bce1d9934abfb0cc13656f141",
    "fog": "7b397314b5670f825465fbcd1f6e9ccd",
    "brightness": "0a81ef75e0b523c3383219c330a85d48",
    "contrast": "3c8262171c51307f916c30a3308235a8",
    "elastic_transform": "9421657c6cd452429cf6ce96cc412b5f",
    "pixelate": "0f14f7e2db14288304e1de10df16832f",
    "jpeg_compression": "2b9cc4c864e0193bb64db8d7728f8187",
    "speckle_noise": "ef00b87611792b00df09c0b0237a1e30",
    "gaussian_blur": "c33370155bc9b055fb4a89113d3c559d",
    "spatter": "8a5a3903a7f8f65b59501a6093b4311e",
    "saturate": "1cfae0964219c5102abbb883e538cc56",
}
LABELS_MD5 = "c439b113295ed5254878798ffe28fd54"
MAIN_CORRUPTIONS = tuple(MD5)[:15]  # the last four were published for validation
IMAGES_PER_SEVERITY = 10_000  # images of each severity


def cifar10_c(
    source: Source,
    corruptions: Sequence[str] | None = None,
    severity: Annotated[int, Between(1, 5)] | None = 5,
    once: bool = False,
) -> Raw:
    """Read CIFAR-10's 10,000 test images under each corruption and severity.

    Source: Hendrycks and Dietterich (ICLR 2019). Groups are the corruptions.

    Args:
        source: The data set.
        corruptions: None: the 15 main ones.
        severity: None: all five, lightest first.
        once: Take each image under one of the corruptions and severities, in turn. Then no client
            trains on an image that another is tested on under another corruption.
    """
    names = MAIN_CORRUPTIONS if corruptions is None else tuple(corruptions)
    if not names or not set(names) <= set(MD5) or len(set(names)) != len(names):
        raise FedpflError(
            f"dataset.corruptions must be null or some of {', '.join(MD5)}, each once, got "
            f"{list(names)}"
        )
    severities = range(1, 6) if severity is None else (severity,)
    kinds = [(name, degree) for name in names for degree in severities]
    x, y, groups = [], [], []
    with unpacked_folder(source, "CIFAR-10-C", "CIFAR-10-C.tar", (TAR_MD5,), (URL,)) as root:
        labels = _read_array(root / "labels.npy", LABELS_MD5)
        arrays = {name: _read_array(root / f"{name}.npy", MD5[name]) for name in names}
        for position, (name, degree) in enumerate(kinds):
            end = degree * IMAGES_PER_SEVERITY
            rows = np.arange(end - IMAGES_PER_SEVERITY, end)
            if once:
                rows = rows[position :: len(kinds)]
            x.append(arrays[name][rows])
            y.append(labels[rows])
            groups.append(np.full(len(rows), names.index(name)))
    images = np.concatenate(x).transpose(0, 3, 1, 2)
    return Raw(images, np.concatenate(y).astype(np.int64), np.concatenate(groups), names)


def _read_array(path: Path, md5: str) -> np.ndarray:
    check_md5(path, (md5,))
    with explain_read_errors(path):
        return np.load(path, mmap_mode="r", allow_pickle=False)
