"""One self-contained HTML page per experiment: `python -m fedpfl.report html [ROOT ...] [--out DIR]`."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedpfl.errors import FedpflError
from fedpfl.report.load import Group, Run, directories, groups, runs, to_stderr
from fedpfl.report.output import positive
from fedpfl.report.page import parts
from fedpfl.report.page.data import page_data
from fedpfl.report.tables import SELECTIONS, accuracy_table


@dataclass(frozen=True, eq=False)
class Experiment:
    """What one page shows. name: of its file. base: the folder that holds its runs.

    skipped: one line for each directory that could not be read.
    """

    name: str
    base: Path
    runs: tuple[Run, ...]
    skipped: tuple[str, ...]


def main(words: Sequence[str]) -> int:
    """Write the pages and name them on the error stream; returns 0. Raises FedpflError where there are no runs."""
    options = _parser().parse_args(words)
    out = options.out or options.roots[0] / "report"
    for target in write(options.roots, out, options.select, options.every):
        to_stderr(f"wrote {target}")
    return 0


def write(
    roots: Sequence[Path],
    out: Path,
    select: str = "last",
    every: int = 1,
    warn: Callable[[str], None] = to_stderr,
) -> list[Path]:
    """Write a page per experiment into `out`, and `index.html` where there are several; returns the files.

    select, every: as in `accuracy_table`. Raises FedpflError where a root does not exist or nothing can be read.
    """
    found = experiments(roots, warn)
    shown = [experiment for experiment in found if experiment.runs]
    if not shown:
        raise FedpflError(
            f"no runs found below {', '.join(map(str, roots))}; "
            "run `python -m fedpfl.train` first or name another folder"
        )
    out.mkdir(parents=True, exist_ok=True)
    written = [_replace(out / f"{experiment.name}.html", page(experiment, out, select, every)) for experiment in shown]
    if len(found) > 1:
        written.append(_replace(out / "index.html", index(found, select, every)))
    return written


def experiments(roots: Iterable[Path], warn: Callable[[str], None] = to_stderr) -> list[Experiment]:
    """The runs below the roots by experiment: the first folder below a root, or the root if it is one or lies in one.

    Of one configuration that ran in two experiments each keeps its own.
    """
    folders: dict[Path, list[Path]] = {}
    taken: set[Path] = set()
    for root in roots:
        for path in directories(root, warn=warn):
            if path.resolve() not in taken:
                taken.add(path.resolve())
                folders.setdefault(_base(path, root), []).append(path)
    found = []
    names = {"index"}
    for base, paths in folders.items():
        skipped: list[str] = []
        members = runs(*paths, warn=skipped.append)
        for line in skipped:
            warn(line)
        name = _free(_name(base.resolve()), names)
        found.append(Experiment(name, base, tuple(members), tuple(line.removeprefix("skipped ") for line in skipped)))
    return found


def page(experiment: Experiment, out: Path, select: str = "last", every: int = 1) -> str:
    """The experiment's page. out: the folder it is written to, which its links start from."""
    notes: list[str] = []
    table = accuracy_table(experiment.runs, select, every, warn=notes.append)
    gathered = groups(experiment.runs)
    judged = [float(value) for value in table.frame["accuracy"]]
    data = page_data(gathered, judged, notes.append)
    has = {
        "curves": bool(data["metrics"]),
        "clients": any("clients" in record for record in data["groups"]),
        "partition": bool(data["partitions"]),
        "masks": any("mask" in record for record in data["groups"]),
    }
    accuracies = parts.accuracies(table)
    compared = [_MARKS] if "<b>" in accuracies else []
    sections = {
        "runs": (
            "Runs",
            parts.tiles(parts.summary(gathered)),
            parts.overview(gathered, out, experiment.base),
            parts.listed("Skipped, not in any table or chart:", experiment.skipped),
            parts.listed("Shown in part:", notes),
        ),
        "accuracy": ("Accuracy", accuracies, parts.lines([table.caption, *compared, *table.notes])),
        **{name: (heading, parts.lines([text]), _HOST) for name, (heading, text) in _CHARTS.items() if has[name]},
        "cost": ("Cost", parts.lines([_COST]), _HOST, parts.costs(gathered, judged)),
    }
    body = "\n".join(parts.section(name, heading, *content) for name, (heading, *content) in sections.items())
    body += f"\n<footer>{parts.lines([f'{experiment.base}; newest round {parts.newest(experiment.runs)}'])}</footer>"
    navigation = {name: heading for name, (heading, *_) in sections.items()}
    return parts.document(experiment.name, navigation, body, data)


def index(found: Sequence[Experiment], select: str = "last", every: int = 1) -> str:
    """A page that names all experiments and links to theirs."""
    heads = [("", "experiment", False), ("", "configurations", True), ("", "runs", True)]
    heads += [("", "status", False), ("", "best mean accuracy by data set and partition", False), ("", "hours", True)]
    rows: list[str] = []
    skipped: list[str] = []
    for experiment in found:
        skipped += experiment.skipped
        if not experiment.runs:
            continue
        gathered = groups(experiment.runs)
        rows.append(parts.experiment_row(experiment.name, gathered, _best(gathered, experiment, select, every)))
    body = parts.section(
        "experiments",
        "Experiments",
        parts.grid("experiments", heads, rows, "bare"),
        parts.listed("Skipped, not in any page:", skipped),
    )
    return parts.document("Experiments", {}, body)


_HOST = '<noscript><p class="note">The chart needs JavaScript.</p></noscript><div class="chart"></div>'
_MARKS = (
    "Bold: best of the data set and partition; underlined: second. Runs that are not finished do not compete with "
    "finished ones. A click on a heading sorts."
)
_CHARTS = {
    "curves": (
        "Convergence",
        "Means over seeds, with a band of one sample standard deviation. Markers are measured points. "
        "Point at the chart for numbers; a click on a method hides it in all charts.",
    ),
    "clients": (
        "Clients",
        "Accuracy of every client's personal model after the last evaluation, all seeds together. "
        "Box: quartiles and median; diamond: mean; crosses: worst decile; triangle: its mean.",
    ),
    "partition": (
        "Partition",
        "Samples of each class that a client holds, training, validation and test together; the stronger the "
        "colour the more, logarithmic; empty is none.",
    ),
    "masks": (
        "Masks",
        "Entries that are personalised, by tensor over rounds, mean over the cohort and over seeds.",
    ),
}
_COST = (
    "Values and MB (megabytes, positions of masked entries included) per client of the cohort and round, mean over "
    "rounds; GB over all rounds and clients of the cohort; s/round: median over rounds, training without evaluation; "
    "hours: the whole run. Means over seeds."
)


def _best(gathered: Sequence[Group], experiment: Experiment, select: str, every: int) -> list[str]:
    """By data set and partition the best configuration, of the finished ones if there are any."""
    frame = accuracy_table(experiment.runs, select, every, warn=lambda _: None).frame
    lines = []
    for (dataset, partition), part in frame.groupby(["dataset", "partition"], sort=False):
        part = part[part["accuracy"].notna()]
        if part.empty:
            lines.append(f"{dataset}, {partition}: not evaluated yet")
            continue
        finished = part[part["status"].str.contains("finished")]
        part = part if finished.empty else finished
        row = part.loc[part["accuracy"].idxmax()]
        lines.append(f"{dataset}, {partition}: {row['method']} {row['accuracy']:.2f}")
    return lines


def _base(path: Path, root: Path) -> Path:
    """The folder whose runs make one page, judged by where `seed<k>` lies: `<experiment>/<method>/<key>/seed<k>`."""
    path, top = path.resolve(), root.resolve()
    own = path.parents[2] if re.fullmatch(r"seed\d+", path.name) and len(path.parents) > 2 else path.parent
    if top == own or own in top.parents:
        return root
    return root / path.relative_to(top).parts[0]


def _name(base: Path) -> str:
    """The folder's name; a single run, whose folder only tells the seed, is named by its place in its experiment."""
    return "-".join(base.parts[-4:]).strip(os.sep) if re.fullmatch(r"seed\d+", base.name) else base.name or "runs"


def _free(name: str, names: set[str]) -> str:
    """The name, with a number where it is taken; file systems may not tell letters' case apart."""
    chosen, count = name, 1
    while chosen.casefold() in names:
        count += 1
        chosen = f"{name}-{count}"
    names.add(chosen.casefold())
    return chosen


def _replace(target: Path, text: str) -> Path:
    """Write a file whole or not at all."""
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(text, encoding="utf-8")
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
    return target


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fedpfl.report html",
        description="One HTML page per experiment, which loads nothing from anywhere: send it, open it.",
    )
    parser.add_argument(
        "roots", nargs="*", metavar="ROOT", type=Path, default=[Path("outputs")], help="default: outputs"
    )
    parser.add_argument("--out", type=Path, metavar="DIR", help="write there; default: ROOT/report")
    parser.add_argument("--select", choices=SELECTIONS, default="last", help="which evaluation the tables judge")
    parser.add_argument(
        "--every", type=positive, default=1, metavar="N", help="best-checkpoint: of every N rounds only"
    )
    return parser
