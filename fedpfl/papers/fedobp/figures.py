"""Draw FedOBP's figures, named like the experiments that make their runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.papers.drawing import (
    ChooseGroups,
    Figure,
    dirichlet_alpha,
    draw_points,
    groups_with_several_values,
    keep_nearest,
    mean_over_seeds,
    paint_accuracy_over,
)
from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import (
    COMPARED_METHODS,
    QUANTILE,
    is_paper_fedobp,
    nearest_of_each_method,
    published_number,
    published_setting,
)
from fedpfl.papers.layout import Selection
from fedpfl.record.columns import METRICS
from fedpfl.report.figures import (
    accuracy_figure,
    draw_panels,
    groups_by_setting,
    legible_text,
    line_style,
)
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
}


# ---- Which runs a figure shows


def _has_paper_score(run: Run) -> bool:
    """Return True for FedOBP by one of the three scores, over all entries."""
    config = run.config["method"]
    score = config.get("score", "obp")
    norm = config.get("norm", "global")
    if score not in SCORE_LABELS or norm not in ("none", "global"):
        return False
    return is_paper_fedobp(run, score=score)


def _has_published_score(run: Run) -> bool:
    """Return True if a run is FedOBP as in the public files.

    There the earlier score has a moving average on some data sets; the other scores are taken per tensor
    of scores by layer.
    """
    score = run.config_value("method.score")
    if score == "obp_as_published":
        config = {"score": score, "norm": "global", "ema": logs.past_weight(run.dataset_name)}
    else:
        config = {"score": score, "norm": "layer", "scope": "tensor"}
    has_log_momentum = run.config_value("local.momentum") == logs.SETUP["local.momentum"]
    return is_paper_fedobp(run, **config) and has_log_momentum


def _is_paper_method(run: Run) -> bool:
    """Return True if a run is the paper's FedOBP, at any q, or another method."""
    if run.method_name != "fedobp":
        return True
    config = run.config["method"]
    if config.get("norm", "global") not in ("none", "global"):
        return False
    return is_paper_fedobp(run, cold_start=config.get("cold_start", "paper"))


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
        return _is_paper_method(run) and _has_paper_quantile(run)

    def choose(groups: Sequence[Group]) -> list[Group]:
        return nearest_of_each_method([group for group in groups if fits(group.runs[0])])

    return choose


def _choose_over_quantile(fits: Callable[[Run], bool]) -> ChooseGroups:
    """Return a function that chooses fitting runs where there are several q."""
    return lambda groups: groups_with_several_values(groups, fits, lambda run: run.q)


def _is_table5_run(run: Run) -> bool:
    """Return True if a run is one of Table V's without a moving average.

    It has the public files' q, where these have one.
    """
    variants: list[dict[str, Any]] = [{"norm": norm} for norm in ("none", "layer", "global")]
    variants.append({"norm": "global", "classifier_only": True})
    log = logs.find_log(run, any_q=True)
    if log is not None and log.q != run.q:
        return False
    return any(is_paper_fedobp(run, score="obp_as_published", **variant) for variant in variants)


def _choose_longest(groups: Sequence[Group]) -> list[Group]:
    """Return FedOBP's configuration of most rounds in each setting, rather without momentum."""
    longest: dict[str, Group] = {}
    for group in groups:
        run = group.reported_runs[0]
        is_fedobp = run.method_name == "fedobp" and _is_paper_method(run)
        if not is_fedobp or layer_shares(run).empty:
            continue
        rival = longest.setdefault(group.setting, group)
        # Shares settle late: the longest run shows most, and the paper's algorithm has no momentum.
        longest[group.setting] = max(rival, group, key=_length_and_plainness)
    return list(longest.values())


def _length_and_plainness(group: Group) -> tuple[int, bool]:
    return group.reported_runs[0].rounds_planned, not _momentum_label(group.runs[0])


# ---- Names of lines


def _score_label(run: Run) -> str:
    """Return the name of a run's score, and how it is used."""
    score = str(run.config["method"].get("score", "obp"))
    label = {"obp_as_published": "earlier score", **SCORE_LABELS}.get(score, score)
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


# ---- How a figure is drawn


def _paint_convergence(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw accuracy over rounds, a line for each configuration."""

    def label(group: Group) -> str:
        method = group.runs[0].method_title
        return f"{method} ({', '.join(group.deviations)})" if group.deviations else method

    members = [run for group in groups for run in group.runs]
    return accuracy_figure(members, path, rule.accuracy, label)


def _paint_norms(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw accuracy over rounds, a line for each normalisation."""
    members = [run for group in groups for run in group.runs]
    return accuracy_figure(
        members,
        path,
        rule.accuracy,
        lambda group: _norm_label(group.runs[0]),
    )


def _paint_over_quantiles(
    groups: list[Group],
    path: Path,
    rule: Selection,
    label_of: Callable[[Run], str],
    with_fine_tuned: bool = False,
    with_public_files: bool = False,
) -> list[Path]:
    """Draw accuracy over q: a panel per setting, a line per label.

    Args:
        groups: FedOBP's at several q.
        path: Without suffix.
        rule: Which accuracy is shown.
        label_of: A run's label.
        with_fine_tuned: Whether the accuracy after fine-tuning is drawn too.
        with_public_files: Whether the public files' curve of the earlier score is drawn too, where
            accuracies are pooled as theirs.
    """
    # ---- Step 1: what has a line.
    groups, note = keep_nearest(
        groups, lambda group: (group.setting, label_of(group.runs[0]), _quantile(group))
    )
    labels = list(dict.fromkeys(label_of(group.runs[0]) for group in groups))
    suffixed_columns = [("", "")]
    if with_fine_tuned:
        suffixed_columns.append((", fine-tuned", f"ft_{rule.accuracy}"))

    # ---- Step 2: a panel, with lines over q.
    def draw_panel(ax: Axes, members: list[Group]) -> None:
        # q is spaced evenly: what happens is close to 1. Local-Only stands at 0, FedAvg at 1.
        quantiles = sorted({_quantile(group) for group in members})
        lines = itertools.product(suffixed_columns, labels)
        for index, ((suffix, column), label) in enumerate(lines):
            line_groups = [group for group in members if label_of(group.runs[0]) == label]
            line_groups.sort(key=_quantile)
            points = []
            for group in line_groups:
                x = float(quantiles.index(_quantile(group)))
                points.append((x, mean_over_seeds(group, rule, column)))
            if any(not math.isnan(mean) for _, (mean, _) in points):
                draw_points(ax, points, label + suffix, index)
        if with_public_files and rule.accuracy == "accuracy_pooled":
            _draw_public_curve(ax, members[0].runs[0], quantiles)
        tick_labels = [f"{q:.10g}" for q in quantiles]
        ax.set_xticks(range(len(quantiles)), tick_labels, rotation=45, ha="right")
        ax.set(xlabel="quantile q", ylabel=METRICS[rule.accuracy].label)

    return draw_panels(groups_by_setting(groups), path, draw_panel, note)


def _quantile(group: Group) -> float:
    return group.runs[0].q or 0.0


def _draw_public_curve(ax: Axes, run: Run, quantiles: list[float]) -> None:
    """Draw the public files' accuracies at those q that own runs have."""
    public_curve = logs.accuracy_by_quantile(run)
    if not public_curve:
        return
    # The axis has places of own runs; a published q between them has none.
    accuracy_by_position = {
        quantiles.index(q): accuracy for q, accuracy in public_curve.items() if q in quantiles
    }
    positions = [*accuracy_by_position]
    accuracies = [*accuracy_by_position.values()]
    label = "earlier score, the authors' public files: better of rounds 100 and 200"
    ax.plot(positions, accuracies, "k:", label=label)


def _paint_layers(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw each layer's share of the personal entries over rounds, a panel per setting."""

    def draw_panel(ax: Axes, group: Group) -> None:
        for index, (name, shares) in enumerate(layer_shares(group.reported_runs[0]).items()):
            ax.plot(
                shares.index,
                100 * shares,
                label=legible_text(str(name)),
                **line_style(index),
                markevery=max(1, len(shares) // 10),
            )
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


def _paint_downlink(groups: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Draw accuracy against the share of the model's values that travel down.

    FedOBP is a line over q, other methods are points.
    """
    # ---- Step 1: methods in the order of the tables.
    groups, note = keep_nearest(
        groups,
        lambda group: (group.setting, *_method_and_momentum(group), group.runs[0].q),
    )
    method_order = [*METHOD_TITLES]
    methods = dict.fromkeys(_method_and_momentum(group) for group in groups)
    ordered_methods = sorted(methods, key=lambda method: method_order.index(method[0]))

    # ---- Step 2: a panel, with a line or a point for each.
    def draw_panel(ax: Axes, members: list[Group]) -> None:
        for index, (method, momentum) in enumerate(ordered_methods):
            points = sorted(
                (_downlink_share(group), mean_over_seeds(group, rule))
                for group in members
                if _method_and_momentum(group) == (method, momentum)
            )
            if points:
                # Other methods have no q for a line to run along.
                style = {} if method == "fedobp" else {"linestyle": "none"}
                draw_points(
                    ax,
                    points,
                    METHOD_TITLES[method] + momentum,
                    index,
                    **style,
                )
        ax.set(xlabel="values down / model size", ylabel=METRICS[rule.accuracy].label)
        ax.locator_params(axis="x", nbins=5)  # labels like 0.9975 are wide

    return draw_panels(groups_by_setting(groups), path, draw_panel, note)


def _method_and_momentum(group: Group) -> tuple[str, str]:
    return group.runs[0].method_name, _momentum_label(group.runs[0])


def _downlink_share(group: Group) -> float:
    """Return the share of the model that a client is sent per round, over seeds."""
    shares = [
        run.per_client("values_down") / (run.summary_number("parameters") or math.nan)
        for run in group.reported_runs
    ]
    mean, _ = mean_and_std(shares)
    return mean


FIGURES = {
    "figure2": Figure(_choose_compared_methods("Dir(0.1)"), _paint_convergence),
    "figure3": Figure(_choose_compared_methods("Dir(0.5)"), _paint_convergence),
    "figure4": Figure(
        _choose_over_quantile(_has_paper_score),
        partial(_paint_over_quantiles, label_of=_score_label),
    ),
    "figure4_as_published": Figure(
        _choose_over_quantile(_has_published_score),
        partial(_paint_over_quantiles, label_of=_score_label, with_public_files=True),
    ),
    "figure5": Figure(
        lambda groups: groups_with_several_values(groups, _is_table5_run, _norm_label),
        _paint_norms,
    ),
    "figure6": Figure(_choose_longest, _paint_layers),
    "figure7": Figure(_choose_over_quantile(_is_paper_method), _paint_downlink),
    "q_sweep": Figure(
        _choose_over_quantile(lambda run: run.method_name == "fedobp" and _is_paper_method(run)),
        partial(
            _paint_over_quantiles,
            label_of=lambda run: "FedOBP" + _momentum_label(run),
            with_fine_tuned=True,
        ),
    ),
    "public_curves": Figure(logs.choose_logged, logs.log_figure, "fedobp/as_published"),
    "alpha_sweep": Figure(
        lambda groups: groups_with_several_values(
            groups, _is_paper_method, dirichlet_alpha, least=3, panel=lambda group: group.dataset
        ),
        paint_accuracy_over(
            dirichlet_alpha, "Dirichlet alpha", lambda group: {group.method: ""}, log=True
        ),
    ),
}
