"""One HTML page per experiment, beside plotly's script: `python -m fedpfl.report html [ROOT ...]`."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote

import pandas as pd
from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from fedpfl.ground.files import atomic_output
from fedpfl.report.fairness import compare_with_baselines, comparisons_table
from fedpfl.report.grouping import Group, groups
from fedpfl.report.load import filter_runs, no_runs_error, print_to_stderr, read_directories, runs
from fedpfl.report.page.data import AXIS_TITLES
from fedpfl.report.page.drawing import DOTS, PageCharts
from fedpfl.report.render import render_html
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.table import Cell, Column, Table, mean_and_std
from fedpfl.report.tables import COLUMNS, ROW_COLUMNS, accuracy_table, selection_note
from fedpfl.report.text import clip_text, one_line

SETUP = (
    *(
        "model.name",
        "clients",
        "participation",
        "local.epochs",
        "local.steps",
        "local.batch_size",
        "local.lr",
    ),
    *(
        "local.momentum",
        "local.weight_decay",
        "eval.every",
        "eval.finetune_epochs",
        "engine.precision",
    ),
)
"""What of the configuration the page names."""
SUMMARY = {
    "runs": Column("runs", "whole"),
    **{status: Column(status, "whole") for status in STATUSES},
    "configurations": Column("configurations", "whole"),
    "seeds": Column("seeds", "whole"),
    "hours": Column("hours of runs", "number"),
    "sent": Column("sent in all", "size"),
}
SPENT = {
    key: Column(title, "number", "whole run so far")
    for key, title in AXIS_TITLES.items()
    if key != "round"
}
COST = {
    **ROW_COLUMNS,
    "accuracy": Column("accuracy", "percent"),
    **{
        key: COLUMNS[key] for key in ("values_down", "values_up", "bits_down", "bits_up", "seconds")
    },
    **SPENT,
    "whole": Column("hours, evaluation included", "number", "whole run so far"),
}


class Experiment(NamedTuple):
    """What one page shows. name: of its file. base: the folder that holds its runs. skipped: a line
    per directory.
    """

    name: str
    base: Path
    runs: list[Run]
    skipped: list[str]


def write_pages(
    roots: Sequence[Path],
    out: Path,
    select: str = "last",
    every: int = 1,
    where: Sequence[str] = (),
    warn: Callable[[str], None] = print_to_stderr,
    table: Callable[..., Table] = accuracy_table,
    trials: bool = False,
) -> list[Path]:
    """Write a page per experiment into `out`, and `index.html` where there are several; returns the
    files.

    select, every: as in `accuracy_table`, for which `table` may stand. where: filters, such as
    `method=fedobp`. trials: as in `read_directories`. Raises FedpflError where a root does not
    exist, nothing can be read, or no run is let through.
    """
    listed = find_experiments(roots, warn, trials)
    kept = set(filter_runs([run for experiment in listed for run in experiment.runs], where))
    if not kept:
        raise no_runs_error(roots)
    pages, records = dict[str, str](), []
    for experiment in listed:
        notes: list[str] = []
        if members := [run for run in experiment.runs if run in kept]:
            accuracy, gathered = table(members, select, every), groups(members)
            summary = _summary(gathered)
            pages[experiment.name] = _page(experiment, gathered, out, accuracy, summary, notes)
            records.append(
                {"experiment": experiment.name} | summary | {"best": _best(accuracy.frame)}
            )
    if len(listed) > 1:
        pages["index"] = _index(records, select, [line for one in listed for line in one.skipped])
    script = resources.files("plotly").joinpath("package_data", "plotly.min.js")
    with atomic_output(out / plotly_file_name()) as file:
        file.write_bytes(script.read_bytes())
    for name, text in pages.items():
        with atomic_output(out / f"{name}.html") as file:
            file.write_text(text, encoding="utf-8")
    return [out / f"{name}.html" for name in pages]


def find_experiments(
    roots: Sequence[Path], warn: Callable[[str], None] = print_to_stderr, trials: bool = False
) -> list[Experiment]:
    """Return the runs by experiment, which is the folder of `<method>/<key>/seed<k>`, else the one
    that holds a run.

    Of one configuration that ran in two experiments, both have a run.
    """
    folders = defaultdict[Path, list[Path]](list)
    for path in (seen.path for seen in read_directories(roots, trials, warn)):
        place = path.resolve()
        usual = re.fullmatch(r"seed\d+", place.name) and len(place.parents) > 2
        folders[place.parents[2] if usual else place.parent].append(path)
    listed, names = [], {"index"}
    for base, paths in folders.items():
        skipped: list[str] = []
        members = runs(*paths, warn=skipped.append, trials=True)
        for line in skipped:
            warn(line)
        name, count = base.name or "runs", 1
        while name.casefold() in names:  # file systems may not tell letters' case apart
            count += 1
            name = f"{base.name}-{count}"
        names.add(name.casefold())
        listed.append(
            Experiment(name, base, members, [line.removeprefix("skipped ") for line in skipped])
        )
    return listed


def plotly_file_name() -> str:
    """Return the name of plotly's script beside the pages; it tells its version, so that browsers
    may keep it.
    """
    return f"plotly-{version('plotly')}.min.js"


def _page(
    experiment: Experiment,
    gathered: Sequence[Group],
    out: Path,
    accuracy: Table,
    summary: dict[str, Any],
    notes: list[str],
) -> str:
    """The experiment's page. out: the folder it is written to, which its links start from."""
    fair, strange = compare_with_baselines(gathered)
    drawing = PageCharts(
        gathered, [float(value) for value in accuracy.frame["accuracy"]], notes.append, fair
    )
    facts, overview = _overview(gathered, out, experiment.base)
    tiles = {column.heading: Cell(summary[key]).text(column) for key, column in SUMMARY.items()}
    tables = {"cost": _costs(gathered, accuracy.frame, drawing.totals)}
    if drawing.charts["fairness"]:
        tables["fairness"] = comparisons_table(fair, strange)
    newest = datetime.fromtimestamp(
        max(run.modified_at for group in gathered for run in group.runs), UTC
    )
    return _rendered(
        "page.html",
        title=experiment.name,
        tiles={word: text for word, text in tiles.items() if text},
        facts=facts,
        overview=overview,
        skipped=experiment.skipped,
        notes=notes,
        accuracy=accuracy,
        charts=drawing.charts,
        dots=DOTS,
        numbers={"curves": drawing.curve_numbers(), "clients": drawing.client_numbers()},
        tables=tables,
        footer=f"{experiment.base}; last written {newest:%Y-%m-%d %H:%M} UTC",
        data=drawing.data(),
        plotly=plotly_file_name(),
    )


def single_table_page(table: Table) -> str:
    """Return a page of one table."""
    return _rendered(
        "index.html", title=table.title, table=table, notes=table.prose("html"), skipped=()
    )


def _index(records: Sequence[dict[str, Any]], select: str, skipped: Sequence[str]) -> str:
    """A page that names all experiments and links to theirs."""
    columns = {"experiment": Column("experiment")} | SUMMARY
    columns["best"] = Column("best mean accuracy by data set and partition", "long")
    table = Table.of(records, columns, title="experiments")
    for row in table.rows:
        row[0].link = f"./{quote(str(row[0].value))}.html"
    notes = (
        ["Rounds were chosen by validation accuracy."]
        if select == "validation"
        else selection_note(select)
    )
    return _rendered("index.html", title="Experiments", table=table, notes=notes, skipped=skipped)


def _rendered(template: str, **values: Any) -> str:
    """A whole page. Only the scripts beside it and inside it may run, and nothing comes from
    elsewhere.
    """
    environment = Environment(
        loader=PackageLoader("fedpfl.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else one_line(value),
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters["table"] = lambda table, kind="": Markup(render_html(table, kind))
    script = environment.get_template("page.js").render()
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(values, script=Markup(script), digest=digest)


def _overview(gathered: Sequence[Group], out: Path, base: Path) -> tuple[dict[str, str], Table]:
    """What is alike in all runs, and a row for each run, whatever its state."""
    members = [(group, run) for group in gathered for run in group.runs]
    setups = [
        {key: run.config_value(key) for key in SETUP}
        | {key: value or None for key, value in run.environment.items()}
        for _, run in members
    ]
    names = list(dict.fromkeys(key for setup in setups for key in setup))
    setup_of = {
        name: ["" if (one := setup.get(name)) is None else clip_text(one) for setup in setups]
        for name in names
    }
    differing = [name for name, texts in setup_of.items() if len(set(texts)) > 1]
    heads = (
        *ROW_COLUMNS.values(),
        Column("seed", "whole"),
        Column("status"),
        Column("rounds", "whole"),
    )
    heads += (Column("accuracy", "percent"), Column("hours", "number"), *map(Column, differing))
    rows = []
    for place, (group, run) in enumerate(members):
        judged = run.last_evaluation
        stale = (
            f"(round {judged['round']:.0f})"
            if judged.get("round", run.rounds_done) != run.rounds_done
            else ""
        )
        why = clip_text(run.summary.get("error") or "", 300)
        # The leading dot keeps a name with a colon from being read as a scheme.
        link = f"./{quote(os.fsencode(os.path.relpath(run.path.resolve(), out.resolve())))}/"
        rows.append(
            [
                *map(Cell, (group.dataset, group.partition, group.method)),
                Cell(run.seed),
                Cell(run.status, state=run.status, below=why),
                Cell(f"{run.rounds_done}/{run.rounds_planned}", order=run.rounds_done),
                Cell(float(judged.get("accuracy", math.nan)), below=stale),
                Cell(run.summary_number("hours")),
                *(Cell(setup_of[name][place]) for name in differing),
                Cell(run.path.resolve().relative_to(base).as_posix(), link=link),
            ]
        )
    facts = {
        name: texts[0] for name, texts in setup_of.items() if name not in differing and texts[0]
    }
    return facts, Table("runs", (*heads, Column("directory", "long")), rows, by=2)


def _summary(gathered: Sequence[Group]) -> dict[str, Any]:
    """The numbers of SUMMARY, None where there is nothing."""
    every = [run for group in gathered for run in group.runs]
    states = Counter(run.status for run in every)
    sent = sum(float(run.rounds.filter(["bits_down", "bits_up"]).sum().sum()) for run in every)
    return {
        "runs": len(every),
        **{status: states[status] or None for status in STATUSES},
        "configurations": len(gathered),
        "seeds": len({run.seed for run in every}),
        "hours": float(pd.Series([run.summary_number("hours") for run in every]).sum(min_count=1)),
        "sent": sent / 8 or None,
    }


def _costs(
    gathered: Sequence[Group], accuracy: pd.DataFrame, totals: dict[Group, pd.DataFrame]
) -> Table:
    """What travelled and how long it took, by configuration; means over seeds."""
    records, timed = accuracy.reindex(columns=[*COST]).to_dict("records"), False
    for record, group in zip(records, gathered, strict=True):
        record |= {key: float(totals[group][key].iloc[-1]) for key in SPENT}
        timed |= math.isfinite(record["simulated"])
        record["whole"] = mean_and_std(
            [run.summary_number("hours") for run in group.reported_runs]
        )[0]
    columns = {key: column for key, column in COST.items() if timed or key != "simulated"}
    return Table.of(records, columns, by=2)


def _best(frame: pd.DataFrame) -> str:
    """The best configuration of each data set and partition, of the finished ones if there are any."""
    known = frame[frame["accuracy"].notna()]
    known = known.assign(finished=known["status"].astype(str).str.contains("finished"))
    best = known.sort_values(["finished", "accuracy"], ascending=False).drop_duplicates(
        ["dataset", "partition"]
    )
    rows = best.sort_index().itertuples()
    return "; ".join(
        f"{row.dataset}, {row.partition}: {row.method} {row.accuracy:.2f}" for row in rows
    )
