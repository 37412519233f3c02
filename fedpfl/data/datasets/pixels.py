"""CIFAR and SVHN, which torchvision reads, and scikit-learn's digits."""

from __future__ import annotations

import warnings
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

import numpy as np
import torch

from fedpfl.data.datasets.samples import Raw, merged
from fedpfl.data.datasets.source import Source, check_md5, corrupt, file, reading, unpacked

_schemas: list[torch.library.Library] = []  # an op schema lives as long as the Library that defined it


def torchvision() -> Any:
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
            _schemas.append(schemas)
            import torchvision.datasets
    return torchvision.datasets


def cifar(source: Source) -> Raw:
    """CIFAR-10 and CIFAR-100 with fine labels (Krizhevsky 2009), from the unpacked folder or the archive."""
    kind = getattr(torchvision(), source.name.upper())
    with unpacked(source, kind.base_folder, kind.filename, (kind.tgz_md5,), (kind.url,)) as base:
        return _read_cifar(kind, base.parent)


def _read_cifar(kind: Any, root: Path) -> Raw:
    files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
    for name, md5 in files:  # torchvision checks too, but does not name the file
        path = root / kind.base_folder / name
        if not path.is_file():
            raise corrupt(path.parent, f"{name} is missing")
        check_md5(path, (md5,))
    with reading(root / kind.base_folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the pickles are of an old numpy
        parts = [kind(root, train=train) for train in (True, False)]
        return merged(*((part.data.transpose(0, 3, 1, 2), _array(part.targets)) for part in parts))


def svhn(source: Source) -> Raw:
    """SVHN, cropped digits, train then test without extra (Netzer et al. 2011); the digit 0 is class 0."""
    kind = torchvision().SVHN
    for split in ("train", "test"):
        url, name, md5 = kind.split_list[split]
        file(source, name, (md5,), (url,))
    with reading(source.folder / kind.split_list["train"][1]):
        parts = [kind(source.folder, split=split) for split in ("train", "test")]
        return merged(*((part.data, _array(part.labels)) for part in parts))


def digits(source: Source) -> Raw:
    """scikit-learn's 1,797 digits of 8 x 8 pixels, values 0..16 (Alpaydin and Kaynak 1998), as 28 x 28 uint8."""
    # The file that its load_digits reads; to import scikit-learn would take as long as all else before the first line.
    file = distribution("scikit-learn").locate_file("sklearn/datasets/data/digits.csv.gz")
    rows = np.loadtxt(str(file), delimiter=",")
    small = torch.from_numpy(rows[:, :-1]).reshape(-1, 1, 8, 8) * (255 / 16)
    large = torch.nn.functional.interpolate(small, size=(28, 28), mode="bilinear", align_corners=False)
    return Raw(large.round().to(torch.uint8).numpy(), rows[:, -1].astype(int))


def _array(labels: Any) -> Any:
    return torch.as_tensor(labels).numpy()
