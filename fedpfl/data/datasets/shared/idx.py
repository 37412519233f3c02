"""Read the IDX format, and MNIST and its twins, which are four files of it."""

from __future__ import annotations

import gzip
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, merge_parts
from fedpfl.data.datasets.shared.source import Source, explain_read_errors, fetch_file


def read_mnist_like(
    source: Source, folder: str, urls: Sequence[str], md5: Mapping[str, str]
) -> Raw:
    """Read four .gz files, or uncompressed ones.

    Args:
        source: The data set.
        folder: The files' folder below `data_dir`.
        urls: Where to download the files.
        md5: The md5 of each file: images and labels of the training part, then of the test part.
    """
    needed_files = f"{folder}/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte.gz"

    def read_part(name: str) -> np.ndarray:
        unpacked_path = source.folder / folder / name.removesuffix(".gz")
        # The packed file is preferred, as its md5 is published.
        if unpacked_path.is_file() and not (source.folder / folder / name).is_file():
            return read_idx_file(unpacked_path)
        return read_idx_file(
            fetch_file(
                source, f"{folder}/{name}", (md5[name],), [url + name for url in urls], needed_files
            )
        )

    train_x, train_y, test_x, test_y = map(read_part, md5)
    with explain_read_errors(source.folder / folder):
        return merge_parts((train_x, train_y), (test_x, test_y))


def read_idx_file(path: Path) -> np.ndarray:
    """Read the array of a file, which is compressed if its name ends in .gz."""
    with explain_read_errors(path):
        return parse_idx(
            gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        )


def parse_idx(data: bytes) -> np.ndarray:
    """Return the uint8 array of an IDX file.

    The format is two zero bytes, type 8, number of axes, axes as big-endian int32, values.

    Raises:
        ValueError: For anything else.
    """
    if data[:3] != b"\0\0\x08":
        raise ValueError("not an IDX file of unsigned bytes")
    start = 4 + 4 * data[3]
    shape = np.frombuffer(data[4:start], ">i4")
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)
