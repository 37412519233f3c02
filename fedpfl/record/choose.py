"""The sinks that a configuration's `logger` asks for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fedpfl.errors import FedpflError
from fedpfl.record.sinks import Console, LogFile, RunInfo, Sink, Sinks

LOGGERS = ("none", "wandb")


def check_logger(logger: Mapping[str, Any]) -> None:
    """Raise FedpflError, in one line, where the `logger` part of a configuration cannot work."""
    name = logger.get("name")
    if name not in LOGGERS:
        raise FedpflError(f"logger.name={name} is unknown; choose one of {', '.join(LOGGERS)}")
    if name == "wandb":
        from fedpfl.record.wandb_sink import Options

        Options.of(logger)
    elif len(logger) > 1:
        raise FedpflError(f"logger.{next(key for key in logger if key != 'name')} is not a key of logger={name}")


def open_sinks(logger: Mapping[str, Any], run: RunInfo, quiet: bool = False) -> Sinks:
    """Terminal, run.log and what `logger` asks for, begun. quiet: no terminal. Raises as `check_logger` does."""
    check_logger(logger)
    chosen: list[Sink] = [Console(quiet), LogFile()]
    if logger["name"] == "wandb":
        from fedpfl.record.wandb_sink import Options, WandbSink

        chosen.append(WandbSink(Options.of(logger), lambda text: sinks.note(text)))
    sinks = Sinks(chosen)
    try:
        sinks.begin(run)
    except BaseException:
        sinks.end("interrupted", {})
        raise
    return sinks
