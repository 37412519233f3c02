"""FedOBP's tables (arXiv:2604.16574), all methods with their cost, and its numbers beside any runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import pandas as pd

from fedpfl.papers.layout import Layout, Line, Listing, Measure, Place, Selection, rank, tuned
from fedpfl.papers.published import Published, departures, lookup, setup_differences
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHODS
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
MEANING = (
    "published: FedOBP (arXiv:2604.16574), Tables III and IV: described there as mean over clients, in the authors' "
    "logs pooled, the best of rounds 100, 200, 300 and 400; Δ: own minus published, in points"
)
LARGE = ("cifar10", "cifar100", "emnist", "svhn")
SMALL = ("mnist", "fmnist", "organamnist", "organcmnist")
_ORDER = "local_only fedavg lg_fedavg fedper fedrep apfl pfedfda flute feddpa floco fedala fedselect fedobp"
COMPARED = tuple(_ORDER.split())
ALPHAS = (0.1, 0.5)


POOLED = Selection("accuracy_pooled", "best-checkpoint", 100, published=True)
"""FedOBP's: the best of rounds 100, 200, 300 and 400, over all clients' test samples."""


def beside(gathered: Sequence[Group], everywhere: bool = False) -> Beside:
    """Return what FedOBP's tables have published of the configurations, for `report.tables.accuracy_table`.

    everywhere: also of those whose set-up is not the published one.
    """
    setups = [setup_of(group.runs[0]) for group in gathered]
    known = [
        of_run(group.runs[0]) if everywhere or not setup_differences(group.runs[0], setup) else None
        for group, setup in zip(gathered, setups, strict=True)
    ]
    compared = [(group, setup, one.note) for group, setup, one in zip(gathered, setups, known, strict=True) if one]
    values = [(one.value, one.std) if one else (math.nan, math.nan) for one in known]
    return Beside(values, MEANING, departures(compared))


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


def quantile(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return FedOBP's q."""
    return math.nan if run.q is None else run.q


def _personal(run: Run, row: pd.Series, rule: Selection) -> float:
    """Personal entries per client, in the last round: nobody has any in the first."""
    return math.nan if run.personal.empty else float(run.personal.iloc[-1].sum(skipna=False))


def own_score(run: Run, **wanted: Any) -> bool:
    """Return whether a run is FedOBP as the paper writes it, but for what is wanted otherwise."""
    usual = {"score": "obp", "scope": "all", "classifier_only": False, "ema": 0.0, "cold_start": "paper"} | wanted
    method = run.config["method"]
    known = all(method.get(key, value) == value for key, value in usual.items())
    return run.method_name == "fedobp" and known


def _whole_norm(run: Run) -> bool:
    return run.method_name != "fedobp" or (own_score(run) and run.config["method"].get("norm") in ("none", "global"))


def _dirichlet(datasets: Sequence[str], alphas: Sequence[float] = ALPHAS, faulty: bool = False) -> tuple[Place, ...]:
    where = {"partition.name": ("dirichlet", "published")}
    return tuple(
        Place(
            name,
            f"Dir({a:g})",
            where,
            (a,),
            words={"dataset": f"{name}_as_published" if faulty else name},
            faulty=faulty,
        )
        for name in datasets
        for a in alphas
    )


def _methods(experiment: str) -> tuple[Line, ...]:
    lines = [Line(METHODS[method], method, experiment, _whole_norm) for method in COMPARED]
    lines.insert(COMPARED.index("fedavg") + 1, Line("FedAvg+FT", "fedavg", experiment, _whole_norm, tuned))
    return tuple(lines)


def _counted(label: str, measure: Measure, metric: str, kind: str) -> Line:
    return Line(label, "fedobp", "fedobp/table2", _whole_norm, measure, known_as="fedobp", metric=metric, kind=kind)


def _ablation(label: str, known_as: str, norm: str) -> Line:
    fits = partial(own_score, norm=norm)
    words = {"norm": norm}
    return Line(label, "fedobp", "fedobp/table5", fits, words=words, known_as=known_as, setting=ABLATION)


ABLATED = (
    _ablation("none", "FedOBP NoNorm", "none"),
    _ablation("layer", "FedOBP LayerNorm", "layer"),
    _ablation("global", "FedOBP GlobalNorm w/o CLS", "global"),
    Line(
        "global, CLS",
        "fedobp",
        "fedobp/table5_cls",
        partial(own_score, norm="global", classifier_only=True),
        known_as="FedOBP GlobalNorm with CLS",
        setting=ABLATION,
    ),
)
"""The lines of Table V."""

_plan = partial(
    Layout,
    rule=POOLED,
    about="published values are described as means over clients; the authors' logs hold pooled ones, the best of "
    "rounds 100, 200, 300 and 400",
    metric=ACCURACY,
    setup=setup_of,
    swept=True,
)
TABLES: dict[str, Layout | Listing] = {
    "table2": _plan(
        "FedOBP's Table II: q, and how many entries it makes personal per client",
        SOURCE + "II",
        (
            _counted("q", quantile, QUANTILE, "exact"),
            _counted("personal entries", _personal, PERSONAL, "entries"),
        ),
        _dirichlet(LARGE + SMALL),
        about="",
    ),
    "table3": _plan("FedOBP's Table III", SOURCE + "III", _methods("fedobp/table3"), _dirichlet(LARGE)),
    "table4": _plan("FedOBP's Table IV", SOURCE + "IV", _methods("fedobp/table4"), _dirichlet(SMALL)),
    "table4_as_published": _plan(
        "FedOBP's Table IV, MedMNIST with the published normalisation, which makes every image constant",
        SOURCE + "IV",
        _methods("fedobp/table4_as_published"),
        _dirichlet(SMALL[2:], faulty=True),
    ),
    "table5": _plan(
        "FedOBP's Table V: normalisation of the scores, and personal entries in the classifier only (CLS)",
        SOURCE + "V",
        ABLATED,
        _dirichlet(LARGE + SMALL, (0.1,)),
    ),
}


def one_each(gathered: Sequence[Group]) -> list[Group]:
    """Return of each method's configurations on a data set and partition the one that FedOBP's tables would show."""
    best: dict[tuple[str, str, str], Group] = {}
    for group in sorted(gathered, key=lambda group: rank(group, setup_of(group.runs[0]))):
        if _whole_norm(group.runs[0]):
            best[group.dataset, group.partition, group.runs[0].method_name] = group
    return list(best.values())


TABLES["all_methods"] = Listing(one_each)
