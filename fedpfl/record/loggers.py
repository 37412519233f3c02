"""The loggers that a configuration's `logger` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedpfl.ground.errors import FedpflError
from fedpfl.record.callbacks import Callback, Callbacks, RunInfo
from fedpfl.record.console import Console
from fedpfl.record.logfile import LogFile

NAMES = ("none", "wandb")
"""What `logger.name` may be; W&B's keys lie beside it."""

GROUPS = ("csv", "mlflow", "tensorboard")
"""Those with keys below their own name, so that `logger=[wandb,mlflow]` holds those of both."""


def mirrors(logger: Mapping[str, Any], say: Callable[[str], None] | None = None) -> list[Callback]:
    """Return the loggers that `logger` asks for, not begun; none for `none` and `csv`, as the files are always written.

    say: told where the run can be seen. Raises FedpflError, in one line, for what cannot work.
    """
    rest = {"name": "none", **logger}
    name, groups = rest["name"], {key: rest.pop(key) for key in GROUPS if key in rest}
    if name not in NAMES:
        raise FedpflError(
            f"logger.name={name} is unknown; choose one of {', '.join(NAMES)}, or give logger={', '.join(GROUPS)}"
        )
    for key, options in groups.items():
        if not isinstance(options, Mapping):
            raise FedpflError(f"logger.{key} must be a group of keys, got {options!r}")
    chosen: list[Callback] = []
    if name == "wandb":
        from fedpfl.record.wandb_logger import Options, WandbLogger

        chosen.append(WandbLogger(Options.of(rest), say))
    elif len(rest) > 1:
        raise FedpflError(f"logger.{next(key for key in rest if key != 'name')} is not a key of logger={name}")
    for key in groups.get("csv", ()):
        raise FedpflError(f"logger.csv.{key} is unknown; logger=csv has no keys")
    if "mlflow" in groups:
        from fedpfl.record.mlflow_logger import MlflowLogger

        chosen.append(MlflowLogger.of(groups["mlflow"]))
    if "tensorboard" in groups:
        from fedpfl.record.tensorboard_logger import TensorboardLogger

        chosen.append(TensorboardLogger.of(groups["tensorboard"]))
    return chosen


def check_logger(logger: Mapping[str, Any]) -> None:
    """Raise FedpflError, in one line, where the `logger` part of a configuration cannot work."""
    mirrors(logger)


def opened(logger: Mapping[str, Any], run: RunInfo, quiet: bool = False, more: Iterable[Callback] = ()) -> Callbacks:
    """Return terminal, run.log, what `logger` asks for and `more`, begun. Raises as `check_logger` does.

    quiet: no terminal.
    """
    asked = mirrors(logger, lambda text: callbacks.on_note(text))
    callbacks = Callbacks([Console(quiet), LogFile(), *asked, *more])
    try:
        callbacks.on_begin(run)
    except BaseException:
        callbacks.on_end("interrupted", {})
        raise
    return callbacks
