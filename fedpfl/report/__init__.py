"""Tables and figures from run directories, which are read without torch; `python -m fedpfl.report`
is the command.

`load` finds runs, `grouping` gathers the seeds of a configuration, `tables` and `figures` show
them.
"""

from fedpfl.report.grouping import Group, groups
from fedpfl.report.load import runs
from fedpfl.report.run import Run

__all__ = ["Group", "Run", "groups", "runs"]
