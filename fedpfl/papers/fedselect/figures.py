"""FedSelect's figures: how large masks become, and how they overlap."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedpfl.papers.drawing import Figure, Points, line, masks, of_method
from fedpfl.papers.plan import Rule
from fedpfl.report.figures import THIN, by_setting, draw_line, look, panels, told
from fedpfl.report.grouping import Group
from fedpfl.report.table import over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _has_sizes(group: Group) -> bool:
    return any("personal_share" in run.rounds for run in group.used)


def _sizes(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set and partition, a line per configuration: its personal share over rounds."""

    def draw(ax: Axes, members: list[Group]) -> None:
        for number, group in enumerate(members):
            draw_line(ax, group, "personal_share", group.method, number)
        ax.set(xlabel="round", ylabel="personal share of the model", xlim=(0, None), ylim=(0, 1))

    return panels(by_setting(shown), path, draw)


def _overlaps(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set and partition, a line per configuration: overlap of two clients' masks, by tensor."""

    def draw(ax: Axes, members: list[Group]) -> None:
        tensors = list(dict.fromkeys(name for group in members for own in masks(group) for name in own))
        for number, group in enumerate(members):
            even = _points(group, tensors, chance=True)
            thin = {"color": look(number)["color"], "linewidth": THIN, "alpha": 0.6}
            if points := _points(group, tensors):
                line(ax, points, group.method, number)
            ax.plot([x for x, _ in even], [mean for _, (mean, _) in even], **thin)
        ax.set_xticks(range(len(tensors)), list(map(told, tensors)), rotation=90, fontsize=6)
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
