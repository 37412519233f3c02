"""Open data sets of Hugging Face's `datasets`: saved folders, and names on the hub."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from fedpfl.data.datasets.shared.source import WouldDownload, error_line, writes_nothing
from fedpfl.ground.errors import FedpflError, choices_text, missing_extra
from fedpfl.ground.records import Values

HUB_NAME = re.compile(r"\w[\w.-]*(/[\w.-]+)?")
TEST = "test"


@dataclass(frozen=True)
class Split:
    """One split of a data set.

    Attributes:
        name: Such as train; empty where the data set is not split.
        origin: What messages call it.
        data: The `datasets.Dataset`.
    """

    name: str
    origin: str
    data: Any


def import_datasets() -> Any:
    """Return the library. Raises FedpflError where it is absent."""
    try:
        import datasets
    except ImportError:
        raise missing_extra("dataset=hf needs a package that is not installed", "hf") from None
    return datasets


def open_splits(
    path: Path | None,
    names: str | Sequence[str] | None,
    subset: str | None = None,
    download: bool = True,
) -> list[Split]:
    """Open the splits of a data set, the one called test last.

    Args:
        path: A folder that `save_to_disk` has written, or a name on the hub.
        names: The splits; None: all.
        subset: Of a name on the hub that has several.
        download: Whether the hub may be asked.

    Raises:
        FedpflError: It cannot be opened, or a split is absent or has no row.
    """
    if path is None:
        raise FedpflError(
            "dataset=hf needs dataset.path=FOLDER, written by save_to_disk, or a name on the hub"
        )

    folder = Path(path).expanduser()
    if folder.exists():
        loaded = _open_folder(folder)
    else:
        loaded = _open_name(str(path), subset, download)
    if isinstance(loaded, Mapping):
        splits = _choose_splits(loaded, str(path), names)
    elif names in (None, str(loaded.split)):
        splits = [Split("", str(path), loaded)]
    else:
        raise FedpflError(f"dataset.split={names}: {path} is one Dataset; leave dataset.split out")
    for split in splits:
        if not len(split.data):
            raise FedpflError(f"{split.origin} has no row; choose others with dataset.split=[...]")
    return splits


def count_test_rows(splits: Sequence[Split]) -> int:
    """Count the rows of the test part.

    A split that stands alone is no test part.
    """
    has_test_part = len(splits) > 1 and splits[-1].name == TEST
    return len(splits[-1].data) if has_test_part else 0


# ---- Where it is


def _open_folder(folder: Path) -> Any:
    """Open what `save_to_disk` has written."""
    datasets = import_datasets()
    try:
        return datasets.load_from_disk(str(folder))
    except Exception as error:  # a damaged file raises pyarrow's errors, json's and more
        raise FedpflError(
            f"dataset.path={folder} cannot be read as a folder of save_to_disk: {error_line(error)}; "
            "write one in Python: dataset.save_to_disk(folder)"
        ) from None


def _open_name(name: str, subset: str | None, download: bool) -> Any:
    """Open a data set of the hub."""
    absent = f"dataset.path={name} is no folder here; give one that save_to_disk has written"
    import_datasets()
    if not HUB_NAME.fullmatch(name) or not download:
        raise FedpflError(f"{absent}, or a name on the hub with dataset.download=true")
    if writes_nothing():
        raise WouldDownload(f"data set hf: a run would load {name} from the Hugging Face hub")
    try:
        return _load_from_hub(name, subset)
    except Exception as error:  # dozens of kinds of several libraries
        raise FedpflError(
            f"{absent}; it cannot be loaded from the Hugging Face hub: {error_line(error)}"
        ) from None


# Number of clients, test fraction and samples are each asked of it.
@lru_cache(maxsize=2)
def _load_from_hub(name: str, subset: str | None) -> Any:
    return import_datasets().load_dataset(name, subset)


# ---- Which splits


def _choose_splits(loaded: Values, path: str, names: str | Sequence[str] | None) -> list[Split]:
    """Return the splits of these names, test last."""
    split_names = [names] if isinstance(names, str) else list(loaded if names is None else names)
    for name in split_names:
        if name not in loaded:
            raise FedpflError(f"dataset.split must be {choices_text(list(loaded), name)} in {path}")
    # Stable: training splits keep the order in which they are named.
    split_names.sort(key=lambda name: name == TEST)
    return [
        Split(name, f"{path}, split {name}", loaded[name]) for name in dict.fromkeys(split_names)
    ]
