"""Sites of your own: every entry of a folder is one, and so a client."""

from __future__ import annotations

import re
import unicodedata
import zipfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedpfl.data.datasets.shared.archive import read_archive_part
from fedpfl.data.datasets.shared.images import OWN_SUFFIXES, Side, read_own_images
from fedpfl.data.datasets.shared.missing import Missing
from fedpfl.data.datasets.shared.parts import (
    Part,
    ReadOptions,
    check_part,
    encode_part,
    find_columns,
    join_parts,
    label_columns,
    split_table,
)
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.data.datasets.shared.source import Source
from fedpfl.data.datasets.shared.tables import TABLE_SUFFIXES, Columns, read_table
from fedpfl.data.datasets.shared.texts import to_texts
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.tasks import CLASSIFICATION, Task, require_classification


def sites(  # noqa: PLR0913 - its arguments are keys of the configuration
    source: Source,
    *,
    path: Path | None = None,
    label: str | tuple[str, ...] | None = None,
    categories: tuple[str, ...] = (),
    size: Side = 64,
    missing: Missing = "refuse",
    task: Task = CLASSIFICATION,
    together: str | None = None,
) -> Raw:
    """Read a folder of sites, all of one kind: archives, tables or folders of images.

    An `.npz` archive holds `x`, `y` and perhaps `test_from`; a table (TABLE_SUFFIXES) has a sample
    a row; a folder has a folder of images per class.

    Args:
        source: Not used; sites lie where `path` says.
        path: The folder.
        label: The column of a table that holds the labels; of task=multilabel one per label.
        categories: Columns of a table that are no numbers: each becomes one feature per value.
        size: Pixels each way to which images are scaled.
        missing: What fills empty cells; indicator: the mean, beside a feature that tells.
        task: The purpose of the labels.
        together: The column, or array, with equal values for samples that stay together.

    Returns:
        The samples of all sites, in the order of their names; groups are the sites, classes the
        union of all labels, sorted. Test parts, if sites have them, come after all training parts.

    Raises:
        FedpflError: A site cannot be read, or two sites differ.
    """
    if path is None:
        raise FedpflError("dataset=sites needs dataset.path=FOLDER, in which every entry is a site")
    options = ReadOptions(
        label_columns(label),
        categories,
        together=together,
        size=size,
        task=task,
        missing=missing,
    )
    return join_parts([_read_part(entry, options) for entry in list_sites(path)], options)


def read_site(
    path: Path, options: ReadOptions, columns: Columns | None = None
) -> tuple[Part, Columns | None]:
    """Read one site alone, and the columns of its table.

    Args:
        path: Any entry that a folder of sites may have.
        options: Those of the data set.
        columns: Those of all sites; None: those of this one.

    Raises:
        FedpflError: It is no site, or cannot be read.
    """
    entry = Path(path).expanduser()
    if not entry.exists():
        raise FedpflError(f"{entry} does not exist; give the site that the node has")
    part = _read_part(entry, options)
    if part.is_table:
        columns = columns or find_columns([part], options)
        part = encode_part(part, columns, options)
    return check_part(part, options), columns


def list_sites(folder: Path) -> list[Path]:
    """List the entries of a folder of sites in the order of their names.

    Raises:
        FedpflError: It is no folder, or has no entry.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        raise FedpflError(
            f"dataset.path={folder} is no folder; give one in which every entry is a site"
        )
    entries = sorted(_list_visible(folder), key=site_name)
    if not entries:
        raise FedpflError(f"dataset.path={folder} is empty; every entry of it is to be a site")
    return entries


def site_name(entry: Path) -> str:
    """Name a site: by its folder, or by its file without the ending."""
    name = entry.name
    if not entry.is_dir():
        name = re.sub(r"(?i)\.gz$", "", name)
        name = name.removesuffix(Path(name).suffix)
    return unicodedata.normalize("NFC", name).strip()


def have_test_parts(folder: Path) -> bool:
    """Look for test parts, which archives may have.

    Only an archive's table of contents is read.
    """
    first_site = list_sites(folder)[0]
    try:
        with zipfile.ZipFile(first_site) as contents:
            return "test_from.npy" in contents.namelist()
    except (OSError, zipfile.BadZipFile):
        return False


# ---- One site


def _find_kind(entry: Path) -> str:
    """Return archive, table or folder. Raises FedpflError for anything else."""
    if entry.is_dir():
        return "folder"
    if entry.is_file() and entry.suffix.lower() == ".npz":
        return "archive"
    if entry.is_file() and entry.name.lower().endswith(TABLE_SUFFIXES):
        return "table"
    raise FedpflError(
        f"{entry} is no site: a site is an .npz archive, a table ({', '.join(TABLE_SUFFIXES)}), or "
        "a folder with a folder of images per class; take it out of dataset.path"
    )


def _read_part(entry: Path, options: ReadOptions) -> Part:
    """Read one site; labels of classes are texts."""
    kind = _find_kind(entry)
    is_classified = options.task is CLASSIFICATION
    if kind == "folder":
        require_classification(options.task, "a site of images", "its folders are classes")
        part = _read_folder(entry, options.size)
    elif kind == "archive":
        part = read_archive_part(entry, options)
    else:
        text_columns = [*options.categories, *filter(None, [options.together])]
        if is_classified:
            text_columns += options.labels
        part = split_table(read_table(entry, text_columns), str(entry), options)
    labels = part.y
    if is_classified and labels.size == len(labels):
        labels = to_texts(labels.reshape(-1), f"{entry}: label")
    return replace(part, y=labels, name=site_name(entry))


def _read_folder(entry: Path, size: int) -> Part:
    """Read a folder that has a folder of images per class."""
    files: list[Path] = []
    for class_folder in _list_visible(entry):
        if not class_folder.is_dir():
            raise FedpflError(f"{class_folder} is no folder of images of a class; take it out")
        files += _list_visible(class_folder)
    for file in files:
        if file.suffix.lower() not in OWN_SUFFIXES:
            raise FedpflError(
                f"{file} is no image ({', '.join(OWN_SUFFIXES)}); convert it, or take it out"
            )
    if not files:
        raise FedpflError(f"{entry} has no image; a site is to have a folder per class")
    labels = np.array([file.parent.name for file in files], dtype=np.str_)
    pixels = read_own_images(files, [str(file) for file in files], size, is_coloured=True)
    return Part(str(entry), pixels, labels)


def _list_visible(folder: Path) -> Sequence[Path]:
    """List a folder's entries that are not hidden, ordered by name."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))
