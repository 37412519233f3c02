"""The IDX format, and MNIST and its twins, which are four files of it."""

from __future__ import annotations

import gzip
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw, merged
from fedpfl.data.datasets.shared.source import Source, file, reading
from fedpfl.ground import memory


def twin(source: Source, folder: str, urls: Sequence[str], md5: Mapping[str, str]) -> Raw:
    """Read four .gz files or the uncompressed ones where they lie (torchvision would unpack beside them).

    md5: by name, in the order images and labels of the training part, then of the test part.
    """
    place = f"{folder}/{{train,t10k}}-{{images-idx3,labels-idx1}}-ubyte.gz"

    def read(name: str) -> np.ndarray:
        unpacked = source.folder / folder / name.removesuffix(".gz")
        if unpacked.is_file() and not (source.folder / folder / name).is_file():
            return values(unpacked)
        return values(file(source, f"{folder}/{name}", (md5[name],), [url + name for url in urls], place))

    train_x, train_y, test_x, test_y = map(read, md5)
    with reading(source.folder / folder):
        return merged((train_x, train_y), (test_x, test_y))


def values(path: Path) -> np.ndarray:
    """Read the array of a file, compressed where its name ends in .gz."""
    size = path.stat().st_size
    with reading(path), path.open("rb") as raw:
        return unzipped(raw, size) if path.suffix == ".gz" else _idx(raw, size)


def unzipped(raw: IO[bytes], size: int) -> np.ndarray:
    """Read the array of a compressed file of `size` bytes."""
    with gzip.open(raw) as inside:
        return _idx(inside, 1032 * size)  # deflate makes no more of it


def _idx(raw: Any, most: int) -> np.ndarray:
    """An array of the IDX format: two zero bytes, type 8 (uint8), number of axes, axes as big-endian int32, values.

    most: bytes that there can be. Raises ValueError for anything else, before more is read than the axes say.
    """
    head = raw.read(4)
    axes = raw.read(4 * head[3]) if len(head) == 4 else b""
    shape = struct.unpack(f">{len(axes) // 4}i", axes[: len(axes) // 4 * 4])
    size = math.prod(shape)
    if head[:3] != b"\0\0\x08" or not shape or len(shape) != head[3] or min(shape) < 0 or size > most:
        raise ValueError(f"not an IDX file of unsigned bytes (shape {list(shape[:8])})")
    memory.check(size, "what it holds")
    data = raw.read(size + 1)
    if len(data) != size:
        raise ValueError(f"not an IDX file of {size} bytes, as its shape {list(shape[:8])} says, but of other length")
    return np.frombuffer(data, np.uint8).reshape(shape)
