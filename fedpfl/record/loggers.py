"""Make the loggers of a run from their options."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from fedpfl.ground.records import Values
from fedpfl.record.callbacks import Callback, Callbacks, RunInfo
from fedpfl.record.console import Console
from fedpfl.record.logfile import LogFile
from fedpfl.record.mirror import ServiceLogger, require_package
from fedpfl.record.mlflow_logger import MlflowLogger
from fedpfl.record.tensorboard_logger import TensorboardLogger
from fedpfl.record.wandb_logger import WandbLogger


def make_loggers(
    options: Values, print_note: Callable[[str], None] | None = None
) -> list[ServiceLogger]:
    """Make loggers, not begun.

    Args:
        options: Of each logger, by the name of the package that it needs.
        print_note: Called with where the run can be seen.

    Raises:
        FedpflError: A package is absent, or a logger cannot work.
    """
    loggers: list[ServiceLogger] = []
    for package in options:
        require_package(package)
    if "wandb" in options:
        loggers.append(WandbLogger(options["wandb"], print_note))
    if "mlflow" in options:
        loggers.append(MlflowLogger(options["mlflow"]))
    if "tensorboard" in options:
        loggers.append(TensorboardLogger())
    return loggers


def start_callbacks(
    options: Values, run: RunInfo, quiet: bool = False, more: Iterable[Callback] = ()
) -> Callbacks:
    """Start the terminal, run.log, the loggers and further callbacks. Raises as `make_loggers`.

    Args:
        options: Of each logger, by name.
        run: The run.
        quiet: Whether there is no terminal.
        more: Further callbacks.
    """
    # The lambda, as the callbacks that it speaks to are made after it.
    loggers = make_loggers(options, lambda text: callbacks.on_note(text))
    callbacks = Callbacks([Console(quiet), LogFile(), *loggers, *more])
    try:
        callbacks.on_begin(run)
    except BaseException:
        callbacks.on_end("interrupted", {})
        raise
    return callbacks
