"""FedPURIN's Figures 3 to 6: how many clients hold an entry."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from fedpfl.papers.drawing import Figure, masks, of_method
from fedpfl.papers.plan import Rule
from fedpfl.report.figures import look, panels, told
from fedpfl.report.grouping import Group

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _frequencies(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per configuration, a line per tensor: which share of its entries so many of the clients hold."""

    def draw(ax: Axes, group: Group) -> None:
        every = masks(group)
        for number, name in enumerate(every[0]):
            # Seeds may have other numbers of clients, as cohorts are drawn.
            alike = [own[name] for own in every if name in own and len(own[name].held) == len(every[0][name].held)]
            held = np.mean([100 * one.held / max(one.entries, 1) for one in alike], axis=0)
            across = 100 * np.arange(len(held)) / max(1, len(held) - 1)
            ax.plot(across, held, label=told(name), **look(number), markevery=max(1, len(held) // 10))
        ax.set(xlabel="clients that hold an entry (%)", ylabel="entries of the tensor (%)", ylim=(0, None))

    return panels({f"{group.setting}\n{group.method}": group for group in shown}, path, draw)


FIGURES = {"masks": Figure(of_method("fedpurin", masks), _frequencies, "fedpurin/cifar10")}
