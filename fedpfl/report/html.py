"""Write a page per experiment: `python -m fedpfl.report html [ROOT ...]`."""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from importlib import resources
from importlib.metadata import version
from pathlib import Path
from typing import Any
from urllib.parse import quote

from jinja2 import Environment, PackageLoader
from markupsafe import Markup
from plotly.io import templates
from plotly.utils import PlotlyJSONEncoder

from fedpfl.ground.files import atomic_output
from fedpfl.ground.records import Record
from fedpfl.ground.tasks import CLASSIFICATION
from fedpfl.report.fairness import compare_with_baselines, comparisons_table
from fedpfl.report.grouping import common_task, group_by, groups, task_metric
from fedpfl.report.listing import entries_table, list_entries
from fedpfl.report.load import (
    Directory,
    experiment_folder,
    no_runs_error,
    read_directories,
    readable_runs,
)
from fedpfl.report.page.drawing import draw_charts
from fedpfl.report.run import Run
from fedpfl.report.table import Column, Table
from fedpfl.report.tables import accuracy_table
from fedpfl.report.text import clip_text, escape_html, one_line

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
"""Keys of the configuration that a page names if all runs agree."""
COST_COLUMNS = (
    *("accuracy", "values_down", "values_up", "bits_down", "bits_up"),
    *("seconds", "gb", "tflops", "sim_hours", "hours"),
)
INDEX_COLUMNS = {
    "experiment": Column("experiment"),
    "runs": Column("runs", "whole"),
    "configurations": Column("configurations", "whole"),
}


def write_pages(
    roots: Sequence[Path],
    out: Path,
    select: str = "last",
    every: int = 1,
    where: Sequence[str] = (),
    table: Callable[..., Table] = accuracy_table,
    trials: bool = False,
) -> list[Path]:
    """Write a page per experiment, and `index.html` if there are several.

    Args:
        roots: folders of runs.
        out: the folder to write into.
        select: as in `accuracy_table`.
        every: as in `accuracy_table`.
        where: filters, such as `method=fedobp`.
        table: makes the table instead of `accuracy_table`.
        trials: as in `read_directories`.

    Returns:
        The files written.

    Raises:
        FedpflError: a root does not exist, nothing can be read, or no run passes the filters.
    """
    # ---- Step 1: a page for each experiment, and one that links to them.
    pages: dict[str, str] = {}
    records = []
    for name, directories in find_experiments(read_directories(roots, where, trials)).items():
        shown_runs = readable_runs(directories)
        if shown_runs:
            accuracy = table(shown_runs, select, every)
            pages[name] = _experiment_page(name, directories, shown_runs, accuracy)
            counts = {"runs": len(shown_runs), "configurations": len(accuracy.frame)}
            records.append({"experiment": name} | counts)
    if not pages:
        raise no_runs_error(roots)
    if len(pages) > 1:
        table_of_pages = Table.of(records, INDEX_COLUMNS, title="Experiments")
        for row in table_of_pages.rows:
            row[0].link = f"./{quote(str(row[0].value))}.html"
        pages["index"] = single_table_page(table_of_pages)

    # ---- Step 2: write them.
    script = resources.files("plotly").joinpath("package_data", "plotly.min.js")
    with atomic_output(out / plotly_file_name()) as file:
        file.write_bytes(script.read_bytes())
    for name, text in pages.items():
        with atomic_output(out / f"{name}.html") as file:
            file.write_text(text, encoding="utf-8")
    return [out / f"{name}.html" for name in pages]


def find_experiments(directories: Sequence[Directory]) -> dict[str, list[Directory]]:
    """Return run directories by the name of their experiment, which names a file."""
    by_folder = group_by(directories, lambda directory: experiment_folder(directory.path))
    experiments = {}
    used_names = {"index"}
    for folder, members in by_folder.items():
        base = name = folder.name or "runs"
        number = 2
        # File systems may not tell letters' case apart.
        while name.casefold() in used_names:
            name = f"{base}-{number}"
            number += 1
        used_names.add(name.casefold())
        experiments[name] = members
    return experiments


def plotly_file_name() -> str:
    """Return the name of plotly's script, with its version so that browsers may cache it."""
    return f"plotly-{version('plotly')}.min.js"


def single_table_page(table: Table) -> str:
    """Return a page of one table."""
    return _render_template("index.html", title=table.title, table=table, notes=table.prose("html"))


def _experiment_page(
    name: str, directories: Sequence[Directory], shown_runs: Sequence[Run], accuracy: Table
) -> str:
    # ---- Step 1: charts and comparisons, with notes on what cannot be read.
    notes: list[str] = []
    shown_groups = groups(shown_runs)
    task = common_task(shown_runs)
    cost_columns = [task_metric(key, task) for key in COST_COLUMNS]
    tables = {"cost": accuracy_table(shown_runs, chosen=cost_columns)}
    if task is CLASSIFICATION:
        comparisons, comparison_notes = compare_with_baselines(shown_groups)
        if any(comparison.pairs for comparison in comparisons):
            tables["fairness"] = comparisons_table(comparisons, comparison_notes)
    charts = draw_charts(shown_groups, accuracy.frame, notes.append)

    # ---- Step 2: the list of runs, and the setup that all of them share.
    run_list = entries_table(list_entries(directories), is_dated=False)
    facts = {}
    for key in SETUP:
        values = {str(run.config_value(key)) for run in shown_runs}
        if len(values) == 1 and values != {"None"}:
            facts[key] = clip_text(values.pop())

    # ---- Step 3: the page. Its date is the runs', so that the same runs give the same page.
    newest = datetime.fromtimestamp(max(run.modified_at for run in shown_runs), UTC)
    content: Record = {"template": templates["plotly_white"]}
    for section, members in charts.items():
        content[section] = [chart._asdict() for chart in members]
    # A `<` could end the script that holds the text.
    data = json.dumps(content, cls=PlotlyJSONEncoder).replace("<", "\\u003c")
    return _render_template(
        "page.html",
        title=name,
        facts=facts,
        run_list=run_list,
        notes=notes,
        accuracy=accuracy,
        score=task.score_word.capitalize() if task.unit else task.score_word,
        charts=charts,
        tables=tables,
        footer=f"{experiment_folder(directories[0].path)}; last written {newest:%Y-%m-%d %H:%M} UTC",
        data=Markup(data),
        plotly=plotly_file_name(),
    )


def render_html(table: Table) -> Markup:
    """Return the page's tables, one per block, sorted by a click on a heading.

    Columns that are empty, or that the blocks' titles name, are left out.
    """
    filled_indices, texts = table.texts("html", escape_html)
    template = _load_templates().get_template("table.html")
    return Markup(template.render(table=table, indices=filled_indices[table.by :], texts=texts))


def _render_template(template: str, **values: Any) -> str:
    """Return a whole page, which runs its own scripts alone and loads nothing from elsewhere."""
    environment = _load_templates()
    script = environment.get_template("page.js").render()
    # The page's security policy lets scripts of this digest run, and no other ones.
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return environment.get_template(template).render(values, script=Markup(script), digest=digest)


@functools.cache
def _load_templates() -> Environment:
    environment = Environment(
        loader=PackageLoader("fedpfl.report", "page"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=lambda value: value if isinstance(value, Markup) else one_line(value),
    )
    environment.filters["table"] = render_html
    return environment
