"""Draw FedOBP's figures, named like the experiments that make their runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd

from fedpfl.papers.drawing import (
    Axis,
    ChooseGroups,
    Decorate,
    Figure,
    Paint,
    choose_nearest,
    draw_columns,
    groups_with_several_values,
    paint_accuracy_over,
)
from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import (
    COMPARED_METHODS,
    QUANTILE,
    is_paper_fedobp,
    is_paper_method,
    published_number,
    published_setting,
    setup_of,
)
from fedpfl.papers.layout import Selection
from fedpfl.report.figures import DASHES, accuracy_figure, draw_panels
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import Run
from fedpfl.report.table import mean_and_std

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORE_LABELS = {
    "obp": "squared difference (FedOBP)",
    "gradient": "change in training",
    "fisher": "Fisher",
    "obp_as_published": "earlier score",
}


# ---- Which runs a figure shows


def _has_paper_score(run: Run) -> bool:
    """Return True for FedOBP by one of the three scores, over all entries."""
    score = run.config["method"].get("score", "obp")
    is_fedobp = run.method_name == "fedobp" and score in ("obp", "gradient", "fisher")
    return is_fedobp and is_paper_method(run, score=score)


def _has_published_score(run: Run) -> bool:
    """Return True if a run is FedOBP as in the public files.

    There the earlier score has a moving average on some data sets; the other scores are taken per tensor
    of scores by layer.
    """
    score = run.config_value("method.score")
    config = {"score": score, "norm": "layer", "scope": "tensor"}
    if score == "obp_as_published":
        config = {"score": score, "norm": "global", "ema": logs.past_weight(run.dataset_name)}
    has_log_momentum = run.config_value("local.momentum") == logs.SETUP["local.momentum"]
    return is_paper_fedobp(run, **config) and has_log_momentum


def _is_plotted_method(run: Run) -> bool:
    """Return True if a run is the paper's FedOBP, from any start, or another method."""
    cold_start = run.config["method"].get("cold_start", "paper")
    return is_paper_method(run, cold_start=cold_start)


def _is_plotted_fedobp(run: Run) -> bool:
    return run.method_name == "fedobp" and _is_plotted_method(run)


def _has_paper_quantile(run: Run) -> bool:
    """Return True if a run has Table II's q, where that has one."""
    entry = published_number(run, QUANTILE)
    # Methods other than FedOBP have no q, and take part in the comparison as they are.
    return entry is None or run.q in (None, entry.value)


def _choose_compared_methods(setting: str) -> ChooseGroups:
    """Return a function that chooses the compared methods on all data sets of a setting."""

    def fits(run: Run) -> bool:
        if run.method_name not in COMPARED_METHODS or published_setting(run) != setting:
            return False
        return is_paper_method(run) and _has_paper_quantile(run)

    return lambda groups: choose_nearest(
        [group for group in groups if fits(group.runs[0])],
        lambda group: (group.setting, group.method_name),
        setup_of,
    )


def _choose_over_quantile(fits: Callable[[Run], bool]) -> ChooseGroups:
    """Return a function that chooses fitting runs where there are several q."""
    return lambda groups: groups_with_several_values(groups, fits, lambda run: run.q)


def _is_table5_run(run: Run) -> bool:
    """Return True if a run is one of Table V's without a moving average.

    It has the public files' q, where these have one.
    """
    log = logs.find_log(run, any_q=True)
    if log is not None and log["q"] != run.q:
        return False
    is_fedobp = partial(is_paper_fedobp, run, score="obp_as_published")
    has_norm = any(is_fedobp(norm=norm) for norm in ("none", "layer", "global"))
    return has_norm or is_fedobp(norm="global", classifier_only=True)


def _choose_longest(groups: Sequence[Group]) -> list[Group]:
    """Return FedOBP's configuration of most rounds in each setting, rather without momentum."""
    with_shares = [
        group
        for group in groups
        if _is_plotted_fedobp(group.runs[0]) and not layer_shares(group.reported_runs[0]).empty
    ]
    # Shares settle late, so the longest run shows most; the paper's algorithm has no momentum.
    with_shares.sort(
        key=lambda group: (group.runs[0].rounds_planned, not _momentum_label(group.runs[0]))
    )
    longest = {group.setting: group for group in with_shares}
    return list(longest.values())


# ---- Names of lines


def _score_label(run: Run) -> str:
    """Return the name of a run's score, and how it is used."""
    score = str(run.config["method"].get("score", "obp"))
    label = SCORE_LABELS.get(score, score)
    if run.config_value("method.scope") == "tensor":
        label += ", per tensor"
    return label + _momentum_label(run)


def _momentum_label(run: Run) -> str:
    """Return a text that keeps runs with momentum apart."""
    momentum = run.config_value("local.momentum")
    return f", momentum {momentum:g}" if momentum else ""


def _norm_label(run: Run) -> str:
    """Return the name of one of Table V's configurations."""
    label = f"{run.config_value('method.norm')} norm"
    return f"{label}, CLS" if run.config_value("method.classifier_only") else label


def _method_label(group: Group) -> str:
    method = group.runs[0].method_title
    return f"{method} ({', '.join(group.deviations)})" if group.deviations else method


# ---- How a figure is drawn


def _paint_over_rounds(label: Callable[[Group], str]) -> Paint:
    """Return a function that draws accuracy over rounds, a line for each configuration."""

    def paint(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
        members = [run for group in groups for run in group.runs]
        return accuracy_figure(members, path, rule.accuracy, label)

    return paint


def _paint_over_quantiles(decorate: Decorate | None = None) -> Paint:
    """Return a function that draws accuracy over q: a panel per setting, a line per score."""
    # q is spaced evenly: what happens is close to 1. Local-Only stands at 0, FedAvg at 1.
    axis = Axis(_quantile, "quantile q", "even")
    return paint_accuracy_over(
        axis, lambda group: {_score_label(group.runs[0]): "{}"}, decorate=decorate
    )


def _quantile(group: Group) -> float:
    return group.runs[0].q or 0.0


def _draw_public_curves(
    ax: Axes, groups: Sequence[Group], quantiles: Sequence[float], rule: Selection
) -> None:
    """Draw the public files' accuracies, which are pooled, at those q that own runs have."""
    run_by_score = {group.runs[0].config_value("method.score"): group.runs[0] for group in groups}
    for number, (score, run) in enumerate(run_by_score.items()):
        public_curve = logs.accuracy_by_quantile(run)
        # The axis has places of own runs; a published q between them has none.
        shared = [q for q in quantiles if q in public_curve and rule.accuracy == "accuracy_pooled"]
        accuracies = [public_curve[q] for q in shared]
        label = f"{SCORE_LABELS[score]}, public files: better of rounds 100 and 200"
        if shared:
            style = {"color": "black", "linestyle": DASHES[1 + number]}
            ax.plot([*map(quantiles.index, shared)], accuracies, label=label, **style)


def _paint_layers(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw each layer's share of the personal entries over rounds, a panel per setting."""

    def draw_panel(ax: Axes, group: Group) -> None:
        draw_columns(ax, 100 * layer_shares(group.reported_runs[0]))
        ax.set(
            xlabel="round", ylim=(0, 100), ylabel="share of personal entries (%)", xlim=(0, None)
        )

    titles = {f"{group.setting}\nq = {group.runs[0].q:.10g}": group for group in groups}
    return draw_panels(titles, path, draw_panel)


def layer_shares(run: Run) -> pd.DataFrame:
    """Return each layer's share of a round's personal entries, of the rounds that have any."""
    # Weight and bias of a layer count as one.
    layers = [name.rsplit(".", 1)[0] for name in run.personalized_entries]
    by_layer = run.personalized_entries.T.groupby(layers, sort=False).sum().T
    total = by_layer.sum(axis=1)
    # Before the first upload nothing is personal, and a share would be 0 / 0.
    return by_layer[total > 0].div(total[total > 0], axis=0)


def _downlink_line(group: Group) -> dict[str, str]:
    run = group.runs[0]
    return {METHOD_TITLES[run.method_name] + _momentum_label(run): "{}"}


def _downlink_share(group: Group) -> float:
    """Return the share of the model that a client is sent per round, over seeds."""
    shares = [
        run.per_client("values_down") / (run.summary_number("parameters") or math.nan)
        for run in group.reported_runs
    ]
    mean, _ = mean_and_std(shares)
    return mean


FIGURES = {
    "figure2": Figure(_choose_compared_methods("Dir(0.1)"), _paint_over_rounds(_method_label)),
    "figure3": Figure(
        _choose_compared_methods("Dir(0.5)"),
        _paint_over_rounds(_method_label),
        "fedobp/figure2 partition.alpha=0.5",
    ),
    "figure4": Figure(_choose_over_quantile(_has_paper_score), _paint_over_quantiles()),
    "figure4_as_published": Figure(
        _choose_over_quantile(_has_published_score),
        _paint_over_quantiles(_draw_public_curves),
    ),
    "figure5": Figure(
        lambda groups: groups_with_several_values(groups, _is_table5_run, _norm_label),
        _paint_over_rounds(lambda group: _norm_label(group.runs[0])),
        "fedobp/table5",
    ),
    "figure6": Figure(_choose_longest, _paint_layers),
    "figure7": Figure(
        _choose_over_quantile(_is_plotted_method),
        paint_accuracy_over(
            Axis(_downlink_share, "values down / model size", "free"),
            _downlink_line,
            identify=_quantile,
        ),
        "fedobp/figure4 score=obp",
    ),
}
