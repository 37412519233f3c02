"""FedOBP's figures, named like the experiments that make their runs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.papers.drawing import Figure, alpha, line, over, several, value
from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import COMPARED, QUANTILE, of_run, one_each, own_score, setting_of
from fedpfl.papers.layout import Selection
from fedpfl.record.columns import METRICS
from fedpfl.report.figures import accuracy_figure, by_setting, legible, look, panels
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHODS
from fedpfl.report.run import Run
from fedpfl.report.table import over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = {
    "obp": "squared difference (FedOBP)",
    "gradient": "change in training",
    "fisher": "Fisher",
}


# Which runs


def _of_scores(run: Run) -> bool:
    """FedOBP by one of the three scores, over all entries."""
    score, norm = (
        run.config["method"].get(key, usual)
        for key, usual in (("score", "obp"), ("norm", "global"))
    )
    return score in SCORES and own_score(run, score=score) and norm in ("none", "global")


def _of_scores_as_published(run: Run) -> bool:
    """As in the public files: the earlier score with a moving average, others per tensor of scores
    by layer.
    """
    kind = {"score": "obp_as_published", "norm": "global", "ema": 0.5}
    if run.get("method.score") != "obp_as_published":
        kind = {"score": run.get("method.score"), "norm": "layer", "scope": "tensor"}
    return own_score(run, **kind) and run.get("local.momentum") == logs.SETUP["local.momentum"]


def _usual(run: Run) -> bool:
    """FedOBP as the paper writes it, at any q, or another method."""
    whole = run.config["method"].get("norm", "global") in ("none", "global")
    return run.method_name != "fedobp" or (
        whole and own_score(run, cold_start=run.config["method"].get("cold_start", "paper"))
    )


def _at_the_papers_q(run: Run) -> bool:
    """Table II's where it has one."""
    known = of_run(run, QUANTILE)
    return known is None or run.q in (None, known.value)


def _converging(setting: str) -> Callable[[Sequence[Group]], list[Group]]:
    """The compared methods on all data sets dealt so."""

    def fits(run: Run) -> bool:
        known = run.method_name in COMPARED and setting_of(run) == setting
        return known and _usual(run) and _at_the_papers_q(run)

    return lambda gathered: one_each([group for group in gathered if fits(group.runs[0])])


def _over_q(fits: Callable[[Run], bool]) -> Callable[[Sequence[Group]], list[Group]]:
    return lambda gathered: several(gathered, fits, lambda run: run.q)


def _normed(run: Run) -> bool:
    """Whether it is one of Table V's runs without a moving average, at the public files' q where
    they have one.
    """
    kinds: list[dict[str, Any]] = [*({"norm": norm} for norm in ("none", "layer", "global"))]
    kinds.append({"norm": "global", "classifier_only": True})
    log = logs.of_run(run, any_q=True)
    known = any(own_score(run, score="obp_as_published", **kind) for kind in kinds)
    return known and (log is None or log.q == run.q)


def _longest(gathered: Sequence[Group]) -> list[Group]:
    """FedOBP as the paper writes it, on each data set and partition the configuration of most
    rounds.
    """
    best: dict[str, Group] = {}
    for group in gathered:
        run = group.used[0]
        if run.method_name == "fedobp" and _usual(run) and not layer_shares(run).empty:
            rival = best.setdefault(group.setting, group)
            best[group.setting] = max(
                rival, group, key=lambda one: (one.used[0].planned, not _momentum(one.runs[0]))
            )
    return list(best.values())


# What they show


def _convergence(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    def label(group: Group) -> str:
        return group.runs[0].called + (f" ({', '.join(group.apart)})" if group.apart else "")

    return accuracy_figure(
        [run for group in shown for run in group.runs], path, rule.accuracy, label
    )


def _score(run: Run) -> str:
    score = str(run.config["method"].get("score", "obp"))
    return (
        {"obp_as_published": "earlier score", **SCORES}.get(score, score)
        + (", per tensor" if run.get("method.scope") == "tensor" else "")
        + _momentum(run)
    )


def _momentum(run: Run) -> str:
    """What tells a run with momentum from one without, so that no line is of both."""
    momentum = run.get("local.momentum")
    return f", momentum {momentum:g}" if momentum else ""


def _over_quantiles(
    shown: list[Group],
    path: Path,
    rule: Selection,
    name: Callable[[Run], str],
    tuned: bool = False,
    files: bool = False,
) -> list[Path]:
    """A panel per data set and partition, a line per name.

    tuned: also the accuracy after fine-tuning. files: also the public files' curve of the earlier
    score.
    """
    names = list(dict.fromkeys(name(group.runs[0]) for group in shown))
    columns = [("", "")] + ([(", fine-tuned", f"ft_{rule.accuracy}")] if tuned else [])

    def draw(ax: Axes, members: list[Group]) -> None:
        # One place per q, evenly: what happens is close to 1. Local-Only stands at 0, FedAvg at 1.
        quantiles = sorted({group.runs[0].q or 0.0 for group in members})
        for at, ((told_as, column), label) in enumerate(itertools.product(columns, names)):
            own = [group for group in members if name(group.runs[0]) == label]
            own.sort(key=lambda group: group.runs[0].q or 0.0)
            points = [
                (float(quantiles.index(group.runs[0].q or 0.0)), value(group, rule, column))
                for group in own
            ]
            if any(not math.isnan(mean) for _, (mean, _) in points):
                line(ax, points, label + told_as, at)
        if files and (curve := logs.over_q(members[0].runs[0])):
            known = {
                quantiles.index(q): accuracy for q, accuracy in curve.items() if q in quantiles
            }
            ax.plot(
                [*known], [*known.values()], "k:", label="earlier score, the authors' public files"
            )
        ax.set_xticks(
            range(len(quantiles)), [f"{q:.10g}" for q in quantiles], rotation=45, ha="right"
        )
        ax.set(xlabel="quantile q", ylabel=METRICS[rule.accuracy].label)

    return panels(by_setting(shown), path, draw)


def _norm(run: Run) -> str:
    """What a configuration of Table V is called."""
    return f"{run.get('method.norm')} norm" + (", CLS" if run.get("method.classifier_only") else "")


def _norms(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    return accuracy_figure(
        [run for group in shown for run in group.runs],
        path,
        rule.accuracy,
        lambda group: _norm(group.runs[0]),
    )


def _layers(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """A panel per data set and partition, a line per layer: its share of the personal entries."""

    def draw(ax: Axes, group: Group) -> None:
        for number, (name, share) in enumerate(layer_shares(group.used[0]).items()):
            ax.plot(
                share.index,
                100 * share,
                label=legible(str(name)),
                **look(number),
                markevery=max(1, len(share) // 10),
            )
        ax.set(
            xlabel="round", ylim=(0, 100), ylabel="share of personal entries (%)", xlim=(0, None)
        )

    return panels(
        {f"{group.setting}\nq = {group.runs[0].q:.10g}": group for group in shown}, path, draw
    )


def layer_shares(run: Run) -> pd.DataFrame:
    """Return each layer's share of a round's personal entries, of the rounds that have any."""
    layers = [name.rsplit(".", 1)[0] for name in run.personal]
    by_layer = run.personal.T.groupby(layers, sort=False).sum().T
    total = by_layer.sum(axis=1)
    return by_layer[total > 0].div(total[total > 0], axis=0)


def _downlink(shown: list[Group], path: Path, rule: Selection) -> list[Path]:
    """Accuracy against the share of the model's values that travel down: FedOBP's line over q,
    others as points.
    """
    kinds = dict.fromkeys((group.runs[0].method_name, _momentum(group.runs[0])) for group in shown)
    methods = sorted(kinds, key=lambda kind: [*METHODS].index(kind[0]))

    def draw(ax: Axes, members: list[Group]) -> None:
        for number, (method, momentum) in enumerate(methods):
            own = [
                g
                for g in members
                if (g.runs[0].method_name, _momentum(g.runs[0])) == (method, momentum)
            ]
            if points := sorted((_ratio(group), value(group, rule)) for group in own):
                style = {} if method == "fedobp" else {"linestyle": "none"}
                line(ax, points, METHODS[method] + momentum, number, **style)
        ax.set(xlabel="values down / model size", ylabel=METRICS[rule.accuracy].label)
        ax.locator_params(axis="x", nbins=5)  # labels like 0.9975 are wide

    return panels(by_setting(shown), path, draw)


def _ratio(group: Group) -> float:
    """Values that a client is sent per round, of those of the model; mean over rounds and seeds."""
    return over_seeds(
        [run.per_client("values_down") / (run.fact("parameters") or math.nan) for run in group.used]
    )[0]


FIGURES = {
    "figure2": Figure(_converging("Dir(0.1)"), _convergence),
    "figure3": Figure(_converging("Dir(0.5)"), _convergence),
    "figure4": Figure(_over_q(_of_scores), partial(_over_quantiles, name=_score)),
    "figure4_as_published": Figure(
        _over_q(_of_scores_as_published), partial(_over_quantiles, name=_score, files=True)
    ),
    "figure5": Figure(lambda every: several(every, _normed, _norm), _norms),
    "figure6": Figure(_longest, _layers),
    "figure7": Figure(_over_q(_usual), _downlink),
    "q_sweep": Figure(
        _over_q(lambda run: run.method_name == "fedobp" and _usual(run)),
        partial(_over_quantiles, name=lambda run: "FedOBP" + _momentum(run), tuned=True),
    ),
    "public_curves": Figure(logs.logged, logs.log_figure, "fedobp/as_published"),
    "alpha_sweep": Figure(
        lambda every: several(every, _usual, alpha, 3, lambda group: group.dataset),
        over(alpha, "Dirichlet alpha", lambda group: {group.method: ""}, log=True),
    ),
}
