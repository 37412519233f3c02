"""The cohort's accuracy in every round beside a published curve of it, as a table and a figure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.report.figures import by_setting, legible, look, panels, smooth
from fedpfl.report.grouping import Group, groups
from fedpfl.report.page.data import by_round
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table
from fedpfl.report.tables import ROW, row_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

WINDOW = 10
COLUMNS = ROW | {
    "seed": Column("seed", "whole"),
    "reference": Column("reference"),
    "first": Column("from", "whole", "rounds"),
    "last": Column("to", "whole", "rounds"),
    "before_absolute": Column("absolute", "percent", "before"),
    "before_signed": Column("signed", "difference", "before"),
    "after_absolute": Column("absolute", "percent", "after"),
    "after_signed": Column("signed", "difference", "after"),
}


def curve_table(
    runs: Iterable[Run], reference: Path, spans: Sequence[tuple[int, int]] = ((1, 20), (21, 100))
) -> Table:
    """Tell how far each run's per-round cohort accuracy is from a published curve, in points, over
    spans of rounds.

    reference: a CSV with the columns method, round, accuracy_before, accuracy_after (percent).
    """
    curves = read_reference(reference)
    records = []
    for group in groups(runs):
        name = reference_for(group, curves["method"].unique())
        for run in group.used if name else ():
            both = run.rounds.merge(curves[curves["method"] == name], on="round")
            for first, last in spans:
                part = both[both["round"].between(first, last)]
                if part.empty:
                    continue
                record = row_of(group) | {"seed": run.seed, "reference": name}
                record |= {"first": int(part["round"].min()), "last": int(part["round"].max())}
                for when in ("before", "after"):
                    apart = part[f"cohort_{when}"] - part[f"accuracy_{when}"]
                    record |= {
                        f"{when}_absolute": apart.abs().mean(),
                        f"{when}_signed": apart.mean(),
                    }
                records.append(record)
    caption = (
        "Distance from the published per-round accuracy of the cohort's clients (pooled, before and after local "
        "training) in points: mean absolute and mean signed difference (own minus published)."
    )
    return Table.of(records, COLUMNS, caption=caption, by=2)


def curves(runs: Iterable[Run], reference: Path, path: Path) -> list[Path]:
    """Draw the cohort's accuracy in every round before and after local training, beside published
    curves.

    These are dashed, with open markers; all are running means over WINDOW rounds. Returns the files
    written.
    reference: a CSV with the columns method, round, accuracy_before, accuracy_after. A published
    curve takes the colour of the first own configuration of its method; without any of its method
    it is left out. path: without suffix.
    """
    published = read_reference(reference)
    gathered = groups(runs)
    settings = list(by_setting(gathered))
    if len(settings) > 1:
        raise FedpflError(
            f"curves compares runs of one data set and partition; these are {len(settings)}: narrow the roots"
        )
    last = max(run.reached for group in gathered for run in group.used)

    def draw(ax: Axes, when: str) -> None:
        drawn: set[str] = set()
        for place, group in enumerate(gathered):
            own = smooth(by_round(group, f"cohort_{when}")["mean"], WINDOW)
            ax.plot(
                own.index,
                own,
                label=legible(group.method),
                **look(place),
                markevery=max(1, len(own) // 10),
            )
            name = reference_for(group, published["method"].unique())
            if name is None or name in drawn:
                continue
            drawn.add(name)
            rows = published[
                (published["method"] == name) & (published["round"] <= last)
            ].set_index("round")
            line = smooth(rows[f"accuracy_{when}"], WINDOW)
            faint: Any = look(place) | {
                "linestyle": (0, (2, 1.2)),
                "linewidth": 1.0,
                "markerfacecolor": "white",
            }
            every = (int(0.06 * len(line)), max(1, len(line) // 10))
            ax.plot(
                line.index,
                line,
                label=legible(f"published: {name}"),
                alpha=0.8,
                markevery=every,
                **faint,
            )
        ax.set(
            xlabel="round",
            ylabel=f"cohort's pooled accuracy (%)\nrunning mean of {WINDOW} rounds",
            xlim=(0, None),
        )

    return panels(
        {f"{settings[0]}, {when} local training": when for when in ("before", "after")}, path, draw
    )


def read_reference(path: Path) -> pd.DataFrame:
    """Read per-round reference curves. Raises FedpflError where the file is no such thing."""
    needed = ["method", "round", "accuracy_before", "accuracy_after"]
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise FedpflError(
            f"{path}: cannot be read as CSV ({type(error).__name__}); give {', '.join(needed)}"
        ) from None
    if missing := [name for name in needed if name not in frame]:
        raise FedpflError(f"{path}: lacks the column {missing[0]}; needed: {', '.join(needed)}")
    if strange := [name for name in needed[1:] if frame[name].dtype.kind not in "if"]:
        raise FedpflError(f"{path}: the column {strange[0]} holds what is no number")
    return frame


def reference_for(group: Group, names: Iterable[str]) -> str | None:
    """Return the reference curve of a group's method: named like it, or beginning with its name and
    an underscore.
    """
    own = group.runs[0].method_name
    return next((name for name in names if name == own or str(name).startswith(f"{own}_")), None)
