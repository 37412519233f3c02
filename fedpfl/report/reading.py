"""Read files of a run directory; a damaged one is an error of one line.

`summary` is the content of summary.json, which has the other files' digests.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from fedpfl.ground.errors import FedpflError, error_text
from fedpfl.ground.records import Record, Values
from fedpfl.ground.release import require_readable
from fedpfl.record import digests, rounds
from fedpfl.report.names import YAML_LOADER
from fedpfl.report.text import clip_text

VALUE_ERRORS = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
"""Errors that values of an unexpected kind raise."""


def read_config(folder: Path, summary: Values) -> Record:
    """Read config.yaml. Raises FedpflError, as all functions here."""
    with _open_text(folder, "config.yaml", summary) as text:
        # A few aliases of aliases are billions of values; no run writes any.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, YAML_LOADER)):
            raise ValueError("it holds aliases, which no run writes")
        return _require_mapping(yaml.load(text, YAML_LOADER))


def read_summary(folder: Path) -> Record:
    """Read summary.json."""
    with _open_text(folder, "summary.json", {}) as text:
        summary = _require_mapping(json.loads(text))
        if not digests.is_summary_intact(summary):
            raise FedpflError(
                f"{folder}: summary.json is not as the run wrote it; "
                "the run's command says what to do"
            )
        require_readable(folder, summary)
        return summary


def read_json_object(folder: Path, name: str, summary: Values) -> Record:
    """Read a JSON object, {} if the file is absent."""
    if not os.path.lexists(folder / name):
        # The summary may have the digest of a file that was removed since.
        digests.check_content(folder, summary, name, None)
        return {}
    with _open_text(folder, name, summary) as text:
        return _require_mapping(json.loads(text))


def read_numbers(folder: Path, name: str, summary: Values) -> pd.DataFrame:
    """Read a table of numbers; nan where a cell is empty or not finite."""
    values: dict[str, np.ndarray] = {}
    with _open_text(folder, name, summary) as text:
        for key, cells in rounds.read_columns(text).items():
            values[key] = np.array(cells, dtype=float)
    return pd.DataFrame(
        # Infinity, too, is no number that a table could average.
        {key: np.where(np.isfinite(numbers), numbers, np.nan) for key, numbers in values.items()}
    )


def read_texts(folder: Path, name: str, column: str, summary: Values) -> list[str]:
    """Read a column of texts of a table; [] where there is no such column."""
    with _open_text(folder, name, summary) as text:
        return rounds.read_texts(text, column)


def describe_error(error: Exception) -> str:
    """Return kind and message of an error on one line."""
    return clip_text(error_text(error, with_class=True), 200)


@contextlib.contextmanager
def _open_text(folder: Path, name: str, summary: Values) -> Iterator[str]:
    """Yield a file's text.

    Errors of reading it, and of parsing it by the caller, become one line.
    """
    try:
        content = (folder / name).read_bytes()
        digests.check_content(folder, summary, name, content)
        yield content.decode()
    except FileNotFoundError:
        raise FedpflError(
            f"{folder}: no {name}; the run never started or is half written"
        ) from None
    except (OSError, yaml.YAMLError, *VALUE_ERRORS) as error:
        raise FedpflError(f"{folder}: {name} cannot be read: {describe_error(error)}") from None


def _require_mapping(value: Any) -> Record:
    if not isinstance(value, dict):
        raise ValueError("it must hold keys and values")
    return value
