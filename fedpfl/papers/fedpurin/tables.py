"""FedPURIN's tables (arXiv:2510.16065)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pandas as pd

from fedpfl.papers.plan import Line, Place, Plan, Rule, titled
from fedpfl.report.names import METHODS
from fedpfl.report.run import Run


def _mebibytes(way: str, late: bool, run: Run, row: pd.Series, rule: Rule) -> float:
    """MiB per client and round, until round beta or after it; the paper counts no positions on the way down."""
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
        Place(name, f"Dir({a:g})", {"partition.name": "fixed_dirichlet"}, (a,), f"fedpurin/{name}", setup=own[name])
        for name in own
        for a in alphas[name]
    )


def _variant(score: str, hessian: bool) -> dict[str, Any]:
    return {"method.score": score, "method.hessian": hessian}


_plan = partial(
    Plan,
    metric="best-round accuracy before aggregation, mean over 3 splits (%)",
    rule=Rule("cohort_after", "best-checkpoint", published=True),
    about="the paper judges every round right after local training and takes the best, chosen on test data",
    setup={
        **{"clients": 20, "participation": 1.0, "local.epochs": 5, "local.batch_size": 100, "local.lr": 0.1},
        **{"local.momentum": 0.9, "method.tau": 0.5},
    },
)
_THREE = {"fmnist": (0.1, 0.5, 1.0), "cifar10": (0.1, 0.5, 1.0), "cifar100": (0.01, 0.1, 0.5)}
TABLES = {
    "table1": _plan(
        "FedPURIN's Table 1",
        "FedPURIN (arXiv:2510.16065) Table 1",
        (
            Line("Separate", "local_only"),
            *(Line(METHODS[name], name) for name in ("fedavg", "fedper", "fedbn", "pfedsd", "fedcac")),
            Line("FedPURIN", "fedpurin", usual=_variant("gradient", False)),
        ),
        _places(_THREE),
    ),
    "table2": _plan(
        "FedPURIN's Table 2: change of the weights or exact gradient, without and with the Hessian term",
        "FedPURIN (arXiv:2510.16065) Table 2",
        tuple(
            Line(
                *(f"FedPURIN ({label}, {'Hessian' if hessian else 'no Hessian'})", "fedpurin", "{}_ablation"),
                where=variant,
            )
            for hessian in (False, True)
            for label, score in (("delta theta", "delta"), ("exact gradient", "gradient"))
            for variant in (_variant(score, hessian),)
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
