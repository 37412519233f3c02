"""Digests in summary.json: every reader checks a finished run's files against them."""

from __future__ import annotations

import json
import zipfile
from pathlib import Path

from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values


def summary_digest(summary: Values) -> str:
    """Return the digest that a summary holds of the rest of itself."""
    fields = {key: value for key, value in summary.items() if key != "digest"}
    return files.content_digest(json.dumps(fields, sort_keys=True).encode())


def is_summary_intact(summary: Values) -> bool:
    """Return True if a summary agrees with its digest or has none."""
    return summary.get("digest") in (None, summary_digest(summary))


def check_archive(path: Path) -> None:
    """Raise OSError, ValueError or an error of zipfile where a checkpoint is damaged."""
    with zipfile.ZipFile(path) as archive:
        # Checksums do not cover an entry's mark of being a folder, which would be read as nothing.
        has_marks = any(entry.external_attr for entry in archive.infolist())
        if archive.testzip() is not None or has_marks:
            raise ValueError(f"{path} is damaged")


def check_content(folder: Path, summary: Values, name: str, content: bytes | None) -> None:
    """Raise FedpflError where a finished run's file is not as the run left it.

    Args:
        folder: the run directory.
        summary: the content of its summary.json.
        name: of the file.
        content: of the file, None if absent.
    """
    if summary.get("status") != "finished" or "files" not in summary:
        return
    digest = None if content is None else files.content_digest(content)
    if summary["files"].get(name) != digest:
        raise FedpflError(
            f"{folder}: {name} is not as the run wrote it; the run's command with restart=true "
            "runs it from the beginning"
        )
