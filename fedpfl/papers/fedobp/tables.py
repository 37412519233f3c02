"""FedOBP's tables (arXiv:2604.16574), all methods with their cost, and its numbers beside any runs."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from fedpfl.papers.fedobp import logs
from fedpfl.papers.layout import Layout, Line, Listing, Measure, Place, Selection, rank, tuned
from fedpfl.papers.published import Published, departures, lookup, setup_differences
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHODS
from fedpfl.report.run import Run
from fedpfl.report.table import Table
from fedpfl.report.tables import Beside, accuracy_table

SOURCE = "FedOBP (arXiv:2604.16574) Table "
# What FedOBP's numbers were produced with; read from the authors' logs, but for the split, which
# seeds differ by.
SETUP = {"rounds": 400} | {
    key: value for key, value in logs.SETUP.items() if key != "partition.name"
}
ACCURACY, QUANTILE, PERSONAL = (
    "mean test accuracy over clients (%)",
    "quantile q",
    "number of personalized parameters",
)
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
    """Return what FedOBP's tables have published of the configurations, for
    `report.tables.accuracy_table`.

    everywhere: also of those whose set-up is not the published one.
    """
    setups = [setup_of(group.runs[0]) for group in gathered]
    known = [
        of_run(group.runs[0]) if everywhere or not setup_differences(group.runs[0], setup) else None
        for group, setup in zip(gathered, setups, strict=True)
    ]
    compared = [
        (group, setup, one.note)
        for group, setup, one in zip(gathered, setups, known, strict=True)
        if one
    ]
    values = [(one.value, one.std) if one else (math.nan, math.nan) for one in known]
    return Beside(values, MEANING, departures(compared))


def setup_of(run: Run) -> dict[str, Any]:
    """Return the set-up of FedOBP's tables for a run's method, data set and partition; FedOBP's has
    no momentum.
    """
    q = of_run(run, QUANTILE)
    return (
        SETUP
        | ({"method.q": q.value} if q else {})
        | ({"method.norm": "global", "local.momentum": 0.0} if run.method_name == "fedobp" else {})
    )


def _as_published(run: Run) -> dict[str, Any]:
    """The set-up of the public files, with their q."""
    log = logs.of_run(run, any_q=True)
    return SETUP | ({"method.q": log.q} if log and run.method_name == "fedobp" else {})


def of_run(run: Run, metric: str = ACCURACY) -> Published | None:
    """Return FedOBP's published number of a run's method, data set and Dirichlet setting, if there
    is one.
    """
    where = metric, run.method_name, run.dataset_name, setting_of(run)
    return next(
        filter(None, (lookup((SOURCE + table, *where)) for table in ("II", "III", "IV"))), None
    )


def setting_of(run: Run) -> str:
    """Return `Dir(0.1)` where the run's partition is one that the paper's tables may mean, else
    nothing.
    """
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
    usual = {
        "score": "obp",
        "scope": "all",
        "classifier_only": False,
        "ema": 0.0,
        "cold_start": "paper",
    }
    method = usual | run.config["method"]  # an older run may lack some
    known = all(method.get(key, value) == value for key, value in (usual | wanted).items())
    return run.method_name == "fedobp" and known


def _whole_norm(run: Run) -> bool:
    return run.method_name != "fedobp" or (
        own_score(run) and run.config["method"].get("norm") in ("none", "global")
    )


def _dirichlet(
    datasets: Sequence[str], alphas: Sequence[float] = ALPHAS, faulty: bool = False, **more: Any
) -> tuple[Place, ...]:
    where = {"partition.name": ("dirichlet", "published")}
    return tuple(
        Place(
            name,
            f"Dir({a:g})",
            where,
            (a,),
            words={"dataset": f"{name}_as_published" if faulty else name},
            faulty=faulty,
            **more,
        )
        for name in datasets
        for a in alphas
    )


def _methods(experiment: str) -> tuple[Line, ...]:
    lines = [Line(METHODS[method], method, experiment, _whole_norm) for method in COMPARED]
    lines.insert(
        COMPARED.index("fedavg") + 1, Line("FedAvg+FT", "fedavg", experiment, _whole_norm, tuned)
    )
    return tuple(lines)


def _counted(label: str, measure: Measure, metric: str, kind: str) -> Line:
    return Line(
        label,
        "fedobp",
        "fedobp/table2",
        _whole_norm,
        measure,
        known_as="fedobp",
        metric=metric,
        kind=kind,
    )


def _with_cls(run: Run) -> bool:
    """What Table V shows as such: on the smaller data sets runs without CLS, with a moving average."""
    shown: dict[str, Any] = {"ema": 0.5} if run.dataset_name in SMALL else {"classifier_only": True}
    return own_score(run, score="obp_as_published", norm="global", **shown)


def _ablation(norm: str, known_as: str) -> Line:
    fits = partial(own_score, score="obp_as_published", norm=norm)
    words = {"paper": f"fedobp_{norm}"}
    return Line(
        norm, "fedobp", "fedobp/table5", fits, words=words, known_as=known_as, setting=ABLATION
    )


ABLATED = (
    _ablation("none", "FedOBP NoNorm"),
    _ablation("layer", "FedOBP LayerNorm"),
    _ablation("global", "FedOBP GlobalNorm w/o CLS"),
    Line(
        "global, CLS",
        "fedobp",
        "fedobp/{}",
        _with_cls,
        known_as="FedOBP GlobalNorm with CLS",
        setting=ABLATION,
    ),
)
"""The lines of Table V."""


def _at_momentum(momentum: float) -> tuple[Line, ...]:
    """Tables III and IV's lines with one momentum for all."""
    where = {"local.momentum": momentum}
    return tuple(
        replace(line, label=f"{line.label}, momentum {momentum:g}", where=where)
        for line in _methods("fedobp/one_momentum")
    )


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
    "table3": _plan(
        "FedOBP's Table III", SOURCE + "III", _methods("fedobp/table3"), _dirichlet(LARGE)
    ),
    "table4": _plan(
        "FedOBP's Table IV", SOURCE + "IV", _methods("fedobp/table4"), _dirichlet(SMALL)
    ),
    "table4_as_published": _plan(
        "FedOBP's Table IV, MedMNIST with the published normalisation, which makes every image constant",
        SOURCE + "IV",
        _methods("fedobp/table4_as_published"),
        _dirichlet(SMALL[2:], faulty=True),
        setup=_as_published,
    ),
    "one_momentum": _plan(
        "FedOBP's Tables III and IV with one momentum for all methods",
        "",
        _at_momentum(0.0) + _at_momentum(0.7),
        _dirichlet(LARGE + SMALL),
        about="none is published; 0 for all favours FedOBP, 0.7 the others",
    ),
    "table5": _plan(
        "FedOBP's Table V: normalisation of the scores, and personal entries in the classifier only (CLS)",
        SOURCE + "V",
        ABLATED,
        (
            *_dirichlet(LARGE, (0.1,), experiment="table5_cls"),
            *_dirichlet(SMALL[:2], (0.1,), experiment="table5_ema"),
            *_dirichlet(SMALL[2:], (0.1,), faulty=True, experiment="table5_ema"),
        ),
        about="published are the authors' logs, pooled, the best of rounds 100, 200, 300 and 400; with CLS these are, "
        "on MNIST, FMNIST and MedMNIST, of runs without CLS, with a moving average",
        setup=_as_published,
    ),
}


def one_each(gathered: Sequence[Group], **setup: Any) -> list[Group]:
    """Return of each method's configurations on a data set and partition the one that FedOBP's
    tables would show.

    setup: what takes the place of theirs.
    """
    best: dict[tuple[str, str, str], Group] = {}
    for group in sorted(gathered, key=lambda group: rank(group, setup_of(group.runs[0]) | setup)):
        if _whole_norm(group.runs[0]):
            best[group.dataset, group.partition, group.runs[0].method_name] = group
    return list(best.values())


def _at_one_momentum(gathered: Sequence[Group]) -> list[Group]:
    return one_each(gathered, **{"local.momentum": 0.0})


def _listed(gathered: Sequence[Group], rule: Selection) -> Table:
    """Accuracies and costs, as of any runs."""
    members = [run for group in gathered for run in group.runs]
    return accuracy_table(members, rule.select, rule.every, partial(beside, everywhere=True))


def _held_against_files(gathered: Sequence[Group], rule: Selection) -> Table:
    """The runs beside the public files, with what is known of the code behind these."""
    known = [(group, of_run(group.runs[0])) for group in gathered]
    notes = departures((group, {}, one.note) for group, one in known if one)
    return replace(logs.log_table(gathered), notes=notes)


TABLES |= {
    "all_methods": Listing(_at_one_momentum, _listed),
    "public_logs": Listing(logs.logged, _held_against_files),
}
