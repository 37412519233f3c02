"""Save a view of the project's runs in Weights & Biases.

It shows accuracy, traffic, sweeps, layers, cost and a runs table.

Every call saves a new view beside the project's others; nothing is read from W&B, and no run is
changed.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedpfl.ground.errors import FedpflError, error_text, missing_extra
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.record.wandb_logger import WandbOptions, is_logged_in

MISSING = str(missing_extra("the dashboard needs the package wandb-workspaces", "dashboard"))
GROUPINGS = {"method": "JobType", "configuration": "config.identity", "run": None}
"""How lines and bars are gathered, as W&B calls it: by method, by configuration, or not."""


@dataclass(frozen=True)
class Panel:
    """Describe one chart.

    Attributes:
        kind: lines (y over x by round), layers (every column that matches y), bars (y of each
            group), scatter and parallel (one mark per run, of its summary), pictures, compare.
        title: of the chart.
        y: columns, or a pattern of columns.
        x: a column.
        log: whether the x-axis is logarithmic.
    """

    kind: str
    title: str
    y: tuple[str, ...] = ()
    x: str = ""
    log: bool = False


def line_panel(title: str, *y: str, x: str = "round") -> Panel:
    """Return a panel of columns over the rounds, or over another column."""
    return Panel("lines", title, y, x)


def scatter_panel(title: str, x: str, y: str, log: bool = False) -> Panel:
    """Return a panel with one point per run."""
    return Panel("scatter", title, (y,), x, log)


SECTIONS: dict[str, tuple[Panel, ...]] = {
    "Accuracy": (
        line_panel("Accuracy, mean over clients (%)", "accuracy"),
        line_panel("Accuracy, pooled (%)", "accuracy_pooled"),
        line_panel("Accuracy, worst decile of clients (%)", "accuracy_worst10"),
        line_panel("Accuracy after fine-tuning (%)", "ft_accuracy"),
        line_panel("Validation accuracy (%)", "val_accuracy"),
        line_panel("Accuracy of unseen clients (%)", "unseen_accuracy", "unseen_ft_accuracy"),
        line_panel("Spread over clients (points)", "accuracy_std"),
        Panel("bars", "Accuracy, last evaluation (%)", ("last_accuracy",)),
    ),
    "Cohort": (
        line_panel("Cohort before local training (%)", "cohort_before"),
        line_panel("Cohort after local training (%)", "cohort_after"),
        line_panel("Training loss (nats)", "train_loss"),
    ),
    "Traffic": (
        line_panel("Bits to the cohort", "bits_down"),
        line_panel("Bits from the cohort", "bits_up"),
        line_panel("Accuracy (%) over traffic so far (GB)", "accuracy", x="traffic_gb"),
        scatter_panel("Accuracy (%) over total traffic (GB)", "traffic_gb", "last_accuracy"),
        scatter_panel(
            "Accuracy (%) over bits up per client and round", "bits_up_per_client", "last_accuracy"
        ),
    ),
    "q sweep": (
        scatter_panel("Accuracy (%) over q", "q", "last_accuracy"),
        scatter_panel("Accuracy (%) over 1 - q", "one_minus_q", "last_accuracy", log=True),
        scatter_panel(
            "Worst decile (%) over 1 - q", "one_minus_q", "last_accuracy_worst10", log=True
        ),
        Panel("parallel", "q", ("q", "personal_entries", "bits_up_per_client", "last_accuracy")),
    ),
    "alpha sweep": (
        scatter_panel("Accuracy (%) over alpha", "alpha", "last_accuracy", log=True),
        scatter_panel("Worst decile (%) over alpha", "alpha", "last_accuracy_worst10", log=True),
        Panel(
            "parallel",
            "alpha",
            ("alpha", "last_accuracy", "last_accuracy_pooled", "last_accuracy_worst10"),
        ),
    ),
    "Personalised entries": (
        Panel("layers", "Personalised entries per layer", ("^personal/.*",), "round"),
        scatter_panel(
            "Accuracy (%) over personalised entries", "personal_entries", "last_accuracy", log=True
        ),
    ),
    "Cost": (
        line_panel("Seconds per round", "seconds"),
        line_panel("Seconds per evaluation", "eval_seconds"),
        Panel("bars", "Seconds per round, median", ("seconds_per_round",)),
        Panel("bars", "Hours of finished runs", ("hours",)),
        scatter_panel("Accuracy (%) over hours", "hours", "last_accuracy"),
    ),
    "Table": (
        Panel("compare", "What differs between runs"),
        Panel("pictures", "Partition", ("partition",)),
    ),
}

PINNED_COLUMNS = (
    *("run:state", "run:group", "run:jobType"),
    *(
        f"summary:last_{name}"
        for name in ("accuracy", "accuracy_pooled", "accuracy_worst10", "ft_accuracy")
    ),
    *(f"summary:last_{name}" for name in ("val_accuracy", "unseen_accuracy", "unseen_ft_accuracy")),
    *(
        "summary:best_accuracy",
        "summary:best_round",
        "summary:q",
        "summary:alpha",
        "summary:personal_entries",
    ),
    *("summary:bits_down_per_client", "summary:bits_up_per_client", "summary:traffic_gb"),
    *("summary:seconds_per_round", "summary:hours", "summary:status", "summary:commit"),
    *("config:identity.value", "config:seed.value", "tags:__ALL__"),
)
"""Of the runs table, after the run's name."""


@dataclass(frozen=True)
class View:
    """Say which view of which runs is made.

    Attributes:
        name: of the view.
        project: of W&B.
        entity: team or user, "" for the account's own.
        experiment: W&B's group of the runs, "" for all.
        by: one of GROUPINGS.
    """

    name: str
    project: str
    entity: str
    experiment: str
    by: str


def describe_view(view: View) -> str:
    """Return the view as text: where it goes, its runs, its columns and its panels."""
    runs = f"group {view.experiment}" if view.experiment else "all"
    # ---- Where the view goes, then a block for each section.
    text_lines = [
        f"view      {view.name}",
        f"project   {view.entity or '(your account)'}/{view.project}",
        f"runs      {runs}, by summary:last_accuracy; lines and bars by {view.by}",
        f"table     {', '.join(PINNED_COLUMNS)}",
    ]
    for section, panels in SECTIONS.items():
        text_lines += ["", section]
        for panel in panels:
            x_text = f" over {panel.x}" if panel.x else ""
            if panel.x and panel.log:
                x_text += " (log)"
            text = f"  {panel.kind:9} {panel.title:46} {', '.join(panel.y)}{x_text}"
            text_lines.append(text.rstrip())
    return "\n".join(text_lines)


def make_workspace(view: View) -> Any:
    """Return the view as wandb-workspaces knows it, not yet saved.

    Raises:
        FedpflError: where the package is missing.
    """
    try:
        reports = importlib.import_module("wandb_workspaces.reports.v2")
        workspaces = importlib.import_module("wandb_workspaces.workspaces")
    except ImportError:
        raise FedpflError(MISSING) from None

    # ---- Step 1: what is shown, section by section.
    # Of the sections two are open: a reader sees at once who is ahead, and what differs.
    sections = [
        workspaces.Section(
            name=section,
            panels=[make_panel(reports, panel, view.by) for panel in panels],
            is_open=section in ("Accuracy", "Table"),
        )
        for section, panels in SECTIONS.items()
    ]

    # ---- Step 2: of which runs.
    # The package takes no group as an empty text.
    filters: Any = ""
    if view.experiment:
        filters = workspaces.And(workspaces.Metric("Group") == view.experiment)
    return workspaces.Workspace(
        entity=view.entity,
        project=view.project,
        name=view.name,
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="round", max_runs=100),
        runset_settings=workspaces.RunsetSettings(
            filters=filters,
            order=[workspaces.Ordering(workspaces.Summary("last_accuracy"), ascending=False)],
            pinned_columns=list(PINNED_COLUMNS),
        ),
    )


def make_panel(reports: Any, panel: Panel, by: str) -> Any:
    """Return a panel as wandb-workspaces knows it.

    Args:
        reports: its module.
        panel: what is shown.
        by: one of GROUPINGS.
    """
    # ---- How runs are gathered in lines and bars.
    plot_options: dict[str, Any] = {"title": panel.title, "max_runs_to_show": 100}
    group: Any = GROUPINGS[by]
    if group:
        if group.startswith("config."):
            group = reports.Config(group.removeprefix("config."))
        plot_options |= {
            "groupby": group,
            "groupby_aggfunc": "mean",
            "groupby_rangefunc": "stddev",
        }

    # ---- The panel of its kind.
    # Of a run one value is left for marks: its summary's.
    metrics = [reports.SummaryMetric(key) for key in panel.y]
    match panel.kind:
        case "lines":
            return reports.LinePlot(x=panel.x, y=list(panel.y), **plot_options)
        case "layers":
            return reports.LinePlot(x=panel.x, metric_regex=panel.y[0], **plot_options)
        case "bars":
            return reports.BarPlot(metrics=list(panel.y), **plot_options)
        case "scatter":
            x = reports.SummaryMetric(panel.x)
            log_x = panel.log or None
            return reports.ScatterPlot(title=panel.title, x=x, y=metrics[0], log_x=log_x)
        case "parallel":
            columns = [reports.ParallelCoordinatesPlotColumn(metric=metric) for metric in metrics]
            return reports.ParallelCoordinatesPlot(title=panel.title, columns=columns)
        case "pictures":
            return reports.MediaBrowser(title=panel.title, media_keys=list(panel.y))
        case "compare":
            return reports.RunComparer(diff_only="split")
    raise AssertionError(panel.kind)


def save_view(view: View) -> str:
    """Save the view and return its address. Raises FedpflError where it cannot be saved."""
    # Everything that is wrong here is found before anything is asked of the server.
    make_workspace(view)  # a missing package is told before a missing login
    if not is_logged_in():
        raise FedpflError(
            "not logged in to W&B; run `wandb login`, or look at the view with --dry-run"
        )
    import wandb

    try:
        owner = view.entity or wandb.Api(timeout=30).default_entity
        if not owner:
            raise FedpflError("W&B names no default entity for this account; give --entity")
        return str(make_workspace(replace(view, entity=owner)).save().url)
    except FedpflError:
        raise
    # What the package and the server may raise has no base class in common.
    except Exception as error:
        reason = error_text(error, with_class=True)
        raise FedpflError(f"the view was not saved in project {view.project}: {reason}") from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the view or save it; return the exit status."""
    parser = _make_view_parser()
    options = parser.parse_args(arguments)
    if options.json and not options.dry_run:
        parser.error("--json goes with --dry-run")
    view = View(
        name=options.name or " ".join(filter(None, ("fedpfl", options.experiment))),
        project=options.project,
        entity=options.entity or "",
        experiment=options.experiment or "",
        by=options.by,
    )
    try:
        if options.json:
            print(json.dumps(make_workspace(view)._spec, indent=1))
        elif options.dry_run:
            print(describe_view(view))
        else:
            print(f"saved {save_view(view)}")
    except FedpflError as error:
        print_notice(error)
        return 2
    return 0


def _make_view_parser() -> Parser:
    # ---- Step 1: what the command is for.
    parser = Parser(
        prog="fedpfl dashboard",
        description=(
            "Save a view of a project's runs in Weights & Biases: accuracy, traffic, sweeps, cost"
            " and a table. Each call saves another view; no run is read or changed."
        ),
        epilog="Examples: fedpfl dashboard --dry-run; fedpfl dashboard --experiment my_q_sweep",
    )

    # ---- Step 2: what it takes.
    parser.add_argument(
        "--project", default=WandbOptions().project, help="default: %(default)s, as of logger=wandb"
    )
    parser.add_argument("--entity", help="team or user; default: the account's")
    parser.add_argument("--name", help="of the view; default: fedpfl, or fedpfl EXPERIMENT")
    parser.add_argument(
        "--experiment", metavar="GROUP", help="only runs of this W&B group; default: all"
    )
    parser.add_argument(
        "--by",
        choices=tuple(GROUPINGS),
        default="method",
        help="what lines and bars are means over",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the view, save nothing")
    parser.add_argument(
        "--json",
        action="store_true",
        help="with --dry-run: print its specification; needs wandb-workspaces",
    )
    return parser


if __name__ == "__main__":
    outlive_readers()
    raise SystemExit(main())
