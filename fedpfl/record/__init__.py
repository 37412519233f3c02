"""What a run leaves behind: its directory, and sinks (terminal, log file, W&B) that mirror the rows while it runs.

Nothing here knows methods, data or the engine: rows and summaries are plain mappings.
"""

from fedpfl.record.choose import check_logger, open_sinks
from fedpfl.record.environment import describe
from fedpfl.record.picture import partition_picture
from fedpfl.record.rundir import RunDirectory, finished
from fedpfl.record.sinks import Console, LogFile, RunInfo, Sink, Sinks

__all__ = [
    "Console",
    "LogFile",
    "RunDirectory",
    "RunInfo",
    "Sink",
    "Sinks",
    "check_logger",
    "describe",
    "finished",
    "open_sinks",
    "partition_picture",
]
