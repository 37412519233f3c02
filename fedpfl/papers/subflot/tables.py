"""Declare SubFLOT's tables (CVPR 2026), from public summaries."""

from __future__ import annotations

import dataclasses
import math
from functools import partial

import pandas as pd

from fedpfl.ground.records import Record
from fedpfl.papers.layout import LAST, Layout, Measure, Selection, TableColumn, TableRow
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import Run

DOMAIN_COUNT = 4
PACS_DOMAINS = {"Photo": 2, "Art": 0, "Cartoon": 1, "Sketch": 3}
"""Indices in the data set's order, by the paper's order."""
PARTS = ("otp", "sar", "ota")
"""Parts of SubFLOT that its ablation leaves out."""


def measure_domain(index: int, run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the mean accuracy of one domain's clients, at the last evaluation.

    Each of four domains has a quarter of the clients; those count that take part.
    """
    clients_per_domain, rest = divmod(len(run.clients), DOMAIN_COUNT)
    is_last_evaluation = row["round"] == run.evaluations["round"].iloc[-1]
    # By domain only the last evaluation is recorded, and only by this measure.
    if rest or rule.accuracy != "accuracy" or not is_last_evaluation:
        return math.nan
    # Clients of a domain have consecutive numbers, as `groups` deals them.
    start = index * clients_per_domain
    clients = run.clients["client"].sort_values().iloc[start : start + clients_per_domain]
    participants = run.participating_clients
    in_domain = participants[participants["client"].isin(clients)]
    return float(in_domain["accuracy"].mean(skipna=False))


def _column(
    dataset: str,
    setting: str,
    partition: str = "dirichlet",
    clients: int = 20,
    experiment: str = "",
    measure: Measure | None = None,
) -> TableColumn:
    """Return a column.

    Args:
        dataset: Name in the configuration.
        setting: As published.
        partition: Of the runs.
        clients: Of the runs, but on HAR, which has its own.
        experiment: Of the command, by default the data set's.
        measure: What its cells show, instead of the row's.
    """
    config: Record = {"partition.name": partition}
    # HAR has a client per person, however many one asks for.
    if dataset != "har":
        config["clients"] = clients
    overrides = {"partition": partition}
    if clients != 20:
        overrides["clients"] = str(clients)
    return TableColumn(
        dataset,
        setting,
        config=config,
        alphas=(0.1,) if partition == "dirichlet" else (None,),
        experiment=experiment or f"subflot/{dataset}",
        overrides=overrides,
        measure=measure,
    )


def _subflot_row(missing_part: str = "") -> TableRow:
    """Return SubFLOT's row, perhaps without one of its parts."""
    implied_config = {f"method.{part}": part != missing_part for part in PARTS}
    if not missing_part:
        return TableRow(
            "SubFLOT", "subflot", implied_config=implied_config, overrides={"paper": "subflot"}
        )
    return TableRow(
        f"SubFLOT w/o {missing_part.upper()}",
        "subflot",
        config={f"method.{missing_part}": False},
        implied_config=implied_config,
        overrides={"paper": f"subflot_without_{missing_part}"},
    )


_make_layout = partial(
    Layout,
    rounds=200,
    metric="average local model accuracy (%)",
    rule=Selection("cohort_after", published=True),
    about="the paper's text is not at hand: neither is known when it judges (here right after the "
    "last local training, over all test samples of the clients) nor how many classes a client of "
    "its pathological split has",
    setup={
        "rounds": 200,
        "participation": 1.0,
        "local.epochs": 5,
        "local.batch_size": 256,
        "local.lr": 0.001,
        "method.alpha": 0.5,
        "method.lam": 1.0,
    },
)
WHOLE_SUBFLOT_ROW = dataclasses.replace(_subflot_row(), overrides={})
SUBMODEL_ROWS = (
    TableRow(METHOD_TITLES["heterofl"], "heterofl"),
    TableRow(METHOD_TITLES["flexfl"], "flexfl"),
    WHOLE_SUBFLOT_ROW,
)
TABLES = {
    "main": _make_layout(
        "SubFLOT's main table",
        "SubFLOT (CVPR 2026), main results, from public summaries",
        SUBMODEL_ROWS[1:],
        (
            _column("cifar100", "pathological", "shards"),
            _column("tiny_imagenet", "pathological", "shards"),
            _column("cifar100", "practical"),
            _column("ag_news", "NLP"),
            _column("har", "real world", "groups"),
        ),
    ),
    "label_skew": _make_layout(
        "SubFLOT's table of label skew",
        "SubFLOT (CVPR 2026), label skew, from a second public summary",
        SUBMODEL_ROWS,
        (
            # The split is not stated; CIFAR100's and Tiny-ImageNet's numbers are the main table's
            # pathological ones.
            _column("cifar10", "label skew or real world", "shards"),
            _column("cifar100", "label skew or real world", "shards"),
            _column("tiny_imagenet", "label skew or real world", "shards"),
            _column("ag_news", "label skew or real world"),
            _column("har", "label skew or real world", "groups"),
        ),
    ),
    "pacs": _make_layout(
        "SubFLOT's table of feature shift, PACS by domain",
        "SubFLOT (CVPR 2026), PACS, from a second public summary",
        SUBMODEL_ROWS,
        (
            *(
                _column("pacs", name, "groups", measure=partial(measure_domain, index))
                for name, index in PACS_DOMAINS.items()
            ),
            _column("pacs", "Avg", "groups"),
        ),
        rule=LAST._replace(published=True),
        about="the paper's text is not at hand: it is not known when it judges; by domain only the "
        "last evaluation of all clients is recorded",
    ),
    "ablation": _make_layout(
        "SubFLOT's ablation",
        "SubFLOT (CVPR 2026), ablation, from public summaries",
        (_subflot_row(), *(_subflot_row(missing_part=part) for part in PARTS)),
        (
            _column("cifar10", "Dir(0.1)", experiment="subflot/ablation"),
            _column("digit5", "feature shift", "groups", experiment="subflot/ablation_digit5"),
        ),
        about="the paper's text is not at hand: neither is known when it judges (here right after "
        "the last local training, over all test samples of the clients) nor what takes the place "
        "of a part that is left out",
    ),
    "scalability": _make_layout(
        "SubFLOT with more clients",
        "SubFLOT (CVPR 2026), scalability, from a second public summary",
        (WHOLE_SUBFLOT_ROW,),
        (
            *(
                TableColumn("", f"{count} clients", omission="the data set is not stated")
                for count in (10, 100)
            ),
            *(
                _column(
                    "cifar100",
                    f"{count} clients",
                    clients=count,
                    experiment="subflot/scalability",
                )
                for count in (10, 100)
            ),
        ),
    ),
}
