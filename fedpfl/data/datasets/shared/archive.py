"""Read .npz archives: a user's arrays, and MedMNIST's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from fedpfl.data import npz
from fedpfl.data.datasets.shared.parts import Part, ReadOptions, join_parts
from fedpfl.data.datasets.shared.samples import Raw, merge_parts
from fedpfl.data.datasets.shared.source import (
    MAX_MESSAGE,
    Source,
    check_md5,
    explain_read_errors,
    fetch_file,
)
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values

USAGE = (
    "save it with np.savez(path, x=x, y=y), y integers or texts [samples], x uint8 images or float32 "
    "[samples, features]"
)


def read_archive(path: Path, medmnist_md5: tuple[str, ...], options: ReadOptions) -> Raw:
    """Read an .npz archive of a user's arrays, or of MedMNIST's.

    MedMNIST's parts train, val and test are joined in this order.

    Args:
        path: The archive.
        medmnist_md5: The md5 of a file in MedMNIST's form.
        options: How a user's arrays are read.
    """
    with _open_arrays(path, medmnist_md5) as arrays:
        if "train_images" not in arrays or "x" in arrays:
            return join_parts([_make_part(path, arrays, options)], options)
        if medmnist_md5:
            check_md5(path, medmnist_md5)
        parts = ("train", "val", "test")
        return merge_parts(
            *((arrays[f"{part}_images"], arrays[f"{part}_labels"]) for part in parts)
        )


def read_archive_part(path: Path, options: ReadOptions) -> Part:
    """Read an archive of `x` and `y`, perhaps `groups`, `test_from` and units."""
    with _open_arrays(path) as arrays:
        return _make_part(path, arrays, options)


@contextmanager
def _open_arrays(path: Path, medmnist_md5: tuple[str, ...] = ()) -> Iterator[Values]:
    """Open an archive. Raises FedpflError for a damaged one."""

    def archive_error(_: Path | str, reason: str) -> FedpflError:
        if medmnist_md5:
            check_md5(path, medmnist_md5)
        if reason.startswith("Object arrays"):
            reason = "an array has Python objects in it, where numbers belong"
        return FedpflError(
            f"{path} cannot be read as an .npz archive of plain arrays ({reason}); {USAGE}"
        )

    with explain_read_errors(path, archive_error), npz.open_archive(path) as arrays:
        yield arrays


def _make_part(path: Path, arrays: Values, options: ReadOptions) -> Part:
    """Return the arrays that a part consists of. Raises FedpflError for one that is absent."""
    for key in ("x", "y", options.together or "x"):
        if key not in arrays:
            names = ", ".join(arrays)[:MAX_MESSAGE] or "no named arrays"
            raise FedpflError(f"{path} has no array {key!r}, only {names}; {USAGE}")
    return Part(
        str(path),
        arrays["x"],
        arrays["y"],
        groups=arrays.get("groups"),
        units=arrays[options.together] if options.together else None,
        test_from=arrays["test_from"].tolist() if "test_from" in arrays else None,
    )


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
        path = fetch_file(source, f"{source.name}.npz", self.md5, (self.url,))
        return read_archive(path, self.md5, ReadOptions())
