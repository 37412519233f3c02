"""CIFAR-10-C: CIFAR-10's test images under corruptions."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np

from fedpfl.data.datasets.cifar10 import cifar10
from fedpfl.data.datasets.shared import corruptions as recipes
from fedpfl.data.datasets.shared.archive import read_archive
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import (
    Source,
    check_md5,
    corrupt_error,
    explain_read_errors,
    not_as_published,
    read_cached,
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
SEED = 2019  # of corruptions made here: the same images in every run
HINT = "; dataset=cifar10_c_made makes most of it from CIFAR-10"


def cifar10_c(
    source: Source,
    corruptions: Sequence[str] | None = None,
    severity: Annotated[int, Between(1, 5)] | None = 5,
    once: bool = False,
    made: bool = False,
) -> Raw:
    """Read CIFAR-10's 10,000 test images under each corruption and severity.

    They are of Hendrycks and Dietterich (ICLR 2019). Groups are the corruptions.

    Args:
        source: The data set.
        corruptions: None: the 15 main ones, or of those the 14 that can be made.
        severity: None: all five, lightest first.
        once: Each image under one of the corruptions and severities, in turn, not under all of
            them: no image is then in one client's training part and, otherwise corrupted, in a test
            part.
        made: By the published recipe, from CIFAR-10.
    """
    # ---- Step 1: which corruptions, by which severities.
    offered = (
        tuple(name for name in MAIN_CORRUPTIONS if name in recipes.RECIPES) if made else tuple(MD5)
    )
    names = (
        tuple(corruptions)
        if corruptions is not None
        else tuple(name for name in MAIN_CORRUPTIONS if name in offered)
    )
    unknown = [name for name in names if name not in offered]
    if unknown or not names or len(set(names)) != len(names):
        raise FedpflError(
            f"dataset.corruptions must be null or some of {', '.join(offered)}, each once, got "
            f"{list(names)}" + ("; with dataset.made=true there are no others" if made else "")
        )

    # ---- Step 2: their images, all of each kind or, with `once`, every image in one kind alone.
    severities = range(1, 6) if severity is None else (severity,)
    kinds = [(name, degree) for name in names for degree in severities]
    read_images = _make_images if made else _read_published
    x = []
    y = []
    groups = []
    for position, (images, labels) in enumerate(read_images(source, kinds)):
        rows = slice(position, None, len(kinds)) if once else slice(None)
        x.append(images[rows])
        y.append(labels[rows])
        groups.append(np.full(len(y[-1]), names.index(kinds[position][0])))

    # ---- Step 3: together, channels first.
    images = np.concatenate(x).transpose(0, 3, 1, 2)
    return Raw(
        images,
        np.concatenate(y).astype(np.int64),
        np.concatenate(groups),
        names,
    )


def _read_published(
    source: Source, kinds: Sequence[tuple[str, int]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield images and labels of each corruption and severity."""
    with unpacked_folder(
        source, "CIFAR-10-C", "CIFAR-10-C.tar", (TAR_MD5,), (URL,), hint=HINT
    ) as root:
        y = _read_array(root / "labels.npy", LABELS_MD5)
        arrays = {name: _read_array(root / f"{name}.npy", MD5[name]) for name in dict(kinds)}
        for name, severity in kinds:
            rows = slice((severity - 1) * IMAGES_PER_SEVERITY, severity * IMAGES_PER_SEVERITY)
            yield arrays[name][rows], y[rows]


def _read_array(path: Path, md5: str) -> np.ndarray:
    if not path.is_file():
        raise corrupt_error(path.parent, f"{path.name} is missing")
    check_md5(path, (md5,))
    with explain_read_errors(path):
        return np.load(path, mmap_mode="r", allow_pickle=False)


def _make_images(
    source: Source, kinds: Sequence[tuple[str, int]]
) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Make images of each corruption and severity from CIFAR-10."""
    path = source.folder / "cifar10.npz"
    clean = read_archive(path) if path.is_file() else cifar10(source._replace(name="cifar10"))
    start = clean.test_from if clean.test_from is not None else 5 * IMAGES_PER_SEVERITY
    images = clean.x[start:].transpose(0, 2, 3, 1)
    y = np.asarray(clean.y[start:]).reshape(-1)
    if images.shape != (IMAGES_PER_SEVERITY, 32, 32, 3) or images.dtype != np.uint8:
        raise not_as_published(
            path,
            f"dataset.made needs CIFAR-10's {IMAGES_PER_SEVERITY:,} test images after the training"
            " images",
        )
    # The cache knows files by name, size and time, and these images come from another data set.
    digest = hashlib.blake2b(images.tobytes(), digest_size=8).hexdigest()

    def make(name: str, severity: int) -> Raw:
        return Raw(recipes.corrupt_images(images, name, severity, SEED), y)

    for name, severity in kinds:
        options = {"corruption": name, "severity": severity, "images": digest}
        yield read_cached(source, options, (), partial(make, name, severity)).x, y
