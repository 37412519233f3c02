"""What a run leaves behind: its directory, and sinks (terminal, log file, W&B) that mirror the rows while it runs.

Nothing here knows methods, data or the engine: rows and summaries are plain mappings.
"""

from fedpfl.record.environment import describe, source
from fedpfl.record.loggers import check_logger, mirrors, open_sinks
from fedpfl.record.picture import partition_picture
from fedpfl.record.rundir import Absent, RunDirectory, ended
from fedpfl.record.sinks import Console, LogFile, RunInfo, Sink, Sinks, add_to_log

__all__ = [
    "Absent",
    "Console",
    "LogFile",
    "RunDirectory",
    "RunInfo",
    "Sink",
    "Sinks",
    "add_to_log",
    "check_logger",
    "describe",
    "ended",
    "mirrors",
    "open_sinks",
    "partition_picture",
    "source",
]
