"""FedPURIN's tables, its Figures 3 and 4, and how many clients hold an entry (arXiv:2510.16065)."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd

from fedpfl.papers.drawing import Figure, alpha, masks, of_method, over, several
from fedpfl.papers.layout import Layout, Line, Place, Selection, has, titled
from fedpfl.report.figures import legible, look, panels
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHODS
from fedpfl.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _mebibytes(way: str, late: bool, run: Run, row: pd.Series, rule: Selection) -> float:
    """MiB per client and round, until round beta or after it; the paper counts no positions on the
    way down.
    """
    beta = run.get("method.beta")
    rows = run.rounds if beta is None else run.rounds[(run.rounds["round"] > beta) == late]
    plain = rule.published and way == "down"
    if rows.empty or f"bits_{way}" not in rows:
        return math.nan
    bits = 32 * rows[f"values_{way}"] if plain else rows[f"bits_{way}"]
    return float(bits.sum() / run.participants[rows.index].sum() / 8 / 2**20)


def _places(alphas: Mapping[str, Sequence[float]]) -> tuple[Place, ...]:
    own = {
        "fmnist": {"rounds": 200, "model.name": "resnet8", "method.beta": 100},
        "cifar10": {"rounds": 200, "model.name": "resnet8", "method.beta": 100},
        "cifar100": {"rounds": 300, "model.name": "resnet10", "method.beta": 170},
    }
    return tuple(
        Place(
            name,
            f"Dir({a:g})",
            {"partition.name": "fixed_dirichlet"},
            (a,),
            f"fedpurin/{name}",
            setup=own[name],
        )
        for name in own
        for a in alphas[name]
    )


def _variant(score: str, hessian: bool) -> dict[str, Any]:
    return {"method.score": score, "method.hessian": hessian}


_plan = partial(
    Layout,
    metric="best-round accuracy before aggregation, mean over 3 splits (%)",
    rule=Selection("cohort_after", "best-checkpoint", published=True),
    about="the paper judges every round right after local training and takes the best, chosen on test data",
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
_THREE = {"fmnist": (0.1, 0.5, 1.0), "cifar10": (0.1, 0.5, 1.0), "cifar100": (0.01, 0.1, 0.5)}
TABLES = {
    "table1": _plan(
        "FedPURIN's Table 1",
        "FedPURIN (arXiv:2510.16065) Table 1",
        (
            Line("Separate", "local_only"),
            *(
                Line(METHODS[name], name)
                for name in ("fedavg", "fedper", "fedbn", "pfedsd", "fedcac")
            ),
            Line("FedPURIN", "fedpurin", usual=_variant("gradient", False)),
        ),
        _places(_THREE),
    ),
    "table2": _plan(
        "FedPURIN's Table 2: change of the weights or exact gradient, without and with the Hessian term",
        "FedPURIN (arXiv:2510.16065) Table 2",
        tuple(
            Line(
                f"FedPURIN ({label}, {words})",
                "fedpurin",
                "{}_ablation",
                where=_variant(score, hessian),
            )
            for hessian, words in ((False, "no Hessian"), (True, "Hessian"))
            for label, score in (("delta theta", "delta"), ("exact gradient", "gradient"))
        ),
        _places(_THREE),
        swept=True,
    ),
    "table3": _plan(
        "FedPURIN's Table 3: MiB per client and round, until round beta and after it",
        "FedPURIN (arXiv:2510.16065) Table 3",
        tuple(
            Line(
                f"{METHODS[name]}, {way}, {when} beta",
                name,
                measure=partial(_mebibytes, way, when == "after"),
                usual=_variant("gradient", False) if name == "fedpurin" else {},
                **titled(METHODS[name], f"{way}link MB per client and round, {when} beta"),
            )
            for name in ("fedavg", "fedcac", "fedpurin")
            for way in ("up", "down")
            for when in ("before", "after")
        ),
        _places(dict.fromkeys(_THREE, (0.1,))),
        about="the paper counts no positions on the way down (as-published: neither here)",
    ),
}


def _frequencies(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """A panel per configuration, a line per tensor: which share of its entries so many of the
    clients hold.
    """

    def draw(ax: Axes, group: Group) -> None:
        every = masks(group)
        for number, name in enumerate(every[0]):
            # Seeds may have other numbers of clients, as cohorts are drawn.
            alike = [
                own[name]
                for own in every
                if name in own and len(own[name].held) == len(every[0][name].held)
            ]
            held = np.mean([100 * one.held / max(one.entries, 1) for one in alike], axis=0)
            across = 100 * np.arange(len(held)) / max(1, len(held) - 1)
            ax.plot(
                across, held, label=legible(name), **look(number), markevery=max(1, len(held) // 10)
            )
        ax.set(
            xlabel="clients that hold an entry (%)",
            ylabel="entries of the tensor (%)",
            ylim=(0, None),
        )

    return panels({f"{group.setting}\n{group.method}": group for group in shown}, path, draw)


def _with_norm(group: Group) -> dict[str, str]:
    scored = group.runs[0].get("method.include_norm")
    return {f"{'with' if scored else 'without'} BatchNorm's weights": ""}


def _of(key: str) -> Callable[[Sequence[Group]], list[Group]]:
    """FedPURIN as in Table 1, with several values of a key."""
    usual = {**_variant("gradient", False), "method.include_norm": False, "method.tau": 0.5}
    del usual[key]
    return lambda every: several(
        every,
        lambda run: run.method_name == "fedpurin" and has(run, usual),
        lambda run: run.get(key),
    )


FIGURES = {
    "figure3": Figure(
        _of("method.include_norm"),
        over(alpha, "Dirichlet alpha", _with_norm, log=True),
        "fedpurin/norm",
    ),
    "figure4": Figure(
        _of("method.tau"),
        over(
            lambda run: run.get("method.tau"),
            "share of critical entries, tau",
            lambda group: {group.partition: ""},
        ),
        "fedpurin/tau",
    ),
    "masks": Figure(of_method("fedpurin", masks), _frequencies, "fedpurin/cifar10"),
}
