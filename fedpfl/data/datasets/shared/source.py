"""Where files are, how they get there, what is kept of slow reading, and what a user reads if
anything is wrong.
"""

from __future__ import annotations

import errno
import hashlib
import logging
import os
import shutil
import stat
import tempfile
import urllib.request
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from http.client import HTTPException
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedpfl.data import npz
from fedpfl.data.datasets.shared.samples import Raw
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.files import atomic_write

log = logging.getLogger(__name__)

MAX_MESSAGE = 300  # letters of another library's message that are shown


_writes_nothing: ContextVar[bool] = ContextVar("writes_nothing", default=False)


class WouldDownload(FedpflError):
    """Files are absent that a run would download first."""


@contextmanager
def without_writing() -> Iterator[None]:
    """While this lasts, download nothing, and keep nothing of what is read below `data_dir`."""
    before = _writes_nothing.set(True)
    try:
        yield
    finally:
        _writes_nothing.reset(before)


class Source(NamedTuple):
    """What a reader is given: the data set's name, the folder `data_dir`, and whether files may be
    downloaded.
    """

    name: str
    folder: Path
    download: bool


def fetch_file(
    source: Source, relative: str, md5: tuple[str, ...], urls: Sequence[str], place: str = ""
) -> Path:
    """Return the file below `data_dir`, its md5 checked; downloaded if it is absent and the user
    allows.

    place: which files the user is to put there, if it is not this one alone. Raises FedpflError.
    """
    path = source.folder / relative
    if path.is_file():
        check_md5(path, md5)
        return path
    if not source.download:
        raise absent_error(
            source, f"{relative} is absent and dataset.download is false", place or relative
        )
    if _writes_nothing.get():
        raise WouldDownload(
            f"data set {source.name} is not in data_dir={source.folder}; a run would download {', '.join(urls)}"
        )
    reasons = []
    for url in urls:
        try:
            _download_file(url, path, md5)
            return path
        except (
            OSError,
            HTTPException,
        ) as error:  # URLError, timeouts and a read-only folder are OSErrors
            reasons.append(error_line(error))
    raise absent_error(
        source,
        f"{relative} is absent and its download failed: {'; '.join(reasons)}",
        place or relative,
    )


def find_folder(source: Source, place: str, *relatives: str) -> Path:
    """Return the first of some folders below `data_dir` that is there; none of them can be
    downloaded.

    place: what the user is to put there. Raises FedpflError if there is none.
    """
    for relative in relatives:
        if (source.folder / relative).is_dir():
            return source.folder / relative
    raise absent_error(
        source, f"{relatives[0]} is absent and has no address to download from", place
    )


@contextmanager
def unpacked_folder(
    source: Source,
    base: str,
    archive: str,
    md5: tuple[str, ...],
    urls: Sequence[str],
    flat: bool = False,
    hint: str = "",
) -> Iterator[Path]:
    """Yield folder `base` below `data_dir`, unpacked from the archive where it is absent.

    flat: the archive holds what is in the folder, not the folder. hint: what else the user may do
    where both are absent. From a `data_dir` that cannot be written to it is unpacked to a temporary
    folder.
    """
    target = source.folder / base
    if target.is_dir():
        yield target
        return
    path = fetch_file(source, archive, md5, urls, f"{archive} (or {base}/, unpacked){hint}")
    writable = os.access(source.folder, os.W_OK) and not _writes_nothing.get()
    with tempfile.TemporaryDirectory(dir=source.folder if writable else None) as scratch:
        inside = Path(scratch) / target.name
        with explain_read_errors(path):
            into = inside if flat else Path(scratch)
            shutil.unpack_archive(path, into, filter=None if path.suffix == ".zip" else "data")
        if not inside.is_dir():
            raise corrupt_error(path, f"it holds no folder {target.name}")
        if not writable:
            yield inside
            return
        if not target.is_dir():  # else another process was first
            target.parent.mkdir(parents=True, exist_ok=True)
            os.replace(inside, target)
    yield target


def _download_file(url: str, path: Path, md5: tuple[str, ...]) -> None:
    """Fetch and check a file. Raises OSError or HTTPException if it cannot be had."""
    log.info("downloading %s to %s", url, path)
    with urllib.request.urlopen(url, timeout=60) as response:
        path.parent.mkdir(
            parents=True, exist_ok=True
        )  # only now: without network nothing is left behind
        with atomic_write(path) as aside:
            with aside.open("wb") as file:
                shutil.copyfileobj(response, file)
            if fault := _describe_md5_mismatch(aside, md5):
                raise OSError(f"{url} gave another file: {fault}")


def check_md5(path: Path, md5: tuple[str, ...]) -> None:
    """Raise FedpflError with both sums if the file is another one."""
    if fault := _describe_md5_mismatch(path, md5):
        raise corrupt_error(path, fault)


def _describe_md5_mismatch(path: Path, md5: tuple[str, ...]) -> str:
    """Both sums, unless the file is the right one."""
    with path.open("rb") as file:
        actual = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    return "" if actual in md5 else f"md5 is {actual}, expected {' or '.join(md5)}"


# What is slow to read

_anew = ContextVar("anew", default=False)


@contextmanager
def without_cache() -> Iterator[None]:
    """Leave `data_dir`/cache alone: everything is read from its files."""
    token = _anew.set(True)
    try:
        yield
    finally:
        _anew.reset(token)


def read_cached(
    source: Source, options: Mapping[str, Any], inputs: Iterable[Path], make: Callable[[], Raw]
) -> Raw:
    """Return what `make` reads from `inputs`, kept in `data_dir`/cache from the second time on.

    It is made again if the options, or name, size or time of any input change. A `data_dir` that
    cannot be written to keeps nothing. Raises FedpflError if an input is missing, or is what one
    would wait for without end (a pipe).
    """
    inputs = sorted(inputs)
    if _anew.get() or not all(path.is_relative_to(source.folder) for path in inputs):
        return make()  # unpacked elsewhere, for this once
    digest = hashlib.blake2b(repr((1, sorted(options.items()))).encode(), digest_size=6)
    for path in inputs:
        try:
            facts = path.stat()
        except OSError:
            raise not_as_published(path, "it is missing") from None
        if not stat.S_ISREG(facts.st_mode):
            raise not_as_published(path, "it is no regular file")
        digest.update(
            f"{path.relative_to(source.folder)} {facts.st_size} {facts.st_mtime_ns}\n".encode()
        )
    path = source.folder / "cache" / f"{source.name}-{digest.hexdigest()}.npz"
    if path.is_file():
        try:
            return _read_cache(path)
        except Exception:  # whatever is wrong with it, it can be made again
            log.warning("%s cannot be read and is made again", path)
    log.info("reading %s, which takes a while the first time", source.name)
    raw = make()
    if _writes_nothing.get():
        return raw
    try:
        _write_cache(raw, path)
    except OSError as error:
        log.warning(
            "%s is read anew at each start: cannot write to %s (%s)",
            source.name,
            path.parent,
            error_line(error),
        )
    return raw


def _write_cache(raw: Raw, path: Path) -> None:
    names = np.array(raw.group_names, np.str_)
    arrays: dict[str, Any] = {
        "x": raw.x,
        "y": raw.y,
        "groups": raw.groups,
        "names": names,
        "test_from": raw.test_from,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as aside, aside.open("wb") as file:
        np.savez(file, **{key: array for key, array in arrays.items() if array is not None})


def _read_cache(path: Path) -> Raw:
    with npz.open_archive(path) as arrays:
        test_from = int(arrays["test_from"]) if "test_from" in arrays else None
        return Raw(
            arrays["x"],
            arrays["y"],
            arrays.get("groups"),
            tuple(arrays["names"].tolist()),
            test_from,
        )


# Errors


class AbsentFiles(FedpflError):
    """Files of a data set are not there."""


def absent_error(source: Source, reason: str, place: str) -> FedpflError:
    """Return that files are not there, and which to put where."""
    return AbsentFiles(
        f"data set {source.name} is not in data_dir={source.folder} ({reason}): put {place} there, or "
        f"{source.name}.npz with x and y; dataset=digits works offline"
    )


def corrupt_error(path: Path | str, reason: str) -> FedpflError:
    """Return that a file that can be downloaded is not the right one."""
    return FedpflError(
        f"{path} is corrupt: {reason}; delete it to have it downloaded again, or put a good copy there"
    )


def not_as_published(path: Path | str, reason: str) -> FedpflError:
    """Return that a file or folder that only the user can replace is not as published."""
    return FedpflError(f"{path} is not as published: {reason}; put a good copy there")


@contextmanager
def explain_read_errors(
    path: Path | str, fault: Callable[[Path | str, str], FedpflError] = corrupt_error
) -> Iterator[None]:
    """Turn whatever a library raises on what it finds in a file into one line that names the file.

    fault: what to say of the file for a reason.
    """
    try:
        yield
    except FedpflError:
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno not in (
            None,
            errno.EINVAL,
        ):  # the system's fault, not the file's
            raise FedpflError(
                f"{path} cannot be read: {error_line(error)}; mend that and start again"
            ) from error
        raise fault(path, error_line(error)) from error


def require_count(path: Path, what: str, count: int, published: int) -> None:
    """Raise FedpflError if the data set has been cut short, or is another edition."""
    if count != published:
        raise not_as_published(path, f"{count:,} {what}, {published:,} are published")


def error_line(error: BaseException) -> str:
    """Return an error's message as one line, not too long, with the error's name where it says
    little alone.
    """
    terse = LookupError | TypeError | AttributeError | NameError | ArithmeticError
    return error_text(error, with_class=isinstance(error, terse))[:MAX_MESSAGE]
