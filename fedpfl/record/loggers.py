"""Make the loggers that a configuration's `logger` asks for."""

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
"""The values of `logger.name`; W&B's keys lie beside it."""

LOGGER_CLASSES = {"csv": Callback, "mlflow": MlflowLogger, "tensorboard": TensorboardLogger}
"""Loggers with keys below their own name, so that `logger=[wandb,mlflow]` holds those of both."""


def make_loggers(
    logger: Mapping[str, Any], print_note: Callable[[str], None] | None = None
) -> list[ServiceLogger]:
    """Make the loggers that `logger` asks for, not begun.

    There are none for `none` and `csv`, as the files are always written.

    Args:
        logger: the configuration's `logger`.
        print_note: called with where the run can be seen.

    Raises:
        FedpflError: the loggers cannot work.
    """
    # ---- Step 1: loggers with keys below their own name.
    settings = {"name": "none", **logger}
    name = settings.pop("name")
    loggers = {}
    for key, logger_class in LOGGER_CLASSES.items():
        if key in settings:
            loggers[key] = build_dataclass(
                logger_class,
                settings.pop(key),
                f"logger.{key}",
            )

    # ---- Step 2: W&B, with keys beside `name`.
    if name not in LOGGER_NAMES:
        raise FedpflError(
            f"logger.name={name} is unknown; choose one of {', '.join(LOGGER_NAMES)}, "
            f"or give logger={', '.join(LOGGER_CLASSES)}"
        )
    if name == "wandb":
        options = build_dataclass(WandbOptions, settings, "logger")
        loggers = {name: WandbLogger(options, print_note), **loggers}
    else:
        require_known_keys(settings, (), "logger")

    # ---- Step 3: those of services need their packages.
    # csv is no service: its files are always written.
    services = {key: item for key, item in loggers.items() if isinstance(item, ServiceLogger)}
    for package in services:
        require_package(package)
    return [*services.values()]


def start_callbacks(
    logger: Mapping[str, Any], run: RunInfo, quiet: bool = False, more: Iterable[Callback] = ()
) -> Callbacks:
    """Start the terminal, run.log, the loggers and further callbacks. Raises as `make_loggers`.

    Args:
        logger: the configuration's `logger`.
        run: the run.
        quiet: no terminal.
        more: further callbacks.
    """
    # The lambda, as the callbacks that it speaks to are made after it.
    loggers = make_loggers(logger, lambda text: callbacks.on_note(text))
    callbacks = Callbacks([Console(quiet), LogFile(), *loggers, *more])
    try:
        callbacks.on_begin(run)
    except BaseException:
        callbacks.on_end("interrupted", {})
        raise
    return callbacks
