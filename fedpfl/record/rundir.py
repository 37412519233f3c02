"""One run's files, written so that a run killed at any moment can be resumed."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import yaml

from fedpfl.data.fingerprint import FINGERPRINTED_PARTS
from fedpfl.ground import files, lock
from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.records import Record, Values
from fedpfl.ground.release import require_readable
from fedpfl.record import checkpoint, digests, rounds
from fedpfl.record.picture import draw_partition
from fedpfl.record.run_files import (
    differences_from,
    read_checkpoint,
    read_summary_file,
    require_finished_files,
)

_CHECKPOINTED_FILES = ("rounds.csv", "clients.csv", "common.csv")
"""Files that a checkpoint holds a copy of."""
_CHECKED_FILES = (*_CHECKPOINTED_FILES, "config.yaml", "partition.npz", "masks.json")
"""Files of a finished run with a digest in its summary."""
SECRET_FILE = "privacy.key"
"""Holds the seed of a private run's noise and cohorts; removed once the run is finished."""
_RUN_FILES = ("state.pt", *_CHECKED_FILES, "partition.png", SECRET_FILE, "run.log", "summary.json")
"""In the order of their removal: the summary goes last, as it identifies the run."""
_APPEND_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW


@dataclass(frozen=True)
class PartitionRecord:
    """Hold the samples of each client, for partition.npz and its picture.

    Attributes:
        train: each client's indices of training samples.
        test: of test samples.
        label_counts: samples `[clients, classes]`.
        title: of the picture.
        validation: indices of validation samples; left out if empty.
        unseen: the newcomers; left out if empty.
        samples_digest: of the data set.
        client_names: left out if empty.
        class_names: of the picture, which has numbers without.
        sizes: of the picture, where label counts do not add up to them.
        survival: Kaplan-Meier's curves, `[rows, 3]`: client, time, share; left out if empty.
    """

    train: Sequence[np.ndarray]
    test: Sequence[np.ndarray]
    label_counts: np.ndarray
    title: str
    validation: Sequence[np.ndarray] = ()
    unseen: Sequence[int] = ()
    samples_digest: str = ""
    client_names: tuple[str, ...] = ()
    class_names: tuple[str, ...] = ()
    sizes: tuple[int, ...] = ()
    survival: Sequence[Sequence[float]] = ()


class RunDirectory:
    """Write and read one run's files. One process writes: a lock on `run.lock` is held until
    `close()`.

    A method that writes raises FedpflError where the file system refuses (full, read-only), or
    where `run.lock` is gone, for then another process may write there.

    A checkpoint holds the text of the tables up to it, which a resumed run writes anew.
    """

    def __init__(
        self,
        path: Path,
        identity: str,
        lock_handle: int,
        code: Mapping[str, str] | None = None,
    ):
        self.path = path
        self.notes: list[str] = []
        """Lines for the user: what has changed since the run began."""
        self._identity = identity
        self._lock: int | None = lock_handle
        self._rounds_file: int | None = None  # open file of rounds.csv
        self._columns: tuple[str, ...] | None = None
        self._summary: Record = {}
        self._contents: dict[str, bytes] = {}  # the expected content of _CHECKED_FILES
        self._code = code
        self._codes = [code] if code else []  # all code that took part

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
        """Create or reopen the directory and lock it.

        Args:
            path: the directory.
            config_yaml: the resolved configuration's text; a finished run keeps the one it had.
            identity: equal only for configurations that compute the same, with the seed.
            data: fingerprint of the data, None where unknown. A finished run of other data is
                removed to make room.
            code: fingerprint of the code, None where unknown. Other code is noted.
            restart: remove files that an earlier run of this identity wrote.

        Raises:
            FedpflError: another living process holds the directory, it belongs to a different run
                or to none, an unfinished run was begun with other data, a file is damaged, or it
                cannot be written.
        """
        path = Path(path)
        with files.explain_write_errors(path):
            path.mkdir(parents=True, exist_ok=True)
            _require_own_directory(path)
            directory = cls(path, identity, lock.acquire_lock(path), code)
            try:
                directory._prepare(config_yaml, data, restart)
            except BaseException:
                directory.close()
                raise
        return directory

    @property
    def status(self) -> str:
        """Return `new`, `interrupted` (begun and not ended), `finished`, `diverged` or `failed`."""
        status = str(self._summary.get("status", "new"))
        return status if status == "new" else lock.run_status(status, is_held=False)

    @property
    def summary(self) -> Record:
        """Return a copy of the content of summary.json."""
        return dict(self._summary)

    def restore(self, earlier: Values | None = None) -> Record | None:
        """Return the last checkpoint, and make rounds.csv hold the rows up to it.

        Call before the first `row`. Its tensors are on the CPU, and stay in the file until they are
        read.

        Args:
            earlier: a checkpoint of another run, for a run that has none.

        Returns:
            The checkpoint, or None.

        Raises:
            FedpflError: state.pt is damaged, cannot be read or belongs to a different run.
        """
        # ---- Step 1: the checkpoint, and the texts that it holds.
        if (self.path / "state.pt").exists():
            earlier = read_checkpoint(self.path, self._summary)
        payload = dict(earlier or {})
        payload.pop("identity", None)
        texts = payload.pop("files", {})

        # ---- Step 2: files that it does not hold are from after it.
        self._remove([name for name in _CHECKPOINTED_FILES if name not in texts])
        if earlier is None:
            return None

        # ---- Step 3: files that it holds are as they were then.
        for name in texts:
            self._write(name, texts[name].encode())
        if texts.get("rounds.csv"):
            self._columns = tuple(rounds.parse_cells(texts["rounds.csv"])[0])
        self._note_other_code(payload.pop("codes", []))
        return payload

    def secret(self) -> str:
        """Return the private run's secret in hexadecimal digits; it is made when the run begins.

        Only the file's owner may read it, and no other file of the run holds it.

        Raises:
            FedpflError: it is not the one that the run began with.
        """
        recorded_digest = self._summary.get("secret")
        if recorded_digest is None:
            # From the operating system: a function of the run's seed would be no secret.
            key = secrets.token_bytes(32)
            self._require_lock()
            files.write_private(self.path / SECRET_FILE, key)
            self.write_summary(secret=files.content_digest(key))
            return key.hex()
        content = files.read_if_exists(self.path / SECRET_FILE)
        if content is None or files.content_digest(content) != recorded_digest:
            raise files.damaged_error(
                self.path / SECRET_FILE,
                "is not what the run began with, without which its noise cannot go on",
            )
        return content.hex()

    def row(self, row: Values) -> None:
        """Append one round to rounds.csv; the first row fixes the columns.

        Raises:
            FedpflError: a later row has an unknown key.
        """
        path = self.path / "rounds.csv"
        self._require_lock()
        columns = self._columns or tuple(row)
        if new_columns := [name for name in row if name not in columns]:  # the code has changed
            raise files.damaged_error(
                path, f"has other columns than rounds now have, such as {new_columns[0]!r}"
            )
        text = rounds.format_row(row.get(name) for name in columns)
        if self._columns is None:
            text = rounds.format_row(columns) + text
        line = text.encode()
        with files.explain_write_errors(path):
            if self._rounds_file is None:
                self._rounds_file = os.open(path, _APPEND_FLAGS, 0o644)
            files.append_all(self._rounds_file, line)
        self._columns = columns
        self._contents["rounds.csv"] = self._contents.get("rounds.csv", b"") + line

    def checkpoint(self, payload: Values) -> None:
        """Replace state.pt, whole or not at all.

        Args:
            payload: tensors, numbers, strings, None, and dicts, lists and tuples of these;
                `payload["round"]` is the last round with a written row.

        Raises:
            TypeError: the payload holds anything else, which could not be loaded again safely.
        """
        # Inside, as files are written at other times: after a kill they would be of other rounds.
        texts = {
            name: self._contents[name].decode()
            for name in _CHECKPOINTED_FILES
            if name in self._contents
        }
        fields = {"identity": self._identity, "files": texts, "codes": self._codes}
        plain_values = checkpoint.to_plain_values({**payload, **fields})
        with files.durable_write(self.path / "state.pt", self._require_lock) as file:
            checkpoint.save_checkpoint(plain_values, file)

    def drop_checkpoint(self) -> None:
        """Remove state.pt, without which a finished run is as finished."""
        self._remove(["state.pt"])

    def write_clients(self, rows: Sequence[Values], name: str = "clients.csv") -> None:
        """Replace a table with a row per client; their keys are the columns."""
        lines = [rounds.format_row(row.values()) for row in rows]
        if rows:
            lines.insert(0, rounds.format_row(rows[0]))
        self._write(name, "".join(lines).encode())

    def write_partition(self, record: PartitionRecord, has_picture: bool = False) -> None:
        """Write partition.npz, and partition.png if a callback may show it."""
        # Samples of all clients in one array; client k's are indices[offsets[k] : offsets[k + 1]].
        arrays: Record = {}
        for name in ("train", "test", "validation"):
            parts = getattr(record, name)
            if len(parts):
                arrays[f"{name}_indices"] = np.concatenate(parts).astype(np.int64)
                arrays[f"{name}_offsets"] = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        for name in ("unseen", "client_names", "samples_digest", "survival"):
            values = getattr(record, name)
            if len(values):
                arrays[name] = np.array(values)
        arrays["label_counts"] = np.asarray(record.label_counts, dtype=np.int64)
        archive = io.BytesIO()
        np.savez_compressed(archive, **arrays)
        self._write("partition.npz", archive.getvalue())
        if has_picture and not (self.path / "partition.png").exists():
            picture = io.BytesIO()
            draw_partition(
                record.label_counts,
                picture,
                record.title,
                record.client_names,
                record.class_names,
                record.sizes,
            )
            self._write("partition.png", picture.getvalue())

    def write_masks(self, masks: Values | None) -> None:
        """Replace masks.json; None writes nothing."""
        if masks is not None:
            self._write("masks.json", f"{json.dumps(masks)}\n".encode())

    def write_summary(self, **fields: Any) -> None:
        """Merge the fields into summary.json; numbers that are not finite become null.

        A new status without an error drops the old error. With the status `finished` the summary
        has digests of all files.
        """
        # ---- Step 1: a finished run is known by the digests of its files.
        is_finishing = fields.get("status") == "finished"
        if is_finishing:
            fields["files"] = self._final_digests()

        # ---- Step 2: the summary and its digest.
        summary = dict(self._summary)
        if "status" in fields:
            summary.pop("error", None)
        summary |= {key: _to_json_value(value) for key, value in fields.items()}
        summary["identity"] = self._identity
        if self._codes:
            summary["code"] = self._codes
        with_digest = {**summary, "digest": digests.summary_digest(summary)}
        text = json.dumps(with_digest, indent=2, allow_nan=False)
        self._write("summary.json", f"{text}\n".encode())
        self._summary = summary

        # ---- Step 3: what only an unfinished run needs.
        if is_finishing:
            self._remove([SECRET_FILE])

    def _final_digests(self) -> dict[str, str]:
        """Return the digests of all files, as this run wrote them."""
        with files.explain_write_errors(self.path / "rounds.csv"):
            if self._rounds_file is not None:
                # Rows were appended without waiting for the disk.
                os.fsync(self._rounds_file)
        file_digests = {
            name: files.content_digest(content) for name, content in self._contents.items()
        }
        state = self.path / "state.pt"
        if state.exists():
            file_digests["state.pt"] = checkpoint.checkpoint_digest(state)
        return file_digests

    def close(self) -> None:
        """Unlock the directory. Safe to repeat."""
        if self._lock is not None:
            if self._rounds_file is not None:
                os.close(self._rounds_file)
            os.close(self._lock)
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

    def _prepare(self, config_yaml: str, data: str | None, restart: bool) -> None:
        """Check the content, and make the directory ready to be written unless it is finished."""
        # ---- Step 1: refuse the directory of another run.
        temporary_names = [files.temporary_path(self.path / name).name for name in _RUN_FILES]
        self._remove(temporary_names)
        self._summary, is_intact = read_summary_file(self.path)
        if not restart:
            require_readable(self.path, self._summary)
        if self._summary.get("identity", self._identity) != self._identity:
            raise self._other_run_error(config_yaml)
        recorded_data = self._summary.get("data")
        has_other_data = None not in (data, recorded_data) and data != recorded_data

        # ---- Step 2: remove, refuse or keep its files.
        if restart:
            self._remove_all()
        elif not is_intact:
            raise files.damaged_error(self.path / "summary.json")
        elif has_other_data and self.status == "finished":
            self.notes.append("data        changed since the run finished: run from the beginning")
            self._remove_all()
        elif has_other_data:
            raise files.damaged_error(
                self.path, f"was begun with other data ({FINGERPRINTED_PARTS})"
            )
        elif self.status == "finished":
            require_finished_files(self.path, self._summary)
            self._note_other_code(self._summary.get("code", []))
            # A kill right after the end may have left it.
            self._remove([SECRET_FILE])
            return

        # ---- Step 3: from here on the directory belongs to this identity.
        if not self._summary or data not in (None, self._summary.get("data")):
            self.write_summary(data=data)
        self._write("config.yaml", config_yaml.encode())

    def _note_other_code(self, codes: list[Mapping[str, str]]) -> None:
        """Note where other code took part in the run so far."""
        if self._code and any(code != self._code for code in codes):
            self.notes.append(
                "code        of the method changed since the run began; restart=true runs it anew"
            )
        self._codes = [*codes, *(code for code in self._codes if code not in codes)]

    def _remove_all(self) -> None:
        self._remove(_RUN_FILES)
        self._summary = {}

    def _remove(self, names: Sequence[str]) -> None:
        self._require_lock()
        with files.explain_write_errors(self.path):
            files.remove_files(self.path, names)

    def _write(self, name: str, content: bytes) -> None:
        """Write a file unless it has this content, and remember the content."""
        # An equal file keeps its time, which tells when the run last did something.
        if files.read_if_exists(self.path / name) != content:
            with files.durable_write(self.path / name, self._require_lock) as file:
                file.write(content)
        if name in _CHECKED_FILES:
            self._contents[name] = content

    def _require_lock(self) -> None:
        """Raise FedpflError where run.lock was replaced: another process may hold the new one."""
        assert self._lock is not None, "the run directory is closed"
        if not lock.is_current_lock(self._lock, self.path):
            raise FedpflError(
                f"{self.path / 'run.lock'} was removed or replaced while the run went on, so "
                "another process may write there; see that none does, and give the same command "
                "again"
            )

    def _other_run_error(self, config_yaml: str) -> FedpflError:
        differences = differences_from(self.path, yaml.safe_load(config_yaml))
        remark = f" ({differences})" if differences else ""
        return FedpflError(
            f"run directory {self.path} holds a different run{remark}; "
            "choose another with hydra.run.dir=... or remove it"
        )


class NullRunDirectory:
    """Run directory of ranks that write nothing: every method is a no-op."""

    def __init__(self, path: Path):
        # None on another machine; mapped tensors then go to the folder of temporary files.
        self.path = path if path.is_dir() else None
        self.summary: Record = {}

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def _require_own_directory(path: Path) -> None:
    """Raise FedpflError for a directory that holds links, or files but no run."""
    for name in (*_RUN_FILES, "run.lock"):
        files.require_regular_file(path / name)
        files.require_regular_file(files.temporary_path(path / name))
    # Hydra may have put its .hydra there, and a run that was killed early has left its lock.
    names = [name for name in os.listdir(path) if not name.startswith(".") and name != "run.lock"]
    if names and not read_summary_file(path)[0]:
        raise FedpflError(
            f"{path} holds {min(names)} and no run; choose a new or an empty directory with "
            "hydra.run.dir=..."
        )


def _to_json_value(value: Any) -> Any:
    value = rounds.to_python_number(value)
    if isinstance(value, Mapping):
        return {str(key): _to_json_value(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return str(value) if isinstance(value, Path) else value
