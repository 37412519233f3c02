"""The FedOBP paper's figures from own runs; `python -m fedpfl.report paper figure4`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pandas as pd

from fedpfl.errors import FedpflError
from fedpfl.report import published
from fedpfl.report.figures import LABELS, accuracy_figure, cells, finish, look, panels, save, style, told
from fedpfl.report.load import METHODS, Group, Run
from fedpfl.report.paper_tables import COMPARED, PLANS, SMALL, Rule, one_each
from fedpfl.report.tables import judged, over_seeds

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SCORES = {"obp": "squared difference (FedOBP)", "gradient": "change in training", "fisher": "Fisher"}
HATCHES = ("", "///", "...", "xx")


@dataclass(frozen=True)
class Figure:
    """of: the groups it shows. paint: draws them. command: what makes such runs."""

    of: Callable[[Sequence[Group]], list[Group]]
    paint: Callable[[list[Group], Path, Rule], list[Path]]
    experiment: str

    def draw(self, gathered: Sequence[Group], path: Path, rule: Rule) -> list[Path]:
        """Draw to `path` (without suffix) as PNG and PDF. Raises FedpflError where no run fits."""
        shown = self.of(gathered)
        if not shown:
            raise FedpflError(f"no runs for {path.name}; run `python -m fedpfl.train experiment={self.experiment}`")
        return self.paint(shown, path, rule)


# Which runs


def _obp(run: Run, **wanted: Any) -> bool:
    method = run.config["method"]
    return run.method_name == "fedobp" and all(method.get(key, value) == value for key, value in wanted.items())


def _usual(run: Run) -> bool:
    """FedOBP as the paper writes it, at any q, or another method."""
    usual = {"score": "obp", "scope": "all", "classifier_only": False, "ema": 0.0}
    return run.method_name != "fedobp" or (
        _obp(run, **usual) and run.config["method"].get("norm", "global") in ("none", "global")
    )


def _chosen(test: Callable[[Run], bool]) -> Callable[[Sequence[Group]], list[Group]]:
    return lambda gathered: [group for group in gathered if test(group.runs[0])]


def _converging(allowed: Callable[[str], bool]) -> Callable[[Sequence[Group]], list[Group]]:
    """The compared methods, FedOBP at the paper's q where there is one."""

    def fits(run: Run) -> bool:
        q = published.of_run(run, published.QUANTILE)
        return run.method_name in COMPARED and _usual(run) and (q is None or run.q in (None, q.value))

    chosen = _chosen(lambda run: fits(run) and allowed(str(run.config["dataset"]["name"])))
    return lambda gathered: one_each(chosen(gathered))


def _swept(gathered: Sequence[Group], key: Callable[[Run], float | None]) -> list[Group]:
    """Groups of FedOBP in settings where `key` takes more than one value."""
    values: dict[tuple[str, str], set[float]] = {}
    for group in gathered:
        if (value := key(group.runs[0])) is not None:
            values.setdefault((group.dataset, group.partition), set()).add(value)
    return [group for group in gathered if len(values.get((group.dataset, group.partition), ())) > 1]


def _over_q(test: Callable[[Run], bool]) -> Callable[[Sequence[Group]], list[Group]]:
    return lambda gathered: _swept([group for group in gathered if test(group.runs[0])], lambda run: run.q)


def _alpha(run: Run) -> float:
    """The Dirichlet alpha, 0 where the partition has none."""
    alpha = run.config["partition"].get("alpha")
    return float(alpha) if isinstance(alpha, int | float) else 0.0


def _over_alpha(gathered: Sequence[Group]) -> list[Group]:
    fitting = [group for group in gathered if _alpha(group.runs[0]) and _usual(group.runs[0])]
    values: dict[str, set[float]] = {}
    for group in fitting:
        values.setdefault(group.dataset, set()).add(_alpha(group.runs[0]))
    return [group for group in fitting if len(values[group.dataset]) > 2]


# What they show


def _value(group: Group, rule: Rule, column: str = "") -> tuple[float, float]:
    """Mean and standard deviation over seeds of the judged accuracy, or of another column of its row."""
    rows = judged(group, rule.select, rule.every).values()
    return over_seeds([float(row.get(column or rule.accuracy, math.nan)) for row in rows])


def _by_setting(shown: Iterable[Group]) -> dict[tuple[str, str], list[Group]]:
    found: dict[tuple[str, str], list[Group]] = {}
    for group in shown:
        found.setdefault((group.dataset, group.partition), []).append(group)
    return found


Points = Sequence[tuple[float, tuple[float, float]]]
"""Places on the x axis, each with the mean and the standard deviation over seeds."""


def _line(ax: Axes, points: Points, label: str, place: int, **changes: Any) -> None:
    """A line through the means, with error bars where there is a spread."""
    across, means, spreads = [x for x, _ in points], [mean for _, (mean, _) in points], [std for _, (_, std) in points]
    error = None if all(map(math.isnan, spreads)) else [0.0 if math.isnan(spread) else spread for spread in spreads]
    ax.errorbar(across, means, yerr=error, label=told(label), capsize=2, **{**look(place), **changes})


def _q_axis(ax: Axes, quantiles: list[float]) -> dict[float, int]:
    """One place per q, evenly: what happens is close to 1. Local-Only stands at 0, FedAvg at 1."""
    ax.set_xticks(range(len(quantiles)), [f"{q:.10g}" for q in quantiles], rotation=45, ha="right")
    ax.set_xlabel("quantile q")
    return {q: place for place, q in enumerate(quantiles)}


def _convergence(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    runs = [run for group in shown for run in group.runs]

    def label(group: Group) -> str:
        name = METHODS[group.runs[0].method_name]
        return f"{name} ({', '.join(group.apart)})" if group.apart else name

    return accuracy_figure(runs, path, rule.accuracy, label)


def _scores_over_q(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    def name(run: Run) -> str:
        method = run.config["method"]
        per_tensor = ", per tensor" if method.get("scope") == "tensor" else ""
        return SCORES.get(method.get("score", "obp"), str(method.get("score"))) + per_tensor

    return _over_quantiles(shown, path, rule, name)


def _quantiles(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    return _over_quantiles(shown, path, rule, lambda run: "FedOBP", tuned=True)


def _over_quantiles(
    shown: list[Group], path: Path, rule: Rule, name: Callable[[Run], str], tuned: bool = False
) -> list[Path]:
    """A panel per data set and partition, a line per name. tuned: also the accuracy after fine-tuning, dashed."""
    settings = _by_setting(shown)
    names = list(dict.fromkeys(name(group.runs[0]) for group in shown))
    with style():
        figure, axes = cells(len(settings))
        for ax, ((dataset, partition), members) in zip(axes, settings.items(), strict=False):
            place = _q_axis(ax, sorted({group.runs[0].q or 0.0 for group in members}))
            for number, label in enumerate(names):
                own = [group for group in members if name(group.runs[0]) == label]
                own.sort(key=lambda group: group.runs[0].q or 0.0)
                if not own:
                    continue
                _line(ax, [(place[group.runs[0].q or 0.0], _value(group, rule)) for group in own], label, number)
                after = [(place[group.runs[0].q or 0.0], _value(group, rule, f"ft_{rule.accuracy}")) for group in own]
                if tuned and any(not math.isnan(value) for _, (value, _) in after):
                    _line(ax, after, f"{label}, fine-tuned", len(names) + number)
            ax.set(title=told(f"{dataset}, {partition}"), ylabel=LABELS[rule.accuracy])
        finish(figure, axes[: len(settings)])
        return save(figure, path)


def _norms(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """Bars: a cluster per data set, a bar per normalisation."""

    def name(run: Run) -> str:
        method = run.config["method"]
        return str(method.get("norm", "global")) + (", classifier only" if method.get("classifier_only") else "")

    settings = _by_setting(shown)
    order = ("none", "layer", "global", "global, classifier only")
    names = sorted({name(group.runs[0]) for group in shown}, key=order.index)
    with style():
        figure, [ax] = panels(1, 1)
        figure.set_size_inches(max(4.6, 1.4 * len(settings)), 3.0)
        width = 0.8 / len(names)
        lowest = 100.0
        for number, label in enumerate(names):
            for at, members in enumerate(settings.values()):
                for group in (group for group in members if name(group.runs[0]) == label):
                    mean, spread = _value(group, rule)
                    lowest = min(lowest, mean)
                    ax.bar(
                        at + (number - (len(names) - 1) / 2) * width,
                        mean,
                        0.92 * width,
                        yerr=None if math.isnan(spread) else spread,
                        color=look(number)["color"],
                        hatch=HATCHES[number % len(HATCHES)],
                        edgecolor="white",
                        label=label,
                        capsize=2,
                    )
        ax.set_xticks(range(len(settings)), ["\n".join(map(told, setting)) for setting in settings])
        ax.set_ylim(max(0.0, math.floor(lowest / 10) * 10 - 10), None)
        ax.set_ylabel(LABELS[rule.accuracy])
        ax.grid(axis="x", visible=False)
        finish(figure, [ax])
        return save(figure, path)


def _layers(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set, partition and configuration: each layer's share of the personal entries, stacked."""
    from matplotlib import colormaps

    with style():
        figure, axes = cells(len(shown))
        for ax, group in zip(axes, shown, strict=False):
            shares = layer_shares(group.used[0])
            colors = colormaps["cividis"]([place / max(1, len(shares.columns) - 1) for place in range(shares.shape[1])])
            ax.stackplot(shares.index, *(100 * shares[name] for name in shares), labels=list(shares), colors=colors)
            ax.set(
                title=told(f"{group.dataset}, {group.partition}") + "\n" + told(group.method),
                xlabel="round",
                ylim=(0, 100),
            )
            ax.set_ylabel("share of personal entries (%)")
            ax.margins(x=0)
        finish(figure, axes[: len(shown)])
        return save(figure, path)


def layer_shares(run: Run) -> pd.DataFrame:
    """Each layer's share of a round's personal entries, rows by round (those that have any), layers in their order."""
    columns = [name for name in run.rounds if name.startswith("personal/")]
    counts = run.rounds.set_index("round")[columns]
    layers = [name.removeprefix("personal/").rsplit(".", 1)[0] for name in columns]
    by_layer = counts.T.groupby(layers, sort=False).sum().T
    total = by_layer.sum(axis=1)
    return by_layer[total > 0].div(total[total > 0], axis=0)


def _downlink(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """Accuracy against the share of the model's values that travel down: FedOBP's line over q, others as points."""
    settings = _by_setting(shown)
    methods = [name for name in METHODS if any(group.runs[0].method_name == name for group in shown)]
    with style():
        figure, axes = cells(len(settings))
        for ax, ((dataset, partition), members) in zip(axes, settings.items(), strict=False):
            for number, method in enumerate(methods):
                own = [group for group in members if group.runs[0].method_name == method]
                points = sorted((_ratio(group), _value(group, rule)) for group in own)
                if points:
                    single = {"linestyle": "none"} if method != "fedobp" else {}
                    _line(ax, points, METHODS[method], number, **single)
            ax.set(
                title=told(f"{dataset}, {partition}"), xlabel="values down / model size", ylabel=LABELS[rule.accuracy]
            )
        finish(figure, axes[: len(settings)])
        return save(figure, path)


def _ratio(group: Group) -> float:
    """Values that a client is sent per round, of those of the model; mean over rounds and seeds."""
    each = [run.per_client("values_down") / (run.fact("parameters") or math.nan) for run in group.used]
    return float(sum(each) / len(each))


def _alphas(shown: list[Group], path: Path, rule: Rule) -> list[Path]:
    """A panel per data set, a line per method over alpha, which is logarithmic."""
    datasets = list(dict.fromkeys(group.dataset for group in shown))
    labels = list(dict.fromkeys(group.method for group in shown))
    with style():
        figure, axes = cells(len(datasets))
        for ax, dataset in zip(axes, datasets, strict=False):
            for number, label in enumerate(labels):
                own = [group for group in shown if (group.dataset, group.method) == (dataset, label)]
                points = sorted((_alpha(group.runs[0]), _value(group, rule)) for group in own)
                if len(points) > 1:
                    _line(ax, points, label, number)
            ax.set(title=told(dataset), xlabel="Dirichlet alpha", ylabel=LABELS[rule.accuracy], xscale="log")
            ticks = sorted({_alpha(group.runs[0]) for group in shown if group.dataset == dataset})
            ax.set_xticks(ticks, [f"{alpha:g}" for alpha in ticks])
            ax.minorticks_off()
        finish(figure, axes[: len(datasets)])
        return save(figure, path)


def _normed(run: Run) -> bool:
    """One of Table V's runs."""
    return _obp(run, score="obp", scope="all", ema=0.0) and any(line.fits(run) for line in PLANS["table5"].lines)


FIGURES = {
    "figure2": Figure(_converging(lambda name: name not in SMALL), _convergence, "figure2"),
    "figure3": Figure(_converging(SMALL.__contains__), _convergence, "figure3"),
    "figure4": Figure(_over_q(lambda run: _obp(run, classifier_only=False, ema=0.0)), _scores_over_q, "figure4"),
    "figure5": Figure(
        lambda gathered: [
            group
            for members in _by_setting(_chosen(_normed)(gathered)).values()
            if len({group.runs[0].config["method"].get("norm") for group in members}) > 1
            for group in members
        ],
        _norms,
        "figure5",
    ),
    "figure6": Figure(_chosen(lambda run: _normed(run) and not layer_shares(run).empty), _layers, "figure6"),
    "figure7": Figure(_over_q(_usual), _downlink, "figure7"),
    "q_sweep": Figure(_over_q(lambda run: _obp(run) and _usual(run)), _quantiles, "q_sweep"),
    "alpha_sweep": Figure(_over_alpha, _alphas, "alpha_sweep"),
}
"""All figures. Convergence on other data sets than the paper's goes into figure2."""
