"""Which releases wrote the run directories that this one reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedpfl import __version__
from fedpfl.ground.errors import FedpflError

OLDEST_READABLE = (0, 2)
"""Runs of an earlier release have other identities, and perhaps other files."""


def require_readable(folder: Path, summary: Mapping[str, Any]) -> None:
    """Refuse a run directory that a release before OLDEST_READABLE wrote.

    Args:
        folder: The run directory, for the message.
        summary: What its summary.json holds; one that names no release is taken as readable.

    Raises:
        FedpflError: An earlier release wrote it, or its version is no version.
    """
    for version in _writing_releases(summary):
        numbers = re.match(r"(\d+)\.(\d+)", version)
        if numbers and (int(numbers[1]), int(numbers[2])) >= OLDEST_READABLE:
            continue
        raise FedpflError(
            f"{folder}: fedpfl {version} wrote this run, and fedpfl {__version__} does not read it;"
            f" use fedpfl {version}, or run it anew with restart=true"
        )


def _writing_releases(summary: Mapping[str, Any]) -> list[str]:
    """Return the versions of fedpfl that a summary names."""
    records = summary.get("code")
    candidates = [*records] if isinstance(records, list) else []
    candidates.append(summary.get("environment"))
    releases = [record.get("fedpfl") for record in candidates if isinstance(record, Mapping)]
    return [str(release) for release in releases if release is not None]
