"""SubFLOT's tables (CVPR 2026), from public summaries."""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import Any

import pandas as pd

from fedpfl.papers.layout import LAST, Layout, Line, Place, Selection
from fedpfl.report.names import METHODS
from fedpfl.report.run import Run


def _domain(place: int, run: Run, row: pd.Series, rule: Selection) -> float:
    """Mean over those that take part of a quarter of the clients, one of four domains, at the last
    evaluation.
    """
    each, own = divmod(len(run.clients), 4)
    if own or rule.accuracy != "accuracy" or row["round"] != run.evaluations["round"].iloc[-1]:
        return math.nan
    numbers = run.clients["client"].sort_values().iloc[place * each : (place + 1) * each]
    part = run.participating
    return float(part[part["client"].isin(numbers)]["accuracy"].mean(skipna=False))


def _place(
    dataset: str, setting: str, partition: str = "dirichlet", clients: int = 20, **more: Any
) -> Place:
    where = {"partition.name": partition} | ({"clients": clients} if dataset != "har" else {})
    words = (
        {"partition": partition} if dataset in ("cifar10", "cifar100") else {}
    )  # their experiments run both splits
    words |= {"clients": str(clients)} if clients != 20 else {}
    alphas = (0.1,) if partition == "dirichlet" else (None,)
    return Place(
        dataset,
        setting,
        where,
        alphas,
        **{"experiment": f"subflot/{dataset}", "words": words, **more},
    )


def _without(part: str = "") -> Line:
    where = {f"method.{part}": False} if part else {}
    usual = {f"method.{name}": name != part for name in ("otp", "sar", "ota")}
    label, paper = (
        (f"SubFLOT w/o {part.upper()}", f"subflot_without_{part}")
        if part
        else ("SubFLOT", "subflot")
    )
    return Line(label, "subflot", where=where, usual=usual, words={"paper": paper})


_plan = partial(
    Layout,
    metric="average local model accuracy (%)",
    rule=Selection("cohort_after", published=True),
    about="the paper's text is not at hand: neither is known when it judges (here right after the last local training, "
    "over all test samples of the clients) nor how many classes a client of its pathological split has",
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
_SUBFLOT = dataclasses.replace(_without(), words={})
_SHRUNK = (*(Line(METHODS[name], name) for name in ("heterofl", "flexfl")), _SUBFLOT)
TABLES = {
    "main": _plan(
        "SubFLOT's main table",
        "SubFLOT (CVPR 2026), main results, from public summaries",
        _SHRUNK[1:],
        (
            _place("cifar100", "pathological", "shards"),
            _place("tiny_imagenet", "pathological", "shards"),
            _place("cifar100", "practical"),
            _place("ag_news", "NLP"),
            _place("har", "real world", "groups"),
        ),
    ),
    "label_skew": _plan(
        "SubFLOT's table of label skew",
        "SubFLOT (CVPR 2026), label skew, from a second public summary",
        _SHRUNK,
        (
            # The split is not stated; CIFAR100's and Tiny-ImageNet's numbers are the main table's
            # pathological ones.
            _place("cifar10", "label skew or real world", "shards"),
            _place("cifar100", "label skew or real world", "shards"),
            _place("tiny_imagenet", "label skew or real world", "shards"),
            _place("ag_news", "label skew or real world"),
            _place("har", "label skew or real world", "groups"),
        ),
    ),
    "pacs": _plan(
        "SubFLOT's table of feature shift, PACS by domain",
        "SubFLOT (CVPR 2026), PACS, from a second public summary",
        _SHRUNK,
        (
            *(
                _place("pacs", name, "groups", measure=partial(_domain, at))
                for name, at in (
                    ("Photo", 2),
                    ("Art", 0),
                    ("Cartoon", 1),
                    ("Sketch", 3),
                )  # in the data set's order
            ),
            _place("pacs", "Avg", "groups"),
        ),
        rule=LAST._replace(published=True),
        about="the paper's text is not at hand: it is not known when it judges; by domain only the last evaluation of "
        "all clients is recorded",
    ),
    "ablation": _plan(
        "SubFLOT's ablation",
        "SubFLOT (CVPR 2026), ablation, from public summaries",
        tuple(map(_without, ("", "otp", "sar", "ota"))),
        (
            _place("cifar10", "Dir(0.1)", experiment="subflot/ablation", words={}),
            _place("digit5", "feature shift", "groups", experiment="subflot/ablation_digit5"),
        ),
        swept=True,
        about="the paper's text is not at hand: neither is known when it judges (here right after the last local "
        "training, over all test samples of the clients) nor what takes the place of a part that is left out",
    ),
    "scalability": _plan(
        "SubFLOT with more clients",
        "SubFLOT (CVPR 2026), scalability, from a second public summary",
        (_SUBFLOT,),
        (
            *(
                Place("", f"{count} clients", untold="the data set is not stated")
                for count in (10, 100)
            ),
            *(
                _place(
                    "cifar100",
                    f"{count} clients",
                    clients=count,
                    experiment="subflot/scalability",
                    words={"clients": str(count)},
                )
                for count in (10, 100)
            ),
        ),
    ),
}
