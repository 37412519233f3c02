"""Tables and the first figure of docs/reproduction.md from docs/results/: `python
scripts/reproduction.py [--write]`.

docs/results/ has what was measured, in all digits; the authors' public files and published values
are those of `fedpfl/papers/fedobp/`. Prints the tables, or puts each between its marks in the page
and draws the figure.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import ACCURACY, SOURCE
from fedpfl.papers.published import lookup
from fedpfl.report.figures import draw_panels, line_style
from fedpfl.report.names import METHOD_TITLES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

DOCS = Path(__file__).parents[1] / "docs"
PAGE, FIGURE = DOCS / "reproduction.md", DOCS / "figures" / "public_logs.png"
BEGIN, END = "<!-- {}: made by scripts/reproduction.py -->", "<!-- to here -->"
HALVES = {"accuracy_pooled": "before fine-tuning", "ft_accuracy_pooled": "fine-tuned"}
FIFTY = (
    "FedOBP FedAvg FedPer FLOCO FedRep LG-FedAvg Local-Only pFedFDA APFL FedALA FLUTE FedDPA FedRoD"
    " FedPAC Ditto"
)
CALLED = {
    "FedAvg (momentum=0.7)": "FedAvg",
    "FedAvg (momentum=0.0)": "FedAvg, momentum 0",
    "FLOCO (pers_epochs=5)": "FLOCO+",
    "FedDPA (rule=quantile, train=joint)": "FedDPA, as in FedOBP's comparison",
    "pFedFDA (as_published)": "pFedFDA, as published",
    "pFedMe (outer_lr=0.02)": "pFedMe, outer_lr 0.02",
}
PLACES = tuple(
    (dataset, f"Dir({alpha})") for dataset in ("FMNIST", "MNIST") for alpha in (0.1, 0.5)
)


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = [tuple(titles), ("---",) * len(titles), *rows]
    return "\n".join(
        f"| {' | '.join(row)} |".replace("|  |", "| |").replace("|  |", "| |") for row in lines
    )


def results(name: str) -> pd.DataFrame:
    """Return a file of docs/results/."""
    return pd.read_csv(DOCS / "results" / f"{name}.csv")


def number(value: float, std: float = float("nan")) -> str:
    """Return two decimals, nothing for nan; `std` in brackets."""
    return "" if pd.isna(value) else f"{value:.2f}" + ("" if pd.isna(std) else f"({std:.2f})")


def over_seeds(values: pd.Series) -> str:
    """Return the mean, with the sample standard deviation where there are several; nothing where a
    seed lacks.
    """
    return "" if values.isna().any() else number(values.mean(), values.std())


def published(label: str, dataset: str, setting: str) -> str:
    """Return a method's value in Table III or IV."""
    table = SOURCE + ("IV" if dataset in ("MNIST", "FMNIST") else "III")
    known = lookup((table, ACCURACY, METHOD_TITLES[label.split(" ")[0]], dataset, setting))
    return number(known.value, known.std) if known else ""


def ordered(runs: pd.DataFrame) -> pd.DataFrame:
    """Return rows of by_round.csv with the methods in the order of the report's tables."""
    place = runs["method"].str.split(" ").str[0].map([*METHOD_TITLES].index)
    return runs.loc[place.sort_values(kind="stable").index]


def named(label: str) -> str:
    """Return a run's name in the tables: of FedOBP with its score, moving average and q."""
    method, _, told = label.rstrip(")").partition(" (")
    values = [
        told.replace("obp_as_published", "earlier score")
        .replace("ema=", "moving average ")
        .replace("q=", "q ")
    ]
    return ", ".join([METHOD_TITLES[method], *filter(None, values)])


def logged() -> dict[tuple[str, str], tuple[pd.DataFrame, logs.Log]]:
    """Return own runs at momentum 0.7 that a public file is for, with it, by data set and label:
    each one's longest.
    """
    runs = results("by_round").query("momentum == 0.7 and round in @logs.ROUNDS")
    runs = runs.query("dataset != 'MNIST' and partition == 'Dir(0.1) published'")
    last = runs.groupby(["dataset", "method", "precision"])["round"].transform("max")
    runs = runs[last == last.groupby([runs["dataset"], runs["method"]]).transform("max")]
    found = {}
    for (dataset, label), rows in ordered(runs).groupby(["dataset", "method"], sort=False):
        method, _, told = label.partition(" (")
        if method != "fedobp" or "obp_as_published" in told:
            key = "tables", method, dataset, "Dir(0.1)"
            [log] = [
                one
                for one in logs.read_logs()
                if (one.files, one.method, one.dataset, one.setting) == key
            ]
            found[dataset, label] = rows.set_index("round"), log
    return found


def agreement() -> str:
    """Own pooled accuracies, and in brackets own minus the file's."""
    rows = []
    for (dataset, label), (own, log) in logged().items():
        cells = []
        for half, column in enumerate(HALVES):
            for at in logs.ROUNDS:
                value = own[column].get(at, float("nan"))
                cells.append(
                    "" if pd.isna(value) else f"{value:.2f} ({value - log.accuracy[at][half]:+.2f})"
                )
        rows.append((dataset, named(label), *cells))
    return markdown(
        (
            "data set",
            "method",
            *(f"{at}" for at in logs.ROUNDS),
            *(f"tuned {at}" for at in logs.ROUNDS),
        ),
        rows,
    )


def draw(path: Path = FIGURE) -> list[Path]:
    """Draw CIFAR100 over rounds: own lines, the files' numbers as open marks."""

    def half(ax: Axes, column: str) -> None:
        shown = [
            (named(label), *both)
            for (dataset, label), both in logged().items()
            if dataset == "CIFAR100"
        ]
        shown = [own for own in shown if len(own[1]) > 1]
        for place, (name, own, log) in enumerate(shown):
            style = line_style(place)
            ax.plot(own.index, own[column], label=name, **style)
            theirs = [both[column != "accuracy_pooled"] for both in log.accuracy.values()]
            marks: dict[str, Any] = style | {
                "linestyle": "none",
                "markerfacecolor": "white",
                "markersize": 8,
            }
            ax.plot([*log.accuracy], theirs, label="authors' public file (open)", zorder=1, **marks)
        ax.set(xlabel="round", ylabel="pooled accuracy (%)", xticks=logs.ROUNDS)

    return draw_panels(
        {f"CIFAR100, Dir(0.1)\n{name}": column for column, name in HALVES.items()}, path, half
    )


def cifar100() -> str:
    """Table III's rule, and the mean over clients in the end."""
    rows = []
    runs = ordered(
        results("by_round").query(
            "dataset == 'CIFAR100' and momentum == 0.7 and precision == 'bf16'"
        )
    )
    for label, own in runs.groupby("method", sort=False):
        at = own[own["round"].isin(logs.ROUNDS)].set_index("round")
        if 400 not in at.index:
            continue
        best = [(number(at[column].max()), f"{at[column].idxmax()}") for column in HALVES]
        last = [
            number(at.loc[400, column])
            for column in ("accuracy", "accuracy_worst10", "ft_accuracy")
        ]
        personal = "" if pd.isna(at["personal"].iloc[0]) else f"{at['personal'].iloc[0]:,.0f}"
        cells = [f"{value} ({where})" for value, where in best]
        rows.append(
            (
                named(label),
                personal,
                cells[0],
                published(label, "CIFAR100", "Dir(0.1)"),
                cells[1],
                *last,
            )
        )
    titles = (
        "method",
        "personal entries",
        "best of four (round)",
        "published",
        "fine-tuned",
        "round 400: mean",
    )
    return markdown((*titles, "worst decile", "fine-tuned: mean"), rows)


def whole(*datasets: str) -> str:
    """Whole runs by the paper's rule, of CIFAR100 FedOBP's and all without momentum: before;
    fine-tuned.
    """
    runs = ordered(results("by_round").query("round in @logs.ROUNDS and dataset in @datasets"))
    keys, rows = ["dataset", "partition", "momentum", "precision", "method"], []
    runs = runs.sort_values(keys[:3], kind="stable")
    for (dataset, partition, value, precision, label), own in runs.groupby(keys, sort=False):
        setting = partition.removesuffix(" published")
        chosen = lookup((SOURCE + "II", "quantile q", "FedOBP", dataset, setting))
        at_q = chosen is not None and label == f"fedobp (q={chosen.value:g})"
        if logs.ROUNDS[-1] not in {*own["round"]} or not (
            at_q or value == 0 or dataset != "CIFAR100"
        ):
            continue
        told = (
            f"{dataset}, {setting}",
            named(label),
            f"{value:g}",
            precision,
            f"{own['seed'].nunique()}",
        )
        over = [own[own["round"] == at] for at in logs.ROUNDS] + [
            own.groupby("seed")[[*HALVES]].max()
        ]
        cells = ("; ".join(filter(None, (over_seeds(at[half]) for half in HALVES))) for at in over)
        rows.append((*told, *cells, published(label, dataset, setting)))
    titles = (
        "data set",
        "method",
        "momentum",
        "precision",
        "seeds",
        *map(str, logs.ROUNDS),
        "best of four",
    )
    return markdown((*titles, "published"), rows)


def momentum() -> str:
    """CIFAR100 without momentum, and FedOBP with it."""
    return whole("CIFAR100")


def table4() -> str:
    """Table IV's rows over 400 rounds."""
    return whole("FMNIST", "MNIST")


def curve() -> str:
    """FedOBP without momentum over q, on CIFAR100 at Dir(0.1)."""
    runs = results("by_round").query(
        "dataset == 'CIFAR100' and partition == 'Dir(0.1) published' and seed == 42"
    )
    runs = runs[runs["method"].str.startswith("fedobp (q=") & (runs["momentum"] == 0)]
    rows = []
    for (personal, label), own in runs.groupby(["personal", "method"]):
        at = own.set_index("round")
        cells = [
            number(at["accuracy_pooled"].get(place, float("nan")))
            for place in (20, 40, 60, 80, 100)
        ]
        tuned = number(at["ft_accuracy_pooled"].get(100, float("nan")))
        rows.append((label.split("=")[1].rstrip(")"), f"{personal:,.0f}", *cells, tuned))
    titles = ("q", "personal entries", "round 20", "40", "60", "80", "100", "100, fine-tuned")
    return markdown(titles, rows)


def fmnist() -> str:
    """FashionMNIST at Dir(0.1) by shorter runs."""
    rows = []
    columns = (
        "accuracy",
        "accuracy_pooled",
        "accuracy_worst10",
        "ft_accuracy",
        "ft_accuracy_pooled",
    )
    runs = results("by_round").query("dataset == 'FMNIST' and partition == 'Dir(0.1) published'")
    runs = runs[
        runs.groupby(["method", "precision", "momentum"])["round"].transform("max")
        < logs.ROUNDS[-1]
    ]
    for row in ordered(runs).sort_values("round", kind="stable").to_dict("records"):
        method = named(row["method"]) + ("" if row["momentum"] else ", momentum 0")
        known = published(row["method"], "FMNIST", "Dir(0.1)") if row["momentum"] else ""
        rows.append(
            (
                f"{row['round']}",
                method,
                row["precision"],
                *(number(row[name]) for name in columns),
                known,
            )
        )
    titles = (
        "round",
        "method",
        "precision",
        "before: mean",
        "pooled",
        "worst decile",
        "fine-tuned: mean",
        "pooled",
    )
    return markdown((*titles, "published"), rows)


def fifty() -> str:
    """Pooled accuracy, the same fine-tuned, and the published one by method and setting."""
    frame = results("table4_50_rounds").rename(
        columns={"accuracy_pooled": "before", "ft_accuracy_pooled": "after"}
    )
    frame["method"] = frame["method"].replace(CALLED).str.replace(r" \(q=.*", "", regex=True)
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in frame.itertuples():
        known = (
            ""
            if pd.isna(row.published) or "momentum" in row.method
            else f" ({number(row.published)})"
        )
        cell = f"{number(row.before)}, {number(row.after)}{known}"
        cells.setdefault(row.method, {})[row.dataset, row.partition.removesuffix(" published")] = (
            cell
        )
    first = [name for name in FIFTY.split() if name in cells]
    order = [*first, *sorted({*cells} - {*first})]
    rows = [(name, *(cells[name].get(place, "") for place in PLACES)) for name in order]
    return markdown(("method", *(", ".join(place) for place in PLACES)), rows)


def tuning() -> str:
    """Means over clients and seeds, by data set and method."""
    rows = []
    for row in results("equal_tuning").to_dict("records"):
        pairs = [
            "accuracy",
            "accuracy_worst10",
            "ft_accuracy",
            "unseen_accuracy",
            "unseen_ft_accuracy",
        ]
        spread = [
            row[f"{name}_seed_std"] if name in pairs[::2] or name == pairs[-1] else float("nan")
            for name in pairs
        ]
        cells = [number(row[name], std) for name, std in zip(pairs, spread, strict=True)]
        harmed = (
            [number(row[name]) for name in ("harmed_fedavg", "loss_fedavg")]
            if row["method"] != "FedAvg"
            else ["", ""]
        )
        rows.append((row["dataset"], row["method"], row["chosen"], *cells, *harmed))
    titles = (
        "data set",
        "method",
        "chosen",
        "before: mean",
        "worst decile",
        "fine-tuned: mean",
        "unseen: before",
    )
    return markdown((*titles, "fine-tuned", "harmed, %", "their loss"), rows)


def yardsticks() -> str:
    """Accuracies of each data set and the average ranks over both, best rank first."""
    frame, rows = results("yardsticks"), []
    for method, own in frame.sort_values(["rank", "method"]).groupby("method", sort=False):
        cells = []
        for row in own.sort_values("dataset").to_dict("records"):
            cells += [
                row["chosen"],
                *(
                    number(row[name], row[f"{name}_seed_std"])
                    for name in ("accuracy", "ft_accuracy")
                ),
            ]
            cells.append("" if pd.isna(row["harmed"]) else f"{row['harmed']:.0f}")
        rows.append((method, f"{own['rank'].iloc[0]:.1f}", *cells))
    each = [
        (f"{name}: chosen", "before", "fine-tuned", "harmed, %")
        for name in sorted(frame["dataset"].unique())
    ]
    return markdown(("method", "rank", *(title for titles in each for title in titles)), rows)


TABLES = {
    "agreement": agreement,
    "cifar100": cifar100,
    "momentum": momentum,
    "table4": table4,
    "curve": curve,
    "fmnist": fmnist,
    "fifty": fifty,
    "tuning": tuning,
    "yardsticks": yardsticks,
}


def filled(page: str, made: Mapping[str, str]) -> str:
    """Return the page with each table between its marks."""
    for name, table in made.items():
        before, rest = page.split(BEGIN.format(name))
        page = f"{before}{BEGIN.format(name)}\n\n{table}\n\n{END}{rest.split(END, 1)[1]}"
    return page


def main() -> None:
    """Print the tables, or put them where they belong and draw the figure."""
    made = {name: table() for name, table in TABLES.items()}
    if "--write" in sys.argv[1:]:
        PAGE.write_text(filled(PAGE.read_text(), made))
        draw()
    else:
        print("\n\n".join(made.values()))


if __name__ == "__main__":
    main()
