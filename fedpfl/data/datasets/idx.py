"""MNIST, FashionMNIST and EMNIST: files of the IDX format."""

from __future__ import annotations

import gzip
import math
import struct
import zipfile
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np

from fedpfl.data.datasets.samples import Raw, merged
from fedpfl.data.datasets.source import Source, file, reading
from fedpfl.ground import memory


class Idx(NamedTuple):
    """The four files of MNIST and its twins below `folder`, with their md5."""

    folder: str
    urls: tuple[str, ...]
    md5: dict[str, str]


# md5 and addresses as in torchvision.datasets.mnist
IDX = {
    "mnist": Idx(
        "MNIST/raw",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fmnist": Idx(
        "FashionMNIST/raw",
        ("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",),
        {
            "train-images-idx3-ubyte.gz": "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
            "train-labels-idx1-ubyte.gz": "25c81989df183df01b3e8a0aad5dffbe",
            "t10k-images-idx3-ubyte.gz": "bef4ecab320f06d8554ea6380940ec79",
            "t10k-labels-idx1-ubyte.gz": "bb300cfdad3c16e7a12a480ee83cd310",
        },
    ),
}
EMNIST_URL = "https://biometrics.nist.gov/cs_links/EMNIST/gzip.zip"
EMNIST_MD5 = "58c8d27c78d21e728a6bc7b3cc06412e"


def idx_set(source: Source) -> Raw:
    """The .gz files or the uncompressed ones, read where they lie (torchvision would unpack beside them)."""
    folder, urls, md5s = IDX[source.name]

    def read(name: str) -> np.ndarray:
        unpacked = source.folder / folder / name.removesuffix(".gz")
        if unpacked.is_file() and not (source.folder / folder / name).is_file():
            return _read(unpacked)
        return _read(file(source, f"{folder}/{name}", (md5s[name],), tuple(url + name for url in urls)))

    train_x, train_y, test_x, test_y = map(read, md5s)
    with reading(source.folder / folder):
        return merged((train_x, train_y), (test_x, test_y))


def emnist(source: Source) -> Raw:
    """EMNIST by class, 62 classes (Cohen et al. 2017): NIST's zip of .gz files, or those unpacked. Images as they are
    in the files, transposed relative to MNIST, as torchvision gives them.
    """
    folder = source.folder / "EMNIST/raw"
    names = [
        f"emnist-byclass-{part}-{kind}-ubyte" for kind in ("images-idx3", "labels-idx1") for part in ("train", "test")
    ]
    for pattern in ("{}", "{}.gz", "gzip/{}.gz"):
        paths = [folder / pattern.format(name) for name in names]
        if all(path.is_file() for path in paths):
            parts = [_read(path) for path in paths]
            break
    else:
        path = file(source, "EMNIST/raw/gzip.zip", (EMNIST_MD5,), (EMNIST_URL,))
        parts = []
        with reading(path), zipfile.ZipFile(path) as zipped:
            for name in names:
                with reading(f"{path}/gzip/{name}.gz"), zipped.open(f"gzip/{name}.gz") as member:
                    parts.append(_unzipped(member, zipped.getinfo(member.name).file_size))
    with reading(folder):
        return merged((parts[0], parts[2]), (parts[1], parts[3]))


def _read(path: Path) -> np.ndarray:
    size = path.stat().st_size
    with reading(path), path.open("rb") as raw:
        return _unzipped(raw, size) if path.suffix == ".gz" else _idx(raw, size)


def _unzipped(raw: IO[bytes], size: int) -> np.ndarray:
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
