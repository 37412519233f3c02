"""Data sets as tensors: file formats, download, checksums, errors that say which file to put where.

A named data set is looked up as `<data_dir>/<name>.npz` first, then as its original files, then downloaded where it has
a lasting address. Nothing is written below `data_dir` but what is downloaded or unpacked, and `cache`, which keeps what
is slow to read; so `data_dir` may be read-only where the files are present.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from fedpfl.data.datasets import archive, cifar10c, digit5, folders, har, idx, leaf, news, pixels, speech
from fedpfl.data.datasets.samples import Raw, Samples, checked
from fedpfl.data.datasets.source import Source, line
from fedpfl.ground.errors import FedpflError

log = logging.getLogger(__name__)

__all__ = ["NAMES", "SETS", "Raw", "Samples", "load"]


class Set(NamedTuple):
    """How a data set is read, and which files belong where below `data_dir`."""

    read: Callable[..., Raw]
    place: str


def _own(source: Source) -> Raw:
    raise FedpflError("dataset=npz needs dataset.path=FILE.npz, an archive with x (uint8) and y (integers)")


SETS = {
    "digits": Set(pixels.digits, "nothing"),
    "mnist": Set(idx.idx_set, "MNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"),
    "fmnist": Set(idx.idx_set, "FashionMNIST/raw/{train,t10k}-{images-idx3,labels-idx1}-ubyte.gz"),
    "emnist": Set(idx.emnist, "EMNIST/raw/gzip.zip"),
    "cifar10": Set(pixels.cifar, "cifar-10-python.tar.gz"),
    "cifar100": Set(pixels.cifar, "cifar-100-python.tar.gz"),
    "svhn": Set(pixels.svhn, "train_32x32.mat and test_32x32.mat"),
    "organamnist": Set(archive.medmnist, "MedMNIST's organamnist.npz"),
    "organcmnist": Set(archive.medmnist, "MedMNIST's organcmnist.npz"),
    "cifar10_c": Set(cifar10c.cifar10_c, cifar10c.PLACE),
    "cinic10": Set(folders.cinic10, "CINIC-10.tar.gz (or CINIC-10/ with train, valid and test, unpacked)"),
    "tiny_imagenet": Set(folders.tiny_imagenet, "tiny-imagenet-200.zip (http://cs231n.stanford.edu)"),
    "mini_imagenet": Set(folders.mini_imagenet, folders.MINI_PLACE),
    "office_home": Set(folders.office_home, folders.OFFICE_PLACE),
    "pacs": Set(folders.pacs, folders.PACS_PLACE),
    "digit5": Set(digit5.digit5, digit5.PLACE),
    "speech_commands": Set(speech.speech_commands, "speech_commands_v0.02.tar.gz (or SpeechCommands/, unpacked)"),
    "ag_news": Set(news.ag_news, "ag_news_csv/train.csv and ag_news_csv/test.csv"),
    "femnist": Set(leaf.femnist, leaf.PLACE.format("femnist")),
    "shakespeare": Set(leaf.shakespeare, leaf.PLACE.format("shakespeare")),
    "har": Set(har.har, har.PLACE),
    "npz": Set(_own, "nothing"),
}
"""Every data set. What its reader takes beside the Source are the data set's own options."""

NAMES = tuple(SETS)


def load(
    name: str,
    data_dir: Path,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[float] | None = None,
    classes: int | None = None,
    path: Path | None = None,
    download: bool = True,
    normalize: bool = True,
    **options: Any,
) -> Samples:
    """Load a data set by name, or with `path` from an .npz archive of `x` and `y`.

    `mean` and `std` None: computed per channel from all samples. `normalize` False: images are only divided by 255,
    signals left as they are. `classes` None: the largest label plus one. `options`: the data set's own, which an
    archive has no use for.

    Raises: FedpflError if the name is unknown, files are absent and cannot be downloaded, a file is corrupt or not of
    its format, or the reader fails in any other way.
    """
    if name not in SETS:
        raise FedpflError(f"dataset.name must be one of {', '.join(NAMES)}, got {name!r}")
    try:
        raw, where = _raw(name, Path(data_dir).expanduser(), path, download, options)
        return checked(name, raw, f"{name} in {where}", mean, std, classes, normalize)
    except FedpflError:
        raise
    except Exception as error:  # what no reader foresaw, or its author's mistake
        log.debug("reading %s", name, exc_info=True)
        reader = getattr(SETS[name].read, "__qualname__", SETS[name].read)
        raise FedpflError(
            f"data set {name} in {data_dir} cannot be read: {line(error)}; put good copies of its files there, "
            f"or mend its reader {reader} (hydra.verbose=true tells where it failed)"
        ) from error


def _raw(name: str, folder: Path, path: Path | None, download: bool, options: dict[str, Any]) -> tuple[Raw, Path]:
    """What is read, and from which file or folder."""
    read, place = SETS[name]
    source = Source(name, folder, download, place)
    own = source.folder / f"{name}.npz"
    if path is not None:
        where = Path(path).expanduser()
        if not where.is_file():
            raise FedpflError(f"dataset.path={path} is not a file; give the path of an .npz archive with x and y")
        raw = archive.archive(where)
    elif name != "npz" and own.is_file():
        where = own
        raw = archive.archive(where, archive.MEDMNIST[name].md5 if name in archive.MEDMNIST else ())
    else:
        where = source.folder
        raw = read(source, **options)
    if where != source.folder:
        _without(options, read, where)
    return raw, where


def _without(options: dict[str, Any], read: Callable[..., Raw], where: Path) -> None:
    """Raises FedpflError for an option that an archive cannot follow."""
    usual = {key: parameter.default for key, parameter in inspect.signature(read).parameters.items()}
    for key, value in options.items():
        if value != usual[key]:
            raise FedpflError(
                f"dataset.{key}={value} has no effect on {where}, an archive is taken as it is; leave {key} out"
            )
