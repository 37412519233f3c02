"""Declare FedPURIN's tables and Figures 2 to 4 (arXiv:2510.16065)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial

import pandas as pd

from fedpfl.ground.records import Record
from fedpfl.papers.drawing import (
    Axis,
    ChooseGroups,
    Figure,
    groups_with_several_values,
    paint_accuracy_over,
    paint_means,
)
from fedpfl.papers.layout import (
    Layout,
    Selection,
    TableColumn,
    TableRow,
    has_config,
)
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import Run

BITS_PER_MEBIBYTE = 8 * 2**20
THREE_ALPHAS = {
    "fmnist": (0.1, 0.5, 1.0),
    "cifar10": (0.1, 0.5, 1.0),
    "cifar100": (0.01, 0.1, 0.5),
}
SETUPS = {
    "fmnist": {"rounds": 200, "model.name": "resnet8", "method.beta": 100},
    "cifar10": {"rounds": 200, "model.name": "resnet8", "method.beta": 100},
    "cifar100": {"rounds": 300, "model.name": "resnet10", "method.beta": 170},
}


def measure_mebibytes(
    direction: str, is_after_beta: bool, run: Run, row: pd.Series, rule: Selection
) -> float:
    """Return MiB per client and round, until round beta or after it.

    The paper counts no positions on the way down.
    """
    beta = run.config_value("method.beta")
    rounds = run.rounds
    if beta is not None:
        rounds = rounds[(rounds["round"] > beta) == is_after_beta]
    if rounds.empty or f"bits_{direction}" not in rounds:
        return math.nan
    # Values are 32 bits; our own count has the positions of entries in it.
    if rule.published and direction == "down":
        bits = 32 * rounds[f"values_{direction}"]
    else:
        bits = rounds[f"bits_{direction}"]
    # Per client that takes part, independent of cohort sizes.
    participants = run.participants[rounds.index].sum()
    return float(bits.sum() / participants / BITS_PER_MEBIBYTE)


def _dirichlet_columns(alphas: Mapping[str, Sequence[float]]) -> tuple[TableColumn, ...]:
    """Return a column for each data set and alpha."""
    return tuple(
        TableColumn(
            name,
            f"Dir({alpha:g})",
            config={"partition.name": "fixed_dirichlet"},
            alphas=(alpha,),
            experiment=f"fedpurin/{name}",
            setup=SETUPS[name],
        )
        for name, values in alphas.items()
        for alpha in values
    )


def _variant(score: str, hessian: bool) -> Record:
    return {"method.score": score, "method.hessian": hessian}


_make_layout = partial(
    Layout,
    rounds=200,
    seeds=3,
    metric="best-round accuracy before aggregation, mean over 3 splits (%)",
    rule=Selection("cohort_after", "best-checkpoint", published=True),
    about="the paper judges every round right after local training and takes the best, chosen on "
    "test data",
    setup={
        "clients": 20,
        "participation": 1.0,
        "local.epochs": 5,
        "local.batch_size": 100,
        "local.lr": 0.1,
        "local.momentum": 0.9,
        "method.tau": 0.5,
    },
)
TABLES = {
    "table1": _make_layout(
        "FedPURIN's Table 1",
        "FedPURIN (arXiv:2510.16065) Table 1",
        (
            TableRow("Separate", "local_only"),
            *(
                TableRow(METHOD_TITLES[name], name)
                for name in ("fedavg", "fedper", "fedbn", "pfedsd", "fedcac")
            ),
            TableRow("FedPURIN", "fedpurin", implied_config=_variant("gradient", False)),
        ),
        _dirichlet_columns(THREE_ALPHAS),
    ),
    "table2": _make_layout(
        "FedPURIN's Table 2: change of the weights or exact gradient, without and with the "
        "Hessian term",
        "FedPURIN (arXiv:2510.16065) Table 2",
        tuple(
            TableRow(
                f"FedPURIN ({score_label}, {hessian_label})",
                "fedpurin",
                "{}_ablation",
                config=_variant(score, hessian),
            )
            for hessian, hessian_label in ((False, "no Hessian"), (True, "Hessian"))
            for score_label, score in (("delta theta", "delta"), ("exact gradient", "gradient"))
        ),
        _dirichlet_columns(THREE_ALPHAS),
    ),
    "table3": _make_layout(
        "FedPURIN's Table 3: MiB per client and round, until round beta and after it",
        "FedPURIN (arXiv:2510.16065) Table 3",
        tuple(
            TableRow(
                f"{METHOD_TITLES[name]}, {direction}, {period} beta",
                name,
                measure=partial(measure_mebibytes, direction, period == "after"),
                implied_config=_variant("gradient", False) if name == "fedpurin" else {},
                published_name=METHOD_TITLES[name],
                metric=f"{direction}link MB per client and round, {period} beta",
                kind="decimal",
            )
            for name in ("fedavg", "fedcac", "fedpurin")
            for direction in ("up", "down")
            for period in ("before", "after")
        ),
        _dirichlet_columns(dict.fromkeys(THREE_ALPHAS, (0.1,))),
        about="the paper counts no positions on the way down (as-published: neither here)",
    ),
}


def _describe_norm(group: Group) -> str:
    """Name a group by whether BatchNorm's weights are scored."""
    with_norm = "with" if group.runs[0].config_value("method.include_norm") else "without"
    return f"{with_norm} BatchNorm's weights"


def _choose_methods(groups: Sequence[Group]) -> list[Group]:
    """Choose the groups that have a row in Table 1."""
    rows = TABLES["table1"].rows

    def fits(run: Run) -> bool:
        return any(
            run.method_name == row.method and has_config(run, row.implied_config) for row in rows
        )

    return groups_with_several_values(groups, fits, lambda run: run.method_name)


def _choose_over(key: str) -> ChooseGroups:
    """Return a function that chooses the paper's default FedPURIN at several values of a key.

    By default it scores the change of the weights, an approximated gradient; the main comparison
    has the exact one.
    """
    config = {**_variant("delta", False), "method.include_norm": False, "method.tau": 0.5}
    # The key that is varied may have any value; all other keys have the default's.
    del config[key]

    def fits(run: Run) -> bool:
        return run.method_name == "fedpurin" and has_config(run, config)

    return lambda groups: groups_with_several_values(
        groups, fits, lambda run: run.config_value(key)
    )


FIGURES = {
    "figure2": Figure(_choose_methods, paint_means(lambda group: group.method), "fedpurin/cifar10"),
    "figure3": Figure(
        _choose_over("method.include_norm"), paint_means(_describe_norm), "fedpurin/norm"
    ),
    "figure4": Figure(
        _choose_over("method.tau"),
        paint_accuracy_over(
            Axis(
                lambda group: group.runs[0].config_value("method.tau"),
                "share of critical entries, tau",
            ),
            lambda group: {"FedPURIN": "{}"},
        ),
        "fedpurin/tau",
    ),
}
