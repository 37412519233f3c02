"""FedSelect's tables and figures: how large masks become, and how they overlap (CVPR 2024)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fedpfl.papers.drawing import Figure, Points, line, masks, of_method, over, several
from fedpfl.papers.layout import Layout, Line, Place, Selection, tuned, untrained
from fedpfl.report.figures import THIN, by_setting, draw_line, legible, look, panels
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHODS
from fedpfl.report.run import Run
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
    _dealt("mini_imagenet", "mini_imagenet", 20, 10, **{"partition.samples_per_client": 480}),
    Place(
        "office_home",
        "4 clients = 4 domains",
        {"partition.name": "groups"},
        experiment="fedselect/office_home",
        setup={"clients": 4, "rounds": 30},
    ),
)
# As one experiment of all four data sets has them.
_TOGETHER = tuple(
    dataclasses.replace(place, words={"paper": place.experiment.replace("/", "_")})
    for place in _PLACES
)


# The limits that Table 1's numbers are of.
_BEST = {"cifar10_c": 0.5, "mini_imagenet": 0.5, "": 0.3}
_LAYERS = {"A": 0, "B": 5, "C": 10, "D": 15}
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
            Line(
                "Personalize Least",
                "fedselect",
                "fedselect/ablation",
                where={"method.personalise": "least"},
            ),
            *(
                Line(
                    f"Layer {name}",
                    "fedselect",
                    "fedselect/ablation",
                    where={"method.personalise": layer},
                )
                for name, layer in _LAYERS.items()
            ),
            Line(
                "Random", "fedselect", "fedselect/ablation", where={"method.personalise": "random"}
            ),
            *_limits(0.3, 0.5),
        ),
        _TOGETHER,
        note="Which layers the paper calls A to D is not stated: here the stem and the first convolutions "
        "of 128, 256 and 512 channels.",
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
    """A panel per data set and partition, a line per configuration: overlap of two clients' masks,
    by tensor.
    """

    def draw(ax: Axes, members: list[Group]) -> None:
        tensors = list(
            dict.fromkeys(name for group in members for own in masks(group) for name in own)
        )
        for number, group in enumerate(members):
            even = _points(group, tensors, chance=True)
            thin = {"color": look(number)["color"], "linewidth": THIN, "alpha": 0.6}
            if points := _points(group, tensors):
                line(ax, points, group.method, number)
            ax.plot([x for x, _ in even], [mean for _, (mean, _) in even], **thin)
        ax.set_xticks(range(len(tensors)), list(map(legible, tensors)), rotation=90, fontsize=6)
        ax.set(ylabel="intersection over union", ylim=(0, 1))

    return panels(
        by_setting(shown), path, draw, "thin: independent masks of the same sizes", (7.2, 3.6)
    )


def _points(group: Group, tensors: list[str], chance: bool = False) -> Points:
    """Of each tensor the overlap over seeds, or what independent masks would have."""
    points = []
    for place, name in enumerate(tensors):
        pairs = [own[name].overlaps(chance) for own in masks(group) if name in own]
        if known := [float(np.nanmean(one)) for one in pairs if not np.isnan(one).all()]:
            points.append((float(place), over_seeds(known)))
    return points


_JUDGED = {
    "fedavg": {"FedAvg": "accuracy", "FedAvg+FT": "ft_accuracy"},
    "fedbabu": {"FedBABU": "ft_accuracy"},
}
"""Methods that the paper does not judge right after local training, as it does the others."""


def _lines(group: Group) -> dict[str, str]:
    """A group's lines as the paper judges them, by the column of each."""
    run = group.runs[0]
    return _JUDGED.get(run.method_name, {run.called: "cohort_after"})


def _compared(gathered: Sequence[Group]) -> list[Group]:
    """Table 1's methods, FedSelect at its best limit."""

    def fits(run: Run) -> bool:
        best = _BEST.get(run.dataset_name, _BEST[""])
        own = run.method_name == "fedselect" and _grown(run) and run.get("method.alpha") == best
        return own or run.method_name in {line.method for line in TABLES["table1"].lines} - {
            "fedselect"
        }

    return [group for group in gathered if fits(group.runs[0])]


def _of_table_1(gathered: Sequence[Group]) -> list[Group]:
    """Its runs, one of a method on a data set and partition."""
    return list(
        {
            (group.setting, group.runs[0].method_name): group
            for group in _compared(_sized(gathered))
        }.values()
    )


def _grown(run: Run) -> bool:
    """Whether what moves most becomes personal."""
    return run.get("method.personalise") in (None, "most") and run.get("method.layer") is None


def _sized(gathered: Sequence[Group]) -> list[Group]:
    """Runs with as many training samples as Tables 1 to 3 have, where that is told."""
    sizes = {place.dataset: place.setup.get("partition.samples_per_client") for place in _PLACES}
    runs = ((group, group.runs[0]) for group in gathered)
    return [
        group for group, run in runs if sizes.get(run.dataset_name) in (None, _training_size(run))
    ]


def _convergence(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """A panel per data set and partition, a line per method over rounds."""
    names = list(dict.fromkeys(name for group in shown for name in _lines(group)))

    def draw(ax: Axes, members: list[Group]) -> None:
        for group in members:
            for name, column in _lines(group).items():
                draw_line(ax, group, column, name, names.index(name))
        ax.set(xlabel="round", ylabel="test accuracy (%)", xlim=(0, None))

    return panels(by_setting(shown), path, draw)


def _training_size(run: Run) -> int | None:
    """Training samples that each client is given, None where it is not set."""
    return run.get("partition.samples_per_client")


def _last_layers(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """A panel per configuration: overlap of each two clients' masks in the last layer, with the
    clients' classes.
    """

    def draw(ax: Axes, group: Group) -> None:
        run = next(run for run in group.used if run.masks)
        mask = [*run.masks.values()][-1]
        sizes, count = mask.both.diagonal(), len(mask.both)
        union = sizes[:, None] + sizes - mask.both
        overlap = np.divide(mask.both, union, out=np.zeros_like(union), where=union > 0)
        ax.imshow(overlap, vmin=0, vmax=1, cmap="magma")
        for i, j in np.ndindex(count, count) if count <= MOST else ():
            shade = "black" if overlap[i, j] > 0.6 else "white"
            ax.text(j, i, f"{overlap[i, j]:.2f}", ha="center", va="center", fontsize=5, color=shade)
        ax.set_xticks(range(count), names := _classes(run, count), rotation=90, fontsize=6)
        ax.set_yticks(range(count), names, fontsize=6)
        ax.grid(visible=False)

    titles = (
        f"{group.setting}\nlimit alpha = {group.runs[0].get('method.alpha')}" for group in shown
    )
    return panels(dict(zip(titles, shown, strict=True)), path, draw, size=(3.4, 3.4))


MOST = 20
"""Clients up to which their overlaps are written out."""


def _classes(run: Run, count: int) -> list[str]:
    """The classes of each client, or its number where masks are not of all clients."""
    labels = run.clients.filter(regex=r"^label_\d+$")
    if len(labels) != count or labels.empty:
        return [str(number) for number in range(count)]
    return [
        " ".join(name.removeprefix("label_") for name in labels if row[name] > 0)
        for _, row in labels.iterrows()
    ]


def _limited(gathered: Sequence[Group]) -> list[Group]:
    """Of Table 2's runs those with masks, one for each limit on a data set and partition."""
    kept = [
        group for group in of_method("fedselect", masks)(_sized(gathered)) if _grown(group.runs[0])
    ]
    return list(
        {(group.setting, group.runs[0].get("method.alpha")): group for group in kept}.values()
    )


FIGURES = {
    "figure2": Figure(_of_table_1, _convergence, "fedselect/cifar10"),
    "figure3": Figure(
        lambda every: several(_compared(every), lambda run: True, _training_size),
        over(_training_size, "training samples of a client", _lines),
        "fedselect/sizes",
    ),
    "figure4": Figure(_limited, _last_layers, "fedselect/alpha"),
    "sizes": Figure(of_method("fedselect", _has_sizes), _sizes, "fedselect/alpha"),
    "overlaps": Figure(of_method("fedselect", masks), _overlaps, "fedselect/alpha"),
}
