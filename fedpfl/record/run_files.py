"""The files of a run directory, read and checked."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import yaml

from fedpfl.ground import files
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import describe_differences
from fedpfl.ground.records import Record, Values
from fedpfl.ground.release import require_readable
from fedpfl.record import checkpoint, digests

STATES_AT_NODES = "at nodes"
"""The summary's `states` for a federation, where nodes keep the clients' states."""


def read_summary_file(path: Path) -> tuple[Record, bool]:
    """Return the content of summary.json ({} without any), and whether it is intact."""
    content = files.read_if_exists(path / "summary.json")
    if content is None:
        return {}, True
    try:
        summary = json.loads(content)
    except (ValueError, RecursionError):
        summary = None
    if not isinstance(summary, dict) or "identity" not in summary:
        raise FedpflError(
            f"{path / 'summary.json'} cannot be read as a run's; choose another directory with "
            f"hydra.run.dir=..., or remove {path} if that was a run"
        )
    return {
        key: value for key, value in summary.items() if key != "digest"
    }, digests.is_summary_intact(summary)


def read_finished_run(path: Path) -> tuple[Record, Record]:
    """Return the summary and the checkpoint of a finished run.

    Raises:
        FedpflError: the run is not finished, or has no checkpoint.
    """
    summary, is_intact = read_summary_file(path)
    if not is_intact:
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
    require_states_here(path, summary)
    return summary, read_checkpoint(path, summary)


def require_states_here(path: Path, summary: Values) -> None:
    """Raise FedpflError for a federation's run: its nodes keep the clients' states."""
    if summary.get("states") == STATES_AT_NODES:
        raise FedpflError(
            f"{path} is of a federation: clients' states are at their nodes. Its tables can "
            "be read, its models cannot; the command that began it, fedpfl federate, goes on"
        )


def read_checkpoint(path: Path, summary: Values) -> Record:
    """Return the checkpoint in a run directory.

    Args:
        path: the directory.
        summary: the run's summary.

    Raises:
        FedpflError: it is damaged, cannot be read, or is not this run's.
    """
    state = path / "state.pt"
    _require_final_checkpoint(state, summary)
    payload = checkpoint.load_checkpoint(state)
    if payload.get("identity") != summary.get("identity"):
        raise files.damaged_error(state, "belongs to a different run")
    return payload


def require_finished_files(path: Path, summary: Values) -> None:
    """Raise FedpflError where a finished run's files are damaged; state.pt may be absent."""
    state = path / "state.pt"
    for name in summary.get("files", {}):
        if name != state.name:
            digests.check_content(path, summary, name, files.read_if_exists(path / name))
    if state.exists():
        _require_final_checkpoint(state, summary)
        checkpoint.check_checkpoint(state)


def _require_final_checkpoint(state: Path, summary: Values) -> None:
    """Raise FedpflError where a finished run's checkpoint differs from its last one."""
    if summary.get("status") != "finished" or "state.pt" not in summary.get("files", {}):
        return
    if summary["files"]["state.pt"] != checkpoint.checkpoint_digest(state):
        raise files.damaged_error(state, "is not the one that the run ended with")


def read_training_samples(path: Path, summary: Values) -> tuple[str, np.ndarray]:
    """Read the digest of a run's data set, and the indices of its training samples.

    The digest is "" where the run did not record it.

    Raises:
        FedpflError: partition.npz is not as the run wrote it.
    """
    content = files.read_if_exists(path / "partition.npz")
    digests.check_content(path, summary, "partition.npz", content)
    if content is None:
        return "", np.empty(0, np.int64)
    arrays = np.load(io.BytesIO(content), allow_pickle=False)
    return str(arrays.get("samples_digest", "")), arrays["train_indices"]


def differences_from(path: Path, config: Any) -> str:
    """Describe how the run in a directory differs from a configuration, "" where unknown."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        recorded_config = yaml.safe_load((path / "config.yaml").read_text(encoding="utf-8"))
        if isinstance(recorded_config, Mapping) and isinstance(config, Mapping):
            return describe_differences(recorded_config, config)
    return ""
