"""What figures of several papers are made of."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from fedpfl.ground.errors import FedpflError
from fedpfl.papers.layout import Selection
from fedpfl.record.columns import METRICS
from fedpfl.report.figures import legible, look, panels
from fedpfl.report.grouping import Group, by
from fedpfl.report.run import Mask, Run
from fedpfl.report.table import over_seeds
from fedpfl.report.tables import judged, unchosen

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Points = list[tuple[float, tuple[float, float]]]
"""Places on the x axis, each with the mean and the standard deviation over seeds."""


class Figure(NamedTuple):
    """of: the groups it shows. paint: draws them. experiment: that makes its runs, if not its
    namesake.
    """

    of: Callable[[Sequence[Group]], list[Group]]
    paint: Callable[[list[Group], Path, Selection], list[Path]]
    experiment: str = ""

    def draw(
        self, name: str, gathered: Sequence[Group], folder: Path, rule: Selection
    ) -> list[Path]:
        """Draw `paper/figure` to `paper_figure.png` and `.pdf`. Raises FedpflError where no run
        fits.
        """
        shown = self.of(gathered)
        if not shown:
            experiment = self.experiment or name
            raise FedpflError(
                f"no runs for {name}; run `python -m fedpfl.train experiment={experiment}`"
            )
        return self.paint(shown, folder / name.replace("/", "_"), rule)


def several(
    gathered: Iterable[Group],
    fits: Callable[[Run], bool],
    key: Callable[[Run], Any],
    least: int = 2,
    place: Callable[[Group], Any] = lambda group: group.setting,
) -> list[Group]:
    """Return the groups that fit, of those places where `key` takes at least so many values."""
    values: dict[Any, set[Any]] = {}
    known = [group for group in gathered if fits(group.runs[0]) and key(group.runs[0]) is not None]
    for group in known:
        values.setdefault(place(group), set()).add(key(group.runs[0]))
    return [group for group in known if len(values[place(group)]) >= least]


def alpha(run: Run) -> float | None:
    """Return the Dirichlet alpha, None where the partition has none."""
    own = run.get("partition.alpha")
    return float(own) if isinstance(own, int | float) and own > 0 else None


def value(group: Group, rule: Selection, column: str = "") -> tuple[float, float]:
    """Return mean and standard deviation over seeds of the judged accuracy, or of another column of
    its row.
    """
    rows = judged(group, rule.select, rule.every).values()
    if rule.select == "validation" and not rows:
        raise unchosen(group)  # a figure has no notes
    return over_seeds([float(row.get(column or rule.accuracy, math.nan)) for row in rows])


def line(ax: Axes, points: Points, label: str, place: int, **changes: Any) -> None:
    """Draw a line through the means, with error bars where there is a spread."""
    across, means, spreads = (
        [x for x, _ in points],
        [mean for _, (mean, _) in points],
        [std for _, (_, std) in points],
    )
    error = (
        None
        if all(map(math.isnan, spreads))
        else [0.0 if math.isnan(spread) else spread for spread in spreads]
    )
    ax.errorbar(
        across, means, yerr=error, label=legible(label), capsize=2, **{**look(place), **changes}
    )


Lines = Callable[[Group], dict[str, str]]
"""What a group's lines are called, each with its column of rounds.csv, empty for the judged
accuracy.
"""


def over(
    x: Callable[[Run], float | None],
    label: str,
    lines: Lines,
    panel: Callable[[Group], str] = lambda group: group.dataset,
    log: bool = False,
) -> Callable[[list[Group], Path, Selection], list[Path]]:
    """Return what paints accuracy over a quantity, a line where it takes two values or more.

    x: a run's value of it, called `label`. panel: a panel's title. log: on a logarithmic scale.
    """

    def paint(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
        names = list(dict.fromkeys(name for group in shown for name in lines(group)))

        def draw(ax: Axes, members: list[Group]) -> None:
            placed = [(at, group) for group in members if (at := x(group.runs[0])) is not None]
            for number, name in enumerate(names):
                own = [
                    (at, value(group, rule, lines(group)[name]))
                    for at, group in placed
                    if name in lines(group)
                ]
                if len(points := sorted(point for point in own if not math.isnan(point[1][0]))) > 1:
                    line(ax, points, name, number)
            own_columns = any(column for group in members for column in lines(group).values())
            told = "test accuracy (%)" if own_columns else METRICS[rule.accuracy].label
            ax.set(xlabel=label, ylabel=told, xscale="log" if log else "linear")
            ticks = sorted({at for at, _ in placed})
            ax.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
            ax.minorticks_off()

        return panels(by(shown, panel), path, draw)

    return paint


def of_method(
    method: str, recorded: Callable[[Group], Any]
) -> Callable[[Sequence[Group]], list[Group]]:
    """Return a choice of the method's runs that recorded it."""
    return lambda every: [
        group for group in every if group.runs[0].method_name == method and recorded(group)
    ]


def masks(group: Group) -> list[dict[str, Mask]]:
    """Return the masks of each seed that recorded them, by tensor."""
    return [run.masks for run in group.used if run.masks]
