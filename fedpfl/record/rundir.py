"""One run's files, each written so that a kill at any moment leaves something to go on from."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml

from fedpfl.data.fingerprint import FINGERPRINTED_PARTS
from fedpfl.data.provenance import Provenance
from fedpfl.ground import files, lock
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.identity import describe_differences
from fedpfl.ground.release import require_readable
from fedpfl.record import checkpoint, digests, rounds
from fedpfl.record.picture import partition_png

_BESIDE = ("rounds.csv", "clients.csv", "common.csv")  # what a checkpoint holds a copy of
_KEPT = (
    *_BESIDE,
    "config.yaml",
    "partition.npz",
    "masks.json",
)  # by what a finished run is checked
SECRET_FILE = "privacy.key"
"""What a private run's noise and cohorts are drawn from: gone once it is finished, when nobody
needs it.
"""
_REPLACED = (*_KEPT, "summary.json", "state.pt", "partition.png", SECRET_FILE)
_CLEARED = "cleared"  # in the summary of a run whose files are being removed


class RunDirectory:
    """Write and read one run's files. One process writes: a lock on `run.lock` is held until
    `close()`.

    A method that writes raises FedpflError where the file system refuses (full, read-only), or
    where `run.lock` is gone, for then another process may write there.

    A checkpoint holds the text of the files that belong to it, which are written anew from it.
    `digests` has what readers know the files by.
    """

    def __init__(self, path: Path, identity: str, held: int, code: Mapping[str, str] | None = None):
        self.path = path
        self.notes: list[str] = []
        """Lines for the user: what has changed since the run began."""
        self._identity = identity
        self._lock: int | None = held
        self._held = path.resolve()
        self._rounds: int | None = None  # open file of rounds.csv
        self._rows: Any = None  # digest of what is in it
        self._notes: digests.DigestNotes | None = None
        self._columns: tuple[str, ...] | None = None
        self._restored = False
        self._summary: dict[str, Any] = {}
        self._written: dict[str, bytes] = {}  # what must be in the files of _KEPT
        self._code = code
        self._codes = [code] if code else []  # all that took part

    @classmethod
    def open(
        cls,
        path: Path,
        config_yaml: str,
        identity: str,
        data: str | None = None,
        code: Mapping[str, str] | None = None,
        restart: bool = False,
    ) -> Self:
        """Create or reopen the directory and hold it.

        config_yaml: the resolved configuration's text; a finished run keeps the one it had.
        identity: equal only for configurations that compute the same; whoever passes one without
        the seed keeps one directory per seed. data,
        code: what else the numbers come from; None where unknown. A finished run of other data is
        removed to make place; other code is noted. restart: remove what an earlier run of this
        identity wrote.

        Raises FedpflError where another living process holds the directory, it belongs to a
        different run or to none, an unfinished run was begun with other data, a file is damaged, or
        it cannot be written.
        """
        path = Path(path)
        with files.explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            new = _is_new(path)
            directory = cls(path, identity, lock.acquire_lock(path), code)
            try:
                directory._begin(config_yaml, data, restart)
            except BaseException:
                if new:
                    with contextlib.suppress(OSError):
                        files.remove_files(path, *_REPLACED, digests.NOTES_FILE, "run.lock")
                directory.close()
                raise
        return directory

    @property
    def status(self) -> str:
        """Return what the files say: `new`, `interrupted` (begun and not ended), `finished`,
        `diverged` or `failed`.
        """
        status = str(self._summary.get("status", "new"))
        return status if status == "new" else lock.run_status(status, is_held=False)

    @property
    def summary(self) -> dict[str, Any]:
        """Return a copy of what summary.json holds."""
        return dict(self._summary)

    def restore(self, earlier: Mapping[str, Any] | None = None) -> dict[str, Any] | None:
        """Return the last checkpoint, else `earlier` (of another run), or None; the rows are those
        up to it.

        Call before the first `row`. Its tensors are on the CPU, and stay in the file until they are
        read.

        Raises FedpflError where state.pt is damaged, cannot be read or belongs to a different run.
        """
        self._close_files()
        self._columns, self._restored = None, True
        if (self.path / "state.pt").exists():
            earlier = read_checkpoint(self.path, self._summary)
        if earlier is not None and "files" not in earlier:
            raise files.damaged_error(self.path / "state.pt", "is of an older version")
        payload = {
            key: value for key, value in (earlier or {}).items() if key not in ("identity", "data")
        }
        texts = payload.pop("files", {})
        self._guard()
        with files.explain_write_errors(self.path / "rounds.csv"):
            files.remove_files(self.path, *(name for name in _BESIDE if name not in texts))
        if earlier is None:
            return None
        for name in texts:
            self._write(name, texts[name].encode())
        if texts.get("rounds.csv"):
            self._columns = tuple(
                rounds.parse_cells(texts["rounds.csv"].partition("\n")[0] + "\n")[0]
            )
        self._compare(payload.pop("codes", []))
        return payload

    def secret(self) -> str:
        """Return the private run's secret in hexadecimal digits; it is made when the run begins.

        Nobody else on the machine may read it, and nothing else of the run holds it.

        Raises FedpflError where it is not the one that the run began with.
        """
        noted = self._summary.get("secret")
        if noted is None:
            key = secrets.token_bytes(32)
            with files.durable_write(
                self.path / SECRET_FILE, self._guard, opener=_open_private
            ) as file:
                file.write(key)
            self.write_summary(secret=files.content_digest(key))
            return key.hex()
        content = files.read_if_exists(self.path / SECRET_FILE)
        if content is None or files.content_digest(content) != noted:
            how = "is not what the run began with, without which its noise cannot go on"
            raise files.damaged_error(self.path / SECRET_FILE, how)
        return content.hex()

    def row(self, row: Mapping[str, Any]) -> None:
        """Append one round to rounds.csv; numbers are written with full precision, None as an empty
        cell.

        The first row fixes the columns. Raises FedpflError for a later row with an unknown key.
        """
        path = self.path / "rounds.csv"
        self._guard()
        header = "" if self._columns else rounds.format_row(row)
        columns = self._columns or tuple(row)
        try:
            line = (header + _line(row, columns)).encode()
        except ValueError as error:  # the code has changed
            raise files.damaged_error(
                path, f"has other columns than rounds now have: {error}"
            ) from None
        with files.explain_write_errors(path):
            if self._rounds is None:
                if path.exists() and not self._restored:
                    raise RuntimeError("restore() comes before the first row()")
                self._rows = self._noted.of(self._written.get("rounds.csv", b""))
                self._rounds = os.open(
                    path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644
                )
            self._rows.update(line)
            self._noted.add("rounds.csv", self._rows)
            files.append_all(self._rounds, line)
        self._columns = columns
        self._written["rounds.csv"] = self._written.get("rounds.csv", b"") + line

    def checkpoint(self, payload: Mapping[str, Any]) -> None:
        """Replace state.pt, whole or not at all. `payload["round"]`: the last round whose row is
        written.

        It may hold tensors, numbers, strings, None, and dicts, lists and tuples of these; anything
        else could not be loaded again safely and raises TypeError. Raises FedpflError where the
        rows are no longer in rounds.csv.
        """
        if not isinstance(payload.get("round"), int):
            raise TypeError("a checkpoint needs its round, an int")
        texts = {name: self._written[name].decode() for name in _BESIDE if name in self._written}
        beside = {"identity": self._identity, "data": self._summary.get("data")}
        beside |= {"files": texts, "codes": self._codes}
        plain = checkpoint.to_plain_values({**payload, **beside})
        self._check("rounds.csv")
        with files.durable_write(self.path / "state.pt", self._guard) as file:
            checkpoint.save_checkpoint(plain, file)

    def drop_checkpoint(self) -> None:
        """Remove state.pt, without which a finished run is as finished."""
        self._guard()
        with files.explain_write_errors(self.path / "state.pt"):
            files.remove_files(self.path, "state.pt")

    def write_clients(self, rows: Sequence[Mapping[str, Any]], name: str = "clients.csv") -> None:
        """Replace a table with a row per client; the first row's keys are the columns.

        Raises ValueError for a row with other keys.
        """
        columns = tuple(rows[0]) if rows else ()
        text = (
            "".join([rounds.format_row(columns), *(_line(row, columns) for row in rows)])
            if rows
            else ""
        )
        self._write(name, text.encode())

    def write_partition(
        self,
        train: Sequence[np.ndarray],
        test: Sequence[np.ndarray],
        label_counts: np.ndarray,
        title: str,
        validation: Sequence[np.ndarray] = (),
        unseen: Sequence[int] = (),
        trained: Provenance | None = None,
    ) -> None:
        """Write partition.npz, and partition.png where it is not there.

        train, test, validation: each client's sample indices. label_counts: samples `[clients,
        classes]`. unseen: who never takes part. An empty `validation` or `unseen` is left out.
        trained: on what the run's models are.
        """
        splits = {"train": train, "test": test} | (
            {"validation": validation} if len(validation) else {}
        )
        arrays: dict[str, Any] = {
            f"{name}_indices": _joined(parts) for name, parts in splits.items()
        }
        arrays |= {f"{name}_offsets": _offsets(parts) for name, parts in splits.items()}
        arrays |= {"unseen": np.array(unseen, dtype=np.int64)} if len(unseen) else {}
        arrays |= trained.to_arrays() if trained else {}
        packed = io.BytesIO()
        np.savez_compressed(packed, **arrays, label_counts=np.asarray(label_counts, dtype=np.int64))
        self._write("partition.npz", packed.getvalue())
        if not (self.path / "partition.png").exists():
            self._write("partition.png", partition_png(label_counts, title))

    def write_masks(self, masks: Mapping[str, Any] | None) -> None:
        """Replace masks.json; None: there are none."""
        if masks is not None:
            self._write("masks.json", f"{json.dumps(masks)}\n".encode())

    def write_summary(self, **fields: Any) -> None:
        """Merge the fields into summary.json; numbers that are not finite become null.

        A new status without an error drops the old error. Raises FedpflError for `finished` where a
        file of the run is not there as it was written.
        """
        if ends := fields.get("status") == "finished":
            self._check(*self._written)
            with files.explain_write_errors(self.path / "rounds.csv"):
                if self._rounds is not None:
                    os.fsync(self._rounds)
            fields["files"] = {
                name: files.content_digest(content) for name, content in self._written.items()
            }
            if (state := self.path / "state.pt").exists():
                fields["files"]["state.pt"] = checkpoint.checkpoint_digest(state)
        elif self.status != "finished":
            fields["files"] = {}  # they are noted
        summary = {
            key: value
            for key, value in self._summary.items()
            if key != "error" or "status" not in fields
        }
        summary |= {key: _jsonable(value) for key, value in fields.items()} | {
            "identity": self._identity
        }
        summary |= {"code": self._codes} if self._codes else {}
        text = json.dumps(
            {**summary, "digest": digests.summary_digest(summary)}, indent=2, allow_nan=False
        )
        self._write("summary.json", f"{text}\n".encode())
        self._summary = summary
        if ends:
            self._close_files()
            with files.explain_write_errors(self.path / digests.NOTES_FILE):
                files.remove_files(self.path, digests.NOTES_FILE, SECRET_FILE)

    def close(self) -> None:
        """Let go of the directory. Safe to repeat."""
        self._close_files()
        if self._lock is not None:
            lock.release_lock(self._lock, self._held)
            self._lock = None

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: object
    ) -> None:
        try:
            # An interrupt (Ctrl-C, a scheduler's signal) stays `running` on disk, which reads as
            # interrupted.
            if isinstance(error, Exception) and self._summary.get("status") == "running":
                with contextlib.suppress(FedpflError):
                    self.write_summary(status="failed", error=error_text(error, with_class=True))
        finally:
            self.close()

    def _begin(self, config_yaml: str, data: str | None, restart: bool) -> None:
        """Look at what is there, and make it ready to be written unless it is finished."""
        files.remove_files(
            self.path, *(files.temporary_path(self.path / name).name for name in _REPLACED)
        )
        self._summary, whole = _read_summary(self.path)
        if not restart:
            require_readable(self.path, self._summary)
        if self._summary.get("identity", self._identity) != self._identity:
            raise self._other_run(config_yaml)
        known = self._summary.get("data")
        other = None not in (data, known) and data != known
        if restart or self._summary.get(_CLEARED):
            if not restart:
                self.notes.append(
                    "files       of a run that an earlier command began to remove are gone: run anew"
                )
            self._clear()
        elif not whole:
            raise files.damaged_error(self.path / "summary.json")
        elif other and self.status == "finished":
            self.notes.append("data        changed since the run finished: run from the beginning")
            self._clear()
        elif other:
            raise files.damaged_error(
                self.path, f"was begun with other data ({FINGERPRINTED_PARTS})"
            )
        elif self.status == "finished" and self._is_whole():
            self._compare(self._summary.get("code", []))
            files.remove_files(
                self.path, digests.NOTES_FILE, SECRET_FILE
            )  # which a kill right after the end may have left
            return
        if not self._summary or data not in (None, self._summary.get("data")):
            self.write_summary(data=data)  # from here on the directory belongs to this identity
        self._write("config.yaml", config_yaml.encode())

    def _is_whole(self) -> bool:
        """Tell whether a finished run's files are as it left them; what state.pt can mend makes it
        unfinished again.

        Raises FedpflError where state.pt cannot: it is gone (as it may be), of an older version, or
        damaged itself.
        """
        state, wrong = self.path / "state.pt", ""
        known = {"config.yaml": None, "rounds.csv": None} | self._summary.get("files", {})
        known.pop("state.pt", None)
        for name, digest in known.items():
            content = files.read_if_exists(self.path / name)
            if content is None or digest not in (None, files.content_digest(content)):
                wrong = f"{name} is {'missing' if content is None else 'damaged'}"
        if state.exists():
            _same(state, self._summary)
            checkpoint.check_checkpoint(state)
        if not wrong:
            return True
        if not ("files" in self._summary and state.exists()):
            raise files.damaged_error(self.path, f"is finished, but {wrong}")
        self.notes.append(f"files       {wrong}: written anew from state.pt")
        del self._summary["status"]
        self._summary.pop("secret", None)  # which went when the run was finished
        return False

    def _compare(self, codes: list[Mapping[str, str]]) -> None:
        """Note where other code took part in what there is."""
        if self._code and any(code != self._code for code in codes):
            self.notes.append(
                "code        of the method changed since the run began; restart=true runs it anew"
            )
        self._codes = [*codes, *(code for code in self._codes if code not in codes)]

    def _clear(self) -> None:
        """Remove what the run wrote, and say so before, so that after a kill the next command does
        the same.
        """
        self._summary = {}
        self.write_summary(**{_CLEARED: True})
        files.remove_files(
            self.path,
            *(name for name in _REPLACED if name != "summary.json"),
            digests.NOTES_FILE,
            "run.log",
        )
        self._summary = {}

    def _write(self, name: str, content: bytes) -> None:
        """Make a file hold this, and remember it."""
        if name in _KEPT:
            self._guard()
            with files.explain_write_errors(self.path / digests.NOTES_FILE):
                self._noted.add(name, self._noted.of(content))
        if files.read_if_exists(self.path / name) != content:
            with files.durable_write(self.path / name, self._guard) as file:
                file.write(content)
        if name in _KEPT:
            self._written[name] = content

    @property
    def _noted(self) -> digests.DigestNotes:
        """What the files are known by until the run is finished. The summary tells by now whose
        they are.
        """
        if self._notes is None:
            self._notes = digests.DigestNotes(self.path, self._summary)
        return self._notes

    def _check(self, *names: str) -> None:
        """Raise FedpflError where a file is not as this process wrote it."""
        self._guard()
        for name in names:
            if (
                name in self._written
                and files.read_if_exists(self.path / name) != self._written[name]
            ):
                raise FedpflError(
                    f"{self.path / name} was changed or removed while the run went on; see that nothing else writes "
                    "there, and give the same command again"
                )

    def _guard(self) -> None:
        """Raise FedpflError where run.lock is no longer the file that is held: another process may
        hold another.
        """
        assert self._lock is not None, "the run directory is closed"
        if not lock.is_current_lock(self._lock, self.path):
            raise FedpflError(
                f"{self.path / 'run.lock'} was removed or replaced while the run went on, so another process may write "
                "there; see that none does, and give the same command again"
            )

    def _close_files(self) -> None:
        if self._rounds is not None:
            os.close(self._rounds)
        if self._notes is not None:
            self._notes.close()
        self._rounds = self._notes = None

    def _other_run(self, config_yaml: str) -> FedpflError:
        differing = differences_from(self.path, yaml.safe_load(config_yaml))
        return FedpflError(
            f"run directory {self.path} holds a different run{f' ({differing})' if differing else ''}; "
            "choose another with hydra.run.dir=... or remove it"
        )


def differences_from(path: Path, config: Any) -> str:
    """Return by which keys the run in a directory is another than that of `config`, "" where it
    cannot be told.
    """
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        there = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        if isinstance(there, Mapping) and isinstance(config, Mapping):
            return describe_differences(there, config)
    return ""


def read_finished_run(path: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the summary and the checkpoint of a finished run. Raises FedpflError where it is none
    or has none.
    """
    summary, whole = _read_summary(path)
    if not whole:
        raise files.damaged_error(path / "summary.json")
    require_readable(path, summary)
    if summary.get("status") != "finished":
        raise FedpflError(
            f"{path} holds no finished run; give the directory of one, outputs/.../seed..."
        )
    if not (path / "state.pt").exists():
        raise FedpflError(
            f"{path} has no state.pt, as of a run with checkpoint.keep=false; run it anew"
        )
    return summary, read_checkpoint(path, summary)


def read_checkpoint(path: Path, summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the checkpoint in a run directory, as `checkpoint.load` does.

    summary: of the run. Raises FedpflError where it is damaged, cannot be read, or is not this
    run's, on its data and by its code; of older runs not all of these are known.
    """
    state = path / "state.pt"
    _same(state, summary)
    payload = checkpoint.load_checkpoint(state)
    for key, whose in (("identity", "a different run"), ("data", "a run on other data")):
        if None not in (known := summary.get(key), own := payload.get(key)) and known != own:
            raise files.damaged_error(state, f"belongs to {whose}")
    if any(code not in summary.get("code", []) for code in payload.get("codes", [])):
        raise files.damaged_error(state, "belongs to a run by other code")
    return payload


def read_provenance(path: Path, summary: Mapping[str, Any]) -> Provenance | None:
    """Return what a run's models were trained on, None where an older version did not note it.

    Raises FedpflError where partition.npz is not as the run wrote it.
    """
    content = files.read_if_exists(path / "partition.npz")
    digests.check_content(path, summary, "partition.npz", content)
    if content is None:
        return None
    return Provenance.from_arrays(np.load(io.BytesIO(content), allow_pickle=False))


def _open_private(path: str, flags: int) -> int:
    """Open a file that nobody but its owner may read."""
    return os.open(path, flags | os.O_EXCL | os.O_NOFOLLOW, 0o600)


def _same(state: Path, summary: Mapping[str, Any]) -> None:
    """Raise FedpflError where a finished run's checkpoint is another than the one it ended with."""
    known = summary.get("files", {}).get("state.pt")
    if summary.get("status") == "finished" and known not in (
        None,
        checkpoint.checkpoint_digest(state),
    ):
        raise files.damaged_error(state, "is not the one that the run ended with")


class NullRunDirectory:
    """Stand in for a run directory in a process that writes nothing: what it is told it forgets."""

    def __init__(self, path: Path):
        self.path = (
            path if path.is_dir() else None
        )  # on another machine; what is mapped then goes where such files go

    def __getattr__(self, name: str) -> Any:
        return lambda *given, **named: None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        """Close nothing."""


def _is_new(path: Path) -> bool:
    """Tell whether no run has begun in the directory. Raises FedpflError where it is somebody
    else's.
    """
    for name in (*_REPLACED, digests.NOTES_FILE, "run.log", "run.lock"):
        files.require_regular_file(path / name)
        files.require_regular_file(files.temporary_path(path / name))
    # Hydra may have put its .hydra there, and a run that was killed at once has left its lock.
    names = [name for name in os.listdir(path) if not name.startswith(".") and name != "run.lock"]
    if names and not _read_summary(path)[0]:
        raise FedpflError(
            f"{path} holds {min(names)} and no run; choose a new or an empty directory with hydra.run.dir=..."
        )
    return not names


def _read_summary(path: Path) -> tuple[dict[str, Any], bool]:
    """Return what summary.json holds, {} where there is none, and whether it is as it was written."""
    content = files.read_if_exists(path / "summary.json")
    if content is None:
        return {}, True
    try:
        summary = json.loads(content)
    except (ValueError, RecursionError):
        summary = None
    if not isinstance(summary, dict) or "identity" not in summary:
        raise FedpflError(
            f"{path / 'summary.json'} cannot be read as a run's; choose another directory with hydra.run.dir=..., or "
            f"remove {path} if that was a run"
        )
    return {
        key: value for key, value in summary.items() if key != "digest"
    }, digests.is_summary_intact(summary)


def _line(row: Mapping[str, Any], columns: Sequence[str]) -> str:
    unknown = [key for key in row if key not in columns]
    if unknown:
        raise ValueError(f"unknown column {unknown[0]!r}: the first row fixed {', '.join(columns)}")
    return rounds.format_row(row.get(name) for name in columns)


def _jsonable(value: Any) -> Any:
    value = rounds.to_python_number(value)
    if isinstance(value, Mapping):
        return {str(key): _jsonable(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, np.int64), *(np.asarray(part, np.int64) for part in parts)])


def _offsets(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Return offsets: client k's indices are `indices[offsets[k]:offsets[k + 1]]`."""
    return np.cumsum([0, *(len(part) for part in parts)], dtype=np.int64)
