"""Data sets: each file has the function that reads one and bears its name; shared/ has helpers.

A named data set is looked up as `<data_dir>/<name>.npz` first, then as its original files, then
downloaded where it has a lasting address. Nothing is written below `data_dir` but
downloads, unpacked archives and `cache`, for data sets that are slow to read; so `data_dir` may be
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
from fedpfl.data.datasets.shared.parts import ReadOptions
from fedpfl.data.datasets.shared.samples import (
    MAX_CLASSES,
    Raw,
    Samples,
    check_samples,
    select_classes,
)
from fedpfl.data.datasets.shared.source import AbsentFiles, Source, error_line
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.ranges import Between, Positive
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import CLASSIFICATION, TASKS

log = logging.getLogger(__name__)

__all__ = ["DATA_SETS", "SHARED_KEYS", "Raw", "Samples", "Source", "load_samples"]


def find_readers() -> dict[str, Callable[..., Raw]]:
    """Return the reader of each file in this folder, by its name."""
    names = [module.name for module in pkgutil.iter_modules(__path__) if not module.ispkg]
    return {name: getattr(importlib.import_module(f"{__name__}.{name}"), name) for name in names}


DATA_SETS = find_readers()
"""The reader of each data set. Its arguments beside the Source are the data set's options."""


def load_samples(  # noqa: PLR0913 - its arguments are keys of the configuration
    name: str,
    data_dir: Path,
    *,
    mean: Sequence[float] | None = None,
    std: Sequence[Positive] | None = None,
    classes: Annotated[int, Between(1, MAX_CLASSES)] | None = None,
    only: tuple[Annotated[int, Between(0, MAX_CLASSES - 1)] | str, ...] | None = None,
    path: Path | None = None,
    download: bool = True,
    normalize: bool = True,
    task: str = CLASSIFICATION.name,
    together: str | None = None,
    **options: Any,
) -> Samples:
    """Load a data set by name, or from an .npz archive at `path`.

    Args:
        name: One of DATA_SETS.
        data_dir: The folder of data sets.
        mean: Per channel; None: of the training samples.
        std: Per channel; None: of the training samples.
        classes: Number of classes; None: the largest label plus one.
        only: Classes to keep, by name or number, which are numbered anew in this order.
        path: An archive that takes the place of the data set's files; of `sites`, their folder.
        download: Whether absent files may be downloaded.
        normalize: Whether samples are scaled; if not, images are only divided by 255.
        task: The purpose of the labels, one of `ground.tasks.TASKS`; a key of the run.
        together: The column, array or `groups` of samples that stay together; a key of the partition.
        options: The data set's options, which an archive has no use for.

    Raises:
        FedpflError: Files are absent or corrupt, or the reader fails in any other way.
    """
    source = Source(name, Path(data_dir).expanduser(), download)
    read_options = ReadOptions(together=together, task=TASKS[task])
    try:
        raw, origin = _read_source(source, path, read_options, options)
        samples = check_samples(
            name=name,
            raw=_keep_together(raw, together, name),
            origin=f"{name} in {origin}",
            mean=mean,
            std=std,
            classes=classes,
            normalize=normalize,
            task=TASKS[task],
        )
        return samples if only is None else select_classes(samples, only)
    except FedpflError:
        raise
    except Exception as error:  # an unexpected file, or a mistake of the reader's author
        log.debug("reading %s", name, exc_info=True)
        raise _unreadable_error(source, error) from error


def _keep_together(raw: Raw, together: str | None, name: str) -> Raw:
    """Return samples with units, which may be their groups."""
    if not together or raw.units is not None:
        return raw
    if together != "groups" or raw.groups is None:
        raise FedpflError(
            f"partition.together={together}: data set {name} has no such column; leave it out"
        )
    return raw._replace(units=raw.groups)


def _unreadable_error(source: Source, error: Exception) -> FedpflError:
    reader = DATA_SETS[source.name]
    return FedpflError(
        f"data set {source.name} in {source.folder} cannot be read: {error_line(error)}; put good "
        f"copies of its files there, or fix its reader {getattr(reader, '__qualname__', reader)} "
        "(hydra.verbose=true tells where it failed)"
    )


_PARAMETERS = frozenset(inspect.signature(load_samples).parameters)
SHARED_KEYS = _PARAMETERS - {"path", "task", "together", "options"}
"""Keys of every data set, which its reader is not given."""


def _read_source(
    source: Source, path: Path | None, read_options: ReadOptions, options: Record
) -> tuple[Raw, Path | None]:
    """Read a data set's files, or the archive in their place, and return their path."""
    reader = DATA_SETS[source.name]
    parameters = inspect.signature(reader).parameters
    facts = {"task": read_options.task, "together": read_options.together, "path": path}
    fact_options = {key: value for key, value in facts.items() if key in parameters}
    # A reader that takes a path looks there itself.
    archive = None if "path" in parameters else _find_archive(source, path)
    if archive is None:
        return reader(source, **options, **fact_options), path or source.folder
    for key, value in options.items():
        if value != parameters[key].default:
            raise FedpflError(
                f"dataset.{key}={value} has no effect on {archive}, an archive is taken as it is; "
                f"leave {key} out"
            )
    return read_archive(archive, getattr(reader, "md5", ()), read_options), archive


def _find_archive(source: Source, path: Path | None) -> Path | None:
    """Return the archive that takes the place of the original files, if any.

    It is the one at `path`, else `<name>.npz`.
    """
    if path is not None:
        archive = Path(path).expanduser()
        if not archive.is_file():
            raise AbsentFiles(
                f"dataset.path={path} is no file; give the path of an .npz archive with x and y"
            )
        return archive
    archive = source.folder / f"{source.name}.npz"
    return archive if source.name != "npz" and archive.is_file() else None
