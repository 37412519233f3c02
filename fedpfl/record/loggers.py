"""The loggers that a configuration's `logger` asks for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from fedpfl.ground.checks import build_dataclass, require_known_keys
from fedpfl.ground.errors import FedpflError
from fedpfl.record.callbacks import Callback, Callbacks, RunInfo
from fedpfl.record.console import Console
from fedpfl.record.logfile import LogFile
from fedpfl.record.mirror import ServiceLogger, require_package
from fedpfl.record.mlflow_logger import MlflowLogger
from fedpfl.record.tensorboard_logger import TensorboardLogger
from fedpfl.record.wandb_logger import WandbLogger, WandbOptions

LOGGER_NAMES = ("none", "wandb")
"""What `logger.name` may be; W&B's keys lie beside it."""

LOGGER_CLASSES = {"csv": Callback, "mlflow": MlflowLogger, "tensorboard": TensorboardLogger}
"""Those with keys below their own name, so that `logger=[wandb,mlflow]` holds those of both."""


def make_loggers(
    logger: Mapping[str, Any], say: Callable[[str], None] | None = None
) -> list[ServiceLogger]:
    """Return the loggers that `logger` asks for, not begun; none for `none` and `csv`, as the files
    are always written.

    say: told where the run can be seen. Raises FedpflError, in one line, for what cannot work.
    """
    rest = {"name": "none", **logger}
    name = rest.pop("name")
    groups = {
        key: build_dataclass(kind, rest.pop(key), f"logger.{key}")
        for key, kind in LOGGER_CLASSES.items()
        if key in rest
    }
    if name not in LOGGER_NAMES:
        raise FedpflError(
            f"logger.name={name} is unknown; choose one of {', '.join(LOGGER_NAMES)}, or give logger={', '.join(LOGGER_CLASSES)}"
        )
    if name == "wandb":
        groups = {name: WandbLogger(build_dataclass(WandbOptions, rest, "logger"), say), **groups}
    else:
        require_known_keys(rest, (), "logger")
    asked = {key: mirror for key, mirror in groups.items() if isinstance(mirror, ServiceLogger)}
    for package in asked:
        require_package(package)
    return [*asked.values()]


def start_callbacks(
    logger: Mapping[str, Any], run: RunInfo, quiet: bool = False, more: Iterable[Callback] = ()
) -> Callbacks:
    """Return terminal, run.log, what `logger` asks for and `more`, begun. Raises as `mirrors` does.

    quiet: no terminal.
    """
    asked = make_loggers(logger, lambda text: callbacks.on_note(text))
    callbacks = Callbacks([Console(quiet), LogFile(), *asked, *more])
    try:
        callbacks.on_begin(run)
    except BaseException:
        callbacks.on_end("interrupted", {})
        raise
    return callbacks
