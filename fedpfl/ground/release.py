"""Which releases wrote the run directories that this one reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from fedpfl import __version__
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.records import Values

OLDEST_READABLE = (0, 2)
"""Runs of an earlier release have other identities, and perhaps other files."""


def require_readable(folder: Path, summary: Values) -> None:
    """Refuse a run directory that a release before OLDEST_READABLE wrote.

    Args:
        folder: The run directory, for the message.
        summary: What its summary.json holds; one that names no release is taken as readable.

    Raises:
        FedpflError: An earlier release wrote it, or its version is no version.
    """
    records = [*(summary.get("code") or []), summary.get("environment")]
    for version in (record.get("fedpfl") for record in records if isinstance(record, Mapping)):
        numbers = re.match(r"(\d+)\.(\d+)", str(version))
        if version is None or (numbers and tuple(map(int, numbers.groups())) >= OLDEST_READABLE):
            continue
        raise FedpflError(
            f"{folder}: fedpfl {version} wrote this run, and fedpfl {__version__} does not read it;"
            f" use fedpfl {version}, or run it anew with restart=true"
        )
