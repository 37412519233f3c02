"""FedSPU's Figure 5: memory over the width of sub-models."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedpfl.papers import costs
from fedpfl.papers.drawing import Figure
from fedpfl.papers.plan import Rule
from fedpfl.report.figures import look, panels, told
from fedpfl.report.grouping import Group
from fedpfl.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def _of_widths(gathered: Sequence[Group]) -> list[Group]:
    """Of FedSPU's runs that tell what widths come to, one for each network and batch on a data set."""
    best: dict[Any, Group] = {}
    for group in gathered:
        run = group.runs[0]
        if run.method_name == "fedspu" and not costs.known(run).empty:
            best.setdefault((run.dataset, str(run.get("model")), run.get("local.batch_size")), group)
    return list(best.values())


def _memory(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set, network and batch, a line per way to train over the width of sub-models."""

    def draw(ax: Axes, run: Run) -> None:
        for number, (name, used) in enumerate(costs.memory(run).items()):
            ax.plot(used.index, used / 2**20, label=told(str(name)), **look(number))
        ax.set(xlabel="share of each layer's neurons", ylabel="memory (MiB)", ylim=(0, None))

    titles = (
        f"{group.dataset}\n{group.runs[0].get('model.name')}, batch {group.runs[0].get('local.batch_size')}"
        for group in shown
    )
    return panels(dict(zip(titles, (group.runs[0] for group in shown), strict=True)), path, draw)


FIGURES = {"figure5": Figure(_of_widths, _memory, "fedspu/cifar10 method=fedspu")}
