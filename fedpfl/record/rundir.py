"""One run's files, each written so that a kill at any moment leaves something to go on from."""

from __future__ import annotations

import contextlib
import csv
import fcntl
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Self

import numpy as np
import torch

from fedpfl.errors import FedpflError
from fedpfl.record.picture import partition_picture

_REPLACED = ("config.yaml", "rounds.csv", "clients.csv", "summary.json", "state.pt", "partition.npz", "partition.png")

# POSIX locks do not exclude a second opening by the same process, and are lost when that one closes its file.
_held: set[Path] = set()


class RunDirectory:
    """One run's files. One process writes: a lock on `run.lock` is held until `close()`.

    Every method that writes raises FedpflError where the file system refuses (full, read-only).
    """

    def __init__(self, path: Path, identity: str, lock: int):
        self.path = path
        self._identity = identity
        self._lock: int | None = lock
        self._held = path.resolve()
        self._rounds: int | None = None  # open file of rounds.csv
        self._columns: tuple[str, ...] | None = None
        self._restored = False
        self._summary: dict[str, Any] = {}

    @classmethod
    def open(cls, path: Path, config_yaml: str, identity: str) -> Self:
        """Create or reopen the directory and hold it.

        config_yaml: the resolved configuration's text; a finished run keeps the one it had. identity: equal only for
        configurations that compute the same; whoever passes one without the seed keeps one directory per seed.

        Raises FedpflError where another living process holds the directory, it belongs to a different run, or it cannot
        be written.
        """
        path = Path(path)
        try:
            path.mkdir(parents=True, exist_ok=True)
            lock = _take_lock(path)
        except OSError as error:
            raise _refused(path, error) from None
        directory = cls(path, identity, lock)
        try:
            for name in _REPLACED:
                _temporary(path / name).unlink(missing_ok=True)
            directory._read_summary()
            if directory.status != "finished":
                with _replacing(path / "config.yaml") as file:
                    file.write(config_yaml.encode())
        except OSError as error:
            directory.close()
            raise _refused(path, error) from None
        except BaseException:
            directory.close()
            raise
        return directory

    @property
    def status(self) -> str:
        """What the files say: `new`, `interrupted` (begun and not ended), `finished`, `diverged` or `failed`."""
        status = str(self._summary.get("status", "new"))
        return "interrupted" if status == "running" else status

    @property
    def summary(self) -> dict[str, Any]:
        """A copy of what summary.json holds."""
        return dict(self._summary)

    def restore(self, mapped: bool = False) -> dict[str, Any] | None:
        """The last checkpoint (tensors on the CPU), or None; rounds.csv is cut back to it. Call before the first `row`.

        mapped: the tensors stay in the file until they are read.

        Raises FedpflError where state.pt cannot be read, belongs to a different run, or is ahead of rounds.csv.
        """
        self._close_rounds()
        self._columns, self._restored = None, True
        state, rounds = self.path / "state.pt", self.path / "rounds.csv"
        try:
            if not state.exists():
                rounds.unlink(missing_ok=True)
                return None
        except OSError as error:
            raise _refused(rounds, error) from None
        payload = _load(state, mapped)
        if payload.pop("identity", self._identity) != self._identity:
            raise self._other_run()
        header, rows = _whole_rows(rounds)
        kept = [row for number, row in rows if number <= payload["round"]]
        reached = max((number for number, _ in rows if number <= payload["round"]), default=0)
        if reached != payload["round"]:
            raise FedpflError(
                f"{rounds} ends at round {reached} but state.pt is at {payload['round']}; remove {state} to start over"
            )
        if header:
            self._columns = tuple(header)
            text = "".join(map(_line, [header, *kept])).encode()
            if text != rounds.read_bytes():
                with _replacing(rounds) as file:
                    file.write(text)
        return payload

    def row(self, row: Mapping[str, Any]) -> None:
        """Append one round to rounds.csv; numbers are written with full precision, None as an empty cell.

        The first row fixes the columns. Raises ValueError for a later row with an unknown key.
        """
        path = self.path / "rounds.csv"
        try:
            if self._rounds is None:
                if path.exists() and not self._restored:
                    raise RuntimeError("restore() comes before the first row()")
                self._rounds = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
            header = "" if self._columns else _line(list(row))
            columns = self._columns or tuple(row)
            _append(self._rounds, (header + _line(_cells(row, columns))).encode())
            self._columns = columns
        except OSError as error:
            raise _refused(path, error) from None

    def checkpoint(self, payload: Mapping[str, Any]) -> None:
        """Replace state.pt, whole or not at all. `payload["round"]`: the last round whose row is written.

        It may hold tensors, numbers, strings, None, and dicts, lists and tuples of these; anything else could not be
        loaded again safely and raises TypeError.
        """
        if not isinstance(payload.get("round"), int):
            raise TypeError("a checkpoint needs its round, an int")
        plain = _plain({**payload, "identity": self._identity}, "payload")
        try:
            if self._rounds is not None:
                os.fsync(self._rounds)  # the rows reach the disk before the state that relies on them
            with _replacing(self.path / "state.pt") as file:
                torch.save(plain, file)
        except OSError as error:
            raise _refused(self.path / "state.pt", error) from None
        except RuntimeError as error:
            # Torch hides a full disk, or Ctrl-C while it writes, behind an error of its own.
            hidden = error.__context__
            while hidden is not None:
                if isinstance(hidden, OSError):
                    raise _refused(self.path / "state.pt", hidden) from None
                if isinstance(hidden, KeyboardInterrupt):
                    raise hidden from None
                hidden = hidden.__context__
            raise

    def write_clients(self, rows: Sequence[Mapping[str, Any]]) -> None:
        """Replace clients.csv; the first row's keys are the columns. Raises ValueError for a row with other keys."""
        columns = tuple(rows[0]) if rows else ()
        text = "".join([_line(columns), *(_line(_cells(row, columns)) for row in rows)]) if rows else ""
        with _replacing(self.path / "clients.csv") as file:
            file.write(text.encode())

    def write_partition(
        self,
        train: Sequence[np.ndarray],
        test: Sequence[np.ndarray],
        label_counts: np.ndarray,
        title: str,
        validation: Sequence[np.ndarray] = (),
    ) -> None:
        """Write partition.npz and partition.png; once both are there they stay.

        train, test, validation: each client's sample indices; an empty `validation` is left out. label_counts: samples
        `[clients, classes]`.
        """
        arrays, picture = self.path / "partition.npz", self.path / "partition.png"
        if arrays.exists() and picture.exists():
            return
        splits = {"train": train, "test": test} | ({"validation": validation} if len(validation) else {})
        found: dict[str, Any] = {f"{name}_indices": _joined(own) for name, own in splits.items()}
        found |= {f"{name}_offsets": _offsets(own) for name, own in splits.items()}
        with _replacing(arrays) as file:
            np.savez_compressed(file, **found, label_counts=np.asarray(label_counts, dtype=np.int64))
        with _replacing(picture) as file:
            partition_picture(label_counts, file, title)

    def write_summary(self, **fields: Any) -> None:
        """Merge the fields into summary.json; numbers that are not finite become null.

        A new status without an error drops the old error.
        """
        if "status" in fields and "error" not in fields:
            self._summary.pop("error", None)
        self._summary |= {key: _jsonable(value) for key, value in fields.items()} | {"identity": self._identity}
        with _replacing(self.path / "summary.json") as file:
            file.write((json.dumps(self._summary, indent=2, allow_nan=False) + "\n").encode())

    def close(self) -> None:
        """Let go of the directory. Safe to repeat."""
        self._close_rounds()
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None
            _held.discard(self._held)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        try:
            # An interrupt (Ctrl-C, a scheduler's signal) stays `running` on disk, which reads as interrupted.
            if isinstance(error, Exception) and self._summary.get("status") == "running":
                with contextlib.suppress(FedpflError):
                    self.write_summary(status="failed", error=" ".join(f"{type(error).__name__}: {error}".split()))
        finally:
            self.close()

    def _close_rounds(self) -> None:
        if self._rounds is not None:
            os.close(self._rounds)
            self._rounds = None

    def _read_summary(self) -> None:
        path = self.path / "summary.json"
        if not path.exists():
            self.write_summary()  # from here on the directory belongs to this identity
            return
        try:
            summary = json.loads(path.read_text(encoding="utf-8"))
        except ValueError:
            summary = None
        if not isinstance(summary, dict):
            raise FedpflError(f"{path} cannot be read; remove the run directory {self.path} to start over")
        if summary.get("identity") != self._identity:
            raise self._other_run()
        self._summary = summary

    def _other_run(self) -> FedpflError:
        return FedpflError(
            f"run directory {self.path} holds a different run; choose another with hydra.run.dir=... or remove it"
        )


def finished(path: Path) -> bool:
    """Whether the directory says that its run is finished; whose run it is, `RunDirectory.open` tells."""
    try:
        return json.loads((path / "summary.json").read_text(encoding="utf-8"))["status"] == "finished"
    except (OSError, ValueError, TypeError, LookupError):
        return False


def _take_lock(path: Path) -> int:
    if path.resolve() in _held:
        raise _busy(path, str(os.getpid()))
    lock = os.open(path / "run.lock", os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):
        holder = os.read(lock, 32).decode(errors="replace").strip()
        os.close(lock)
        raise _busy(path, holder or "unknown") from None
    except OSError:
        pass  # some cluster file systems have no locks; better to run unguarded than not at all
    _held.add(path.resolve())
    with contextlib.suppress(OSError):
        os.ftruncate(lock, 0)
        os.write(lock, f"{os.getpid()}\n".encode())
    return lock


def _busy(path: Path, pid: str) -> FedpflError:
    return FedpflError(
        f"run directory {path} is in use by process {pid}; wait for it, or choose another with hydra.run.dir=..."
    )


def _refused(path: Path, error: OSError) -> FedpflError:
    reason = error.strerror or type(error).__name__
    return FedpflError(
        f"cannot write {path}: {reason}; make room or set its permissions, or choose another with hydra.run.dir=..."
    )


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


@contextlib.contextmanager
def _replacing(path: Path) -> Iterator[BinaryIO]:
    """A file that takes its place only when it is whole and on the disk; a kill leaves the old one."""
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
        with contextlib.suppress(OSError):  # not every file system lets a directory be synced
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise _refused(path, error) from None
        raise


def _append(file: int, data: bytes) -> None:
    """Write all of it in one go, or nothing: half a line must not stay in front of the next."""
    before = os.fstat(file).st_size
    try:
        written = os.write(file, data)
        while written < len(data):
            written += os.write(file, data[written:])
    except OSError:
        with contextlib.suppress(OSError):
            os.ftruncate(file, before)
        raise


def _line(cells: Sequence[Any]) -> str:
    buffer = io.StringIO()
    csv.writer(buffer, lineterminator="\n").writerow(cells)
    return buffer.getvalue()


def _cells(row: Mapping[str, Any], columns: Sequence[str]) -> list[str]:
    unknown = [key for key in row if key not in columns]
    if unknown:
        raise ValueError(f"unknown column {unknown[0]!r}: the first row fixed {', '.join(columns)}")
    return [_cell(row.get(name)) for name in columns]


def _cell(value: Any) -> str:
    value = _scalar(value)
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else str(value)


def _scalar(value: Any) -> Any:
    """A numpy or torch number as Python's; everything else as it is."""
    if isinstance(value, np.generic) or (isinstance(value, torch.Tensor) and value.ndim == 0):
        return value.item()
    return value


def _jsonable(value: Any) -> Any:
    value = _scalar(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _plain(value: Any, where: str) -> Any:
    """The value as `torch.load(weights_only=True)` takes it back. Raises TypeError naming what it would not."""
    if isinstance(value, torch.Tensor):
        value = value.detach()
        # torch saves the whole storage behind a view.
        return value.clone() if value.untyped_storage().nbytes() > value.nbytes else value
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return {key: _plain(inner, f"{where}[{key!r}]") for key, inner in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_plain(inner, f"{where}[{index}]") for index, inner in enumerate(value))
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise TypeError(f"a checkpoint cannot hold {where} of type {type(value).__name__}")


def _load(path: Path, mapped: bool) -> dict[str, Any]:
    try:
        payload = torch.load(path, map_location="cpu", weights_only=True, mmap=mapped)
        if isinstance(payload, dict) and isinstance(payload.get("round"), int):
            return payload
    except Exception:  # torch raises a dozen kinds for a file that is not what it should be
        pass
    raise FedpflError(f"{path} cannot be read as a checkpoint; remove it to start over")


def _whole_rows(path: Path) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """Header, and each row with its round, up to the first line that is torn; a checkpoint never relies on more."""
    try:
        with path.open(encoding="utf-8", errors="replace", newline="") as file:
            text = file.read()
    except FileNotFoundError:
        return [], []
    except OSError as error:
        raise FedpflError(f"cannot read {path}: {error.strerror}") from None
    rows: list[tuple[int, list[str]]] = []
    header: list[str] = []
    try:
        for cells in csv.reader(io.StringIO(text[: text.rfind("\n") + 1])):
            if not header:
                header = cells
            elif len(cells) != len(header):
                break
            else:
                rows.append((int(cells[header.index("round")]), cells))
    except (ValueError, csv.Error):
        pass
    return header, rows


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(part, np.int64) for part in parts)])


def _offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Client k's indices are `indices[offsets[k]:offsets[k + 1]]`."""
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
