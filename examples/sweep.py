"""Compare methods over seeds, and write a table for a paper: `python examples/sweep.py`."""

import fedpfl
from fedpfl.report.__main__ import main as report

# ---- Step 1: all combinations of what is a list, each a run in its own directory.
runs, table = fedpfl.sweep(
    "dataset=digits",
    "model=mlp",
    clients=10,
    participation=0.5,
    rounds=10,
    method=["fedavg", "fedper", "local_only"],
    seed=[1, 2],
    directory="outputs/sweep",
    progress=False,
)

# ---- Step 2: a row for each run, to go on with in pandas.
print(table.groupby("method")["accuracy"].agg(["mean", "std"]).round(2))

# ---- Step 3: the report's table, here for LaTeX; `fedpfl report tables outputs/sweep` says the same.
report(["tables", "outputs/sweep", "--format", "latex"])
