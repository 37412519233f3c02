"""Digests of a run's files, by which every reader tells whether they are as the run wrote them.

Those of a finished run stand in summary.json. Until then what a file is about to hold is noted in
run.sums before it is written, so that neither a kill nor a copy made while the run goes on leaves
anything that is not noted.
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
    """Note what files are about to hold. summary: of the run they belong to. Raises OSError as the
    file system does.
    """

    def __init__(self, folder: Path, summary: Mapping[str, Any]):
        self._path, self._summary, self._known = folder / NOTES_FILE, dict(summary), _noted(folder)
        self._file: int | None = None

    def of(self, content: bytes) -> Any:
        """Return the digest of a content, to go on with `update`."""
        return _digest(self._summary, content)

    def add(self, name: str, digest: Any) -> None:
        """Note a file's next content."""
        if (note := _note(name, digest)) in self._known:
            return
        if self._file is None:
            self._file = os.open(
                self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644
            )
            files.append_all(self._file, b"\n")  # a kill may have left half a line
        files.append_all(self._file, note)

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            os.close(self._file)


def summary_digest(summary: Mapping[str, Any]) -> str:
    """Return the digest that a summary holds of the rest of itself."""
    rest = {key: value for key, value in summary.items() if key != "digest"}
    return files.content_digest(json.dumps(rest, sort_keys=True).encode())


def check_archive(path: Path) -> None:
    """Raise OSError, ValueError or what zipfile does where a checkpoint is not as it was written."""
    with zipfile.ZipFile(path) as archive:
        # Checksums do not cover an entry's mark of being a folder, which would be read as nothing.
        if archive.testzip() is not None or any(
            entry.external_attr for entry in archive.infolist()
        ):
            raise ValueError(f"{path} is damaged")


def is_summary_intact(summary: Mapping[str, Any]) -> bool:
    """Return whether a summary is as it was written; there was a time when it held no digest."""
    if "digest" not in summary and not {"data", "code", "files"} & summary.keys():
        return True
    return summary.get("digest") == summary_digest(summary)


def check_content(
    folder: Path, summary: Mapping[str, Any], name: str, content: bytes | None
) -> None:
    """Raise FedpflError where a file does not hold what the run wrote.

    summary: of the same folder. content: None for no file. Of older runs, whose summary has no
    `files`, nothing is known. An unfinished run's file may be any that it wrote, and rounds.csv may
    end in the middle of a row.
    """
    if "files" not in summary or _known(folder, summary, name, content):
        return
    if summary.get("status") != "finished":
        now = json.loads(files.read_if_exists(folder / "summary.json") or b"{}")
        if now.get("status") == "finished" and is_summary_intact(now):  # meanwhile
            return check_content(folder, now, name, content)
    raise FedpflError(
        f"{folder}: {name} is not as the run wrote it; give the run's command, which mends it if it can"
    )


def _known(folder: Path, summary: Mapping[str, Any], name: str, content: bytes | None) -> bool:
    if summary.get("status") == "finished":
        return summary["files"].get(name) == (
            None if content is None else files.content_digest(content)
        )
    if name == "rounds.csv" and content is not None:
        content = content[: content.rfind(b"\n") + 1] or None
    return content is None or _note(name, _digest(summary, content)) in _noted(folder)


def _digest(summary: Mapping[str, Any], content: bytes) -> Any:
    """Return a digest that is of one run on one data."""
    key = hashlib.blake2b(f"{summary.get('identity')} {summary.get('data')}".encode()).digest()
    return hashlib.blake2b(content, digest_size=16, key=key)


def _note(name: str, digest: Any) -> bytes:
    return f"{digest.hexdigest()} {name}\n".encode()


def _noted(folder: Path) -> set[bytes]:
    return {*(files.read_if_exists(folder / NOTES_FILE) or b"").splitlines(keepends=True)}
