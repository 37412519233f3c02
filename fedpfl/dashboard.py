"""Save a view of a project's runs in Weights & Biases: accuracy, traffic, sweeps, cost."""

from __future__ import annotations

import importlib
from argparse import Namespace
from collections.abc import Sequence
from typing import Any

from fedpfl.ground import answer
from fedpfl.ground.errors import FedpflError, error_text, missing_extra
from fedpfl.ground.terminal import Parser, outlive_readers, print_notice
from fedpfl.record.wandb_logger import WandbOptions, is_logged_in

LOG_AXES = ("one_minus_q", "alpha", "personal_entries")


CURVES = (
    *("accuracy", "accuracy_pooled", "accuracy_worst10", "accuracy_std", "ft_accuracy"),
    *("val_accuracy", "unseen_accuracy", "unseen_ft_accuracy"),
    *("cohort_before", "cohort_after", "train_loss"),
)
SECTIONS = {
    "Accuracy": [("lines", name, "round") for name in CURVES],
    "Traffic": [
        ("lines", "bits_down", "round"),
        ("lines", "bits_up", "round"),
        ("lines", "accuracy", "traffic_gb"),
        ("scatter", "last_accuracy", "bits_up_per_client"),
    ],
    "Sweeps": [("scatter", "last_accuracy", name) for name in ("q", *LOG_AXES)],
    "Cost": [
        ("lines", "seconds", "round"),
        ("lines", "eval_seconds", "round"),
        ("scatter", "last_accuracy", "hours"),
    ],
}
"""Charts: their kind, y and x.

`lines` are y over x by round, `scatter` one mark per run, of its summary.
"""
PINNED_COLUMNS = (
    *("run:state", "run:group", "run:jobType", "summary:last_accuracy"),
    *("summary:last_accuracy_worst10", "summary:last_ft_accuracy", "summary:q", "summary:alpha"),
    *("summary:personal_entries", "summary:traffic_gb", "summary:seconds_per_round"),
    *("summary:hours", "summary:status", "config:identity.value", "config:seed.value"),
)
"""Of the runs table, after the run's name."""


def make_workspace(options: Namespace) -> Any:
    """Return the view as wandb-workspaces knows it, not yet saved."""
    try:
        reports = importlib.import_module("wandb_workspaces.reports.v2")
        workspaces = importlib.import_module("wandb_workspaces.workspaces")
    except ImportError:
        raise missing_extra(
            "the dashboard needs the package wandb-workspaces", "dashboard"
        ) from None

    # ---- Step 1: the charts of each section.
    by_method = {"groupby": "JobType", "groupby_aggfunc": "mean", "groupby_rangefunc": "stddev"}
    makers = {
        "lines": lambda y, x: reports.LinePlot(x=x, y=[y], **by_method),
        "scatter": lambda y, x: reports.ScatterPlot(
            x=reports.SummaryMetric(x), y=reports.SummaryMetric(y), log_x=x in LOG_AXES or None
        ),
    }
    sections = []
    for name, charts in SECTIONS.items():
        panels = [makers[kind](y, x) for kind, y, x in charts]
        sections.append(workspaces.Section(name=name, panels=panels))

    # ---- Step 2: the runs. The package takes no group as an empty text.
    filters: Any = ""
    if options.experiment:
        filters = workspaces.And(workspaces.Metric("Group") == options.experiment)
    order = [workspaces.Ordering(workspaces.Summary("last_accuracy"), ascending=False)]
    return workspaces.Workspace(
        entity=options.entity,
        project=options.project,
        name=f"fedpfl {options.experiment}".strip(),
        sections=sections,
        settings=workspaces.WorkspaceSettings(x_axis="round", max_runs=100),
        runset_settings=workspaces.RunsetSettings(
            filters=filters, order=order, pinned_columns=[*PINNED_COLUMNS]
        ),
    )


def save_view(options: Namespace) -> str:
    """Save the view and return its address. Raises FedpflError if it cannot be saved."""
    make_workspace(options)  # a missing package is told before a missing login
    if not is_logged_in():
        raise FedpflError(
            "not logged in to W&B; run `wandb login`, or look at the view with --dry-run"
        )
    import wandb

    try:
        options.entity = options.entity or wandb.Api(timeout=30).default_entity
        return str(make_workspace(options).save().url)
    # The errors of the package and of the server have no base class in common.
    except Exception as error:
        reason = error_text(error, with_class=True)
        raise FedpflError(
            f"the view was not saved in project {options.project}: {reason}"
        ) from None


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the view or save it; return the exit status."""
    parser = Parser(
        prog="fedpfl dashboard",
        description="Save a view of a project's runs in Weights & Biases. Each call saves another.",
        epilog="Examples: fedpfl dashboard --dry-run; fedpfl dashboard --experiment my_q_sweep",
    )
    parser.add_argument("--project", default=WandbOptions().project, help="default: %(default)s")
    parser.add_argument("--entity", default="", help="team or user; default: the account's")
    parser.add_argument("--experiment", default="", help="a W&B group of runs; default: all")
    parser.add_argument("--dry-run", action="store_true", help="print the view, save nothing")
    options = parser.parse_args(arguments)
    try:
        if not options.dry_run:
            print(f"saved {save_view(options)}")
            return 0
    except FedpflError as error:
        print_notice(error)
        return 2
    for section, panels in SECTIONS.items():
        print(section)
        for kind, y, x in panels:
            print(f"  {kind:8} {y} {x}".rstrip())
    return 0


if __name__ == "__main__":
    outlive_readers()
    answer.run_command(main)
