"""FedSPU's tables, and its Figure 5: memory over the width of sub-models (AAAI 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.papers import costs
from fedpfl.papers.drawing import Figure
from fedpfl.papers.layout import LAST, Layout, Line, Place, Selection, spelt, titled
from fedpfl.report.figures import legible, look, panels
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHODS
from fedpfl.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _volume(run: Run, row: pd.Series, rule: Selection) -> float:
    """Gigabytes that all clients send and get in all rounds; by the paper's count gigabits, which its numbers fit, and
    before the first round with fewer clients than a cohort.
    """
    if "values_up" not in run.rounds:
        return math.nan
    rows = run.rounds[costs.before_few(run)] if rule.published else run.rounds
    values = float(rows["values_down"].sum() + rows["values_up"].sum())
    return values * (32 if rule.published else 4) / 1e9


def _hours(run: Run, row: pd.Series, rule: Selection) -> float:
    """Hours that the clients' devices would take; by the paper's count without transfers."""
    return costs.hours(run, rule.device, transfers=not rule.published, until_few=rule.published)


def _reckoned(rule: Selection) -> str:
    whose = "ours, not the paper's" if rule.device == costs.OURS else "as given"
    return f"Hours are reckoned (docs/report.md), for clients of {rule.device}, {whose}."


def _active(run: Run, row: pd.Series, rule: Selection) -> float:
    """The first round with fewer clients than a cohort, which may be none; without one the rounds that there are."""
    full = int(costs.before_few(run).sum())
    over = run.status == "finished" and run.reached < run.planned  # everybody has stopped
    return float(run.rounds["round"].iloc[full] if full < len(run.rounds) else run.reached + over)


COMPARED = ("prunefl", "fjord", "hermes", "fedmp", "fedselect", "fedspu")
ALPHAS = (0.1, 0.5, 1.0)


def _places(setting: str, apart: bool = False, **where: Any) -> tuple[Place, ...]:
    """The columns of FedSPU's tables: means over three alphas, or each `apart`."""
    values = (
        ("emnist", "emnist", 16, 0.0002),
        ("cifar10", "cifar10", 128, 0.1),
        ("speech_commands", "speech", 16, 0.0005),
    )
    return tuple(
        Place(
            name,
            f"Dir({alphas[0]:g})" if apart else setting,
            {"partition.name": "dirichlet", "model.name": f"fedspu_{short}"} | where,
            alphas,
            f"fedspu/{short}",
            {key: spelt(value) for key, value in where.items()},
            {"local.batch_size": batch, "local.lr": lr},
        )
        for name, short, batch, lr in values
        for alphas in ([(alpha,) for alpha in ALPHAS] if apart else [ALPHAS])
    )


def _untold(method: str) -> str:
    grown = "what is described there, a pruned model that grows, is another method than its authors'"
    return grown if method == "fedselect" else ""


_MEAN = "mean of Dir(0.1), Dir(0.5), Dir(1)"
_COST = (*((METHODS[name], name, False) for name in COMPARED), ("FedSPU+ES", "fedspu", True))
_plan = partial(
    Layout,
    rule=LAST._replace(published=True),
    about="the paper too takes the mean over clients of the last round",
    setup={"rounds": 500, "clients": 100, "participation": 0.1, "local.epochs": 5},
)
TABLES = {
    "table1": _plan(
        "FedSPU's Table 1",
        "FedSPU (AAAI 2025) Table 1",
        tuple(Line(METHODS[name], name, untold=_untold(name)) for name in COMPARED),
        _places(_MEAN, **{"stopping.early": False}),
        metric="mean final test accuracy (%)",
    ),
    "table2": _plan(
        "FedSPU's Table 2: with early stopping",
        "FedSPU (AAAI 2025) Table 2",
        tuple(Line(METHODS[name], name, untold=_untold(name)) for name in COMPARED),
        _places(_MEAN, **{"stopping.early": True}),
        metric="mean test accuracy (%)",
    ),
    "table3": _plan(
        "FedSPU's Table 3: what clients send and get in all, in gigabytes, and hours of local training",
        "FedSPU (AAAI 2025) Table 3",
        tuple(
            Line(
                f"{label} ({what})",
                method,
                measure=measure,
                where={"stopping.early": early},
                untold=_untold(method),
                **titled(label, metric),
            )
            for what, measure, metric in (
                ("volume", _volume, "total transmitted parameters (GB)"),
                ("hours", _hours, "total local training time (hours)"),
            )
            for label, method, early in _COST
        ),
        _places("500 rounds"),
        about="the published gigabytes fit gigabits: 18.43 on CIFAR10 are 57,608 values of 32 bits, the mean over the "
        "five widths, to and from 10 clients in 500 rounds; with early stopping they end where Table 4 does, 7.23 of "
        "11.71 on EMNIST being 309 of 500 rounds (as-published: both so here, and hours without transfers)",
        note=_reckoned,
    ),
    "table4": _plan(
        "FedSPU's Table 4: rounds until fewer clients are active than a round takes",
        "FedSPU (AAAI 2025) Table 4",
        tuple(
            Line(label, "fedspu", measure=_active, where={"stopping.early": early}, kind="entries")
            for label, early in (("FedSPU", False), ("FedSPU+ES", True))
        ),
        _places("", apart=True),
        about="+ES: with early stopping",
        metric="rounds",
    ),
}


def _of_widths(gathered: Sequence[Group]) -> list[Group]:
    """Of FedSPU's runs that tell what widths come to, one for each network and batch on a data set."""
    best: dict[Any, Group] = {}
    for group in gathered:
        run = group.runs[0]
        if run.method_name == "fedspu" and not costs.known(run).empty:
            best.setdefault((run.dataset, str(run.get("model")), run.get("local.batch_size")), group)
    return list(best.values())


def _memory(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """A panel per data set, network and batch, a line per way to train over the width of sub-models."""

    def draw(ax: Axes, run: Run) -> None:
        for number, (name, used) in enumerate(costs.memory(run).items()):
            ax.plot(used.index, used / 2**20, label=legible(str(name)), **look(number))
        ax.set(xlabel="share of each layer's neurons", ylabel="memory (MiB)", ylim=(0, None))

    titles = (
        f"{group.dataset}\n{group.runs[0].get('model.name')}, batch {group.runs[0].get('local.batch_size')}"
        for group in shown
    )
    return panels(dict(zip(titles, (group.runs[0] for group in shown), strict=True)), path, draw)


FIGURES = {"figure5": Figure(_of_widths, _memory, "fedspu/cifar10 method=fedspu")}
