"""FedSelect's tables and figures: how large masks become, and how they overlap (CVPR 2024)."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpfl.papers.drawing import Figure, Points, line, masks, of_method
from fedpfl.papers.layout import Layout, Line, Place, Selection, tuned, untrained
from fedpfl.report.figures import THIN, by_setting, draw_line, legible, look, panels
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHODS
from fedpfl.report.table import over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _dealt(dataset: str, short: str, clients: int, classes: int, **setup: Any) -> Place:
    where = {"partition.name": "shuffled_shards"}
    setting = f"{clients} clients, {classes} classes each"
    setup |= {"clients": clients, "partition.classes_per_client": classes}
    return Place(dataset, setting, where, experiment=f"fedselect/{short}", setup=setup)


_PLACES = (
    _dealt("cifar10", "cifar10", 10, 2, **{"partition.samples_per_client": 100}),
    _dealt("cifar10_c", "cifar10c", 10, 2, **{"partition.samples_per_client": 100}),
    _dealt("mini_imagenet", "mini_imagenet", 20, 10),
    Place(
        "office_home",
        "4 clients = 4 domains",
        {"partition.name": "groups"},
        experiment="fedselect/office_home",
        setup={"clients": 4, "rounds": 30},
    ),
)
# As one experiment of all four data sets has them.
_TOGETHER = tuple(dataclasses.replace(place, words={"paper": place.experiment.replace("/", "_")}) for place in _PLACES)


# The limits that Table 1's numbers are of.
_BEST = {"cifar10_c": 0.5, "mini_imagenet": 0.5, "": 0.3}
_MOST = {"method.personalise": "most", "method.layer": (None,)}


def _limits(*alphas: float) -> tuple[Line, ...]:
    return tuple(
        Line(
            f"FedSelect (alpha={alpha:.2f})",
            "fedselect",
            "fedselect/alpha",
            where={"method.alpha": alpha},
            usual=_MOST,
        )
        for alpha in alphas
    )


_plan = partial(
    Layout,
    metric="personalized accuracy, final round (%)",
    rule=Selection("cohort_after", published=True),
    about="the paper judges the last round's models right after local training, here over all test samples of the "
    "clients, FedAvg's before it and FedAvg+FT's and FedBABU's after fine-tuning",
    setup={"rounds": 200, "participation": 1.0, "local.epochs": 3, "model.name": "resnet18"},
)
TABLES = {
    "table1": _plan(
        "FedSelect's Table 1",
        "FedSelect (CVPR 2024) Table 1",
        (
            Line("Local-Only", "local_only"),
            Line("FedAvg", "fedavg", measure=untrained),
            Line("FedAvg+FT", "fedavg", measure=tuned),
            *(Line(METHODS[name], name) for name in ("ditto", "fedpac", "fedrep", "fedper")),
            Line("FedBABU", "fedbabu", measure=tuned),
            Line("LG-FedAvg", "lg_fedavg"),
            Line("FedSelect", "fedselect", where={"method.alpha": _BEST}, usual=_MOST),
        ),
        _PLACES,
    ),
    "table2": _plan(
        "FedSelect's Table 2: the limit of the personal share",
        "FedSelect (CVPR 2024) Table 2",
        _limits(0.05, 0.3, 0.5, 0.8),
        _TOGETHER,
        swept=True,
    ),
    "table3": _plan(
        "FedSelect's Table 3: what becomes personal",
        "FedSelect (CVPR 2024) Table 3",
        (
            Line("Personalize Least", "fedselect", "fedselect/ablation", where={"method.personalise": "least"}),
            *(Line(f"Layer {name}", untold="which layers the paper means is not stated") for name in "ABCD"),
            Line("Random", "fedselect", "fedselect/ablation", where={"method.personalise": "random"}),
            *_limits(0.3, 0.5),
        ),
        _TOGETHER,
    ),
}


def _has_sizes(group: Group) -> bool:
    return any("personal_share" in run.rounds for run in group.used)


def _sizes(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """A panel per data set and partition, a line per configuration: its personal share over rounds."""

    def draw(ax: Axes, members: list[Group]) -> None:
        for number, group in enumerate(members):
            draw_line(ax, group, "personal_share", group.method, number)
        ax.set(xlabel="round", ylabel="personal share of the model", xlim=(0, None), ylim=(0, 1))

    return panels(by_setting(shown), path, draw)


def _overlaps(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """A panel per data set and partition, a line per configuration: overlap of two clients' masks, by tensor."""

    def draw(ax: Axes, members: list[Group]) -> None:
        tensors = list(dict.fromkeys(name for group in members for own in masks(group) for name in own))
        for number, group in enumerate(members):
            even = _points(group, tensors, chance=True)
            thin = {"color": look(number)["color"], "linewidth": THIN, "alpha": 0.6}
            if points := _points(group, tensors):
                line(ax, points, group.method, number)
            ax.plot([x for x, _ in even], [mean for _, (mean, _) in even], **thin)
        ax.set_xticks(range(len(tensors)), list(map(legible, tensors)), rotation=90, fontsize=6)
        ax.set(ylabel="intersection over union", ylim=(0, 1))

    return panels(by_setting(shown), path, draw, "thin: independent masks of the same sizes", (7.2, 3.6))


def _points(group: Group, tensors: list[str], chance: bool = False) -> Points:
    """Of each tensor the overlap over seeds, or what independent masks would have."""
    points = []
    for place, name in enumerate(tensors):
        pairs = [own[name].overlaps(chance) for own in masks(group) if name in own]
        if known := [float(np.nanmean(one)) for one in pairs if not np.isnan(one).all()]:
            points.append((float(place), over_seeds(known)))
    return points


FIGURES = {
    "figure3": Figure(of_method("fedselect", _has_sizes), _sizes, "fedselect/alpha"),
    "figure4": Figure(of_method("fedselect", masks), _overlaps, "fedselect/alpha"),
}
