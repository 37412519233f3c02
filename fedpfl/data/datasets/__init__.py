"""Data sets: a file here holds one, in a function of the file's name that reads it; what they share
lies in shared/.

A named data set is looked up as `<data_dir>/<name>.npz` first, then as its original files, then
downloaded where it has a lasting address. Nothing is written below `data_dir` but what is
downloaded or unpacked, and `cache`, which keeps what is slow to read; so `data_dir` may be
read-only where the files are present.
"""

from __future__ import annotations

import importlib
import inspect
import logging
import pkgutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

from fedpfl.data.datasets.shared.archive import read_archive
from fedpfl.data.datasets.shared.samples import (
    MAX_CLASSES,
    Raw,
    Samples,
    check_samples,
    select_classes,
)
from fedpfl.data.datasets.shared.source import AbsentFiles, Source, error_line
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Above, Between

log = logging.getLogger(__name__)

__all__ = ["DATA_SETS", "Raw", "Samples", "Source", "load_samples"]


def find_readers() -> dict[str, Callable[..., Raw]]:
    """Return the reader in each file of this folder, by its name."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg]
    return {name: getattr(importlib.import_module(f"{__name__}.{name}"), name) for name in names}


DATA_SETS = find_readers()
"""The reader of each data set. What it takes beside the Source are the data set's options."""


def load_samples(
    name: str,
    data_dir: Path,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[Annotated[float, Above(0)]] | None = None,
    classes: Annotated[int, Between(1, MAX_CLASSES)] | None = None,
    only: tuple[Annotated[int, Between(0, MAX_CLASSES - 1)], ...] | None = None,
    path: Path | None = None,
    download: bool = True,
    normalize: bool = True,
    **options: Any,
) -> Samples:
    """Load a data set by name, or with `path` from an .npz archive of `x` and `y`.

    `mean` and `std` None: of the training samples, per channel. `normalize` False: images are only
    divided by 255,
    signals left as they are. `classes` None: the largest label plus one. `only`: labels of the
    samples that are kept, which are numbered anew in this order. `options`: the data set's, which
    an archive has no use for.

    Raises: FedpflError if files are absent and cannot be downloaded, a file is corrupt or not of
    its format, or the reader fails in any other way.
    """
    source = Source(name, Path(data_dir).expanduser(), download)
    try:
        file = _find_archive(source, path)
        if file is None:
            raw = DATA_SETS[name](source, **options)
        else:
            raw = read_archive(file, getattr(DATA_SETS[name], "md5", ()))
            _refuse_options(options, DATA_SETS[name], file)
        samples = check_samples(
            name, raw, f"{name} in {file or source.folder}", mean, std, classes, normalize
        )
        return samples if only is None else select_classes(samples, only)
    except FedpflError:
        raise
    except Exception as error:  # what no reader foresaw, or its author's mistake
        log.debug("reading %s", name, exc_info=True)
        reader = getattr(DATA_SETS[name], "__qualname__", DATA_SETS[name])
        raise FedpflError(
            f"data set {name} in {data_dir} cannot be read: {error_line(error)}; put good copies of its files there, "
            f"or mend its reader {reader} (hydra.verbose=true tells where it failed)"
        ) from error


def _find_archive(source: Source, path: Path | None) -> Path | None:
    """The archive that takes the place of the original files: the one that is named, else
    `<name>.npz`, if any.
    """
    if path is not None:
        named = Path(path).expanduser()
        if not named.is_file():
            what = "a folder" if named.is_dir() else "not a file"
            raise AbsentFiles(
                f"dataset.path={path} is {what}; give the path of an .npz archive with x and y"
            )
        return named
    usual = source.folder / f"{source.name}.npz"
    return usual if source.name != "npz" and usual.is_file() else None


def _refuse_options(options: dict[str, Any], read: Callable[..., Raw], file: Path) -> None:
    """Raise FedpflError for an option that an archive cannot follow."""
    usual = inspect.signature(read).parameters
    for key, value in options.items():
        if value != usual[key].default:
            raise FedpflError(
                f"dataset.{key}={value} has no effect on {file}, an archive is taken as it is; leave {key} out"
            )
