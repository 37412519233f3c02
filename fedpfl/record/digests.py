"""Digests of a run's files, by which every reader knows whether they are as the run wrote them.

Those of a finished run stand in summary.json. Until then the digest of a file's next content is
noted in run.sums before the file is written, so that neither a kill nor a copy made while the run
goes on leaves anything that is not noted.
"""

from __future__ import annotations

import hashlib
import json
import os
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError

NOTES_FILE = "run.sums"


class DigestNotes:
    """Note the next contents of files. Raises OSError as the file system does.

    Args:
        folder: the run directory.
        summary: the summary of the run.
    """

    def __init__(self, folder: Path, summary: Mapping[str, Any]):
        self._path = folder / NOTES_FILE
        self._summary = dict(summary)
        self._notes = _read_notes(folder)
        self._file: int | None = None

    def of(self, content: bytes) -> Any:
        """Return the digest of a content, to which `update` adds more."""
        return _run_digest(self._summary, content)

    def add(self, name: str, digest: Any) -> None:
        """Note a file's next content."""
        # Before the content: after a kill in between the former content is noted, too.
        note = _format_note(name, digest)
        if note in self._notes:
            return
        if self._file is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW
            self._file = os.open(self._path, flags, 0o644)
            files.append_all(self._file, b"\n")  # a kill may have left half a line
        files.append_all(self._file, note)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)


def summary_digest(summary: Mapping[str, Any]) -> str:
    """Return the digest that a summary holds of the rest of itself."""
    fields = {key: value for key, value in summary.items() if key != "digest"}
    return files.content_digest(json.dumps(fields, sort_keys=True).encode())


def check_archive(path: Path) -> None:
    """Raise OSError, ValueError or an error of zipfile where a checkpoint is damaged."""
    with zipfile.ZipFile(path) as archive:
        # Checksums do not cover an entry's mark of being a folder, which would be read as nothing.
        has_marks = any(entry.external_attr for entry in archive.infolist())
        if archive.testzip() is not None or has_marks:
            raise ValueError(f"{path} is damaged")


def is_summary_intact(summary: Mapping[str, Any]) -> bool:
    """Return whether a summary is as it was written; once summaries held no digest."""
    if "digest" not in summary and not {"data", "code", "files"} & summary.keys():
        return True
    return summary.get("digest") == summary_digest(summary)


def check_content(
    folder: Path, summary: Mapping[str, Any], name: str, content: bytes | None
) -> None:
    """Raise FedpflError where a file does not hold what the run wrote.

    Nothing is known where the summary has no `files`. An unfinished run's file may be any that it
    wrote, and rounds.csv may end in the middle of a row.

    Args:
        folder: the run directory.
        summary: the content of its summary.json.
        name: of the file.
        content: of the file, None where there is none.
    """
    if "files" not in summary or _is_known_content(folder, summary, name, content):
        return
    if summary.get("status") != "finished":
        current = json.loads(files.read_if_exists(folder / "summary.json") or b"{}")
        # The run may have finished meanwhile.
        if current.get("status") == "finished" and is_summary_intact(current):
            return check_content(folder, current, name, content)
    raise FedpflError(
        f"{folder}: {name} is not as the run wrote it; "
        "give the run's command, which mends it if it can"
    )


def _is_known_content(
    folder: Path, summary: Mapping[str, Any], name: str, content: bytes | None
) -> bool:
    if summary.get("status") == "finished":
        digest = None if content is None else files.content_digest(content)
        return summary["files"].get(name) == digest
    if name == "rounds.csv" and content is not None:
        # A row that is being written has no end yet.
        content = content[: content.rfind(b"\n") + 1] or None
    if content is None:
        return True
    return _format_note(name, _run_digest(summary, content)) in _read_notes(folder)


def _run_digest(summary: Mapping[str, Any], content: bytes) -> Any:
    """Return a digest that depends on the run and its data, too."""
    # Keyed by the run, so that a file of another run does not pass for this one's.
    key = hashlib.blake2b(f"{summary.get('identity')} {summary.get('data')}".encode()).digest()
    return hashlib.blake2b(content, digest_size=16, key=key)


def _format_note(name: str, digest: Any) -> bytes:
    return f"{digest.hexdigest()} {name}\n".encode()


def _read_notes(folder: Path) -> set[bytes]:
    content = files.read_if_exists(folder / NOTES_FILE) or b""
    return {*content.splitlines(keepends=True)}
