"""Federations of processes beside the simulation: whether they are equal, what was counted and what
was sent.

    python scripts/federation.py outputs/federated outputs [--figure docs/figures/federation.png]

Takes every run of `fedpfl.federate` below the first folder and, at the same place below the second,
that of `fedpfl.train`. Prints a Markdown table; the figure has accuracy over rounds, and over what
a client has been sent and has sent.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.report import load
from fedpfl.report.figures import draw_panels, line_style
from fedpfl.report.run import Run
from reproduction import markdown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MEBIBYTE = 2**20
OVER = {"round": "Processes and the simulation", "mebibytes": "What travels, counted and sent"}


@dataclass(frozen=True)
class Pair:
    """A federation, the simulation beside it, and the bytes of the federation's rounds."""

    there: Run
    here: Run
    wire: pd.DataFrame

    @property
    def equal(self) -> bool:
        """Whether both have the same numbers in all rounds, but times."""
        return self.there.reproducible_columns.equals(
            self.here.reproducible_columns[self.there.reproducible_columns.columns]
        )

    def mebibytes(self, kind: str) -> pd.Series:
        """Return MiB from and to a client up to each round. kind: `counted` or `bytes`."""
        wire = self.wire.set_index("round")
        return ((wire[f"{kind}_down"] + wire[f"{kind}_up"]) / wire["answers"]).cumsum() / MEBIBYTE

    def row(self) -> list[str]:
        """Return the table's row."""
        counted, sent = (self.mebibytes(kind).iloc[-1] for kind in ("counted", "bytes"))
        told = ["equal" if self.equal else "differs", f"{self.accuracy.iloc[-1]:.2f}"]
        return [
            self.there.method,
            *told,
            f"{counted:.3f}",
            f"{sent:.3f}",
            f"{100 * (sent / counted - 1):.2f}",
        ]

    @property
    def accuracy(self) -> pd.Series:
        """Return the simulation's accuracy by round."""
        return self.here.rounds.set_index("round")["accuracy"].dropna()


def paired(federated: Path, simulated: Path) -> list[Pair]:
    """Return every federation and its simulation. Raises FedpflError where there is none."""
    found = []
    for there in load.runs(federated):
        here = load.read_run(simulated / there.path.relative_to(federated))
        found.append(Pair(there, here, pd.read_csv(there.path / "wire.csv")))
    return found


def draw(ax: Axes, along: str, pairs: list[Pair]) -> None:
    """Draw the simulation as lines, and the federations as rings over them."""
    for place, pair in enumerate(pairs):
        own, federated = (
            line_style(place),
            pair.there.rounds.set_index("round")["accuracy"].dropna(),
        )
        counted, sent = (pair.mebibytes(kind) for kind in ("counted", "bytes"))
        over = (pair.accuracy.index, federated.index)
        if along == "mebibytes":
            over = (counted[pair.accuracy.index], sent[federated.index])
        line = {"color": own["color"], "linestyle": own["linestyle"]}
        ax.plot(over[0], pair.accuracy, label=pair.there.method, **line)
        ax.plot(over[1], federated, "o", color=own["color"], fillstyle="none", markersize=6)
    ax.set(
        xlabel="round" if along == "round" else "MiB to and from a client",
        ylabel="accuracy, %",
        xlim=(0, None),
    )


def main() -> None:
    """Print the table; draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("federated", type=Path)
    parser.add_argument("simulated", type=Path)
    parser.add_argument("--figure", type=Path, metavar="FILE.png")
    given = parser.parse_args()
    pairs = paired(given.federated, given.simulated)
    titles = ("method", "all rounds", "accuracy, %", "MiB a client, counted", "sent", "more, %")
    print(markdown(titles, [pair.row() for pair in pairs]))
    if given.figure:
        shown = {title: along for along, title in OVER.items()}
        draw_panels(
            shown,
            given.figure,
            lambda ax, along: draw(ax, along, pairs),
            "rings: processes, lines: simulation",
        )


if __name__ == "__main__":
    try:
        main()
    except FedpflError as error:
        sys.exit(f"fedpfl: {error}")
