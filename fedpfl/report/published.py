"""The published numbers: FedOBP (arXiv:2604.16574), Tables II to V, and what is known about how they came about."""

from __future__ import annotations

import csv
from functools import cache
from importlib import resources
from typing import NamedTuple

from fedpfl.report.load import DATASETS, Run

# What the published numbers were produced with; read from the authors' logs (momentum is not in the paper).
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
    """One published number, an accuracy in percent; std is nan and note empty where there is none."""

    value: float
    std: float
    source: str
    note: str


def lookup(metric: str, method: str, dataset: str, setting: str) -> Published | None:
    """Return a published number. dataset: a name of the configuration; setting: `Dir(0.1)`; method: in any spelling."""
    return _numbers().get((metric, bare(method), f"{DATASETS.get(dataset, dataset)} {setting}"))


def of_run(run: Run, metric: str = ACCURACY) -> Published | None:
    """Return the published number of a run's method, data set and Dirichlet setting, if there is one."""
    return lookup(metric, run.method_name, run.dataset_name, setting(run))


def setting(run: Run) -> str:
    """Return `Dir(0.1)` where the run's partition is one that the paper's tables may mean, else nothing."""
    partition = run.config["partition"]
    alpha = partition.get("alpha") if partition["name"] in ("dirichlet", "published") else None
    return f"Dir({alpha:g})" if isinstance(alpha, int | float) else ""


def bare(name: str) -> str:
    """Return letters and digits in lower case: `FedOBP`, `fedobp` and `fed_obp` are one method."""
    return "".join(letter for letter in name.lower() if letter.isalnum())


@cache
def _numbers() -> dict[tuple[str, str, str], Published]:
    """By metric, method, and data set with setting. A cell of the file is `58.15 0.26`: value and std, if known."""
    text = resources.files("fedpfl.report").joinpath("published.csv").read_text(encoding="utf-8")
    return {
        (row["metric"], bare(row["method"]), place): Published(
            float(cell.split()[0]), float((*cell.split(), "nan")[1]), row["source"], row["note"]
        )
        for row in csv.DictReader(text.splitlines())
        for place, cell in row.items()
        if place not in ("source", "metric", "method", "note") and cell
    }
