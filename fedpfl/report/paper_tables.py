"""The FedOBP paper's tables from own runs; `python -m fedpfl.report paper table3`.

Every cell shows the own value beside the published one and their difference; what is missing is listed with the command
that fills it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pandas as pd

from fedpfl.errors import FedpflError
from fedpfl.report import published
from fedpfl.report.grid import Cell, Grid
from fedpfl.report.load import DATASETS, METHODS, Group, Run, unlike
from fedpfl.report.tables import departures, emptiness, few, judged, over_which, setup_differences

LARGE = ("cifar10", "cifar100", "emnist", "svhn")
SMALL = ("mnist", "fmnist", "organamnist", "organcmnist")
COMPARED = (
    *("local_only", "fedavg", "lg_fedavg", "fedper", "fedrep", "apfl", "pfedfda", "flute", "feddpa", "floco"),
    *("fedala", "fedselect", "fedobp"),
)
ALPHAS = (0.1, 0.5)
TUNED = {"accuracy": "ft_accuracy", "accuracy_pooled": "ft_accuracy_pooled", "accuracy_worst10": "ft_accuracy_worst10"}


@dataclass(frozen=True)
class Rule:
    """Which accuracy of which evaluation a cell shows: a column of rounds.csv, and the round as in `tables`."""

    accuracy: str = "accuracy"
    select: str = "last"
    every: int = 1


@dataclass(frozen=True)
class Line:
    """One row of a table: which runs fill it, with what, beside which published number, and by which command.

    fits: besides method, data set and alpha. measure: of a run's judged row. known_as, setting: the method and (given
    the cell's) the setting under which the number is published. sweep: what narrows `experiment` to this line.
    """

    label: str
    method: str
    sweep: tuple[str, str]
    experiment: str
    fits: Callable[[Run], bool] = lambda run: True
    measure: Callable[[Run, pd.Series, Rule], float] = lambda run, row, rule: float(row.get(rule.accuracy, math.nan))
    known_as: str = ""
    metric: str = published.ACCURACY
    setting: Callable[[str], str] = lambda setting: setting
    kind: str = "percent"


@dataclass(frozen=True)
class Plan:
    """A table: its lines and columns. faulty: filled from runs with the published MedMNIST normalisation."""

    title: str
    lines: tuple[Line, ...]
    datasets: tuple[str, ...]
    alphas: tuple[float, ...] = ALPHAS
    faulty: bool = False

    @property
    def columns(self) -> list[tuple[str, float]]:
        """Data set and alpha of every column."""
        return [(dataset, alpha) for dataset in self.datasets for alpha in self.alphas]


# The tables


def _own_score(run: Run, **wanted: Any) -> bool:
    """FedOBP as the paper writes it, but for what is wanted otherwise."""
    usual = {"score": "obp", "scope": "all", "classifier_only": False, "ema": 0.0, "cold_start": "paper"}
    return all(run.config["method"].get(key, value) == value for key, value in (usual | wanted).items())


def _whole_norm(run: Run) -> bool:
    return run.method_name != "fedobp" or (_own_score(run) and run.config["method"].get("norm") in ("none", "global"))


def _methods(experiment: str) -> tuple[Line, ...]:
    lines = []
    for method in COMPARED:
        line = Line(METHODS[method], method, ("method", method), experiment, fits=_whole_norm, known_as=method)
        lines.append(line)
        if method == "fedavg":
            lines.append(
                Line("FedAvg+FT", method, ("method", method), experiment, fits=_whole_norm, measure=_after_tuning)
            )
    return tuple(lines)


def _after_tuning(run: Run, row: pd.Series, rule: Rule) -> float:
    return float(row.get(TUNED.get(rule.accuracy, rule.accuracy), math.nan))


def _quantile(run: Run, row: pd.Series, rule: Rule) -> float:
    return math.nan if run.q is None else run.q


def _personal(run: Run, row: pd.Series, rule: Rule) -> float:
    """Personal entries per client, in the last round: nobody has any in the first."""
    columns = [name for name in run.rounds if name.startswith("personal/")]
    return float(run.rounds[columns].iloc[-1].sum()) if columns else math.nan


def _counted(label: str, measure: Callable[[Run, pd.Series, Rule], float], metric: str, kind: str) -> Line:
    sweep = ("method", "fedobp")
    return Line(label, "fedobp", sweep, "table2", _whole_norm, measure, "fedobp", metric, kind=kind)


def _ablation(label: str, name: str, norm: str, classifier_only: bool = False) -> Line:
    return Line(
        label,
        "fedobp",
        ("method", "fedobp") if classifier_only else ("norm", norm),
        "table5_cls" if classifier_only else "table5",
        fits=partial(_own_score, norm=norm, classifier_only=classifier_only),
        known_as=name,
        setting=lambda setting: published.ABLATION if setting == "Dir(0.1)" else "",
    )


PLANS = {
    "table2": Plan(
        "FedOBP's Table II: q, and how many entries it makes personal per client",
        (
            _counted("q", _quantile, published.QUANTILE, "exact"),
            _counted("personal entries", _personal, published.PERSONAL, "count"),
        ),
        LARGE + SMALL,
    ),
    "table3": Plan("FedOBP's Table III", _methods("table3"), LARGE),
    "table4": Plan("FedOBP's Table IV", _methods("table4"), SMALL),
    "table4_as_published": Plan(
        "FedOBP's Table IV, MedMNIST with the published normalisation, which makes every image constant",
        _methods("table4_as_published"),
        SMALL[2:],
        faulty=True,
    ),
    "table5": Plan(
        "FedOBP's Table V: normalisation of the scores, and personal entries in the classifier only (CLS)",
        (
            _ablation("none", "FedOBP NoNorm", "none"),
            _ablation("layer", "FedOBP LayerNorm", "layer"),
            _ablation("global", "FedOBP GlobalNorm w/o CLS", "global"),
            _ablation("global, CLS", "FedOBP GlobalNorm with CLS", "global", classifier_only=True),
        ),
        LARGE + SMALL,
        alphas=(0.1,),
    ),
}


# Filling


def fill(
    name: str, gathered: Sequence[Group], rule: Rule = Rule(), datasets: Sequence[str] = (), test: str = ""
) -> Grid:
    """Fill table `name` from groups of runs. datasets: only these columns; by default the paper's,
    or those of the runs where none of the paper's is among them. test: t or wilcoxon, against FedOBP.

    Raises FedpflError for a name that is not in PLANS.
    """
    if name not in PLANS:
        raise FedpflError(f"there is no table {name!r}; choose from {', '.join(PLANS)}")
    plan = PLANS[name]
    present = {str(group.runs[0].config["dataset"]["name"]): None for group in gathered}
    if datasets or not present.keys() & {*LARGE, *SMALL}:
        plan = replace(plan, datasets=tuple(datasets or present) or plan.datasets)
    cells: dict[tuple[int, int], Cell] = {}
    speaking: dict[int, Group] = {}
    columns_of: dict[int, dict[int, Group]] = {}
    ambiguous: list[str] = []
    for i, line in enumerate(plan.lines):
        for j, (dataset, alpha) in enumerate(plan.columns):
            own = [group for group in gathered if _fits(group.runs[0], line, dataset, alpha, plan.faulty)]
            own.sort(key=_rank, reverse=True)
            cell = cells[i, j] = _cell(own[0], line, rule) if own else Cell()
            if own:
                speaking[id(own[0])] = own[0]
                columns_of.setdefault(j, {})[id(own[0])] = own[0]
            setting = line.setting(f"Dir({alpha:g})")
            cell.published = published.lookup(line.metric, line.known_as, dataset, setting) if line.known_as else None
            if len(own) > 1 and line.measure not in (_after_tuning, _quantile):
                ambiguous.append(f"{own[0].method} on {own[0].dataset}, {own[0].partition}")
    notes = list(departures(list(speaking.values())))
    if ambiguous:
        notes.append(
            f"Several configurations fit {few(ambiguous)}; shown is the one nearest to the paper's, then the longest."
        )
    notes += emptiness(list(speaking.values()), rule.select, rule.every)
    if told := _mixed(plan, columns_of):
        notes.append(f"Not alike in what a column should share: {few(told)}.")
    if any(cell.reached for cell in cells.values()):
        reached = {cell.reached: None for cell in cells.values() if cell.reached}
        notes.append(f"° not all planned rounds: the last evaluation that there is ({few(reached)}).")
    if test:
        notes.append(_compare(plan, cells, test))
    grid = Grid(
        name,
        tuple((line.label, line.kind) for line in plan.lines),
        tuple(
            (DATASETS.get(dataset, dataset) + " as published" * plan.faulty, f"Dir({alpha:g})")
            for dataset, alpha in plan.columns
        ),
        cells,
        _caption(plan, cells, rule),
        tuple(notes),
        _missing(plan, cells),
    )
    grid.mark()
    return grid


def _mixed(plan: Plan, columns_of: dict[int, dict[int, Group]]) -> list[str]:
    """What of a column's runs is not as in most of them, but for the method."""
    told = []
    for j, members in sorted(columns_of.items()):
        shown = list(members.values())
        for group, words in zip(shown, unlike(shown), strict=True):
            if words:
                dataset, alpha = plan.columns[j]
                name = METHODS.get(group.runs[0].method_name, group.runs[0].method_name)
                told.append(f"{name} on {DATASETS.get(dataset, dataset)}, Dir({alpha:g}) ({', '.join(words)})")
    return told


def _fits(run: Run, line: Line, dataset: str, alpha: float, faulty: bool) -> bool:
    if run.method_name != line.method or run.config["dataset"]["name"] != dataset:
        return False
    if published.setting(run) != f"Dir({alpha:g})" or run.dataset.endswith("as published") != faulty:
        return False
    return line.fits(run)


def one_each(gathered: Sequence[Group]) -> list[Group]:
    """Of each method's configurations on a data set and partition the one that the paper's tables would show."""
    best: dict[tuple[str, str, str], Group] = {}
    for group in sorted(gathered, key=_rank):
        if _whole_norm(group.runs[0]):
            best[group.dataset, group.partition, group.runs[0].method_name] = group
    return list(best.values())


def _rank(group: Group) -> tuple[Any, ...]:
    """Larger is nearer to what the table means."""
    run = group.runs[0]
    q = published.of_run(run, published.QUANTILE)
    return (
        run.q is None or q is None or run.q == q.value,
        run.config["method"].get("variant") != "as_published",
        -len([key for key, *_ in setup_differences(run) if key != "rounds"]),
        run.config["partition"]["name"] == "published",
        group.used[0].status == "finished",
        run.planned,
        max(used.reached for used in group.used),
        len(group.used),
    )


def _cell(group: Group, line: Line, rule: Rule) -> Cell:
    found = judged(group, rule.select, rule.every)
    values = {run.seed: line.measure(run, row, rule) for run, row in found.items()}
    if any(map(math.isnan, values.values())):  # a mean that a seed lacks is no mean
        values = {}
    return Cell(values, "" if group.whole or not values else group.status)


def _compare(plan: Plan, cells: dict[tuple[int, int], Cell], test: str) -> str:
    """Paired tests over the seeds of the last line and of each other one; marks what differs, and says how it went."""
    from fedpfl.report.compare import LEAST, paired_test

    last, counts = len(plan.lines) - 1, set()
    for j in range(len(plan.columns)):
        for i in range(last):
            seeds = sorted(cells[i, j].values.keys() & cells[last, j].values.keys())
            if len(seeds) > 1:
                counts.add(len(seeds))
                p = paired_test([cells[i, j].values[s] for s in seeds], [cells[last, j].values[s] for s in seeds], test)
                cells[i, j].differs = p < 0.05
    against = plan.lines[last].label
    if not counts:
        return f"No paired test against {against}: no two of its seeds were run with another method."
    name = {"t": "t test", "wilcoxon": "Wilcoxon signed-rank test"}[test]
    few_seeds = f" (never met with fewer than {LEAST[test]})" if min(counts) < LEAST[test] else ""
    numbers = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return f"† differs from {against}: paired {name} over {numbers} seeds, p < 0.05{few_seeds}, not corrected for many."


def _caption(plan: Plan, cells: dict[tuple[int, int], Cell], rule: Rule) -> str:
    if plan.lines[0].kind != "percent":
        return f"{plan.title}: own, below it the published number and the difference."
    which = {
        "accuracy": "mean over clients",
        "accuracy_pooled": "pooled over all clients' test samples",
        "accuracy_worst10": "mean over the worst decile of clients",
    }.get(rule.accuracy, rule.accuracy)
    when = "the last evaluation of each run"
    if rule.select == "best-checkpoint":
        when = f"the best evaluation of each run, chosen on test data as the published numbers are (every {rule.every})"
    seeds: dict[str, str] = {}
    for i, line in enumerate(plan.lines):
        own = {
            j: " ".join(map(str, sorted(cells[i, j].values))) for j in range(len(plan.columns)) if cells[i, j].values
        }
        for j, told in own.items():
            dataset, alpha = plan.columns[j]
            one = len(set(own.values())) == 1
            seeds[line.label if one else f"{line.label} on {DATASETS.get(dataset, dataset)}, Dir({alpha:g})"] = told
    over = over_which(seeds) if seeds else "no runs"
    return (
        f"{plan.title}. Test accuracy in percent, {which}, before fine-tuning but for FedAvg+FT, at {when}; {over}. "
        "Best and second of each column are marked. Below: the published value, and own minus published; published "
        "values are described as means over clients; the authors' logs hold pooled ones, the best of rounds 100, 200, "
        "300 and 400."
    )


def _missing(plan: Plan, cells: dict[tuple[int, int], Cell]) -> tuple[str, ...]:
    """Commands that fill the empty cells, as few as say it."""
    columns = plan.columns
    wanted: dict[tuple[str, str, str, float], dict[str, None]] = {}
    for (i, j), cell in cells.items():
        line, (dataset, alpha) = plan.lines[i], columns[j]
        if not cell.values:
            wanted.setdefault((line.experiment, line.sweep[0], dataset, alpha), {})[line.sweep[1]] = None
    by_values: dict[tuple[str, str, tuple[str, ...], float], list[str]] = {}
    for (experiment, key, dataset, alpha), values in wanted.items():
        by_values.setdefault((experiment, key, tuple(values), alpha), []).append(dataset)
    by_datasets: dict[tuple[str, str, tuple[str, ...], tuple[str, ...]], list[float]] = {}
    for (experiment, key, chosen, alpha), datasets in by_values.items():
        by_datasets.setdefault((experiment, key, chosen, tuple(datasets)), []).append(alpha)
    commands = []
    for (experiment, key, chosen, places), alphas in by_datasets.items():
        all_values = {line.sweep[1] for line in plan.lines if (line.experiment, line.sweep[0]) == (experiment, key)}
        words = [f"experiment={experiment}"]
        if set(chosen) != all_values:
            words.append(f"{key}={','.join(chosen)}")
        if places != plan.datasets:
            suffix = "_as_published" if plan.faulty else ""
            words.append(f"dataset={','.join(name + suffix for name in places)}")
        if tuple(alphas) != plan.alphas:
            words.append(f"partition.alpha={','.join(f'{alpha:g}' for alpha in alphas)}")
        commands.append(f"python -m fedpfl.train {' '.join(words)}")
    return tuple(commands)
