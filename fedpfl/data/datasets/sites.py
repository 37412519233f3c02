"""Sites of your own: every entry of a folder is one, and so a client."""

from __future__ import annotations

import csv
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from fedpfl.data.datasets.shared.archive import read_archive
from fedpfl.data.datasets.shared.images import IMAGE_SUFFIXES, Side, read_images
from fedpfl.data.datasets.shared.parts import LabelledPart, join_labels, require_equal_forms
from fedpfl.data.datasets.shared.samples import Raw, convert_labels, to_finite_floats
from fedpfl.data.datasets.shared.source import Source
from fedpfl.data.datasets.shared.tables import (
    Table,
    encode_tables,
    find_levels,
    label_columns,
)
from fedpfl.ground.errors import FedpflError, missing_extra
from fedpfl.ground.tasks import CLASSIFICATION, MULTILABEL, Task, require_classification

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Site:
    """What one site holds.

    Attributes:
        name: The file's name without its ending, or the folder's name.
        path: Where it was read from, for messages.
        x: Its samples, `[samples, ...]`.
        labels: Their labels as they were written, `[samples]`: integers or texts.
        test_from: Where its test part begins, None where it has none.
        features: What the features of a table are called.
    """

    name: str
    path: Path
    x: np.ndarray
    labels: np.ndarray
    test_from: int | None = None
    features: tuple[str, ...] = ()


@dataclass(frozen=True)
class SiteOptions:
    """How sites are read; the fields are as of `sites`.

    Attributes:
        labels: The columns that `label` names.
    """

    labels: tuple[str, ...] = ()
    categories: tuple[str, ...] = ()
    size: int = 64
    task: Task = CLASSIFICATION


class Columns(NamedTuple):
    """What tables must have in common.

    Attributes:
        names: Of all columns but labels, in their order.
        levels: The values that each category takes, as texts.
    """

    names: list[str]
    levels: dict[str, list[str]]


def sites(
    source: Source,
    *,
    path: Path | None = None,
    label: str | tuple[str, ...] | None = None,
    categories: tuple[str, ...] = (),
    size: Side = 64,
    task: Task = CLASSIFICATION,
) -> Raw:
    """Read a folder of sites, all of one kind: archives, tables or folders of images.

    Args:
        source: Not used; sites lie where `path` says.
        path: The folder. An `.npz` archive holds `x`, `y` and perhaps `test_from`; a `.csv` or
            `.parquet` table has a sample a row; a folder has a folder of images per class.
        label: The column of a table that holds the labels; of task=multilabel one per label.
        categories: Columns of a table that are no numbers: each becomes one feature per value.
        size: Pixels each way to which images are scaled.
        task: What the labels are for.

    Returns:
        The samples of all sites, in the order of their names; groups are the sites, classes the
        union of all labels, sorted. Test parts, if sites have them, come after all training parts.

    Raises:
        FedpflError: A site cannot be read, or differs from the others.
    """
    if path is None:
        raise FedpflError("dataset=sites needs dataset.path=FOLDER, in which every entry is a site")
    labels = label_columns(label)
    read_sites = _read_entries(
        list_sites(path),
        SiteOptions(labels, categories, size, task),
    )
    _require_equal_samples(read_sites)
    raw = _merge_sites(read_sites, task)
    return raw._replace(class_names=labels) if task is MULTILABEL else raw


def read_site(path: Path, options: SiteOptions, columns: Columns | None = None) -> Site:
    """Read one site alone, such as the one that a node has.

    Args:
        path: Any entry that a folder of sites may have.
        options: Those of the data set.
        columns: What the tables of all sites have in common; None: what this one has.

    Raises:
        FedpflError: It is no site, or cannot be read.
    """
    entry = Path(path).expanduser()
    if not entry.exists():
        raise FedpflError(f"{entry} does not exist; give the site that the node has")
    # Archives and folders say all about themselves; a table's categories are those of all sites.
    if columns is None or _kind_of(entry) != "table":
        return _read_entries([entry], options)[0]
    # The template stands first, so that its columns and values are those of the features.
    tables = [
        _make_template(columns, options),
        Table(str(entry), _read_table(entry, options.categories)),
    ]
    encoded = encode_tables(
        tables,
        options.labels,
        options.categories,
        options.task,
    )
    _, (x, labels) = encoded.parts
    return Site(site_name(entry), entry, x, labels, features=encoded.features)


def read_table_columns(path: Path, options: SiteOptions) -> Columns | None:
    """Return the columns of a site that is a table; None of any other."""
    entry = Path(path).expanduser()
    if _kind_of(entry) != "table":
        return None
    table = Table(str(entry), _read_table(entry, options.categories))
    names = [str(name) for name in table.frame.columns if name not in options.labels]
    return Columns(
        names,
        {name: find_levels([table], name) for name in options.categories},
    )


def _make_template(columns: Columns, options: SiteOptions) -> Table:
    """Return a table that has all columns in their order and all values of categories."""
    import pandas as pd

    # As many rows as the longest list of values has, the others filled up with their first.
    rows = max([1, *map(len, columns.levels.values())])
    cells: dict[str, list[str | int]] = dict.fromkeys([*columns.names, *options.labels], [0] * rows)
    for name, levels in columns.levels.items():
        cells[name] = [*levels, *levels[:1] * (rows - len(levels))]
    return Table("the tables of the other sites", pd.DataFrame(cells))


def list_sites(folder: Path) -> list[Path]:
    """Return the entries of a folder of sites in the order of their names.

    Raises:
        FedpflError: It is no folder or has no entry, or two entries have one name.
    """
    folder = Path(folder).expanduser()
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise FedpflError(
            f"dataset.path={folder} {what}; give a folder in which every entry is a site"
        )
    entries = _list_visible(folder)
    if not entries:
        raise FedpflError(f"dataset.path={folder} is empty; every entry of it is to be a site")
    paths_by_name: dict[str, Path] = {}
    for entry in entries:
        if not site_name(entry).isprintable() or not site_name(entry).strip():
            raise FedpflError(
                f"dataset.path={folder} has a site called {site_name(entry)!r}; rename it, as its "
                "name is to be shown in a line"
            )
        other = paths_by_name.setdefault(site_name(entry), entry)
        if other is not entry:
            raise FedpflError(
                f"{entry} and {other.name} are both site {site_name(entry)!r}; rename one of them"
            )
    return sorted(entries, key=site_name)


def site_name(entry: Path) -> str:
    """Return what a site is called: a folder's name, or a file's without its ending."""
    return entry.name if entry.is_dir() else entry.stem


# ---- kinds


def _read_entries(entries: Sequence[Path], options: SiteOptions) -> list[Site]:
    """Read sites of one kind."""
    kind = _common_kind(entries)
    task = options.task
    if kind == "table":
        return _read_tables(entries, options.labels, options.categories, task)
    _refuse_table_options(kind, options.labels, options.categories)
    if kind == "archive":
        return _read_archives(entries, task)
    require_classification(task, "a site of images", "its folders are classes")
    return _read_folders(entries, options.size)


def _kind_of(entry: Path) -> str:
    """Return archive, table or folder. Raises FedpflError for anything else."""
    if entry.is_dir():
        return "folder"
    kind = {".npz": "archive", ".csv": "table", ".parquet": "table"}.get(entry.suffix.lower())
    if kind is None or not entry.is_file():
        raise FedpflError(
            f"{entry} is no site: a site is an .npz archive, a .csv or .parquet table, or a folder "
            "with a folder of images per class; take it out of dataset.path"
        )
    return kind


def _common_kind(entries: Sequence[Path]) -> str:
    """Return what kind all sites are. Raises FedpflError where they differ."""
    kind = _kind_of(entries[0])
    for entry in entries[1:]:
        if (other := _kind_of(entry)) != kind:
            raise FedpflError(
                f"{entry} is of kind {other}, and {entries[0].name} of kind {kind}; "
                "all sites are to be of one kind"
            )
    return kind


def _refuse_table_options(kind: str, label: tuple[str, ...], categories: tuple[str, ...]) -> None:
    for key, value in (("label", label), ("categories", categories)):
        if value:
            raise FedpflError(
                f"dataset.{key} is for tables, and these sites are of kind {kind}; leave it out"
            )


# ---- archives


def _read_archives(entries: Sequence[Path], task: Task) -> list[Site]:
    """Read one .npz archive per site."""
    read_sites = []
    for entry in entries:
        raw = read_archive(entry)
        if raw.groups is not None:
            raise FedpflError(f"{entry} has an array groups, and a site is one group; leave it out")
        if raw.x.ndim < 2:
            raise FedpflError(f"{entry}: x must be [samples, ...], got {list(raw.x.shape)}")
        if not len(raw.x):
            raise FedpflError(f"{entry} has no sample; take it out of dataset.path")
        labels = _archive_labels(entry, raw.y, task)
        if len(labels) != len(raw.x):
            raise FedpflError(f"{entry}: x has {len(raw.x)} samples, and y has {len(labels)}")
        if raw.test_from is not None and raw.test_from not in range(1, len(labels)):
            raise FedpflError(
                f"{entry}: test_from must be from 1 to {len(labels) - 1}, got {raw.test_from}"
            )
        x = raw.x
        if x.dtype.kind == "f":
            try:
                x = to_finite_floats(x)
            except ValueError as error:
                raise FedpflError(f"{entry}: {error}") from None
        read_sites.append(Site(site_name(entry), entry, x, labels, raw.test_from))
    return read_sites


def _archive_labels(entry: Path, y: np.ndarray, task: Task) -> np.ndarray:
    """Return an archive's labels: integers or texts, or in the form of another task."""
    if task is not CLASSIFICATION:
        try:
            return convert_labels(y, task)
        except ValueError as error:
            raise FedpflError(f"{entry}: {error}") from None
    labels = y[:, 0] if y.ndim == 2 and y.shape[1] == 1 else y
    if labels.ndim != 1 or labels.dtype.kind not in "iuU":
        raise FedpflError(
            f"{entry}: y must be integers or texts [samples], got {labels.dtype} "
            f"{list(labels.shape)}; floats are for task=regression, 0 and 1 [samples, labels] for "
            "task=multilabel"
        )
    return labels


# ---- tables


def _read_tables(
    entries: Sequence[Path], label: tuple[str, ...], categories: tuple[str, ...], task: Task
) -> list[Site]:
    """Read one table per site."""
    tables = [Table(str(entry), _read_table(entry, categories)) for entry in entries]
    encoded = encode_tables(tables, label, categories, task)
    return [
        Site(site_name(entry), entry, x, labels, features=encoded.features)
        for entry, (x, labels) in zip(entries, encoded.parts, strict=True)
    ]


def _read_table(entry: Path, categories: Sequence[str]) -> pd.DataFrame:
    """Read a table.

    Raises:
        FedpflError: It is none, has no row, or has columns that cannot be told apart by name.
    """
    import pandas as pd

    try:
        if entry.suffix.lower() == ".csv":
            _check_header(entry)
            # A code such as 01 is a text: another site may have 0A, and 01 must be the same there.
            table = pd.read_csv(entry, dtype=dict.fromkeys(categories, str))
        else:
            table = pd.read_parquet(entry)
    except ImportError:
        raise missing_extra(f"{entry} needs a package that is absent", "parquet") from None
    except (ValueError, OSError) as error:  # pandas' and pyarrow's own errors are ValueErrors
        reason = " ".join(str(error).split())
        raise FedpflError(f"{entry} cannot be read as a table: {reason}") from None
    if table.empty:
        raise FedpflError(f"{entry} has no row; take it out of dataset.path")
    return table


def _check_header(entry: Path) -> None:
    """Raise FedpflError for column names that pandas would change or move."""
    with entry.open(encoding="utf-8-sig", newline="") as file:
        rows = csv.reader(file)
        columns = next(rows, [])
        first_row = next(rows, [])
    for name in columns:
        if name.strip() and columns.count(name) > 1:
            raise FedpflError(f"{entry} has column {name!r} twice; rename or leave out one")
    # pandas would take the first cell of each row for the row's name.
    if len(first_row) > len(columns) > 0:
        raise FedpflError(
            f"{entry}: row 1 has {len(first_row)} cells, and the header {len(columns)} names; "
            "give each column one"
        )


# ---- folders of images


def _read_folders(entries: Sequence[Path], size: int) -> list[Site]:
    """Read one folder per site, with a folder of images per class."""
    read_sites = []
    for entry in entries:
        files: list[Path] = []
        for class_folder in _list_visible(entry):
            if not class_folder.is_dir():
                raise FedpflError(f"{class_folder} is no folder of images of a class; take it out")
            files += _list_visible(class_folder)
        for file in files:
            if file.suffix.lower() not in IMAGE_SUFFIXES:
                raise FedpflError(
                    f"{file} is no image ({', '.join(IMAGE_SUFFIXES)}); convert it, or take it out"
                )
        if not files:
            raise FedpflError(f"{entry} has no image; a site is to have a folder per class")
        labels = np.array(
            [file.parent.name for file in files],
            dtype=np.str_,
        )
        pixels = read_images(files, size, _image_error)
        read_sites.append(Site(site_name(entry), entry, pixels, labels))
    return read_sites


def _list_visible(folder: Path) -> list[Path]:
    """Return a folder's entries that are not hidden, ordered by name."""
    return sorted(entry for entry in folder.iterdir() if not entry.name.startswith("."))


def _image_error(path: Path | str, reason: str) -> FedpflError:
    return FedpflError(f"{path} cannot be read as an image: {reason}; mend it, or take it out")


# ---- all sites


def _require_equal_samples(read_sites: Sequence[Site]) -> None:
    """Raise FedpflError where sites differ in form, or one has no test part."""
    require_equal_forms(
        [LabelledPart(str(site.path), site.path.name, site.x, site.labels) for site in read_sites]
    )
    reference = read_sites[0]
    for site in read_sites[1:]:
        if (site.test_from is None) != (reference.test_from is None):
            without, other = (site, reference) if site.test_from is None else (reference, site)
            raise FedpflError(
                f"{without.path} has no test_from, and {other.path.name} has one; all sites are to "
                "have a test part, or none"
            )


def _merge_sites(read_sites: Sequence[Site], task: Task) -> Raw:
    """Join sites to one data set: training parts in the order of the sites, then test parts."""
    names = tuple(site.name for site in read_sites)
    codes = join_labels([site.labels for site in read_sites])
    class_names: tuple[str, ...] = ()
    if task is CLASSIFICATION:
        values, codes = np.unique(codes, return_inverse=True)
        class_names = tuple(map(str, values.tolist()))
    sizes = [len(site.labels) for site in read_sites]
    groups = np.repeat(np.arange(len(read_sites)), sizes)
    x = np.concatenate([site.x for site in read_sites])
    features = read_sites[0].features
    if read_sites[0].test_from is None:
        return Raw(x, codes, groups, names, class_names=class_names, feature_names=features)
    is_test = np.concatenate(
        [np.arange(len(site.labels)) >= (site.test_from or 0) for site in read_sites]
    )
    # Stable: within each part the sites' order stays.
    order = np.argsort(is_test, kind="stable")
    return Raw(
        x[order],
        codes[order],
        groups[order],
        names,
        test_from=int((~is_test).sum()),
        class_names=class_names,
    )


def have_test_parts(folder: Path) -> bool:
    """Tell whether sites come with a test part of their own, as archives may.

    Only an archive's table of contents is read; what is wrong with it is told by reading it.
    """
    first_site = list_sites(folder)[0]
    try:
        with zipfile.ZipFile(first_site) as contents:
            return "test_from.npy" in contents.namelist()
    except (OSError, zipfile.BadZipFile):
        return False
