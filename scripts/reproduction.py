"""Make the tables of docs/reproduction.md and of the site, and a figure, from docs/results/.

    python scripts/reproduction.py [--write]

docs/results/ has the measured numbers in all digits; the authors' public files and published values
are those of `fedpfl/papers/fedobp/`. Prints all tables, or puts the page's between their marks and
draws the figure. The site shows all of them.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
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
PAGE = DOCS / "reproduction.md"
FIGURE = DOCS / "figures" / "public_logs.png"
BEGIN = "<!-- {}: made by {} -->"
END = "<!-- to here -->"
HALVES = {"accuracy_pooled": "before fine-tuning", "ft_accuracy_pooled": "fine-tuned"}
TABLE4_METHODS = (
    "FedOBP FedAvg FedPer FLOCO FedRep LG-FedAvg Local-Only pFedFDA APFL FedALA FLUTE FedDPA FedRoD"
    " FedPAC Ditto"
)
"""The order of the table of 50 rounds; other methods follow."""
METHOD_NAMES = {
    "FedAvg (momentum=0.7)": "FedAvg",
    "FedAvg (momentum=0.0)": "FedAvg, momentum 0",
    "FLOCO (pers_epochs=5)": "FLOCO+",
    "FedDPA (rule=quantile, train=joint)": "FedDPA, as in FedOBP's comparison",
    "pFedFDA (as_published)": "pFedFDA, as published",
    "pFedMe (outer_lr=0.02)": "pFedMe, outer_lr 0.02",
}
UNPUBLISHED = ("FedAvg, momentum 0", "FLOCO+")
"""Of these names, whose rows have the number of the method without a suffix."""
TABLE4_SETTINGS = tuple(
    (dataset, f"Dir({alpha})") for dataset in ("FMNIST", "MNIST") for alpha in (0.1, 0.5)
)
AS_PUBLISHED = (
    "",
    " (head_init=server_average)",
    " (personal_init=server_average)",
    " (variant=as_published)",
    " (variant=as_published, personal_init=server_average)",
)
"""How labels of the variants that FedOBP's tables have end."""
LAST_ROUND = logs.ROUNDS[-1]
NAN = float("nan")


def markdown(titles: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table."""
    lines = []
    for cells in (tuple(titles), ("---",) * len(titles), *rows):
        line = f"| {' | '.join(cells)} |"
        # Twice, as each empty cell shares its bars with the next.
        lines.append(line.replace("|  |", "| |").replace("|  |", "| |"))
    return "\n".join(lines)


def read_results(name: str) -> pd.DataFrame:
    """Return a file of docs/results/."""
    return pd.read_csv(DOCS / "results" / f"{name}.csv")


def format_number(value: float, std: float = NAN) -> str:
    """Return two decimals, nothing for nan; `std` in brackets."""
    if pd.isna(value):
        return ""
    if pd.isna(std):
        return f"{value:.2f}"
    return f"{value:.2f}({std:.2f})"


def format_mean(values: pd.Series) -> str:
    """Return the mean over seeds, with the sample standard deviation of several.

    Nothing where a seed lacks its value.
    """
    if values.isna().any():
        return ""
    return format_number(values.mean(), values.std())


def format_published(label: str, dataset: str, setting: str) -> str:
    """Return a method's value in Table III or IV."""
    table = SOURCE + ("IV" if dataset in ("MNIST", "FMNIST") else "III")
    title = METHOD_TITLES[label.split(" ")[0]]
    value = lookup((table, ACCURACY, title, dataset, setting))
    return format_number(value.value, value.std) if value else ""


def sort_methods(runs: pd.DataFrame) -> pd.DataFrame:
    """Return rows of by_round.csv with the methods in the order of the report's tables."""
    positions = runs["method"].str.split(" ").str[0].map([*METHOD_TITLES].index)
    return runs.loc[positions.sort_values(kind="stable").index]


def format_label(label: str) -> str:
    """Return a run's name in the tables: of FedOBP with its score, moving average and q."""
    method, _, options = label.rstrip(")").partition(" (")
    title = METHOD_TITLES[method]
    if not options:
        return title
    options = options.replace("obp_as_published", "earlier score")
    options = options.replace("ema=", "moving average ").replace("q=", "q ")
    return f"{title}, {options}"


def pair_with_logs() -> dict[tuple[str, str], tuple[pd.DataFrame, logs.Log]]:
    """Return runs and the public files on them, by data set and label.

    They are those at momentum 0.7, of several of a label the longest.
    """
    runs = read_results("by_round").query("momentum == 0.7 and round in @logs.ROUNDS")
    runs = runs.query("dataset != 'MNIST' and partition == 'Dir(0.1) published'")
    lengths = runs.groupby(["dataset", "method", "precision"])["round"].transform("max")
    longest = lengths.groupby([runs["dataset"], runs["method"]]).transform("max")
    pairs = {}
    for (dataset, label), rows in sort_methods(runs[lengths == longest]).groupby(
        ["dataset", "method"], sort=False
    ):
        method, _, options = label.partition(" (")
        if method == "fedobp" and "obp_as_published" not in options:
            continue
        place = ["tables", method, dataset, "Dir(0.1)"]
        files = logs.read_logs()
        is_there = (files[["files", "method", "dataset", "setting"]] == place).all(axis=1)
        [(_, log)] = files[is_there].iterrows()
        pairs[dataset, label] = rows.set_index("round"), dict(log)
    return pairs


def make_agreement() -> str:
    """Return pooled accuracies, and in brackets how far above the file's they are."""
    rows = []
    for (dataset, label), (run, log) in pair_with_logs().items():
        cells = []
        for moment, column in logs.ACCURACY_COLUMNS.items():
            for round_number in logs.ROUNDS:
                value = run[column].get(round_number, NAN)
                difference = value - log[f"{moment}_{round_number}"]
                cells.append("" if pd.isna(value) else f"{value:.2f} ({difference:+.2f})")
        rows.append((dataset, format_label(label), *cells))
    before_titles = [f"{round_number}" for round_number in logs.ROUNDS]
    tuned_titles = [f"tuned {round_number}" for round_number in logs.ROUNDS]
    return markdown(("data set", "method", *before_titles, *tuned_titles), rows)


def draw(path: Path = FIGURE) -> list[Path]:
    """Draw CIFAR100 over rounds: lines of runs, the files' numbers as open marks."""
    # ---- One evaluation is no line.
    pairs = {
        label: (run, log)
        for (dataset, label), (run, log) in pair_with_logs().items()
        if dataset == "CIFAR100" and len(run) > 1
    }

    def draw_half(ax: Axes, column: str) -> None:
        moment = "before" if column == "accuracy_pooled" else "after"
        for number, (label, (run, log)) in enumerate(pairs.items()):
            style = line_style(number)
            ax.plot(run.index, run[column], label=format_label(label), **style)
            mark_style: dict[str, Any] = style | {
                "linestyle": "none",
                "markerfacecolor": "white",
                "markersize": 8,
            }
            ax.plot(
                logs.ROUNDS,
                [log[f"{moment}_{number}"] for number in logs.ROUNDS],
                label="authors' public file (open)",
                zorder=1,
                **mark_style,
            )
        ax.set(xlabel="round", ylabel="pooled accuracy (%)", xticks=logs.ROUNDS)

    panels = {f"CIFAR100, Dir(0.1)\n{name}": column for column, name in HALVES.items()}
    return draw_panels(panels, path, draw_half)


def make_cifar100() -> str:
    """Return Table III's rule, and the mean over clients in the end."""
    # ---- A row for each run of full length
    runs = read_results("by_round").query(
        "dataset == 'CIFAR100' and momentum == 0.7 and precision == 'bf16'"
    )
    rows = []
    for label, run in sort_methods(runs).groupby("method", sort=False):
        evaluations = run[run["round"].isin(logs.ROUNDS)].set_index("round")
        if LAST_ROUND not in evaluations.index:
            continue
        before, tuned = (
            f"{format_number(evaluations[column].max())} ({evaluations[column].idxmax()})"
            for column in HALVES
        )
        final_columns = ("accuracy", "accuracy_worst10", "ft_accuracy")
        personal = evaluations["personal"].iloc[0]
        rows.append(
            (
                format_label(label),
                "" if pd.isna(personal) else f"{personal:,.0f}",
                before,
                format_published(label, "CIFAR100", "Dir(0.1)"),
                tuned,
                *(format_number(evaluations.loc[LAST_ROUND, name]) for name in final_columns),
            )
        )
    titles = "method|personal entries|best of four (round)|published|fine-tuned"
    titles += "|round 400: mean|worst decile|fine-tuned: mean"
    return markdown(titles.split("|"), rows)


def make_whole_runs(*datasets: str) -> str:
    """Return whole runs by the paper's rule: before; fine-tuned.

    Of CIFAR100 they are FedOBP's, and all without momentum.
    """
    # ---- Runs by method and setting
    runs = sort_methods(
        read_results("by_round").query("round in @logs.ROUNDS and dataset in @datasets")
    )
    keys = ["dataset", "partition", "momentum", "precision", "method"]
    runs = runs.sort_values(keys[:3], kind="stable")

    # ---- A row for each, at the quantile of the paper
    rows = []
    for (dataset, partition, momentum, precision, label), run in runs.groupby(keys, sort=False):
        setting = partition.removesuffix(" published")
        quantile = lookup((SOURCE + "II", "quantile q", "FedOBP", dataset, setting))
        is_at_quantile = quantile is not None and label == f"fedobp (q={quantile.value:g})"
        is_shown = is_at_quantile or momentum == 0 or dataset != "CIFAR100"
        if not is_shown or LAST_ROUND not in set(run["round"]):
            continue
        columns = [run[run["round"] == round_number] for round_number in logs.ROUNDS]
        columns.append(run.groupby("seed")[[*HALVES]].max())
        cells = []
        for values in columns:
            halves = [format_mean(values[half]) for half in HALVES]
            cells.append("; ".join(filter(None, halves)))
        rows.append(
            (
                f"{dataset}, {setting}",
                format_label(label),
                f"{momentum:g}",
                precision,
                f"{run['seed'].nunique()}",
                *cells,
                format_published(label, dataset, setting),
            )
        )
    titles = ["data set", "method", "momentum", "precision", "seeds", *map(str, logs.ROUNDS)]
    return markdown([*titles, "best of four", "published"], rows)


def make_curve() -> str:
    """Return FedOBP without momentum over q, on CIFAR100 at Dir(0.1)."""
    runs = read_results("by_round").query(
        "dataset == 'CIFAR100' and partition == 'Dir(0.1) published' and seed == 42"
    )
    runs = runs[runs["method"].str.startswith("fedobp (q=") & (runs["momentum"] == 0)]
    rows = []
    for (personal, label), run in runs.groupby(["personal", "method"]):
        evaluations = run.set_index("round")
        accuracies = [
            format_number(evaluations["accuracy_pooled"].get(round_number, NAN))
            for round_number in (20, 40, 60, 80, 100)
        ]
        tuned = format_number(evaluations["ft_accuracy_pooled"].get(100, NAN))
        quantile = label.split("=")[1].rstrip(")")
        rows.append((quantile, f"{personal:,.0f}", *accuracies, tuned))
    titles = "q|personal entries|round 20|40|60|80|100|100, fine-tuned"
    return markdown(titles.split("|"), rows)


def make_fmnist() -> str:
    """Return FashionMNIST at Dir(0.1) by shorter runs."""
    columns = [
        "accuracy",
        "accuracy_pooled",
        "accuracy_worst10",
        "ft_accuracy",
        "ft_accuracy_pooled",
    ]
    runs = read_results("by_round").query(
        "dataset == 'FMNIST' and partition == 'Dir(0.1) published'"
    )
    lengths = runs.groupby(["method", "precision", "momentum"])["round"].transform("max")
    runs = sort_methods(runs[lengths < LAST_ROUND]).sort_values("round", kind="stable")
    rows = []
    for row in runs.to_dict("records"):
        method = format_label(row["method"])
        published = format_published(row["method"], "FMNIST", "Dir(0.1)")
        if not row["momentum"]:
            method += ", momentum 0"
            published = ""
        accuracies = [format_number(row[name]) for name in columns]
        rows.append((f"{row['round']}", method, row["precision"], *accuracies, published))
    titles = "round|method|precision|before: mean|pooled|worst decile"
    titles += "|fine-tuned: mean|pooled|published"
    return markdown(titles.split("|"), rows)


def make_fifty_rounds() -> str:
    """Return pooled accuracies, fine-tuned and published ones, by method and setting."""
    frame = read_results("table4_50_rounds")
    frame["method"] = frame["method"].replace(METHOD_NAMES)
    frame["method"] = frame["method"].str.replace(r" \(q=.*", "", regex=True)
    cells: dict[str, dict[tuple[str, str], str]] = {}
    for row in frame.to_dict("records"):
        cell = (
            f"{format_number(row['accuracy_pooled'])}, {format_number(row['ft_accuracy_pooled'])}"
        )
        if not pd.isna(row["published"]) and row["method"] not in UNPUBLISHED:
            cell += f" ({format_number(row['published'])})"
        setting = row["dataset"], row["partition"].removesuffix(" published")
        cells.setdefault(row["method"], {})[setting] = cell
    ordered_names = [name for name in TABLE4_METHODS.split() if name in cells]
    ordered_names += sorted(set(cells) - set(ordered_names))
    rows = [
        (name, *(cells[name].get(setting, "") for setting in TABLE4_SETTINGS))
        for name in ordered_names
    ]
    return markdown(("method", *(", ".join(setting) for setting in TABLE4_SETTINGS)), rows)


def make_tuning() -> str:
    """Return means over clients and seeds, by data set and method."""
    columns = [
        "accuracy",
        "accuracy_worst10",
        "ft_accuracy",
        "unseen_accuracy",
        "unseen_ft_accuracy",
    ]
    with_std = ("accuracy", "ft_accuracy", "unseen_ft_accuracy")
    rows = []
    for row in read_results("equal_tuning").to_dict("records"):
        cells = []
        for name in columns:
            std = row[f"{name}_seed_std"] if name in with_std else NAN
            cells.append(format_number(row[name], std))
        harms = ["", ""]  # FedAvg is what the others are compared with
        if row["method"] != "FedAvg":
            harms = [format_number(row["harmed_fedavg"]), format_number(row["loss_fedavg"])]
        rows.append((row["dataset"], row["method"], row["chosen"], *cells, *harms))
    titles = "data set|method|chosen|before: mean|worst decile|fine-tuned: mean"
    titles += "|unseen: before|fine-tuned|harmed, %|their loss"
    return markdown(titles.split("|"), rows)


def make_yardsticks() -> str:
    """Return accuracies of each data set and average ranks over both, best rank first."""
    frame = read_results("yardsticks")
    rows = []
    for method, runs in frame.sort_values(["rank", "method"]).groupby("method", sort=False):
        cells = []
        for row in runs.sort_values("dataset").to_dict("records"):
            cells.append(row["chosen"])
            for name in ("accuracy", "ft_accuracy"):
                cells.append(format_number(row[name], row[f"{name}_seed_std"]))
            cells.append("" if pd.isna(row["harmed"]) else f"{row['harmed']:.0f}")
        rows.append((method, f"{runs['rank'].iloc[0]:.1f}", *cells))
    titles = ["method", "rank"]
    for dataset in sorted(frame["dataset"].unique()):
        titles += [f"{dataset}: chosen", "before", "fine-tuned", "harmed, %"]
    return markdown(titles, rows)


def make_settings() -> str:
    """Return a row per setting: FedOBP without and with momentum, published, and FedAvg+FT."""
    runs = read_results("by_round").query("round in @logs.ROUNDS")
    rows = []
    for (dataset, partition), of_setting in runs.groupby(["dataset", "partition"]):
        setting = partition.removesuffix(" published")
        quantile = lookup((SOURCE + "II", "quantile q", "FedOBP", dataset, setting))
        label = f"fedobp (q={quantile.value:g})" if quantile else ""
        cells = [
            find_best(of_setting, label, 0.0),
            find_best(of_setting, label, 0.7),
            format_published(label, dataset, setting),
            find_best(of_setting, "fedavg", 0.7, "ft_accuracy_pooled"),
        ]
        rows.append((f"{dataset}, {setting}", *cells))
    titles = "setting|FedOBP|at 0.7|published|FedAvg+FT at 0.7"
    return markdown(titles.split("|"), rows)


def find_best(
    runs: pd.DataFrame, label: str, momentum: float, column: str = "accuracy_pooled"
) -> str:
    """Return the best of four checkpoints of whole runs, a mean over seeds; empty without runs."""
    chosen = runs[(runs["method"] == label) & (runs["momentum"] == momentum)]
    if LAST_ROUND not in set(chosen["round"]):
        return ""
    return format_mean(chosen.groupby("seed")[column].max())


def read_best_of_four() -> dict[tuple[str, str, str], dict[float, float]]:
    """Return the best of four checkpoints of whole runs as FedOBP's tables have them.

    By data set, setting and method, then by momentum. Several precisions: the last counts.
    """
    runs = read_results("by_round")
    runs = runs[runs["round"].isin(logs.ROUNDS)]
    keys = ["dataset", "partition", "method", "momentum", "precision"]
    best_by_cell: dict[tuple[str, str, str], dict[float, float]] = {}
    for (dataset, partition, label, momentum, _), run in runs.groupby(keys):
        setting = partition.removesuffix(" published")
        method = label.split(" ")[0]
        quantile = lookup((SOURCE + "II", "quantile q", "FedOBP", dataset, setting))
        is_papers = label.removeprefix(method) in AS_PUBLISHED
        if method == "fedobp" and quantile:
            is_papers = label == f"fedobp (q={quantile.value:g})"
        if is_papers and LAST_ROUND in set(run["round"]):
            best = run.groupby("seed")["accuracy_pooled"].max().mean()
            best_by_cell.setdefault((dataset, setting, method), {})[momentum] = best
    return best_by_cell


def make_mixtures(*datasets: str) -> str:
    """Return baselines' runs at both momenta beside the public file's number and the derived one."""
    rows = []
    for (dataset, setting, method), best in sorted(read_best_of_four().items()):
        if len(best) < 2 or method == "fedobp" or dataset not in datasets:
            continue
        table = SOURCE + ("IV" if dataset in ("MNIST", "FMNIST") else "III")
        published = lookup((table, ACCURACY, METHOD_TITLES[method], dataset, setting))
        assert published
        file_number = logs.best_accuracy(method, dataset, setting)
        derived = published.value - (file_number - published.value) / 3
        mean = (best[0.7] + 3 * best[0.0]) / 4
        # Of x, y, y, y.
        deviation = abs(best[0.7] - mean) / math.sqrt(3)
        rows.append(
            (
                f"{METHOD_TITLES[method]}, {dataset}, {setting}",
                f"{format_number(best[0.7])} ({format_number(file_number)})",
                f"{format_number(best[0.0])} ({format_number(derived)})",
                format_number(mean, deviation),
                format_number(published.value, published.std),
            )
        )
    titles = "run|0.7 (file)|0 (derived)|together|published"
    return markdown(titles.split("|"), rows)


PAGE_TABLES = {"settings": make_settings, "mixtures": partial(make_mixtures, "FMNIST", "MNIST")}
"""Tables of the page, by the name of their marks."""

SITE_TABLES = {
    "agreement": make_agreement,
    "cifar100": make_cifar100,
    "mixtures": partial(make_mixtures, "CIFAR100", "FMNIST", "MNIST"),
    "momentum": partial(make_whole_runs, "CIFAR100"),
    "table4": partial(make_whole_runs, "FMNIST", "MNIST"),
    "curve": make_curve,
    "fmnist": make_fmnist,
    "fifty": make_fifty_rounds,
    "tuning": make_tuning,
    "yardsticks": make_yardsticks,
}


def fill_page(page: str, tables: Mapping[str, str], script: str = "scripts/reproduction.py") -> str:
    """Return the page with each table between its marks, which name the script."""
    for name, table in tables.items():
        mark = BEGIN.format(name, script)
        before, after_mark = page.split(mark)
        _, after = after_mark.split(END, 1)
        page = f"{before}{mark}\n\n{table}\n\n{END}{after}"
    return page


def main() -> None:
    """Print all tables, or put the page's where they belong and draw the figure."""
    if "--write" in sys.argv[1:]:
        tables = {name: make_table() for name, make_table in PAGE_TABLES.items()}
        PAGE.write_text(fill_page(PAGE.read_text(), tables))
        draw()
    else:
        print("\n\n".join(make() for make in (PAGE_TABLES | SITE_TABLES).values()))


if __name__ == "__main__":
    main()
