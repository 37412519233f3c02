"""Declare FedSPU's tables, and its Figure 5: memory over the width of sub-models (AAAI 2025)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.papers.drawing import Figure, draw_columns
from fedpfl.papers.layout import (
    LAST,
    Layout,
    Selection,
    TableColumn,
    TableRow,
)
from fedpfl.report.figures import draw_panels
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPARED_METHODS = ("prunefl", "fjord", "hermes", "fedmp", "fedselect", "fedspu")
ALPHAS = (0.1, 0.5, 1.0)
BYTES_PER_VALUE = 4


# ---- Measures of cells


def _is_before_few_clients(run: Run) -> pd.Series:
    """Mark the rounds before the first with fewer clients than a cohort."""
    # Once too few, all later rounds are out, though a cohort may be full again.
    return (run.participants >= run.cohort).cummin()


def _counted_rounds(run: Run, rule: Selection) -> pd.DataFrame:
    """Return the rounds that count; by the paper, before the first with too few clients."""
    return run.rounds[_is_before_few_clients(run)] if rule.published else run.rounds


def measure_volume(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the gigabytes that all clients send and get in all rounds.

    By the paper's count they are gigabits, which its numbers fit.
    """
    if "values_up" not in run.rounds:
        return math.nan
    rounds = _counted_rounds(run, rule)
    values = float(rounds["values_down"].sum() + rounds["values_up"].sum())
    return values * (32 if rule.published else BYTES_PER_VALUE) / 1e9


def measure_hours(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the simulated hours of all rounds, nan of runs that simulate no devices."""
    if "sim_seconds" not in run.rounds:
        return math.nan
    return float(_counted_rounds(run, rule)["sim_seconds"].sum(skipna=False)) / 3600


def measure_active_rounds(run: Run, row: pd.Series, rule: Selection) -> float:
    """Return the first round with fewer clients than a cohort, else the last one."""
    full_rounds = int(_is_before_few_clients(run).sum())
    if full_rounds < len(run.rounds):
        return float(run.rounds["round"].iloc[full_rounds])
    # A run that ended early has stopped everybody: its next round would have been empty.
    has_stopped_everybody = run.status == "finished" and run.rounds_done < run.rounds_planned
    return float(run.rounds_done + has_stopped_everybody)


# ---- Tables


def _columns(setting: str = "") -> tuple[TableColumn, ...]:
    """Return the columns of a table.

    Args:
        setting: As published, of cells that are means over all alphas; by default each alpha has
            a column.
    """
    datasets = (
        ("emnist", "emnist", 16, 0.0002),
        ("cifar10", "cifar10", 128, 0.1),
        ("speech_commands", "speech", 16, 0.0005),
    )
    alphas_of_columns = [ALPHAS] if setting else [(alpha,) for alpha in ALPHAS]
    return tuple(
        TableColumn(
            name,
            setting or f"Dir({alphas[0]:g})",
            config={"partition.name": "dirichlet", "model.name": f"fedspu_{short_name}"},
            alphas=alphas,
            experiment=f"fedspu/{short_name}",
            setup={"local.batch_size": batch_size, "local.lr": lr},
        )
        for name, short_name, batch_size, lr in datasets
        for alphas in alphas_of_columns
    )


def _make_row(label: str, method: str, early: bool, **fields: Any) -> TableRow:
    """Return the row of a method, with or without early stopping."""
    omission = ""
    if method == "fedselect":
        omission = (
            "what is described there, a pruned model that grows, is another method than its "
            "authors'"
        )
    return TableRow(label, method, config={"stopping.early": early}, omission=omission, **fields)


def _method_rows(early: bool) -> tuple[TableRow, ...]:
    return tuple(_make_row(METHOD_TITLES[name], name, early) for name in COMPARED_METHODS)


MEAN_SETTING = "mean of Dir(0.1), Dir(0.5), Dir(1)"
COST_ROWS = (*_method_rows(early=False), _make_row("FedSPU+ES", "fedspu", early=True))
"""Rows of both halves of Table 3."""
COST_MEASURES = (
    ("volume", measure_volume, "total transmitted parameters (GB)"),
    ("hours", measure_hours, "total local training time (hours)"),
)
"""Name, measure and metric of Table 3's two halves."""
_make_layout = partial(
    Layout,
    rounds=500,
    seeds=3,
    rule=LAST._replace(published=True),
    about="the paper too takes the mean over clients of the last round",
    setup={"rounds": 500, "clients": 100, "participation": 0.1, "local.epochs": 5},
)
TABLES = {
    "table1": _make_layout(
        "FedSPU's Table 1",
        "FedSPU (AAAI 2025) Table 1",
        _method_rows(early=False),
        _columns(MEAN_SETTING),
        metric="mean final test accuracy (%)",
    ),
    "table2": _make_layout(
        "FedSPU's Table 2: with early stopping",
        "FedSPU (AAAI 2025) Table 2",
        _method_rows(early=True),
        _columns(MEAN_SETTING),
        metric="mean test accuracy (%)",
    ),
    "table3": _make_layout(
        "FedSPU's Table 3: what clients send and get in all, in gigabytes, and hours of local "
        "training",
        "FedSPU (AAAI 2025) Table 3",
        tuple(
            dataclasses.replace(
                row,
                label=f"{row.label} ({measure_name})",
                measure=measure,
                published_name=row.label,
                metric=metric,
                kind="decimal",
            )
            for measure_name, measure, metric in COST_MEASURES
            for row in COST_ROWS
        ),
        _columns("500 rounds"),
        about="the published gigabytes fit gigabits: 18.43 on CIFAR10 are 57,608 values of 32 "
        "bits, the mean over the five widths, to and from 10 clients in 500 rounds; with early "
        "stopping they end where Table 4 does, 7.23 of 11.71 on EMNIST being 309 of 500 rounds "
        "(as-published: both so here)",
        note="Hours are those of simulated devices (docs/system.md), which are ours, not the "
        "paper's; transfers count.",
    ),
    "table4": _make_layout(
        "FedSPU's Table 4: rounds until fewer clients are active than a round takes",
        "FedSPU (AAAI 2025) Table 4",
        (
            _make_row("FedSPU", "fedspu", False, measure=measure_active_rounds, kind="entries"),
            _make_row("FedSPU+ES", "fedspu", True, measure=measure_active_rounds, kind="entries"),
        ),
        _columns(),
        about="+ES: with early stopping",
        metric="rounds",
    ),
}


# ---- Figure 5


def _choose_with_memory(groups: Sequence[Group]) -> list[Group]:
    """Return one of FedSPU's groups for each network and batch on a data set.

    Their runs have recorded what widths come to.
    """
    first_groups: dict[str, Group] = {}
    for group in groups:
        # Widths are the data set's and the network's: seeds and splits have the same.
        if group.runs[0].method_name == "fedspu" and not memory_by_width(group.runs[0]).empty:
            first_groups.setdefault(_memory_title(group), group)
    return list(first_groups.values())


def _memory_title(group: Group) -> str:
    """Name a panel: data set, network and batch."""
    run = group.runs[0]
    network = f"{run.config_value('model.name')}, batch {run.config_value('local.batch_size')}"
    return f"{group.dataset}\n{network}"


def memory_by_width(run: Run) -> pd.DataFrame:
    """Return the bytes that training takes by width: parameters, gradients and activations.

    Empty where the run has not recorded them. Layers count that have parameters, each number as 32
    bits. FedSPU keeps all parameters, the gradients of active ones and at least the activations of
    active neurons. Gradients pass on to these through frozen neurons, so exact ones need most of
    the activations of frozen neurons too: at most all of them.
    """
    try:
        devices = pd.DataFrame(run.summary["devices"], dtype=float).set_index("width")
        entries = devices["entries"]
        activations = run.config_value("local.batch_size") * devices["values"]
    except (LookupError, TypeError, ValueError):
        return pd.DataFrame()
    # Values and gradients of a sub-model; FedSPU holds all values and the gradients of some.
    whole_entries, whole_activations = entries.iloc[-1], activations.iloc[-1]
    values = {
        "full network (Hermes, FedMP, PruneFL while ranking)": 2 * whole_entries
        + whole_activations,
        "FedSPU, at most": whole_entries + entries + whole_activations,
        "FedSPU, at least": whole_entries + entries + activations,
        "sub-model (FjORD, random dropout, others once ranked)": 2 * entries + activations,
    }
    return BYTES_PER_VALUE * pd.DataFrame(values, index=devices.index)


def _paint_memory(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw memory over the width of sub-models, a panel per data set, network and batch."""

    def draw_panel(ax: Axes, run: Run) -> None:
        draw_columns(ax, memory_by_width(run) / 2**20)
        ax.set(xlabel="share of each layer's neurons", ylabel="memory (MiB)", ylim=(0, None))

    run_by_title = {_memory_title(group): group.runs[0] for group in groups}
    return draw_panels(run_by_title, path, draw_panel)


FIGURES = {"figure5": Figure(_choose_with_memory, _paint_memory, "fedspu/cifar10 method=fedspu")}
