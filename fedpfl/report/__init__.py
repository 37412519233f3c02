"""Tables and figures from run directories. Reads files only: no torch, and nothing of fedpfl but its error.

`load` reads run directories and gathers the seeds of one configuration, `tables` and `figures` show them, and
`python -m fedpfl.report` is the command.
"""

from fedpfl.report.grouping import Group, groups
from fedpfl.report.load import runs
from fedpfl.report.run import Run

__all__ = ["Group", "Run", "groups", "runs"]
