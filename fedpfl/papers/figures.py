"""The papers' figures from own runs; `python -m fedpfl.report paper figure4`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pandas as pd

from fedpfl.ground.errors import FedpflError
from fedpfl.papers import costs, published
from fedpfl.papers.tables import COMPARED, PLANS, Rule, one_each, own_score
from fedpfl.record.columns import METRICS
from fedpfl.report.figures import THIN, accuracy_figure, by_setting, draw_line, look, panels, told
from fedpfl.report.grouping import Group
from fedpfl.report.names import METHODS
from fedpfl.report.run import Mask, Run
from fedpfl.report.table import over_seeds
from fedpfl.report.tables import judged, unchosen

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = {"obp": "squared difference (FedOBP)", "gradient": "change in training", "fisher": "Fisher"}

Points = list[tuple[float, tuple[float, float]]]
"""Places on the x axis, each with the mean and the standard deviation over seeds."""


class Figure(NamedTuple):
    """of: the groups it shows. paint: draws them. experiment: that makes its runs, if not its namesake."""

    of: Callable[[Sequence[Group]], list[Group]]
    paint: Callable[[list[Group], Path, Rule], list[Path]]
    experiment: str = ""

    def draw(self, gathered: Sequence[Group], path: Path, rule: Rule) -> list[Path]:
        """Draw to `path` (the figure's name, without suffix) as PNG and PDF. Raises FedpflError where no run fits."""
        shown = self.of(gathered)
        if not shown:
            experiment = self.experiment or path.name
            raise FedpflError(f"no runs for {path.name}; run `python -m fedpfl.train experiment={experiment}`")
        return self.paint(shown, path, rule)


# Which runs


def _of_scores(run: Run) -> bool:
    return run.method_name == "fedobp" and not run.get("method.classifier_only") and not run.get("method.ema")


def _usual(run: Run) -> bool:
    """FedOBP as the paper writes it, at any q, or another method."""
    whole = run.config["method"].get("norm", "global") in ("none", "global")
    return run.method_name != "fedobp" or (whole and own_score(run, cold_start=run.get("method.cold_start")))


def _at_the_papers_q(run: Run) -> bool:
    """Table II's where it has one; with CLS the table's is not meant."""
    known = published.of_run(run, published.QUANTILE)
    return known is None or bool(run.get("method.classifier_only")) or run.q in (None, known.value)


def _converging(setting: str) -> Callable[[Sequence[Group]], list[Group]]:
    """The compared methods on all data sets dealt so."""

    def fits(run: Run) -> bool:
        known = run.method_name in COMPARED and published.setting(run) == setting
        return known and _usual(run) and _at_the_papers_q(run)

    return lambda gathered: one_each([group for group in gathered if fits(group.runs[0])])


def _several(
    gathered: Iterable[Group],
    fits: Callable[[Run], bool],
    key: Callable[[Run], Any],
    least: int = 2,
    place: Callable[[Group], Any] = lambda group: group.setting,
) -> list[Group]:
    """The groups that fit, of those places where `key` takes at least so many values."""
    values: dict[Any, set[Any]] = {}
    known = [group for group in gathered if fits(group.runs[0]) and key(group.runs[0]) is not None]
    for group in known:
        values.setdefault(place(group), set()).add(key(group.runs[0]))
    return [group for group in known if len(values[place(group)]) >= least]


def _over_q(fits: Callable[[Run], bool]) -> Callable[[Sequence[Group]], list[Group]]:
    return lambda gathered: _several(gathered, fits, lambda run: run.q)


def _alpha(run: Run) -> float | None:
    """The Dirichlet alpha, None where the partition has none."""
    alpha = run.get("partition.alpha")
    return float(alpha) if isinstance(alpha, int | float) and alpha > 0 else None


def _normed(run: Run) -> bool:
    """Whether it is one of Table V's runs."""
    return any(line.fits(run) for line in PLANS["table5"].lines) and _at_the_papers_q(run)


def _longest(gathered: Sequence[Group]) -> list[Group]:
    """FedOBP as the paper writes it, on each data set and partition the configuration of most rounds."""
    best: dict[str, Group] = {}
    for group in gathered:
        run = group.used[0]
        if run.method_name == "fedobp" and _usual(run) and not layer_shares(run).empty:
            rival = best.setdefault(group.setting, group)
            best[group.setting] = max(rival, group, key=lambda one: one.used[0].planned)
    return list(best.values())


# What they show


def _value(group: Group, rule: Rule, column: str = "") -> tuple[float, float]:
    """Mean and standard deviation over seeds of the judged accuracy, or of another column of its row."""
    rows = judged(group, rule.select, rule.every).values()
    if rule.select == "validation" and not rows:
        raise unchosen(group)  # a figure has no notes
    return over_seeds([float(row.get(column or rule.accuracy, math.nan)) for row in rows])


def _line(ax: Axes, points: Points, label: str, place: int, **changes: Any) -> None:
    """Draw a line through the means, with error bars where there is a spread."""
    across, means, spreads = [x for x, _ in points], [mean for _, (mean, _) in points], [std for _, (_, std) in points]
    error = None if all(map(math.isnan, spreads)) else [0.0 if math.isnan(spread) else spread for spread in spreads]
    ax.errorbar(across, means, yerr=error, label=told(label), capsize=2, **{**look(place), **changes})


def _convergence(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    def label(group: Group) -> str:
        return group.runs[0].called + (f" ({', '.join(group.apart)})" if group.apart else "")

    return accuracy_figure([run for group in shown for run in group.runs], path, rule.accuracy, label)


def _score(run: Run) -> str:
    score = str(run.config["method"].get("score", "obp"))
    return SCORES.get(score, score) + (", per tensor" if run.get("method.scope") == "tensor" else "")


def _over_quantiles(name: Callable[[Run], str], tuned: bool) -> Callable[[list[Group], Path, Rule], list[Path]]:
    """A panel per data set and partition, a line per name. tuned: also the accuracy after fine-tuning."""

    def paint(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
        names = list(dict.fromkeys(name(group.runs[0]) for group in shown))

        def draw(ax: Axes, members: list[Group]) -> None:
            # One place per q, evenly: what happens is close to 1. Local-Only stands at 0, FedAvg at 1.
            quantiles = sorted({group.runs[0].q or 0.0 for group in members})
            for number, label in enumerate(names):
                own = [group for group in members if name(group.runs[0]) == label]
                own.sort(key=lambda group: group.runs[0].q or 0.0)
                places = [float(quantiles.index(group.runs[0].q or 0.0)) for group in own]
                for extra, told_as, column in ((0, "", ""), (len(names), ", fine-tuned", f"ft_{rule.accuracy}")):
                    points = [(x, _value(group, rule, column)) for x, group in zip(places, own, strict=True)]
                    if points and (not column or (tuned and any(not math.isnan(value) for _, (value, _) in points))):
                        _line(ax, points, label + told_as, number + extra)
            ax.set_xticks(range(len(quantiles)), [f"{q:.10g}" for q in quantiles], rotation=45, ha="right")
            ax.set(xlabel="quantile q", ylabel=METRICS[rule.accuracy].label)

        return panels(by_setting(shown), path, draw)

    return paint


def _norm(run: Run) -> str:
    """What a configuration of Table V is called."""
    return f"{run.get('method.norm')} norm" + ", CLS" * bool(run.get("method.classifier_only"))


def _norms(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    return accuracy_figure(
        [run for group in shown for run in group.runs], path, rule.accuracy, lambda group: _norm(group.runs[0])
    )


def _layers(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set and partition, a line per layer: its share of the personal entries."""

    def draw(ax: Axes, group: Group) -> None:
        for number, (name, share) in enumerate(layer_shares(group.used[0]).items()):
            ax.plot(share.index, 100 * share, label=told(str(name)), **look(number), markevery=max(1, len(share) // 10))
        ax.set(xlabel="round", ylim=(0, 100), ylabel="share of personal entries (%)", xlim=(0, None))

    return panels({f"{group.setting}\nq = {group.runs[0].q:.10g}": group for group in shown}, path, draw)


def layer_shares(run: Run) -> pd.DataFrame:
    """Return each layer's share of a round's personal entries, of the rounds that have any."""
    layers = [name.rsplit(".", 1)[0] for name in run.personal]
    by_layer = run.personal.T.groupby(layers, sort=False).sum().T
    total = by_layer.sum(axis=1)
    return by_layer[total > 0].div(total[total > 0], axis=0)


def _downlink(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """Accuracy against the share of the model's values that travel down: FedOBP's line over q, others as points."""
    methods = [name for name in METHODS if any(group.runs[0].method_name == name for group in shown)]

    def draw(ax: Axes, members: list[Group]) -> None:
        for number, method in enumerate(methods):
            own = [group for group in members if group.runs[0].method_name == method]
            if points := sorted((_ratio(group), _value(group, rule)) for group in own):
                _line(ax, points, METHODS[method], number, **({} if method == "fedobp" else {"linestyle": "none"}))
        ax.set(xlabel="values down / model size", ylabel=METRICS[rule.accuracy].label)
        ax.locator_params(axis="x", nbins=5)  # labels like 0.9975 are wide

    return panels(by_setting(shown), path, draw)


def _ratio(group: Group) -> float:
    """Values that a client is sent per round, of those of the model; mean over rounds and seeds."""
    return over_seeds([run.per_client("values_down") / (run.fact("parameters") or math.nan) for run in group.used])[0]


def _alphas(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set, a line per method over alpha, which is logarithmic."""
    labels = list(dict.fromkeys(group.method for group in shown))

    def draw(ax: Axes, dataset: str) -> None:
        here = [(alpha, group) for group in shown if group.dataset == dataset and (alpha := _alpha(group.runs[0]))]
        for number, label in enumerate(labels):
            points = sorted((alpha, _value(group, rule)) for alpha, group in here if group.method == label)
            if len(points) > 1:
                _line(ax, points, label, number)
        ax.set(xlabel="Dirichlet alpha", ylabel=METRICS[rule.accuracy].label, xscale="log")
        ticks = sorted({alpha for alpha, _ in here})
        ax.set_xticks(ticks, [f"{alpha:g}" for alpha in ticks])
        ax.minorticks_off()

    return panels({group.dataset: group.dataset for group in shown}, path, draw)


# FedSPU


def _of_widths(gathered: Sequence[Group]) -> list[Group]:
    """Of FedSPU's runs that tell what widths come to, one for each network and batch on a data set."""
    best: dict[Any, Group] = {}
    for group in gathered:
        run = group.runs[0]
        if run.method_name == "fedspu" and not costs.known(run).empty:
            best.setdefault((run.dataset, str(run.get("model")), run.get("local.batch_size")), group)
    return list(best.values())


def _memory(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set, network and batch, a line per way to train over the width of sub-models."""

    def draw(ax: Axes, run: Run) -> None:
        for number, (name, used) in enumerate(costs.memory(run).items()):
            ax.plot(used.index, used / 2**20, label=told(str(name)), **look(number))
        ax.set(xlabel="share of each layer's neurons", ylabel="memory (MiB)", ylim=(0, None))

    titles = (
        f"{group.dataset}\n{group.runs[0].get('model.name')}, batch {group.runs[0].get('local.batch_size')}"
        for group in shown
    )
    return panels(dict(zip(titles, (group.runs[0] for group in shown), strict=True)), path, draw)


# Masks: FedSelect's Figures 3 and 4, FedPURIN's 3 to 6


def _of(method: str, recorded: Callable[[Group], Any]) -> Callable[[Sequence[Group]], list[Group]]:
    """The method's runs that recorded it."""
    return lambda every: [group for group in every if group.runs[0].method_name == method and recorded(group)]


def masks(group: Group) -> list[dict[str, Mask]]:
    """Return the masks of each seed that recorded them, by tensor."""
    return [run.masks for run in group.used if run.masks]


def _has_sizes(group: Group) -> bool:
    return any("personal_share" in run.rounds for run in group.used)


def _sizes(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set and partition, a line per configuration: its personal share over rounds."""

    def draw(ax: Axes, members: list[Group]) -> None:
        for number, group in enumerate(members):
            draw_line(ax, group, "personal_share", group.method, number)
        ax.set(xlabel="round", ylabel="personal share of the model", xlim=(0, None), ylim=(0, 1))

    return panels(by_setting(shown), path, draw)


def _overlaps(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set and partition, a line per configuration: overlap of two clients' masks, by tensor."""

    def draw(ax: Axes, members: list[Group]) -> None:
        tensors = list(dict.fromkeys(name for group in members for own in masks(group) for name in own))
        for number, group in enumerate(members):
            for chance in (False, True):
                points = []
                for place, name in enumerate(tensors):
                    pairs = [own[name].overlaps(chance) for own in masks(group) if name in own]
                    if known := [float(np.nanmean(one)) for one in pairs if not np.isnan(one).all()]:
                        points.append((float(place), over_seeds(known)))
                if chance:
                    thin = {"color": look(number)["color"], "linewidth": THIN, "alpha": 0.6}
                    ax.plot([x for x, _ in points], [mean for _, (mean, _) in points], **thin)
                elif points:
                    _line(ax, points, group.method, number)
        ax.set_xticks(range(len(tensors)), list(map(told, tensors)), rotation=90, fontsize=6)
        ax.set(ylabel="intersection over union", ylim=(0, 1))

    return panels(by_setting(shown), path, draw, "thin: independent masks of the same sizes", (7.2, 3.6))


def _frequencies(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per configuration, a line per tensor: which share of its entries so many of the clients hold."""

    def draw(ax: Axes, group: Group) -> None:
        every = masks(group)
        for number, name in enumerate(every[0]):
            # Seeds may have other numbers of clients, as cohorts are drawn.
            alike = [own[name] for own in every if name in own and len(own[name].held) == len(every[0][name].held)]
            held = np.mean([100 * one.held / max(one.entries, 1) for one in alike], axis=0)
            across = 100 * np.arange(len(held)) / max(1, len(held) - 1)
            ax.plot(across, held, label=told(name), **look(number), markevery=max(1, len(held) // 10))
        ax.set(xlabel="clients that hold an entry (%)", ylabel="entries of the tensor (%)", ylim=(0, None))

    return panels({f"{group.setting}\n{group.method}": group for group in shown}, path, draw)


FEDOBP_FIGURES = {
    "figure2": Figure(_converging("Dir(0.1)"), _convergence),
    "figure3": Figure(_converging("Dir(0.5)"), _convergence),
    "figure4": Figure(_over_q(_of_scores), _over_quantiles(_score, tuned=False)),
    "figure5": Figure(lambda every: _several(every, _normed, _norm), _norms),
    "figure6": Figure(_longest, _layers),
    "figure7": Figure(_over_q(_usual), _downlink),
    "q_sweep": Figure(
        _over_q(lambda run: run.method_name == "fedobp" and _usual(run)),
        _over_quantiles(lambda run: "FedOBP", tuned=True),
    ),
    "alpha_sweep": Figure(lambda every: _several(every, _usual, _alpha, 3, lambda group: group.dataset), _alphas),
}
"""FedOBP's figures, named like the experiments that make their runs."""

FIGURES = FEDOBP_FIGURES | {
    "fedselect_figure3": Figure(_of("fedselect", _has_sizes), _sizes, "fedselect_alpha"),
    "fedselect_figure4": Figure(_of("fedselect", masks), _overlaps, "fedselect_alpha"),
    "fedpurin_masks": Figure(_of("fedpurin", masks), _frequencies, "fedpurin_cifar10"),
    "fedspu_figure5": Figure(_of_widths, _memory, "fedspu_cifar10 method=fedspu"),
}
