"""Find and download the files of data sets, cache slow ones, explain errors."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from fedpfl.data import npz
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.files import atomic_write
from fedpfl.ground.records import Record

log = logging.getLogger(__name__)

MAX_MESSAGE = 300  # characters of another library's message that are shown


_writes_nothing: ContextVar[bool] = ContextVar("writes_nothing", default=False)


class WouldDownload(FedpflError):
    """Files are absent, but a run would download them."""


@contextmanager
def _turn_on(variable: ContextVar[bool]) -> Iterator[None]:
    before = variable.set(True)
    try:
        yield
    finally:
        variable.reset(before)


def without_writing() -> AbstractContextManager[None]:
    """Within the context, download nothing and write nothing below `data_dir`."""
    return _turn_on(_writes_nothing)


def writes_nothing() -> bool:
    """Return True while downloading and writing are off."""
    return _writes_nothing.get()


class Source(NamedTuple):
    """The argument of every reader.

    Attributes:
        name: Of the data set.
        folder: `data_dir`.
        download: Whether absent files may be downloaded.
    """

    name: str
    folder: Path
    download: bool


def fetch_file(
    source: Source, relative: str, md5: tuple[str, ...], urls: Sequence[str], needed: str = ""
) -> Path:
    """Return a file below `data_dir` with a checked md5; download it if it is absent.

    Args:
        source: The data set.
        relative: The path below `data_dir`.
        md5: The sums of its editions.
        urls: Where to download it, in order.
        needed: The files that the user is to put there, if it is not this one alone.

    Raises:
        FedpflError: If it is absent and cannot be downloaded, or its md5 is another.
    """
    path = source.folder / relative
    if path.is_file():
        check_md5(path, md5)
        return path
    if not source.download:
        raise absent_error(
            source, f"{relative} is absent and dataset.download is false", needed or relative
        )
    if _writes_nothing.get():
        raise WouldDownload(
            f"data set {source.name} is not in data_dir={source.folder}; a run would download "
            f"{', '.join(urls)}"
        )
    for url in urls:
        try:
            _download_file(url, path, md5)
            return path
        # URLError, timeouts and a read-only folder are OSErrors.
        except (OSError, HTTPException) as error:
            reason = error_line(error)
    reason = f"{relative} is absent and its download failed: {reason}"
    raise absent_error(source, reason, needed or relative)


def find_folder(source: Source, needed: str, *relatives: str) -> Path:
    """Return the first folder below `data_dir` that exists, of those that cannot be downloaded.

    Args:
        source: The data set.
        needed: The files that the user is to put there.
        relatives: Paths below `data_dir`, in order.

    Raises:
        FedpflError: No such folder exists.
    """
    for relative in relatives:
        if (source.folder / relative).is_dir():
            return source.folder / relative
    raise absent_error(
        source, f"{relatives[0]} is absent and has no address to download from", needed
    )


@contextmanager
def unpacked_folder(
    source: Source,
    base: str,
    archive: str,
    md5: tuple[str, ...],
    urls: Sequence[str],
    flat: bool = False,
) -> Iterator[Path]:
    """Yield folder `base` below `data_dir`, unpacked from its archive where it is absent.

    Where `data_dir` cannot be written to, it is unpacked to a temporary folder.

    Args:
        source: The data set.
        base: The folder below `data_dir`.
        archive: The archive below `data_dir`.
        md5: The archive's sums.
        urls: Where to download the archive.
        flat: Whether the archive holds the folder's content, not the folder.
    """
    # ---- Step 1: unpacked already, or the archive.
    target = source.folder / base
    if target.is_dir():
        yield target
        return
    path = fetch_file(
        source,
        archive,
        md5,
        urls,
        f"{archive} (or {base}/, unpacked)",
    )

    # ---- Step 2: unpack it beside its place, and move it there whole.
    writable = os.access(source.folder, os.W_OK) and not _writes_nothing.get()
    with tempfile.TemporaryDirectory(dir=source.folder if writable else None) as scratch:
        unpacked = Path(scratch) / target.name
        with explain_read_errors(path):
            tar_filter: Literal["data"] | None = None if path.suffix == ".zip" else "data"
            shutil.unpack_archive(path, unpacked if flat else scratch, filter=tar_filter)
        if not unpacked.is_dir():
            raise corrupt_error(path, f"it holds no folder {target.name}")
        if writable and not target.is_dir():  # else another process was first
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(unpacked, target)
        yield target if writable else unpacked


def _download_file(url: str, path: Path, md5: tuple[str, ...]) -> None:
    """Download and check a file, or raise OSError or HTTPException."""
    log.info("downloading %s to %s", url, path)
    with urllib.request.urlopen(url, timeout=60) as response:
        # Only now, so that without a network no folder is left behind.
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            with temporary.open("wb") as file:
                shutil.copyfileobj(response, file)
            try:
                check_md5(temporary, md5)
            except FedpflError as error:
                raise OSError(f"{url} gave another file ({error})") from None


def check_md5(path: Path, md5: tuple[str, ...]) -> None:
    """Raise FedpflError for a file that is missing or has another sum."""
    if not path.is_file():
        raise corrupt_error(path.parent, f"{path.name} is missing")
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if actual not in md5:
        raise corrupt_error(path, f"md5 is {actual}, expected {' or '.join(md5)}")


# ---- The cache

_ignores_cache: ContextVar[bool] = ContextVar("ignores_cache", default=False)


def without_cache() -> AbstractContextManager[None]:
    """Within the context, read data sets from their files, not from `data_dir`/cache."""
    return _turn_on(_ignores_cache)


CACHED_FIELDS = ("x", "y", "groups", "group_names", "test_from")


def read_cached(
    source: Source, inputs: Iterable[Path], make: Callable[[], Raw], size: int = 0
) -> Raw:
    """Return the result of `make`, from `data_dir`/cache from the second time on.

    It is for data sets that take a minute to read. It is made again if name, size or time of an
    input change. Nothing is cached where `data_dir` cannot be written to.

    Args:
        source: The data set.
        inputs: The files that `make` reads.
        make: Reads the data set.
        size: Pixels each way of the result.

    Raises:
        FedpflError: If an input is absent.
    """
    inputs = sorted(inputs)
    is_below_data_dir = all(path.is_relative_to(source.folder) for path in inputs)
    if _ignores_cache.get() or not is_below_data_dir:  # unpacked to a temporary folder
        return make()
    key = _make_cache_key(source.folder, inputs, size)
    path = source.folder / "cache" / f"{source.name}-{key}.npz"
    # A damaged cache is made again.
    with contextlib.suppress(Exception), npz.open_archive(path) as kept:
        names = tuple(kept["group_names"].tolist())
        test_from = int(kept["test_from"]) if "test_from" in kept else None
        return Raw(kept["x"], kept["y"], kept.get("groups"), names, test_from)
    log.info("reading %s, which takes a while the first time", source.name)
    raw = make()
    if not _writes_nothing.get():
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with atomic_write(path) as temporary, temporary.open("wb") as file:
                arrays: Record = dict(zip(CACHED_FIELDS, raw, strict=False))
                np.savez(
                    file, **{name: arrays[name] for name in arrays if arrays[name] is not None}
                )
        except OSError as error:
            reason = error_line(error)
            log.warning("%s is read anew at each start: %s (%s)", source.name, path.parent, reason)
    return raw


def _make_cache_key(folder: Path, inputs: list[Path], size: int) -> str:
    """Hash name, size and time of each input."""
    # 2: the version of the form in which it is kept.
    digest = hashlib.blake2b(f"2 {size}\n".encode(), digest_size=6)
    for path in inputs:
        with explain_read_errors(path, not_as_published):
            facts = path.stat()
        relative = path.relative_to(folder)
        digest.update(f"{relative} {facts.st_size} {facts.st_mtime_ns}\n".encode())
    return digest.hexdigest()


# ---- Errors


class AbsentFiles(FedpflError):
    """Files of a data set are absent."""


def absent_error(source: Source, reason: str, needed: str) -> FedpflError:
    """Return the error for absent files, which says what to put where."""
    return AbsentFiles(
        f"data set {source.name} is not in data_dir={source.folder} ({reason}): "
        f"put {needed} there, or {source.name}.npz with x and y; dataset=digits works offline"
    )


def corrupt_error(path: Path | str, reason: str) -> FedpflError:
    """Return the error for a wrong file that can be downloaded again."""
    return FedpflError(
        f"{path} is corrupt: {reason}; delete it to have it downloaded again, "
        "or put a good copy there"
    )


def not_as_published(path: Path | str, reason: str) -> FedpflError:
    """Return the error for a wrong file or folder that only the user can replace."""
    return FedpflError(f"{path} is not as published: {reason}; put a good copy there")


@contextmanager
def explain_read_errors(
    path: Path | str, make_error: Callable[[Path | str, str], FedpflError] = corrupt_error
) -> Iterator[None]:
    """Turn a library's error inside the context into one line that names the file.

    Args:
        path: The file that is read.
        make_error: Makes the error from the path and the reason.
    """
    try:
        yield
    except FedpflError:
        raise
    except Exception as error:
        raise make_error(path, error_line(error)) from error


def require_count(path: Path, noun: str, count: int, published: int) -> None:
    """Raise FedpflError if the data set is cut short, or is another edition."""
    if count != published:
        raise not_as_published(path, f"{count:,} {noun}, {published:,} are published")


def error_line(error: BaseException) -> str:
    """Return an error's message as one short line.

    The class stands before messages that say little alone, such as a KeyError's.
    """
    terse = LookupError | TypeError | AttributeError | NameError | ArithmeticError
    return error_text(error, with_class=isinstance(error, terse))[:MAX_MESSAGE]
