"""Federations of processes beside the simulation: whether they are equal, and what was sent.

    python -m benchmarks federation outputs/federated outputs [--figure FILE.png]

Takes every run of `fedpfl.federate` below the first folder and, at the same place below the second,
that of `fedpfl.train`. Prints a Markdown table; the figure has accuracy over rounds, and over what
a client has been sent and has sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from benchmarks import harness
from fedpfl.report import load
from fedpfl.report.figures import draw_panels, line_style
from fedpfl.report.run import Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TITLES = ("method", "all rounds", "accuracy, %", "MiB a client, counted", "sent", "more, %")
X_AXES = {"Processes and the simulation": "round", "What travels, counted and sent": "mebibytes"}


@dataclass(frozen=True)
class Pair:
    """Hold a federation and the simulation beside it.

    Attributes:
        federated: Of real nodes.
        simulated: In one process.
        wire: The bytes of the federation's rounds.
    """

    federated: Run
    simulated: Run
    wire: pd.DataFrame

    def mebibytes(self, kind: str) -> pd.Series:
        """Return MiB from and to a client up to each round.

        `kind` is `counted` or `bytes`.
        """
        wire = self.wire.set_index("round")
        per_client = (wire[f"{kind}_down"] + wire[f"{kind}_up"]) / wire["answers"]
        return per_client.cumsum() / 2**20

    def table_row(self) -> list[str]:
        """Return the table's row."""
        numbers = self.federated.reproducible_columns
        is_equal = numbers.equals(self.simulated.reproducible_columns[numbers.columns])
        counted = self.mebibytes("counted").iloc[-1]
        sent = self.mebibytes("bytes").iloc[-1]
        return [
            self.federated.method,
            "equal" if is_equal else "differs",
            f"{accuracy_by_round(self.simulated).iloc[-1]:.2f}",
            f"{counted:.3f}",
            f"{sent:.3f}",
            f"{100 * (sent / counted - 1):.2f}",
        ]


def accuracy_by_round(run: Run) -> pd.Series:
    """Return a run's accuracy at its evaluations."""
    return run.rounds.set_index("round")["accuracy"].dropna()


def load_pairs(federated: Path, simulated: Path) -> list[Pair]:
    """Return every federation with its simulation. Raises FedpflError where there is none."""
    pairs = []
    for run in load.runs(federated):
        simulation = load.read_run(simulated / run.path.relative_to(federated))
        pairs.append(Pair(run, simulation, pd.read_csv(run.path / "wire.csv")))
    return pairs


def draw_panel(pairs: list[Pair], ax: Axes, x_axis: str) -> None:
    """Draw simulations as lines, and federations as rings over them."""
    for index, pair in enumerate(pairs):
        style = line_style(index)
        simulated = accuracy_by_round(pair.simulated)
        federated = accuracy_by_round(pair.federated)
        simulated_x, federated_x = simulated.index, federated.index
        if x_axis == "mebibytes":
            simulated_x = pair.mebibytes("counted")[simulated.index]
            federated_x = pair.mebibytes("bytes")[federated.index]
        color = style["color"]
        label = pair.federated.method
        ax.plot(simulated_x, simulated, label=label, color=color, linestyle=style["linestyle"])
        ax.plot(federated_x, federated, "o", color=color, fillstyle="none", markersize=6)
    x_label = "round" if x_axis == "round" else "MiB to and from a client"
    ax.set(xlabel=x_label, ylabel="accuracy, %", xlim=(0, None))


def main(arguments: Sequence[str]) -> None:
    """Print the table; draw the figure."""
    parser = harness.make_parser("federation", __doc__)
    parser.add_argument("federated", type=Path)
    parser.add_argument("simulated", type=Path)
    parser.add_argument("--figure", type=Path, metavar="FILE.png")
    options = parser.parse_args(arguments)
    pairs = load_pairs(options.federated, options.simulated)
    print(harness.format_table(TITLES, [pair.table_row() for pair in pairs]))
    if options.figure:
        draw = partial(draw_panel, pairs)
        draw_panels(X_AXES, options.figure, draw, "rings: processes, lines: simulation")
