"""Read and write single files: never half, never through a link, never waiting for a pipe."""

from __future__ import annotations

import contextlib
import hashlib
import os
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from fedpfl.ground.errors import FedpflError, error_text

# ---- Reading


def content_digest(content: bytes) -> str:
    """Return a digest of 16 bytes, in hexadecimal."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def read_if_exists(path: Path) -> bytes | None:
    """Return a file's content, or None where there is no file.

    Raises:
        FedpflError: If it cannot be read, or is no regular file.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        with open(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise irregular_error(path)
            return file.read()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise unreadable_error(path, error) from None


def require_regular_file(path: Path) -> None:
    """Raise FedpflError for a link, a named pipe or a folder; an absent file passes."""
    with contextlib.suppress(FileNotFoundError):
        if not stat.S_ISREG(path.lstat().st_mode):
            raise irregular_error(path)


# ---- Writing


@contextlib.contextmanager
def explain_write_errors(path: Path, option: str = "hydra.run.dir=...") -> Iterator[None]:
    """Turn an OSError inside the context into a FedpflError that names the path.

    Args:
        path: The file or folder that is written.
        option: The option that chooses another file.
    """
    try:
        yield
    except OSError as error:
        advice = f"make room or set its permissions, or choose another with {option}"
        raise FedpflError(f"cannot write {path}: {error_text(error)}; {advice}") from None


def temporary_path(path: Path) -> Path:
    """Return the name under which a run's file is written until it is complete."""
    # One name, not one per process: the next run writes over the file of a killed one.
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def atomic_write(
    path: Path, temporary: Path | None = None, guard: Callable[[], None] = lambda: None
) -> Iterator[Path]:
    """Yield a temporary name; the file replaces `path` if the context ends without error.

    Args:
        path: The file to write.
        temporary: The temporary name; by default one that no other process writes.
        guard: Raises an error where this process may no longer write to the folder.
    """
    temporary = temporary or path.with_name(f".{os.getpid()}-{path.name}")
    guard()
    try:
        yield temporary
        # Again, as writing took time: without the lock, another run's file must not be replaced.
        guard()
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError, FedpflError):
            guard()
            temporary.unlink(missing_ok=True)
        raise


@contextlib.contextmanager
def atomic_output(path: Path) -> Iterator[Path]:
    """Yield a temporary name for a command's output file, and make its folder.

    Raises:
        FedpflError: If the file system refuses.
    """
    with explain_write_errors(path, "--out"):
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_write(path) as temporary:
            yield temporary


def open_without_link(path: str, flags: int) -> int:
    """Open a file unless a link stands in its place; an opener for `open`."""
    return os.open(path, flags | os.O_NOFOLLOW, 0o666)


@contextlib.contextmanager
def durable_write(
    path: Path,
    guard: Callable[[], None] = lambda: None,
    opener: Callable[[str, int], int] = open_without_link,
) -> Iterator[BinaryIO]:
    """Yield an open file that replaces a run's file once it is on the disk.

    Args:
        path: The file to write.
        guard: See `atomic_write`.
        opener: See `open`.

    Raises:
        FedpflError: If the file system refuses.
    """
    with explain_write_errors(path):
        with (
            atomic_write(path, temporary_path(path), guard) as temporary,
            open(temporary, "wb", opener=opener) as file,
        ):
            yield file
            file.flush()
            os.fsync(file.fileno())
        # The new name is on the disk once the folder is. Not every file system lets one sync it.
        with contextlib.suppress(OSError):
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def write_private(path: Path, content: bytes) -> None:
    """Write a file that its owner alone may read, and its folder. Raises FedpflError."""
    with explain_write_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with durable_write(path, opener=_open_private) as file:
        file.write(content)


def _open_private(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NOFOLLOW, 0o600)


def append_all(descriptor: int, data: bytes) -> None:
    """Append all of the data or, on an error, nothing."""
    # Half a line must not stay in front of the next one.
    size_before = os.fstat(descriptor).st_size
    try:
        bytes_written = os.write(descriptor, data)
        while bytes_written < len(data):
            bytes_written += os.write(descriptor, data[bytes_written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(descriptor, size_before)
        raise


def remove_files(folder: Path, names: Iterable[str]) -> None:
    """Remove files that may exist."""
    for name in names:
        (folder / name).unlink(missing_ok=True)


# ---- Errors in one line


def unreadable_error(path: Path, error: Exception) -> FedpflError:
    """Return the error for a file that may be complete but cannot be read."""
    return FedpflError(
        f"cannot read {path}: {error_text(error)}; once that is fixed, give the same command again"
    )


def damaged_error(path: Path, problem: str = "is damaged") -> FedpflError:
    """Return the error for a run's file that is not as it was written."""
    return FedpflError(
        f"{path} {problem}; restart=true removes the run's files and runs it from the beginning"
    )


def irregular_error(path: Path) -> FedpflError:
    """Return the error for a link, pipe or folder in place of a file."""
    advice = "remove it, or choose another directory with hydra.run.dir=..."
    return FedpflError(f"{path} is not a regular file; {advice}")


def remove_empty_folders(path: Path) -> None:
    """Remove a folder and its empty parents below the working directory."""
    with contextlib.suppress(OSError):
        for folder in (path.absolute(), *path.absolute().parents):
            if folder == Path.cwd():
                return
            # A name may be too long to exist, and its parent was made before it failed.
            if os.path.isdir(folder):
                folder.rmdir()
