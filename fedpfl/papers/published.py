"""The published numbers of five papers, and what is known about how FedOBP's came about."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import NamedTuple

from fedpfl.report.names import DATASETS
from fedpfl.report.run import Run
from fedpfl.report.text import bare

FEDOBP = "FedOBP (arXiv:2604.16574) Table "
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


class Published(NamedTuple):
    """One published number, an accuracy in percent or what its metric says; std is nan and note empty where unknown."""

    value: float
    std: float
    source: str
    note: str


Key = tuple[str, str, str, str, str]
"""Source, metric, method, data set and setting of a published number."""


def lookup(key: Key) -> Published | None:
    """Return a published number. The data set may be a name of the configuration, the method in any spelling."""
    source, metric, method, dataset, setting = key
    return numbers().get((source, metric, bare(method), DATASETS.get(dataset, dataset), setting))


def of_run(run: Run, metric: str = ACCURACY) -> Published | None:
    """Return FedOBP's published number of a run's method, data set and Dirichlet setting, if there is one."""
    where = metric, run.method_name, run.dataset_name, setting(run)
    return next(filter(None, (lookup((FEDOBP + table, *where)) for table in ("II", "III", "IV"))), None)


def setting(run: Run) -> str:
    """Return `Dir(0.1)` where the run's partition is one that the paper's tables may mean, else nothing."""
    partition = run.config["partition"]
    alpha = partition.get("alpha") if partition["name"] in ("dirichlet", "published") else None
    return f"Dir({alpha:g})" if isinstance(alpha, int | float) else ""


@cache
def numbers() -> dict[Key, Published]:
    """Return all published numbers."""
    text = resources.files("fedpfl.papers").joinpath("published.csv").read_text(encoding="utf-8")
    return {
        (row["source"], row["metric"], bare(row["method"]), row["dataset"], row["setting"]): Published(
            float(row["value"]), float(row["std"] or "nan"), row["source"], row["note"]
        )
        for row in csv.DictReader(text.splitlines())
    }
