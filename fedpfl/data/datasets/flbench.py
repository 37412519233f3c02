"""A folder of FL-bench's `data`: its samples in its order, for the partition beside them."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import numpy as np

from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source
from fedpfl.ground.errors import FedpflError

ARRAYS = (("data.npy", "targets.npy"), ("raw/xdata.npy", "raw/ydata.npy"))
TORCHVISION_FOLDERS = {"mnist": "", "fmnist": "", "cifar10": "", "cifar100": "", "svhn": "raw"}
"""Where FL-bench has torchvision keep the files of its data sets, by the name of its folder."""


def flbench(source: Source, *, path: Path | None = None) -> Raw:
    """Read arrays, or the files that FL-bench left to torchvision, training part first.

    Args:
        source: Not used; the files lie where `path` says.
        path: The folder, such as `data/mnist`; by its name FL-bench knows the data set.

    Raises:
        FedpflError: It has neither, or labels that its files have not.
    """
    folder = Path(path or "").expanduser().resolve()
    for x_name, y_name in ARRAYS:
        if (folder / x_name).is_file():
            x = np.load(folder / x_name)
            is_flat = folder.name == "femnist"
            return Raw(x.reshape(-1, 28, 28) if is_flat else x, np.load(folder / y_name).ravel())
    name = folder.name
    if name not in TORCHVISION_FOLDERS:
        raise FedpflError(
            f"dataset.path={path} has no data.npy, and is none of {', '.join(TORCHVISION_FOLDERS)}"
        )
    if json.loads((folder / "args.json").read_bytes()).get("super_class"):
        raise FedpflError(f"{folder} has labels of 20 superclasses; generate it without them")
    reader = getattr(importlib.import_module(f"fedpfl.data.datasets.{name}"), name)
    return reader(Source(name, folder / TORCHVISION_FOLDERS[name], download=False))
