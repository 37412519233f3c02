"""Declare FedOBP's tables (arXiv:2604.16574), and set its numbers beside any runs."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pandas as pd

from fedpfl.ground.records import Record
from fedpfl.papers.fedobp import logs
from fedpfl.papers.layout import (
    Layout,
    Listing,
    Selection,
    TableColumn,
    TableRow,
    measure_fine_tuned,
)
from fedpfl.papers.published import Published, departures, lookup, setup_differences
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import Run
from fedpfl.report.table import Table
from fedpfl.report.tables import PublishedColumn

SOURCE = "FedOBP (arXiv:2604.16574) Table "
# From the authors' logs, but for the split: seeds differ by it.
SETUP = {"rounds": 400} | {
    key: value for key, value in logs.SETUP.items() if key != "partition.name"
}
ACCURACY = "mean test accuracy over clients (%)"
QUANTILE = "quantile q"
ABLATION = "ablation"
"""The setting of Table V, which does not state its partition."""
BESIDE_NOTE = (
    "published: FedOBP (arXiv:2604.16574), Tables III and IV: described there as mean over "
    "clients, in the authors' logs pooled, the best of rounds 100, 200, 300 and 400; Δ: own minus "
    "published, in points"
)
LARGE_DATASETS = ("cifar10", "cifar100", "emnist", "svhn")
SMALL_DATASETS = ("mnist", "fmnist", "organamnist", "organcmnist")
MEDMNIST_DATASETS = SMALL_DATASETS[2:]
COMPARED_METHODS = (
    "local_only",
    "fedavg",
    "fedper",
    "apfl",
    "lg_fedavg",
    "fedrep",
    "pfedfda",
    "flute",
    "feddpa",
    "floco",
    "fedala",
    "fedselect",
    "fedobp",
)
"""In the order of the paper's tables."""
AS_PUBLISHED = {
    "lg_fedavg": {"method.variant": "as_published", "method.personal_init": "server_average"},
    "flute": {"method.variant": "as_published"},
    "pfedfda": {"method.variant": "as_published"},
    "fedper": {"method.head_init": "server_average"},
    "fedrep": {"method.personal_init": "server_average"},
}
"""How the published code of these methods differs from their papers."""
SHARES = (({"local.momentum": 0.7}, 1), ({"local.momentum": 0.0}, 3))
"""What a baseline's published number mixes: the public file's run, and thrice a second one."""
ALPHAS = (0.1, 0.5)
POOLED = Selection("accuracy_pooled", "best-checkpoint", 100, published=True)
"""FedOBP's rule: the best of rounds 100, 200, 300 and 400, over all clients' test samples."""


# ---- Published numbers beside any runs


def published_beside(groups: Sequence[Group], everywhere: bool = False) -> PublishedColumn:
    """Return FedOBP's published accuracies of configurations, for `report.tables.accuracy_table`.

    Args:
        groups: The configurations.
        everywhere: Whether configurations with another set-up have a number, too.
    """
    values: list[tuple[float, float]] = []
    comparisons = []
    for group in groups:
        run = group.runs[0]
        setup = setup_of(run)
        entry = None
        # A published number stands beside runs of its set-up; beside other runs on demand, with a note.
        if everywhere or not setup_differences(run, setup):
            entry = published_number(run)
        if entry is None:
            values.append((math.nan, math.nan))
        else:
            values.append((entry.value, entry.std))
            comparisons.append((group, setup, entry.note))
    return PublishedColumn(values, BESIDE_NOTE, departures(comparisons))


def setup_of(run: Run) -> Record:
    """Return the set-up of FedOBP's tables for a run's method, data set and partition."""
    setup = dict(SETUP)
    quantile = published_number(run, QUANTILE)
    if quantile:
        setup["method.q"] = quantile.value
    if run.method_name == "fedobp":
        # The paper's algorithm has no momentum, which its logs have.
        setup |= {"method.norm": "global", "local.momentum": 0.0}
    return setup | AS_PUBLISHED.get(run.method_name, {})


def _setup_of_table(run: Run) -> Record:
    """Return the set-up of Tables III and IV: rows name the momentum, and all runs share a split."""
    setup = setup_of(run) | {"partition.seed": logs.SEED}
    if run.method_name != "fedobp":
        del setup["local.momentum"]
    return setup


def _setup_of_public_file(run: Run) -> Record:
    """Return the set-up of the public files, with their q."""
    log = logs.find_log(run, any_q=True)
    if log and run.method_name == "fedobp":
        return SETUP | {"method.q": log["q"]}
    return SETUP


def published_number(run: Run, metric: str = ACCURACY) -> Published | None:
    """Return the published number of a run's method, data set and Dirichlet setting."""
    setting = published_setting(run)
    # Each data set is in one of them.
    for table in ("II", "III", "IV"):
        entry = lookup((SOURCE + table, metric, run.method_name, run.dataset_name, setting))
        if entry:
            return entry
    return None


def published_setting(run: Run) -> str:
    """Return `Dir(0.1)` for a partition that the paper's tables may mean, else ""."""
    alpha = run.config_value("partition.alpha")
    is_dirichlet = run.config_value("partition.name") in ("dirichlet", "published")
    return f"Dir({alpha:g})" if is_dirichlet and isinstance(alpha, int | float) else ""


# ---- Measures of cells


def measure_quantile(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return FedOBP's q."""
    return math.nan if run.q is None else run.q


def measure_personal_entries(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the personal entries per client in the last round; the first has none."""
    if run.personalized_entries.empty:
        return math.nan
    return float(run.personalized_entries.iloc[-1].sum(skipna=False))


# ---- Which runs fill it


def is_paper_fedobp(run: Run, **config: Any) -> bool:
    """Return True if a run is the paper's FedOBP, but for some keys of `method`.

    Args:
        run: Any run.
        config: Values of keys that shall differ from the paper's.
    """
    paper_config = {
        "score": "obp",
        "scope": "all",
        "classifier_only": False,
        "ema": 0.0,
        "cold_start": "paper",
    }
    run_config = paper_config | run.config["method"]  # an older run may lack some
    wanted_config = paper_config | config
    if run.method_name != "fedobp":
        return False
    return all(run_config.get(key, value) == value for key, value in wanted_config.items())


def is_paper_method(run: Run, **config: Any) -> bool:
    """Return True for another method, or FedOBP with one norm for all scores."""
    if run.method_name != "fedobp":
        return True
    norm = run.config["method"].get("norm", "global")
    return norm in ("none", "global") and is_paper_fedobp(run, **config)


def _is_table5_cls(run: Run) -> bool:
    """Return True if a run is what Table V shows as CLS.

    On the smaller data sets these are runs without CLS, with a moving average.
    """
    config: Record = {"classifier_only": True}
    # So the authors' logs have it, though the table calls them CLS.
    if run.dataset_name in SMALL_DATASETS:
        config = {"ema": 0.5}
    return is_paper_fedobp(run, score="obp_as_published", norm="global", **config)


# ---- Rows and columns


def _dirichlet_columns(
    datasets: Sequence[str],
    alphas: Sequence[float] = ALPHAS,
    faulty: bool = False,
    overrides: Mapping[str, str] | None = None,
) -> tuple[TableColumn, ...]:
    """Return a column for each data set and alpha."""
    columns = []
    for name in datasets:
        config_name = f"{name}_as_published" if faulty else name
        for alpha in alphas:
            column = TableColumn(
                name,
                f"Dir({alpha:g})",
                config={"partition.name": ("dirichlet", "published")},
                alphas=(alpha,),
                overrides={"dataset": config_name, **(overrides or {})},
                faulty=faulty,
            )
            columns.append(column)
    return tuple(columns)


def _plain_rows(experiment: str) -> list[TableRow]:
    """Return a row for each compared method, and one for FedAvg after fine-tuning."""
    rows = []
    for method in COMPARED_METHODS:
        row = TableRow(METHOD_TITLES[method], method, experiment, is_paper_method)
        rows.append(row)
        if method == "fedavg":
            rows.append(replace(row, label="FedAvg+FT", measure=measure_fine_tuned))
    return rows


def _rows_by_momentum(experiment: str, table: str) -> tuple[TableRow, ...]:
    """Return the rows of Table III or IV: of baselines the mixture, then each momentum."""
    *baselines, fedobp = _plain_rows(experiment)
    logged_labels = {METHOD_TITLES[name] for name in logs.read_logs()["method"]}
    rows = []
    for row in baselines:
        rows.append(replace(row, shares=SHARES))
        if row.label in logged_labels:
            beside_file = partial(_file_number, row.method)
            beside_derived = partial(_derived_number, table, row.method)
            for (config, _), beside in zip(SHARES, (beside_file, beside_derived), strict=True):
                label = f"{row.label}, momentum {config['local.momentum']:g}"
                rows.append(replace(row, label=label, config=config, beside=beside))
    config = {"local.momentum": 0.0}
    overrides = {"method": "fedobp", "local.momentum": "0.0", "seed": "42,1,2,3"}
    return (*rows, replace(fedobp, config=config, overrides=overrides))


def _file_number(method: str, column: TableColumn) -> Published | None:
    """Return the best of four of a method's public file."""
    best = logs.best_accuracy(method, column.dataset, column.setting)
    return None if math.isnan(best) else Published(best, math.nan, "public file", "")


def _derived_number(table: str, method: str, column: TableColumn) -> Published | None:
    """Derive the number that a published mean has three times beside the file's."""
    number = lookup((SOURCE + table, ACCURACY, method, column.dataset, column.setting))
    best = logs.best_accuracy(method, column.dataset, column.setting)
    # Below 0.03 a deviation of two digits says too little.
    if number is None or math.isnan(best) or not number.std >= 0.03:
        return None
    # Of x, y, y, y the deviation is |x - mean| / sqrt(3), which two digits give within 8 %.
    if abs(abs(best - number.value) / number.std - math.sqrt(3)) > 0.14:
        return None
    return Published(number.value - (best - number.value) / 3, math.nan, "derived", "")


_make_table2_row = partial(
    TableRow,
    method="fedobp",
    experiment="fedobp/table2",
    fits=is_paper_method,
    published_name="fedobp",
)
_make_table5_row = partial(TableRow, method="fedobp", experiment="fedobp/table5", setting=ABLATION)


def _table5_row(norm: str, published_name: str) -> TableRow:
    """Return the row of one normalisation."""
    return _make_table5_row(
        norm,
        fits=partial(is_paper_fedobp, score="obp_as_published", norm=norm),
        overrides={"paper": f"fedobp_{norm}"},
        published_name=published_name,
    )


TABLE5_ROWS = (
    _table5_row("none", "FedOBP NoNorm"),
    _table5_row("layer", "FedOBP LayerNorm"),
    _table5_row("global", "FedOBP GlobalNorm w/o CLS"),
    _make_table5_row(
        "global, CLS",
        fits=_is_table5_cls,
        overrides={
            "paper": {"": "fedobp_cls"} | dict.fromkeys(SMALL_DATASETS, "fedobp_global"),
            "method.ema": {"": 0.0} | dict.fromkeys(SMALL_DATASETS, 0.5),
        },
        published_name="FedOBP GlobalNorm with CLS",
    ),
)


# ---- The tables

MOMENTUM_NOTE = (
    "A baseline's number is (x + 3 y) / 4 of a run at momentum 0.7 (x) and one at 0 (y), and its "
    "deviation that of x, y, y, y: most published deviations are the largest of four numbers with "
    "that mean, which three equal ones have. Beside momentum 0.7 stands the public file, beside 0 "
    "the y that follows from published mean and file; that y is the run at momentum 0 is a "
    "hypothesis. LG-FedAvg, FLUTE, pFedFDA and the heads of FedPer and FedRep are as in the "
    "published code; method.variant=paper and method.head_init=initial are their papers' rules."
)
_make_layout = partial(
    Layout,
    rounds=400,
    rule=POOLED,
    about="published values are described as means over clients; the authors' logs hold pooled "
    "ones, the best of rounds 100, 200, 300 and 400",
    metric=ACCURACY,
    setup=setup_of,
)
TABLES: dict[str, Layout | Listing] = {
    "table2": _make_layout(
        "FedOBP's Table II: q, and how many entries it makes personal per client",
        SOURCE + "II",
        (
            _make_table2_row("q", measure=measure_quantile, metric=QUANTILE, kind="exact"),
            _make_table2_row(
                "personal entries",
                measure=measure_personal_entries,
                metric="number of personalized parameters",
                kind="entries",
            ),
        ),
        _dirichlet_columns(LARGE_DATASETS + SMALL_DATASETS),
        about="",
    ),
    "table3": _make_layout(
        "FedOBP's Table III",
        SOURCE + "III",
        _rows_by_momentum("fedobp/table3", "III"),
        _dirichlet_columns(LARGE_DATASETS),
        setup=_setup_of_table,
        note=MOMENTUM_NOTE,
    ),
    "table4": _make_layout(
        "FedOBP's Table IV",
        SOURCE + "IV",
        _rows_by_momentum("fedobp/table4", "IV"),
        _dirichlet_columns(SMALL_DATASETS),
        setup=_setup_of_table,
        note=MOMENTUM_NOTE,
    ),
    "table4_as_published": _make_layout(
        "FedOBP's Table IV, MedMNIST with the published normalisation, which makes every image "
        "constant",
        SOURCE + "IV",
        tuple(_plain_rows("fedobp/table4")),
        _dirichlet_columns(MEDMNIST_DATASETS, faulty=True, overrides={"local.momentum": "0.7"}),
        setup=_setup_of_public_file,
    ),
    "table5": _make_layout(
        "FedOBP's Table V: normalisation of the scores, and personal entries in the classifier "
        "only (CLS)",
        SOURCE + "V",
        TABLE5_ROWS,
        (
            *_dirichlet_columns(LARGE_DATASETS + SMALL_DATASETS[:2], (0.1,)),
            *_dirichlet_columns(MEDMNIST_DATASETS, (0.1,), faulty=True),
        ),
        about="published are the authors' logs, pooled, the best of rounds 100, 200, 300 and 400; "
        "with CLS these are, on MNIST, FMNIST and MedMNIST, of runs without CLS, with a moving "
        "average",
        setup=_setup_of_public_file,
    ),
}


def _make_log_table(groups: Sequence[Group]) -> Table:
    """Return runs beside the public files, with notes on the code behind these."""
    entries = [published_number(group.runs[0]) for group in groups]
    comparisons: list[tuple[Group, Record, str]] = [
        (group, {}, entry.note) for group, entry in zip(groups, entries, strict=True) if entry
    ]
    return replace(logs.log_table(groups), notes=departures(comparisons))


TABLES["public_logs"] = Listing(logs.choose_logged, _make_log_table)
