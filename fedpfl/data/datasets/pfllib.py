"""A folder that PFLlib's generators have written: its samples at its clients, split as there."""

from __future__ import annotations

import zipfile
from pathlib import Path

import numpy as np

from fedpfl.data.datasets.shared.parts import Part, ReadOptions, join_parts
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source, explain_read_errors, not_as_published
from fedpfl.data.pickles import PlainUnpickler
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Record


def pfllib(source: Source, *, path: Path | None = None) -> Raw:
    """Read `train/N.npz` and `test/N.npz` of each client N.

    Args:
        source: Not used; the files lie where `path` says.
        path: The folder, such as `dataset/MNIST`.

    Raises:
        FedpflError: A file is absent or damaged, or holds more than arrays.
    """
    folder = Path(path or "").expanduser()
    parts = []
    for client in sorted(int(file.stem) for file in folder.glob("train/*.npz")):
        train, test = (_read_split(folder / split / f"{client}.npz") for split in ("train", "test"))
        x, y = (np.concatenate([train[key], test[key]]) for key in "xy")
        origin = f"{folder}, client {client}"
        parts.append(Part(origin, x, y, name=str(client), test_from=len(train["y"])))
    if not parts:
        raise FedpflError(f"dataset.path={path} has no train/0.npz; give a folder of PFLlib's")
    return join_parts(parts, ReadOptions())


def _read_split(file: Path) -> Record:
    """Return the inputs and labels that a file holds as one pickled dict."""
    explained = explain_read_errors(file, not_as_published)
    with explained, zipfile.ZipFile(file) as archive, archive.open("data.npy") as content:
        np.lib.format.read_magic(content)
        np.lib.format.read_array_header_1_0(content)
        return PlainUnpickler(content).load().item()
