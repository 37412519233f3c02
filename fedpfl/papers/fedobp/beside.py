"""FedOBP's published numbers beside runs, and what is known about how they came about."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedpfl.papers.published import Published, departures, lookup
from fedpfl.report.grouping import Group
from fedpfl.report.run import Run
from fedpfl.report.tables import Beside

SOURCE = "FedOBP (arXiv:2604.16574) Table "
# What FedOBP's numbers were produced with; read from the authors' logs (momentum is not in the paper).
SETUP = {
    "rounds": 400,
    "clients": 100,
    "participation": 0.1,
    "local.epochs": 5,
    "local.batch_size": 32,
    "local.lr": 0.01,
    "local.momentum": 0.7,
    "model.name": "cnn4",
}
ACCURACY, QUANTILE, PERSONAL = "mean test accuracy over clients (%)", "quantile q", "number of personalized parameters"
ABLATION = "ablation"
"""The setting of Table V, which does not state its partition."""
CAPTION = (
    "Published: FedOBP (arXiv:2604.16574), Tables III and IV; described there as mean over clients, in the authors' "
    "logs pooled, the best of rounds 100, 200, 300 and 400 before fine-tuning. Δ: own minus published, in points."
)


def beside(gathered: Sequence[Group]) -> Beside:
    """Return what FedOBP's tables have published of the configurations, for `report.tables.accuracy_table`."""
    known = [of_run(group.runs[0]) for group in gathered]
    compared = [(group, setup_of(group.runs[0]), one.note) for group, one in zip(gathered, known, strict=True) if one]
    values = [(one.value, one.std) if one else (math.nan, math.nan) for one in known]
    return Beside(values, CAPTION, departures(compared))


def setup_of(run: Run) -> dict[str, Any]:
    """Return the set-up of FedOBP's tables for a run's method, data set and partition."""
    q = of_run(run, QUANTILE)
    return (
        SETUP
        | ({"method.q": q.value} if q else {})
        | ({"method.norm": "global"} if run.method_name == "fedobp" else {})
    )


def of_run(run: Run, metric: str = ACCURACY) -> Published | None:
    """Return FedOBP's published number of a run's method, data set and Dirichlet setting, if there is one."""
    where = metric, run.method_name, run.dataset_name, setting_of(run)
    return next(filter(None, (lookup((SOURCE + table, *where)) for table in ("II", "III", "IV"))), None)


def setting_of(run: Run) -> str:
    """Return `Dir(0.1)` where the run's partition is one that the paper's tables may mean, else nothing."""
    partition = run.config["partition"]
    alpha = partition.get("alpha") if partition["name"] in ("dirichlet", "published") else None
    return f"Dir({alpha:g})" if isinstance(alpha, int | float) else ""
