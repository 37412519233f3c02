"""Write a page per experiment: `python -m fedpfl.report html [ROOT ...]`."""

from __future__ import annotations

import base64
import hashlib
import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
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
from fedpfl.ground.tasks import CLASSIFICATION, Task
from fedpfl.record.columns import METRICS
from fedpfl.report.fairness import BaselineComparison, compare_with_baselines, comparisons_table
from fedpfl.report.grouping import Group, common_task, groups, task_metric
from fedpfl.report.load import filter_runs, no_runs_error, print_to_stderr, read_directories, runs
from fedpfl.report.page.data import COST_TITLES
from fedpfl.report.page.drawing import DOTS, PageCharts
from fedpfl.report.render import render_html
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.table import Cell, Column, Table, format_number, mean_and_std
from fedpfl.report.tables import COLUMNS, ROW_COLUMNS, accuracy_table, selection_note
from fedpfl.report.text import clip_text, one_line

SETUP = (
    "model.name",
    "clients",
    "participation",
    "local.epochs",
    "local.steps",
    "local.batch_size",
    "local.lr",
    "local.momentum",
    "local.weight_decay",
    "eval.every",
    "eval.finetune_epochs",
    "engine.precision",
)
"""Keys of the configuration that the page names."""
SUMMARY_COLUMNS = {
    "runs": Column("runs", "whole"),
    **{status: Column(status, "whole") for status in STATUSES},
    "configurations": Column("configurations", "whole"),
    "seeds": Column("seeds", "whole"),
    "hours": Column("hours of runs", "number"),
    "sent": Column("sent in all", "size"),
}
SPENT_COLUMNS = {
    key: Column(title, "number", "whole run so far") for key, title in COST_TITLES.items()
}
COST_COLUMNS = {
    **ROW_COLUMNS,
    "accuracy": Column("accuracy", "percent"),
    **{
        key: COLUMNS[key] for key in ("values_down", "values_up", "bits_down", "bits_up", "seconds")
    },
    **SPENT_COLUMNS,
    "whole": Column("hours, evaluation included", "number", "whole run so far"),
}


class Experiment(NamedTuple):
    """The content of one page.

    Attributes:
        name: the name of its file.
        base: the folder that holds its runs.
        runs: its runs.
        skipped: a line per directory that cannot be read.
    """

    name: str
    base: Path
    runs: list[Run]
    skipped: list[str]


def write_pages(  # noqa: PLR0913 - its arguments are words of the command line
    roots: Sequence[Path],
    out: Path,
    select: str = "last",
    every: int = 1,
    where: Sequence[str] = (),
    warn: Callable[[str], None] = print_to_stderr,
    table: Callable[..., Table] = accuracy_table,
    trials: bool = False,
) -> list[Path]:
    """Write a page per experiment, and `index.html` where there are several.

    Args:
        roots: folders of runs.
        out: the folder to write into.
        select: as in `accuracy_table`.
        every: as in `accuracy_table`.
        where: filters, such as `method=fedobp`.
        warn: called once for each directory that is skipped.
        table: makes the table instead of `accuracy_table`.
        trials: as in `read_directories`.

    Returns:
        The files written.

    Raises:
        FedpflError: a root does not exist, nothing can be read, or no run passes the filters.
    """
    # ---- Step 1: the experiments and their runs.
    experiments = find_experiments(roots, warn, trials)
    all_runs = [run for experiment in experiments for run in experiment.runs]
    selected = set(filter_runs(all_runs, where))
    if not selected:
        raise no_runs_error(roots)

    # ---- Step 2: a page for each, and one that links to them.
    pages: dict[str, str] = {}
    records = []
    for experiment in experiments:
        shown_runs = [run for run in experiment.runs if run in selected]
        if shown_runs:
            accuracy = table(shown_runs, select, every)
            shown_groups = groups(shown_runs)
            pages[experiment.name] = _experiment_page(experiment, shown_groups, out, accuracy)
            record = {"experiment": experiment.name} | _summary_numbers(shown_groups)
            task = common_task(shown_runs)
            records.append(record | {"best": _describe_best(accuracy.frame, task)})
    if len(experiments) > 1:
        skipped = [line for experiment in experiments for line in experiment.skipped]
        pages["index"] = _index_page(records, select, skipped)

    # ---- Step 3: write them.
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
    """Return the runs by experiment.

    An experiment is the folder of `<method>/<key>/seed<k>`, else the one that holds a run. Of one
    configuration that ran in two experiments, both have a run.
    """
    # ---- Step 1: the folder of each experiment.
    paths_by_folder: dict[Path, list[Path]] = defaultdict(list)
    for directory in read_directories(roots, trials, warn):
        path = directory.path.resolve()
        # <experiment>/<method>/<key>/seed<k>
        is_usual_place = re.fullmatch(r"seed\d+", path.name) and len(path.parents) > 2
        folder = path.parents[2] if is_usual_place else path.parent
        paths_by_folder[folder].append(directory.path)

    # ---- Step 2: the runs below it, and a file name that no other page has.
    experiments = []
    used_names = {"index"}
    for folder, paths in paths_by_folder.items():
        skipped: list[str] = []
        # Trials were left out above, unless asked for.
        experiment_runs = runs(*paths, warn=skipped.append, trials=True)
        for line in skipped:
            warn(line)
        name = folder.name or "runs"
        count = 1
        while name.casefold() in used_names:  # file systems may not tell letters' case apart
            count += 1
            name = f"{folder.name}-{count}"
        used_names.add(name.casefold())
        reasons = [line.removeprefix("skipped ") for line in skipped]
        experiments.append(Experiment(name, folder, experiment_runs, reasons))
    return experiments


def plotly_file_name() -> str:
    """Return the name of plotly's script, with its version so that browsers may cache it."""
    return f"plotly-{version('plotly')}.min.js"


def single_table_page(table: Table) -> str:
    """Return a page of one table."""
    return _render_template(
        "index.html", title=table.title, table=table, notes=table.prose("html"), skipped=()
    )


def _experiment_page(
    experiment: Experiment, shown_groups: Sequence[Group], out: Path, accuracy: Table
) -> str:
    """Return the experiment's page.

    Args:
        experiment: the experiment.
        shown_groups: its configurations.
        out: the folder it is written to, which its links start from.
        accuracy: the table of accuracies.
    """
    # ---- Step 1: numbers, charts and comparisons, with notes of what could not be read.
    notes: list[str] = []
    task = common_task(group.runs[0] for group in shown_groups)
    comparisons: Sequence[BaselineComparison] = ()
    comparison_notes: tuple[str, ...] = ()
    if task is CLASSIFICATION:
        comparisons, comparison_notes = compare_with_baselines(shown_groups)
    page_charts = PageCharts(shown_groups, accuracy.frame, notes.append, comparisons)

    # ---- Step 2: tables and tiles.
    shared_facts, overview = _runs_overview(shown_groups, out, experiment.base)
    summary = _summary_numbers(shown_groups)
    tiles = {}
    for key, column in SUMMARY_COLUMNS.items():
        text = Cell(summary[key]).text(column)
        if text:
            tiles[column.heading] = text
    tables = {"cost": _costs_table(shown_groups, accuracy.frame, page_charts.spent)}
    if page_charts.charts["fairness"]:
        tables["fairness"] = comparisons_table(comparisons, comparison_notes)

    # ---- Step 3: the page. Its date is the runs', so that the same runs give the same page.
    last_modification = max(run.modified_at for group in shown_groups for run in group.runs)
    newest = datetime.fromtimestamp(last_modification, UTC)
    return _render_template(
        "page.html",
        title=experiment.name,
        tiles=tiles,
        facts=shared_facts,
        overview=overview,
        skipped=experiment.skipped,
        notes=notes,
        accuracy=accuracy,
        score=task.score_word,
        score_title=task.score_word[0].upper() + task.score_word[1:],
        score_unit=f"{task.score_word} in percent" if task.unit else task.score_word,
        charts=page_charts.charts,
        dots=DOTS,
        numbers={"curves": page_charts.curve_numbers(), "clients": page_charts.client_numbers()},
        tables=tables,
        footer=f"{experiment.base}; last written {newest:%Y-%m-%d %H:%M} UTC",
        data=page_charts.data(),
        plotly=plotly_file_name(),
    )


def _index_page(records: Sequence[dict[str, Any]], select: str, skipped: Sequence[str]) -> str:
    """Return a page that names all experiments and links to theirs."""
    columns = {"experiment": Column("experiment")} | SUMMARY_COLUMNS
    columns["best"] = Column("best mean accuracy by data set and partition", "long")
    table = Table.of(records, columns, title="experiments")
    for row in table.rows:
        row[0].link = f"./{quote(str(row[0].value))}.html"
    notes = selection_note(select)
    if select == "validation":
        notes = ("Rounds were chosen by validation accuracy.",)
    return _render_template(
        "index.html", title="Experiments", table=table, notes=notes, skipped=skipped
    )


def _render_template(template: str, **values: Any) -> str:
    """Return a whole page.

    Only the scripts beside it and inside it may run, and nothing comes from elsewhere.
    """
    environment = Environment(
        loader=PackageLoader("fedpfl.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else one_line(value),
    )
    # A nan would be no JSON; charts hold null in its place.
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters["table"] = lambda table, kind="": Markup(render_html(table, kind))
    script = environment.get_template("page.js").render()
    # The page's security policy lets scripts of this digest run, and no others.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(values, script=Markup(script), digest=digest)


def _runs_overview(
    shown_groups: Sequence[Group], out: Path, base: Path
) -> tuple[dict[str, str], Table]:
    """Return the setup that all runs share, and a table of runs."""
    members = [(group, run) for group in shown_groups for run in group.runs]
    task = common_task(run for _, run in members)
    setups = _setup_texts([run for _, run in members])
    differing = [name for name, texts in setups.items() if len(set(texts)) > 1]
    columns = (
        *ROW_COLUMNS.values(),
        Column("seed", "whole"),
        Column("status"),
        Column("rounds", "whole"),
        Column(task.score_word, METRICS[task.score].kind),
        Column("hours", "number"),
        *map(Column, differing),
        Column("directory", "long"),
    )
    rows = []
    for index, (group, run) in enumerate(members):
        setup_cells = [Cell(setups[name][index]) for name in differing]
        rows.append(_run_cells(group, run, setup_cells, out, base))
    shared_facts = {
        name: texts[0] for name, texts in setups.items() if name not in differing and texts[0]
    }
    return shared_facts, Table("runs", columns, rows, by=2)


def _setup_texts(shown_runs: Sequence[Run]) -> dict[str, list[str]]:
    """Return by name the values of SETUP and of the environment in each run."""
    setups = []
    for run in shown_runs:
        setup = {key: run.config_value(key) for key in SETUP}
        environment = {key: value or None for key, value in run.environment.items()}
        setups.append(setup | environment)
    texts = {}
    for name in dict.fromkeys(key for setup in setups for key in setup):
        values = [setup.get(name) for setup in setups]
        texts[name] = ["" if value is None else clip_text(value) for value in values]
    return texts


def _run_cells(
    group: Group, run: Run, setup_cells: Sequence[Cell], out: Path, base: Path
) -> list[Cell]:
    """Return a run's row in the overview."""
    evaluation = run.last_evaluation
    is_older = evaluation.get("round", run.rounds_done) != run.rounds_done
    evaluated_round = f"(round {evaluation['round']:.0f})" if is_older else ""
    progress = f"{run.rounds_done}/{run.rounds_planned}"
    error = clip_text(run.summary.get("error") or "", 300)
    path = run.path.resolve()
    # The leading dot keeps a name with a colon from being read as a scheme.
    link = f"./{quote(os.fsencode(os.path.relpath(path, out.resolve())))}/"
    return [
        Cell(group.dataset),
        Cell(group.partition),
        Cell(group.method),
        Cell(run.seed),
        Cell(run.status, state=run.status, below=error),
        Cell(progress, order=run.rounds_done),
        Cell(float(evaluation.get(run.task.score, math.nan)), below=evaluated_round),
        Cell(run.summary_number("hours")),
        *setup_cells,
        Cell(path.relative_to(base).as_posix(), link=link),
    ]


def _summary_numbers(shown_groups: Sequence[Group]) -> dict[str, Any]:
    """Return the numbers of SUMMARY_COLUMNS, None where there is nothing."""
    all_runs = [run for group in shown_groups for run in group.runs]
    status_counts = Counter(run.status for run in all_runs)
    hours = pd.Series([run.summary_number("hours") for run in all_runs])
    bits = sum(float(run.rounds.filter(["bits_down", "bits_up"]).sum().sum()) for run in all_runs)
    return {
        "runs": len(all_runs),
        **{status: status_counts[status] or None for status in STATUSES},
        "configurations": len(shown_groups),
        "seeds": len({run.seed for run in all_runs}),
        "hours": float(hours.sum(min_count=1)),
        "sent": bits / 8 or None,
    }


def _costs_table(
    shown_groups: Sequence[Group], accuracy: pd.DataFrame, spent: dict[Group, pd.DataFrame]
) -> Table:
    """Make the table of traffic and time by configuration, means over seeds."""
    task = shown_groups[0].task
    cost_columns = {
        task_metric(key, task): replace(column, heading=task_metric(column.heading, task))
        for key, column in COST_COLUMNS.items()
    }
    if task.score in cost_columns:
        score_column = cost_columns[task.score]
        cost_columns[task.score] = replace(score_column, kind=METRICS[task.score].kind)
    records = accuracy.reindex(columns=[*cost_columns]).to_dict("records")
    has_simulated_time = False
    for record, group in zip(records, shown_groups, strict=True):
        for key in SPENT_COLUMNS:
            record[key] = float(spent[group][key].iloc[-1])
        has_simulated_time |= math.isfinite(record["simulated"])
        hours = [run.summary_number("hours") for run in group.reported_runs]
        record["whole"], _ = mean_and_std(hours)
    columns = {
        key: column
        for key, column in cost_columns.items()
        if has_simulated_time or key != "simulated"
    }
    return Table.of(records, columns, by=2)


def _describe_best(frame: pd.DataFrame, task: Task) -> str:
    """Name the best configuration of each data set and partition.

    Of the finished ones if there are any.
    """
    judged = frame[frame[task.score].notna()]
    judged = judged.assign(finished=judged["status"].astype(str).str.contains("finished"))
    # Finished ones first, then the best score, which may be the lowest.
    ascending = [False, not task.is_higher_better]
    ordered = judged.sort_values(["finished", task.score], ascending=ascending)
    best = ordered.drop_duplicates(["dataset", "partition"])
    kind = METRICS[task.score].kind
    return "; ".join(
        f"{row['dataset']}, {row['partition']}: {row['method']} "
        f"{format_number(kind, row[task.score])}"
        for row in best.sort_index().to_dict("records")
    )
