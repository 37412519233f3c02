"""FedSPU's tables, and its Figure 5: memory over the width of sub-models (AAAI 2025)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.papers.drawing import Figure
from fedpfl.papers.layout import LAST, Layout, Line, Place, Selection, spelt, titled
from fedpfl.report.figures import legible, look, panels
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHODS
from fedpfl.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _before_few(run: Run) -> pd.Series:
    """Which rounds come before the first with fewer clients than a cohort."""
    return (run.participants >= run.cohort).cummin()


def _counted(run: Run, rule: Selection) -> pd.DataFrame:
    """The rounds that count: by the paper those before the first with fewer clients than a cohort."""
    return run.rounds[_before_few(run)] if rule.published else run.rounds


def _volume(run: Run, row: pd.Series, rule: Selection) -> float:
    """Gigabytes that all clients send and get in all rounds; by the paper's count gigabits, which
    its numbers fit.
    """
    if "values_up" not in run.rounds:
        return math.nan
    rows = _counted(run, rule)
    values = float(rows["values_down"].sum() + rows["values_up"].sum())
    return values * (32 if rule.published else 4) / 1e9


def _hours(run: Run, row: pd.Series, rule: Selection) -> float:
    """Simulated hours of all rounds; nan of runs that simulate no devices."""
    if "sim_seconds" not in run.rounds:
        return math.nan
    return float(_counted(run, rule)["sim_seconds"].sum(skipna=False)) / 3600


def _active(run: Run, row: pd.Series, rule: Selection) -> float:
    """The first round with fewer clients than a cohort, which may be none; without one the rounds
    that there are.
    """
    full = int(_before_few(run).sum())
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
    grown = (
        "what is described there, a pruned model that grows, is another method than its authors'"
    )
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
        "11.71 on EMNIST being 309 of 500 rounds (as-published: both so here)",
        note="Hours are those of simulated devices (docs/system.md), which are ours, not the paper's; transfers count.",
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
        if run.method_name == "fedspu" and not memory(run).empty:
            best.setdefault(
                (run.dataset, str(run.get("model")), run.get("local.batch_size")), group
            )
    return list(best.values())


def memory(run: Run) -> pd.DataFrame:
    """Return the bytes that training takes by width: parameters, gradients and what layers make of
    a batch.

    Empty where the run does not tell. Layers count that have parameters, each number as 32 bits.
    FedSPU keeps all parameters, the gradients of active ones and at least what active neurons make.
    Gradients pass on to these through frozen neurons, so exact ones need most of what frozen
    neurons make too: at most all of it.
    """
    try:
        made = pd.DataFrame(run.summary["devices"], dtype=float).set_index("width")[
            ["entries", "values"]
        ]
    except (LookupError, TypeError, ValueError):
        return pd.DataFrame()
    batch, whole = run.get("local.batch_size"), made.iloc[-1]
    part = made["entries"] + made["entries"]
    kept = whole["entries"] + made["entries"]
    found = {
        "full network (Hermes, FedMP, PruneFL while ranking)": 2 * whole["entries"]
        + batch * whole["values"],
        "FedSPU, at most": kept + batch * whole["values"],
        "FedSPU, at least": kept + batch * made["values"],
        "sub-model (FjORD, random dropout, others once ranked)": part + batch * made["values"],
    }
    return 4 * pd.DataFrame(found, index=made.index)


def _memory(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """A panel per data set, network and batch, a line per way to train over the width of
    sub-models.
    """

    def draw(ax: Axes, run: Run) -> None:
        for number, (name, used) in enumerate(memory(run).items()):
            ax.plot(used.index, used / 2**20, label=legible(str(name)), **look(number))
        ax.set(xlabel="share of each layer's neurons", ylabel="memory (MiB)", ylim=(0, None))

    titles = (
        f"{group.dataset}\n{group.runs[0].get('model.name')}, batch {group.runs[0].get('local.batch_size')}"
        for group in shown
    )
    return panels(dict(zip(titles, (group.runs[0] for group in shown), strict=True)), path, draw)


FIGURES = {"figure5": Figure(_of_widths, _memory, "fedspu/cifar10 method=fedspu")}
