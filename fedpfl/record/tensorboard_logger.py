"""TensorBoard as a copy of rounds.csv: event files in the run directory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.records import Record, Values
from fedpfl.record.callbacks import RunInfo
from fedpfl.record.mirror import ServiceLogger

FOLDER = "tensorboard"
EVENTS = "events.out.tfevents."
FLUSH = 10  # seconds that a round may wait in memory


class TensorboardLogger(ServiceLogger):
    """Write event files below `tensorboard/`; those of an earlier process are replaced."""

    def __init__(self) -> None:
        super().__init__()
        self._writer: Any = None
        self._config: Record = {}
        self._round = 0

    def _send_picture(self, path: Path) -> None:
        """Add an image."""
        from PIL import Image

        with Image.open(path) as image:
            self._writer.add_image(path.stem, np.array(image.convert("RGB")), dataformats="HWC")

    def _start(self, run: RunInfo, facts: Values) -> int:
        from torch.utils.tensorboard import SummaryWriter

        folder = run.path / FOLDER
        # Events cannot be taken back, and rows up to the checkpoint are sent anew.
        for old_file in folder.glob(f"{EVENTS}*"):
            old_file.unlink()
        self._writer = SummaryWriter(str(folder), flush_secs=FLUSH)
        self._config = {key: value for key, value in flatten_keys(run.config) if value is not None}
        self._config["identity"] = run.identity  # to group seeds by
        self._writer.add_text("configuration", _as_markdown(run.config))
        return 0

    def _send_round(self, row: Values, values: Values) -> None:
        self._round = row["round"]
        for name, value in values.items():
            if name != "round":  # the step
                self._writer.add_scalar(name, value, self._round)

    def _finish(self, status: str, summary: Values) -> None:
        if self._writer is None:
            return
        numbers = {key: value for key, value in summary.items() if isinstance(value, int | float)}
        hyperparameters = {}
        for key, value in self._config.items():
            hyperparameters[key] = value if isinstance(value, int | float) else str(value)
        hyperparameters["status"] = status
        try:
            self._writer.add_text("summary", _as_markdown(summary), self._round)
            # `.`: beside the other values, not as a separate run.
            self._writer.add_hparams(
                hyperparameters, numbers, run_name=".", global_step=self._round
            )
        finally:
            self._writer.close()
            self._writer = None


def _as_markdown(values: Values) -> str:
    """Return nested values as TensorBoard's Markdown."""
    return "\n".join(
        f"    {line}" for line in json.dumps(values, indent=2, default=str).splitlines()
    )
