"""Read .npz archives: a user's arrays, and MedMNIST's."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fedpfl.data import npz
from fedpfl.data.datasets.shared.samples import Raw, merge_parts, number_groups
from fedpfl.data.datasets.shared.source import (
    MAX_MESSAGE,
    Source,
    check_md5,
    explain_read_errors,
    fetch_file,
)
from fedpfl.ground.errors import FedpflError


def read_archive(path: Path, medmnist_md5: tuple[str, ...] = ()) -> Raw:
    """Read an .npz archive of a user's arrays, or of MedMNIST's.

    A user's has `x` and `y`, perhaps `groups` and `test_from`. MedMNIST's parts train, val and test
    are joined in this order.

    Args:
        path: The archive.
        medmnist_md5: The md5 of a file in MedMNIST's form.
    """

    # ---- Step 1: what to say of a file that is no such archive.
    def archive_error(_: Path | str, reason: str) -> FedpflError:
        if medmnist_md5:
            check_md5(path, medmnist_md5)
        if reason.startswith("Object arrays"):
            reason = "an array has Python objects in it, where numbers belong"
        problem = f"{path} cannot be read as an .npz archive of plain arrays ({reason})"
        if path.suffix == ".npz":
            return FedpflError(f"{problem}; save it with np.savez(path, x=x, y=y)")
        return FedpflError(
            f"{problem}; read it in Python and save its arrays: "
            f"np.savez('{path.stem}.npz', x=x, y=y), y integers [samples], "
            "x uint8 images or float32 [samples, features]"
        )

    # ---- Step 2: MedMNIST's parts, or the user's arrays.
    with explain_read_errors(path, archive_error), npz.open_archive(path) as arrays:
        if "train_images" in arrays and "x" not in arrays:
            if medmnist_md5:
                check_md5(path, medmnist_md5)
            parts = ("train", "val", "test")
            return merge_parts(
                *((arrays[f"{part}_images"], arrays[f"{part}_labels"]) for part in parts)
            )
        for key in ("x", "y"):
            if key not in arrays:
                raise FedpflError(
                    f"{path} has no array {key!r}, only "
                    f"{', '.join(arrays)[:MAX_MESSAGE] or 'no named arrays'}; save it with "
                    "np.savez(path, x=x, y=y), x uint8 [samples, channels, height, width], y "
                    "integers [samples]"
                )
        groups: np.ndarray | None = None
        names: tuple[str, ...] = ()
        if "groups" in arrays:
            values = arrays["groups"]
            try:
                groups, names = number_groups(values)
            except ValueError as error:
                raise FedpflError(f"{path}: {error}") from None
        test_from = arrays["test_from"].tolist() if "test_from" in arrays else None
        return Raw(arrays["x"], arrays["y"], groups, names, test_from)


@dataclass(frozen=True)
class MedMNIST:
    """The reader of a data set of MedMNIST v2 with 28 x 28 images.

    Source: Yang et al. 2023. A file that exists is read as the archive `<name>.npz`.

    Attributes:
        url: Where to download it.
        md5: Of its releases, that behind `url` first.
    """

    url: str
    md5: tuple[str, ...]

    def __call__(self, source: Source) -> Raw:
        """Download and read it."""
        path = fetch_file(
            source,
            f"{source.name}.npz",
            self.md5,
            (self.url,),
        )
        return read_archive(path, self.md5)
