"""Data sets as uint8 tensors: file formats, download, checksums, errors that say which file to put where.

A named data set is looked up as `<data_dir>/<name>.npz` first, then as its original files, then downloaded. Nothing is
written below `data_dir` but what is downloaded, so `data_dir` may be read-only where the files are present.
"""

from __future__ import annotations

import gzip
import hashlib
import logging
import math
import os
import struct
import tarfile
import tempfile
import urllib.request
import warnings
import zipfile
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedpfl.errors import FedpflError

log = logging.getLogger(__name__)

NAMES = (
    "digits",
    "mnist",
    "fmnist",
    "emnist",
    "cifar10",
    "cifar100",
    "svhn",
    "organamnist",
    "organcmnist",
    "npz",
)

Arrays = tuple[np.ndarray, np.ndarray]  # x uint8, y integers


@dataclass(frozen=True, eq=False)
class Images:
    """One data set, its original parts merged in order (training, then validation where there is one, then test)."""

    name: str
    x: Tensor  # uint8 [samples, channels, height, width]
    y: Tensor  # int64 [samples]
    classes: int
    mean: tuple[float, ...]  # per channel, applied to x / 255
    std: tuple[float, ...]


def load(
    name: str,
    data_dir: Path,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    classes: int | None = None,
    path: Path | None = None,
    download: bool = True,
) -> Images:
    """Load a data set by name, or with `path` from an .npz archive of `x` and `y`.

    `mean` and `std` None: computed per channel from all images. `classes` None: the largest label plus one.

    Raises: FedpflError if the name is unknown, files are absent and cannot be downloaded, or a file is corrupt or not
    of its format.
    """
    if name not in NAMES:
        raise FedpflError(f"dataset.name must be one of {', '.join(NAMES)}, got {name!r}")
    source = _Source(name, Path(data_dir).expanduser(), download)
    archive = source.folder / f"{name}.npz"
    if path is not None:
        where = Path(path).expanduser()
        if not where.is_file():
            raise FedpflError(f"dataset.path={path} is not a file; give the path of an .npz archive with x and y")
        x, y = _archive(where)
    elif name == "npz":
        raise FedpflError("dataset=npz needs dataset.path=FILE.npz, an archive with x (uint8) and y (integers)")
    elif archive.is_file():
        where = archive
        x, y = _archive(where, MEDMNIST[name].md5 if name in MEDMNIST else ())
    else:
        where = source.folder
        x, y = _READERS[name](source)
    x, y, classes = _checked(x, y, classes, f"{name} in {where}")
    images = torch.from_numpy(x)
    if mean is None or std is None:
        moments = _moments(images)
        mean, std = (moments[0] if mean is None else mean), (moments[1] if std is None else std)
    return Images(name, images, torch.from_numpy(y), classes, *_constants(mean, std, x.shape[1]))


# Where files are, and how they get there


class _Source(NamedTuple):
    name: str
    folder: Path
    download: bool


class _Idx(NamedTuple):
    """The four files of MNIST and its twins below `folder`, with their md5."""

    folder: str
    urls: tuple[str, ...]
    md5: dict[str, str]


class _MedMNIST(NamedTuple):
    url: str
    md5: tuple[str, ...]  # the releases of 28 x 28 images, the one behind `url` first


# md5 and addresses as in torchvision.datasets.mnist
IDX = {
    "mnist": _Idx(
        "MNIST/raw",
        ("https://ossci-datasets.s3.amazonaws.com/mnist/", "http://yann.lecun.com/exdb/mnist/"),
        {
            "train-images-idx3-ubyte.gz": "f68b3c2dcbeaaa9fbdd348bbdeb94873",
            "train-labels-idx1-ubyte.gz": "d53e105ee54ea40749a09fcbcd1e9432",
            "t10k-images-idx3-ubyte.gz": "9fb629c4189551a2d022fa330f9573f3",
            "t10k-labels-idx1-ubyte.gz": "ec29112dd5afa0611ce80d1b7f02629c",
        },
    ),
    "fmnist": _Idx(
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
# md5 and addresses as in medmnist/info.py; the first of each is release 3 (a few images fewer), the second release 2
MEDMNIST = {
    "organamnist": _MedMNIST(
        "https://zenodo.org/records/10519652/files/organamnist.npz?download=1",
        ("68e3f8846a6bd62f0c9bf841c0d9eacc", "866b832ed4eeba67bfb9edee1d5544e6"),
    ),
    "organcmnist": _MedMNIST(
        "https://zenodo.org/records/10519652/files/organcmnist.npz?download=1",
        ("b9ceb9546e10131b32923c5bbeaea2b1", "0afa5834fb105f7705a7d93372119a21"),
    ),
}
_PLACES = {
    "mnist": "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
    "fmnist": "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz",
    "emnist": "EMNIST/raw/gzip.zip",
    "cifar10": "cifar-10-python.tar.gz",
    "cifar100": "cifar-100-python.tar.gz",
    "svhn": "train_32x32.mat and test_32x32.mat",
    "organamnist": "MedMNIST's organamnist.npz",
    "organcmnist": "MedMNIST's organcmnist.npz",
}


def _file(source: _Source, relative: str, md5: tuple[str, ...], urls: tuple[str, ...]) -> Path:
    """The file below `data_dir`, its md5 checked; downloaded if it is absent and the user allows."""
    path = source.folder / relative
    if path.is_file():
        _check_md5(path, md5)
        return path
    if not source.download:
        raise _absent(source, f"{relative} is absent and dataset.download is false")
    reasons = []
    for url in urls:
        try:
            _download(url, path, md5)
            return path
        except (OSError, HTTPException) as error:  # URLError, timeouts and a read-only folder are OSErrors
            reasons.append(_line(error))
    raise _absent(source, f"{relative} is absent and its download failed: {'; '.join(reasons)}")


def _absent(source: _Source, reason: str) -> FedpflError:
    return FedpflError(
        f"data set {source.name} is not in data_dir={source.folder} ({reason}): put {_PLACES[source.name]} there, or "
        f"{source.name}.npz with x (uint8) and y; dataset=digits works offline"
    )


def _download(url: str, path: Path, md5: tuple[str, ...]) -> None:
    """Fetch to a temporary file, check, then rename: what lies at `path` is always whole.

    Raises: OSError or HTTPException if it cannot be had.
    """
    log.info("downloading %s to %s", url, path)
    digest = hashlib.md5(usedforsecurity=False)
    with urllib.request.urlopen(url, timeout=60) as response:
        path.parent.mkdir(parents=True, exist_ok=True)  # only now: without network nothing is left behind
        with tempfile.NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = Path(file.name)
            try:
                while chunk := response.read(1 << 20):
                    digest.update(chunk)
                    file.write(chunk)
                file.flush()
                if digest.hexdigest() not in md5:
                    raise OSError(f"{url} gave another file: md5 is {digest.hexdigest()}, expected {' or '.join(md5)}")
                temporary.chmod(0o644)  # a temporary file has 0600
                os.replace(temporary, path)
            finally:
                temporary.unlink(missing_ok=True)


def _check_md5(path: Path, md5: tuple[str, ...]) -> None:
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if actual not in md5:
        raise _corrupt(path, f"md5 is {actual}, expected {' or '.join(md5)}")


def _corrupt(path: Path | str, reason: str) -> FedpflError:
    return FedpflError(f"{path} is corrupt: {reason}; delete it to have it downloaded again, or put a good copy there")


# The user's own arrays, and MedMNIST's


def _archive(path: Path, medmnist_md5: tuple[str, ...] = ()) -> Arrays:
    """Arrays of an .npz archive: `x` and `y`, or MedMNIST's keys, merged in the order train, val, test.

    `medmnist_md5` holds for a file in MedMNIST's form; one with `x` and `y` is the user's own.
    """
    try:
        with path.open("rb") as raw:
            file = np.load(raw, allow_pickle=False)
            if not isinstance(file, np.lib.npyio.NpzFile):
                raise ValueError("it is a single array")
            keys = file.files
            if "train_images" in keys and "x" not in keys:
                if medmnist_md5:
                    _check_md5(path, medmnist_md5)
                x, y = (
                    np.concatenate([file[f"{part}_{kind}"] for part in ("train", "val", "test")])
                    for kind in ("images", "labels")
                )
                return x, y
            for key in ("x", "y"):
                if key not in keys:
                    raise FedpflError(
                        f"{path} has no array {key!r}, only {', '.join(keys) or 'no named arrays'}; save it with "
                        "np.savez(path, x=x, y=y), x uint8 [samples, channels, height, width], y integers [samples]"
                    )
            return file["x"], file["y"]
    except (OSError, EOFError, KeyError, ValueError, zipfile.BadZipFile, zlib.error) as error:
        if medmnist_md5:
            _check_md5(path, medmnist_md5)
        raise FedpflError(
            f"{path} cannot be read as an .npz archive of plain arrays ({_line(error)}); save it with "
            "np.savez(path, x=x, y=y)"
        ) from None


def _medmnist(source: _Source) -> Arrays:
    """Download; a file already there was read as `<name>.npz` (Yang et al. 2023, MedMNIST v2)."""
    url, md5 = MEDMNIST[source.name]
    return _archive(_file(source, f"{source.name}.npz", md5, (url,)))


# MNIST and its twins


def _idx_set(source: _Source) -> Arrays:
    """The .gz files or the uncompressed ones, read where they lie (torchvision would unpack beside them)."""
    folder, urls, md5s = IDX[source.name]

    def read(name: str) -> np.ndarray:
        unpacked = source.folder / folder / name.removesuffix(".gz")
        if unpacked.is_file() and not (source.folder / folder / name).is_file():
            with unpacked.open("rb") as raw:
                return _idx(raw, unpacked)
        path = _file(source, f"{folder}/{name}", (md5s[name],), tuple(url + name for url in urls))
        return _idx_gz(path.open("rb"), path)

    train_x, train_y, test_x, test_y = map(read, md5s)
    return np.concatenate([train_x, test_x]), np.concatenate([train_y, test_y])


def _emnist(source: _Source) -> Arrays:
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
            read = _idx_gz if pattern.endswith(".gz") else _idx
            parts = []
            for path in paths:
                with path.open("rb") as file:
                    parts.append(read(file, path))
            break
    else:
        path = _file(source, "EMNIST/raw/gzip.zip", (EMNIST_MD5,), (EMNIST_URL,))
        parts = []
        with zipfile.ZipFile(path) as zipped:
            for name in names:
                parts.append(_idx_gz(zipped.open(f"gzip/{name}.gz"), f"{path}/gzip/{name}.gz"))
    return np.concatenate(parts[:2]), np.concatenate(parts[2:])


def _idx_gz(file: IO[bytes], path: Path | str) -> np.ndarray:
    try:
        with file, gzip.open(file) as raw:
            return _idx(raw, path)
    except (OSError, EOFError, zlib.error) as error:
        raise _corrupt(path, _line(error)) from None


def _idx(raw: Any, path: Path | str) -> np.ndarray:
    """An array of the IDX format: two zero bytes, type 8 (uint8), number of axes, axes as big-endian int32, values."""
    data = raw.read()
    shape: tuple[int, ...] = ()
    if len(data) > 4 and data[:3] == b"\0\0\x08" and len(data) >= 4 + 4 * data[3]:
        shape = struct.unpack_from(f">{data[3]}i", data, 4)
    start = 4 + 4 * len(shape)
    if not shape or len(data) - start != math.prod(shape):
        raise _corrupt(
            path, f"not an IDX file of unsigned bytes, or cut short ({len(data)} bytes, shape {list(shape)})"
        )
    return np.frombuffer(data, np.uint8, offset=start).reshape(shape)


# Data sets that torchvision reads

_torchvision_schemas: list[torch.library.Library] = []  # an op schema lives as long as the Library that defined it


def _torchvision() -> Any:
    """`torchvision.datasets`, imported when first needed.

    The plain wheel is a CUDA build: beside a CPU build of torch its ops do not load and the import fails. Data sets
    need none of them, so the two missing schemas are declared and the import repeated.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            import torchvision.datasets
        except RuntimeError as error:
            if "torchvision::nms" not in str(error):
                raise
            schemas = torch.library.Library("torchvision", "DEF")
            for op in ("nms", "qnms"):
                schemas.define(f"{op}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
            _torchvision_schemas.append(schemas)
            import torchvision.datasets
    return torchvision.datasets


def _cifar(source: _Source) -> Arrays:
    """CIFAR-10 and CIFAR-100 with fine labels (Krizhevsky 2009), from the unpacked folder or the archive."""
    kind = getattr(_torchvision(), source.name.upper())
    if not (source.folder / kind.base_folder).is_dir():
        archive = _file(source, kind.filename, (kind.tgz_md5,), (kind.url,))
        writable = os.access(source.folder, os.W_OK)
        with tempfile.TemporaryDirectory(dir=source.folder if writable else None) as scratch:
            with tarfile.open(archive) as tar:
                tar.extractall(scratch, filter="data")
            if not writable:
                return _read_cifar(kind, Path(scratch))
            if not (source.folder / kind.base_folder).is_dir():  # else another process was first
                os.replace(Path(scratch) / kind.base_folder, source.folder / kind.base_folder)
    return _read_cifar(kind, source.folder)


def _read_cifar(kind: Any, root: Path) -> Arrays:
    files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    for name, md5 in files:  # torchvision checks too, but does not name the file
        path = root / kind.base_folder / name
        if not path.is_file():
            raise _corrupt(path.parent, f"{name} is missing")
        _check_md5(path, (md5,))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pickles are of an old numpy
        parts = [kind(root, train=train) for train in (True, False)]
    x = np.concatenate([part.data for part in parts]).transpose(0, 3, 1, 2)
    return x, np.concatenate([part.targets for part in parts])


def _svhn(source: _Source) -> Arrays:
    """SVHN, cropped digits, train then test without extra (Netzer et al. 2011); the digit 0 is class 0."""
    kind = _torchvision().SVHN
    for split in ("train", "test"):
        url, name, md5 = kind.split_list[split]
        _file(source, name, (md5,), (url,))
    parts = [kind(source.folder, split=split) for split in ("train", "test")]
    return np.concatenate([part.data for part in parts]), np.concatenate([part.labels for part in parts])


def _digits(source: _Source) -> Arrays:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, values 0..16 (Alpaydin and Kaynak 1998), as 28 x 28 uint8."""
    from sklearn.datasets import load_digits

    digits = load_digits()
    small = torch.from_numpy(digits.images)[:, None] * (255 / 16)
    large = torch.nn.functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    return large.round().to(torch.uint8).numpy(), digits.target


_READERS: dict[str, Callable[[_Source], Arrays]] = {
    "digits": _digits,
    "mnist": _idx_set,
    "fmnist": _idx_set,
    "emnist": _emnist,
    "cifar10": _cifar,
    "cifar100": _cifar,
    "svhn": _svhn,
    "organamnist": _medmnist,
    "organcmnist": _medmnist,
}


# Checks and constants


def _checked(x: np.ndarray, y: np.ndarray, classes: int | None, where: str) -> tuple[np.ndarray, np.ndarray, int]:
    """Contiguous x, uint8 `[n, c, h, w]`, y as int64 `[n]`, and the number of classes."""
    if x.dtype != np.uint8:
        raise FedpflError(f"{where}: x must be uint8 (pixels 0..255), got {x.dtype}; scale and convert it")
    if x.ndim == 3:
        x = x[:, None]
    if x.ndim != 4 or 0 in x.shape[1:]:
        raise FedpflError(
            f"{where}: x must be [samples, channels, height, width], or without channels, or with channels last; "
            f"got shape {list(x.shape)}"
        )
    if _channels_last(x.shape):
        x = x.transpose(0, 3, 1, 2)
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1 or not np.issubdtype(y.dtype, np.integer):
        raise FedpflError(f"{where}: y must be integers [samples], got {y.dtype} {list(y.shape)}; convert the labels")
    if len(x) != len(y):
        raise FedpflError(f"{where}: x has {len(x)} samples but y has {len(y)}; they must be of one length")
    if not len(y):
        raise FedpflError(f"{where}: there are no samples; x and y must hold at least one")
    if y.min() < 0:
        raise FedpflError(f"{where}: labels must be 0..C-1, found {y.min()}; number the classes from 0")
    if classes is not None and (isinstance(classes, bool) or not isinstance(classes, int) or classes < 1):
        raise FedpflError(f"dataset.classes must be null or an integer of at least 1, got {classes!r}")
    if classes is not None and y.max() >= classes:
        raise FedpflError(f"{where}: found label {y.max()}, but dataset.classes={classes} allows 0..{classes - 1}")
    if classes is None:
        present = np.unique(y)
        classes = int(present[-1]) + 1
        if len(present) != classes:
            absent = int(np.flatnonzero(present != np.arange(len(present)))[0])
            raise FedpflError(
                f"{where}: labels must be 0..C-1, but no sample has label {absent} and the largest is {present[-1]}; "
                "number the classes from 0, or set dataset.classes if a class is empty on purpose"
            )
    return np.ascontiguousarray(x), y.astype(np.int64), classes


def _channels_last(shape: tuple[int, ...]) -> bool:
    """Whether `[n, a, b, c]` can only be `[n, h, w, c]`: a is no usual number of channels; c is, or a x b is square."""
    usual = (1, 3, 4)
    return shape[1] not in usual and (shape[3] in usual or shape[1] == shape[2] != shape[3])


def _moments(x: Tensor) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """Mean and standard deviation of x / 255 per channel, exact from the histogram of the pixels."""
    values = torch.arange(256, dtype=torch.float64) / 255
    means, stds = [], []
    for channel in x.unbind(1):
        share = torch.bincount(channel.flatten(), minlength=256).double() / channel.numel()
        mean = float((share * values).sum())
        means.append(mean)
        stds.append(max(float((share * (values - mean) ** 2).sum()) ** 0.5, 1 / 255))  # a constant channel stays finite
    return tuple(means), tuple(stds)


def _constants(
    mean: Sequence[float], std: Sequence[float], channels: int
) -> tuple[tuple[float, ...], tuple[float, ...]]:
    for key, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise FedpflError(
                f"dataset.{key} has {len(values)} entries, but the images have {channels} channels; give one per "
                "channel, or null to compute it"
            )
        if not all(math.isfinite(value) and (key == "mean" or value > 0) for value in values):
            raise FedpflError(
                f"dataset.{key} must be {'positive' if key == 'std' else 'finite'} numbers, got {list(values)}"
            )
    return tuple(map(float, mean)), tuple(map(float, std))


def _line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
