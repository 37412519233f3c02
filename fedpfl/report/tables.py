"""Tables of what ran, beside what was published: for the terminal, Markdown, CSV and LaTeX."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from fedpfl.errors import FedpflError
from fedpfl.report.load import METHODS, Group, Run, groups, span, to_stderr
from fedpfl.report.published import QUANTILE, SETUP, Published, of_run
from fedpfl.report.text import clip, csv_cell, latex, markdown, plain

SELECTIONS = ("last", "best-checkpoint")
FORMATS = {"terminal": ".txt", "markdown": ".md", "csv": ".csv", "latex": ".tex"}

ACCURACIES = ("accuracy", "accuracy_pooled", "accuracy_worst10", "ft_accuracy", "ft_accuracy_pooled")
TRAFFIC = ("values_down", "values_up", "bits_down", "bits_up")


@dataclass(frozen=True)
class Column:
    """How one column of a table's frame is shown. kind: text, percent, difference, count, seconds or whole."""

    key: str
    group: str
    heading: str
    kind: str = "text"


@dataclass(frozen=True, eq=False)
class Table:
    """A table: exact numbers in `frame`, and how they are shown.

    A column `key` of the frame may have a neighbour `key_seed_std` (sample standard deviation over seeds).
    notes: what a reader must know besides, one line each.
    """

    frame: pd.DataFrame
    columns: tuple[Column, ...]
    caption: str
    notes: tuple[str, ...] = ()

    @property
    def shown(self) -> tuple[Column, ...]:
        """The columns in which anything stands."""
        return tuple(column for column in self.columns if self.frame[column.key].notna().any())

    def text(self, column: Column, row: int) -> str:
        """One cell as people read it: `96.89(0.03)`, `+0.12`, `1.31k`, or nothing."""
        value = self.frame[column.key].iloc[row]
        spread = f"{column.key}_seed_std"
        return _text(column.kind, value, self.frame[spread].iloc[row] if spread in self.frame else math.nan)


def accuracy_table(
    runs: Iterable[Run], select: str = "last", every: int = 1, warn: Callable[[str], None] = to_stderr
) -> Table:
    """One row per data set, partition and configuration: accuracies, traffic, seconds, and the published value.

    select: `last` judges the last evaluation of a run; `best-checkpoint` the one of highest accuracy, which looks
    at test data and exists to match the published rule. every: with `best-checkpoint`, look at the evaluations
    after multiples of this many rounds only (published: 100).
    """
    if select not in SELECTIONS:
        raise FedpflError(f"unknown selection {select!r}; choose one of: {', '.join(SELECTIONS)}")
    gathered = groups(runs)
    records = [_record(group, select, every) for group in gathered]
    for record, group in zip(records, gathered, strict=True):
        if math.isnan(record["accuracy"]):
            warn(f"{group.dataset}, {group.partition}, {group.method}: no evaluation of all clients to judge")
    frame = pd.DataFrame(records, columns=_record_keys())
    notes = (*departures(gathered), *emptiness(gathered, select, every))
    return Table(frame, ACCURACY_COLUMNS, _caption(gathered, frame, select, every), notes)


def curve_table(runs: Iterable[Run], reference: Path, spans: Sequence[tuple[int, int]] = ((1, 20), (21, 100))) -> Table:
    """How far each run's per-round cohort accuracy is from a published curve, in points, over spans of rounds.

    reference: a CSV with the columns method, round, accuracy_before, accuracy_after (percent).
    """
    published = read_reference(reference)
    records = []
    for group in groups(runs):
        name = reference_for(group, published["method"].unique())
        if name is None:
            continue
        for run in group.used:
            both = run.rounds.merge(published[published["method"] == name], on="round")
            for first, last in spans:
                part = both[both["round"].between(first, last)]
                if part.empty:
                    continue
                before = part["cohort_before"] - part["accuracy_before"]
                after = part["cohort_after"] - part["accuracy_after"]
                records.append(
                    {
                        "dataset": group.dataset,
                        "partition": group.partition,
                        "method": group.method,
                        "seed": run.seed,
                        "reference": name,
                        "first": int(part["round"].min()),
                        "last": int(part["round"].max()),
                        "before_absolute": before.abs().mean(),
                        "before_signed": before.mean(),
                        "after_absolute": after.abs().mean(),
                        "after_signed": after.mean(),
                    }
                )
    caption = (
        "Distance from the published per-round accuracy of the cohort's clients (pooled, before and after local "
        "training) in points: mean absolute and mean signed difference (own minus published)."
    )
    return Table(pd.DataFrame(records, columns=[column.key for column in CURVE_COLUMNS]), CURVE_COLUMNS, caption)


def published(group: Group) -> Published | None:
    """The published accuracy of this method, data set and Dirichlet setting, if there is one."""
    return of_run(group.runs[0])


def read_reference(path: Path) -> pd.DataFrame:
    """Per-round reference curves. Raises FedpflError where the file is no such thing."""
    needed = ["method", "round", "accuracy_before", "accuracy_after"]
    try:
        frame = pd.read_csv(path)
    except (OSError, ValueError) as error:
        raise FedpflError(f"{path}: cannot be read as CSV ({type(error).__name__}); give {', '.join(needed)}") from None
    missing = [name for name in needed if name not in frame]
    if missing:
        raise FedpflError(f"{path}: lacks the column {missing[0]}; needed: {', '.join(needed)}")
    return frame


def reference_for(group: Group, names: Iterable[str]) -> str | None:
    """The reference curve of a group's method: named like it, or beginning with its name and an underscore."""
    own = group.runs[0].method_name
    return next((name for name in names if name == own or name.startswith(f"{own}_")), None)


def render(table: Table, form: str = "terminal", width: int | None = None) -> str:
    """The table as text in one of FORMATS. width: of the terminal, in characters; by default as wide as needed."""
    if form not in FORMATS:
        raise FedpflError(f"unknown format {form!r}; choose one of: {', '.join(FORMATS)}")
    return {"terminal": _terminal, "markdown": _markdown, "csv": _csv, "latex": _latex}[form](table, width)


ACCURACY_COLUMNS = (
    Column("dataset", "", "data set"),
    Column("partition", "", "partition"),
    Column("method", "", "method"),
    Column("accuracy", "before", "mean", "percent"),
    Column("accuracy_pooled", "before", "pooled", "percent"),
    Column("accuracy_worst10", "before", "worst 10%", "percent"),
    Column("ft_accuracy", "fine-tuned", "mean", "percent"),
    Column("ft_accuracy_pooled", "fine-tuned", "pooled", "percent"),
    Column("published", "published", "value", "percent"),
    Column("difference", "published", "Δ mean", "difference"),
    Column("difference_pooled", "published", "Δ pooled", "difference"),
    Column("values_down", "values", "down", "count"),
    Column("values_up", "values", "up", "count"),
    Column("bits_down", "bits", "down", "count"),
    Column("bits_up", "bits", "up", "count"),
    Column("seconds", "", "s/round", "seconds"),
    Column("round", "", "round"),
    Column("seeds", "", "seeds", "whole"),
    Column("status", "", "status"),
)
CURVE_COLUMNS = (
    Column("dataset", "", "data set"),
    Column("partition", "", "partition"),
    Column("method", "", "method"),
    Column("seed", "", "seed", "whole"),
    Column("reference", "", "reference"),
    Column("first", "rounds", "from", "whole"),
    Column("last", "rounds", "to", "whole"),
    Column("before_absolute", "before", "absolute", "percent"),
    Column("before_signed", "before", "signed", "difference"),
    Column("after_absolute", "after", "absolute", "percent"),
    Column("after_signed", "after", "signed", "difference"),
)


def _record_keys() -> list[str]:
    keys: list[str] = []
    for column in ACCURACY_COLUMNS:
        keys.append(column.key)
        if column.key in (*ACCURACIES, *TRAFFIC, "seconds", "published"):
            keys.append(f"{column.key}_seed_std")
        if column.key == "seeds":
            keys.append("seed_list")
    return keys


def _record(group: Group, select: str, every: int) -> dict[str, Any]:
    found = judged(group, select, every)
    # Seeds without an evaluation yet say nothing, unless there is no other.
    used, rows = list(found) or list(group.used), list(found.values())
    record: dict[str, Any] = {
        "dataset": group.dataset,
        "partition": group.partition,
        "method": group.method,
        "round": span([int(row["round"]) for row in rows]),
        "seeds": len(used),
        "seed_list": _seeds(used),
        "status": group.status,
    }
    for key in ACCURACIES:
        record[key], record[f"{key}_seed_std"] = over_seeds([float(row.get(key, math.nan)) for row in rows])
    for key in TRAFFIC:
        record[key], record[f"{key}_seed_std"] = over_seeds([run.per_client(key) for run in used])
    record["seconds"], record["seconds_seed_std"] = over_seeds(
        [float(run.rounds["seconds"].median()) if "seconds" in run.rounds else math.nan for run in used]
    )
    known = published(group)
    record["published"] = known.value if known else math.nan
    record["published_seed_std"] = known.std if known else math.nan
    record["difference"] = record["accuracy"] - record["published"]
    record["difference_pooled"] = record["accuracy_pooled"] - record["published"]
    return record


def judged(group: Group, select: str, every: int) -> dict[Run, pd.Series]:
    """Return the rows of `rounds.csv` that the runs which speak for a group are judged by, of those that have one.

    Runs that are not finished are judged as far as all of them came, so that none is averaged with a longer one.
    """
    rows = {run: run.evaluations for run in group.used}
    rows = {run: own for run, own in rows.items() if len(own)}
    if rows and group.used[0].status != "finished":
        last = min(own["round"].iloc[-1] for own in rows.values())
        rows = {run: own[own["round"] <= last] for run, own in rows.items()}
    if select == "best-checkpoint":
        rows = {run: own[own["round"] % every == 0] for run, own in rows.items()}
    chosen = {}
    for run, own in rows.items():
        if len(own):
            best = select == "best-checkpoint" and own["accuracy"].notna().any()
            chosen[run] = own.loc[own["accuracy"].idxmax()] if best else own.iloc[-1]
    return chosen


def emptiness(gathered: Sequence[Group], select: str, every: int) -> tuple[str, ...]:
    """Say which judged evaluations hold no accuracy, which leaves cells empty."""
    told = [
        f"{group.method} on {group.dataset}, {group.partition} (seed {run.seed}, round {int(row['round'])})"
        for group in gathered
        for run, row in judged(group, select, every).items()
        if math.isnan(row["accuracy"])
    ]
    if not told:
        return ()
    return (f"Empty, as a model was not finite or no client has test samples: {few(told)}.",)


def over_seeds(values: list[float]) -> tuple[float, float]:
    """Mean and sample standard deviation; nan where a seed lacks the value, and the deviation of a single seed."""
    series = pd.Series(values, dtype=float)
    return float(series.mean(skipna=False)), float(series.std(skipna=False))


def _caption(gathered: list[Group], frame: pd.DataFrame, select: str, every: int) -> str:
    used = [run for group in gathered for run in group.used]
    tuning = sorted({int(epochs) for run in used if (epochs := run.get("eval.finetune_epochs"))})
    which = "the last evaluation of each run"
    if select == "best-checkpoint":
        among = "its evaluations" if every == 1 else f"its evaluations after multiples of {every} rounds"
        which = f"the best of {among}, chosen on test data as the published tables do,"
    seeds = dict(
        zip(frame["method"] + " on " + frame["dataset"] + ", " + frame["partition"], frame["seed_list"], strict=True)
    )
    over = over_which(seeds)
    parts = [
        f"Test accuracy in percent over all clients at {which} (column round); {over}.",
        "Mean: over clients; pooled: over all their test samples; worst 10%: the clients' worst decile.",
        "Before: each client's personal model as it stands"
        + (f"; fine-tuned: after {span(tuning)} local epochs more." if frame["ft_accuracy"].notna().any() else "."),
        "Values and bits: per client of the cohort and round, mean over rounds; s/round: median over rounds.",
    ]
    if frame["published"].notna().any():
        parts.append(
            "Published: FedOBP (arXiv:2604.16574), Tables III and IV; described there as mean over clients, in the "
            "authors' logs pooled, the best of rounds 100, 200, 300 and 400 before fine-tuning. "
            "Δ: own minus published, in points."
        )
    return " ".join(parts)


def over_which(seeds: Mapping[str, str]) -> str:
    """Say over which seeds means are, for each row where they differ. seeds: `0 1 2` by row."""
    by_seeds: dict[str, list[str]] = {}
    for row, own in seeds.items():
        by_seeds.setdefault(own.replace(" ", ", "), []).append(row)
    if len(by_seeds) == 1:
        (own,) = by_seeds
        return f"mean(sample standard deviation) over seeds {own}" if "," in own else f"one seed ({own})"
    told = [f"{own} ({few(rows)})" for own, rows in sorted(by_seeds.items(), key=lambda item: -len(item[1]))]
    return f"mean(sample standard deviation) over different seeds: {'; '.join(told)}"


def _seeds(members: Iterable[Run]) -> str:
    return " ".join(str(run.seed) for run in members)


def departures(gathered: Sequence[Group]) -> tuple[str, ...]:
    """In what own runs depart from the published set-up, and what is known about the published code; a line each."""
    compared = [group for group in gathered if published(group)]
    behind: dict[str, list[str]] = {}
    differing: dict[str, list[tuple[str, Group]]] = {}
    for group in compared:
        known = published(group)
        name = METHODS.get(group.runs[0].method_name, group.runs[0].method_name)
        if known and known.note and name not in behind.setdefault(known.note, []):
            behind[known.note].append(name)
        for what, own, theirs in setup_differences(group.runs[0]):
            differing.setdefault(f"{what} {{}} (published {theirs})", []).append((own, group))
    lines = []
    if differing:
        told = []
        for words, found in differing.items():
            text = words.format(few(dict.fromkeys(own for own, _ in found)))
            if len(found) < len(compared):
                text += f" for {few(dict.fromkeys(group.method for _, group in found))}"
            told.append(text)
        lines.append(f"Set-up that differs from the published one: {'; '.join(told)}.")
    lines += [f"{', '.join(names)}: {note}." for note, names in behind.items()]
    return tuple(lines)


def few(words: Iterable[str]) -> str:
    """A sweep must not turn a note into a list of its values."""
    every = list(words)
    return ", ".join(every) if len(every) <= 4 else f"{', '.join(every[:3])} and {len(every) - 3} more"


def setup_differences(run: Run) -> list[tuple[str, str, str]]:
    """What, own value and published value, where they differ."""
    found: list[tuple[str, Any, Any]] = []
    for key, value in SETUP.items():
        found.append((key, run.get(key), value))
    q = of_run(run, QUANTILE)
    found.append(("q", run.q, q and q.value))
    if run.method_name == "fedobp":
        found.append(("norm", run.config["method"].get("norm"), "global"))
    return [(key, str(own), str(value)) for key, own, value in found if None not in (own, value) and own != value]


def _text(kind: str, value: Any, spread: float) -> str:
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if kind == "percent":
        return f"{value:.2f}" + ("" if math.isnan(spread) else f"({spread:.2f})")
    if kind == "difference":
        return f"{round(value, 2) + 0.0:+.2f}"  # no negative zero
    if kind == "seconds":
        return f"{value:.3g}" if value < 100 else f"{value:.0f}"
    if kind == "whole":
        return str(int(value))
    if kind == "count":
        for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
            if value >= size:
                return f"{value / size:.4g}{unit}"
        return f"{value:.4g}"
    return clip(value)


def _terminal(table: Table, width: int | None) -> str:
    """One block per data set and partition, whose names move into its title; more where the window is narrow."""
    from rich import box
    from rich.console import Console
    from rich.table import Table as RichTable
    from rich.text import Text

    columns = [column for column in table.shown if column.key not in ("dataset", "partition")]
    console = Console(file=io.StringIO(), width=width or 10_000, record=True)
    frame = table.frame.reset_index(drop=True)
    for (dataset, partition), part in frame.groupby(["dataset", "partition"], sort=False):
        for number, block in enumerate(_blocks(table, columns, width)):
            title = Text(plain(f"{dataset}, {partition}")) if number == 0 else None
            shown = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1))
            for column in block:
                heading = Text(f"{column.group}\n{column.heading}" if column.group else f"\n{column.heading}")
                justify: Any = "left" if column.kind == "text" else "right"
                shown.add_column(heading, justify=justify, no_wrap=width is None, overflow="fold")
            for row in part.index:
                shown.add_row(*(Text(table.text(column, row)) for column in block))
            console.print(shown)
    for line in (table.caption, *table.notes):
        console.print(Text(plain(line)), width=width or 120)
    return "\n".join(line.rstrip() for line in console.export_text().splitlines()) + "\n"


def _blocks(table: Table, columns: list[Column], width: int | None) -> list[list[Column]]:
    """Split the columns so that each block fits the width, the first column repeated."""
    if width is None:
        return [columns]

    def wide(column: Column) -> int:
        texts = [column.group, column.heading, *(table.text(column, row) for row in range(len(table.frame)))]
        return max(map(len, texts)) + 2  # rich's padding

    first, *rest = columns
    # A long label folds rather than push the numbers out.
    start = min(wide(first), max(18, width // 3)) + 2
    blocks: list[list[Column]] = [[first]]
    used = start
    for column in rest:
        if used + wide(column) > width and len(blocks[-1]) > 1:
            blocks.append([first])
            used = start
        blocks[-1].append(column)
        used += wide(column)
    return blocks


def _markdown(table: Table, _: int | None) -> str:
    columns = table.shown
    lines = [
        "| " + " | ".join(markdown(f"{column.group} {column.heading}".strip()) for column in columns) + " |",
        "|" + "|".join("---" if column.kind == "text" else "---:" for column in columns) + "|",
    ]
    for row in range(len(table.frame)):
        lines.append("| " + " | ".join(markdown(table.text(column, row)) for column in columns) + " |")
    lines += [line for note in (table.caption, *table.notes) for line in ("", markdown(note))]
    return "\n".join(lines) + "\n"


def _csv(table: Table, _: int | None) -> str:
    return table.frame.map(csv_cell).to_csv(index=False, lineterminator="\n")


def _latex(table: Table, _: int | None) -> str:
    r"""Needs `\usepackage{booktabs,graphicx}`."""
    columns = table.shown
    spans: list[tuple[str, int]] = []
    for column in columns:
        if spans and spans[-1][0] == column.group and column.group:
            spans[-1] = (column.group, spans[-1][1] + 1)
        else:
            spans.append((column.group, 1))
    top, rules, place = [], [], 1
    for group, size in spans:
        top.append(f"\\multicolumn{{{size}}}{{c}}{{{latex(group)}}}" if group else "")
        rules += [f"\\cmidrule(lr){{{place}-{place + size - 1}}}"] if group else []
        place += size
    lines = [
        r"% \usepackage{booktabs,graphicx}",
        r"\begin{table*}",
        rf"\caption{{{latex(' '.join((table.caption, *table.notes)))}}}",
        r"\resizebox{\textwidth}{!}{%",
        rf"\begin{{tabular}}{{{''.join('l' if column.kind == 'text' else 'r' for column in columns)}}}",
        r"\toprule",
        " & ".join(top) + r" \\",
        " ".join(rules),
        " & ".join(latex(column.heading) for column in columns) + r" \\",
    ]
    settings = list(zip(table.frame["dataset"], table.frame["partition"], strict=True))
    for row, setting in enumerate(settings):
        if row == 0 or setting != settings[row - 1]:
            lines.append(r"\midrule")
        lines.append(" & ".join(latex(table.text(column, row)) for column in columns) + r" \\")
    lines += [r"\bottomrule", r"\end{tabular}}", r"\end{table*}"]
    return "\n".join(line for line in lines if line) + "\n"
