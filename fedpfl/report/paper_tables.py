"""The FedOBP paper's tables from own runs; `python -m fedpfl.report paper table3`.

Every cell shows the own value above the published one and their difference; what is missing is listed with the command
that fills it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import pandas as pd

from fedpfl.report import published
from fedpfl.report.load import DATASETS, METHODS, Group, Run, unlike
from fedpfl.report.table import Cell, Column, Table, mark, number, over_seeds
from fedpfl.report.tables import departures, emptiness, few, judged, over_which, setup_differences

LARGE = ("cifar10", "cifar100", "emnist", "svhn")
SMALL = ("mnist", "fmnist", "organamnist", "organcmnist")
COMPARED = (
    *("local_only", "fedavg", "lg_fedavg", "fedper", "fedrep", "apfl", "pfedfda", "flute", "feddpa", "floco"),
    *("fedala", "fedselect", "fedobp"),
)
ALPHAS = (0.1, 0.5)


class Rule(NamedTuple):
    """Which accuracy of which evaluation a cell shows: a column of rounds.csv, and the round as in `accuracy_table`."""

    accuracy: str = "accuracy"
    select: str = "last"
    every: int = 1


LAST = Rule()
Measure = Callable[[Run, pd.Series, Rule], float]
"""What a cell shows of a run and its judged row."""


def _accuracy(run: Run, row: pd.Series, rule: Rule) -> float:
    return float(row.get(rule.accuracy, math.nan))


def _tuned(run: Run, row: pd.Series, rule: Rule) -> float:
    return float(row.get(rule.accuracy if rule.accuracy.startswith("ft_") else f"ft_{rule.accuracy}", math.nan))


def _quantile(run: Run, row: pd.Series, rule: Rule) -> float:
    return math.nan if run.q is None else run.q


def _personal(run: Run, row: pd.Series, rule: Rule) -> float:
    """Personal entries per client, in the last round: nobody has any in the first."""
    return math.nan if run.personal.empty else float(run.personal.iloc[-1].sum(skipna=False))


def own_score(run: Run, **wanted: Any) -> bool:
    """Return whether a run is FedOBP as the paper writes it, but for what is wanted otherwise."""
    usual = {"score": "obp", "scope": "all", "classifier_only": False, "ema": 0.0, "cold_start": "paper"} | wanted
    return run.method_name == "fedobp" and all(
        run.config["method"].get(key, value) == value for key, value in usual.items()
    )


def _whole_norm(run: Run) -> bool:
    return run.method_name != "fedobp" or (own_score(run) and run.config["method"].get("norm") in ("none", "global"))


@dataclass(frozen=True)
class Line:
    """One row of a table: which runs fill it, with what, beside which published number, and by which command.

    fits: besides method, data set and alpha. known_as, setting: the method and the setting, if it is not the cell's,
    under which the number is published. norm: of the runs, where `experiment` has several.
    """

    label: str
    method: str
    experiment: str
    fits: Callable[[Run], bool] = _whole_norm
    measure: Measure = _accuracy
    known_as: str = ""
    metric: str = published.ACCURACY
    setting: str = ""
    kind: str = "percent"
    norm: str = ""

    @property
    def sweep(self) -> tuple[str, str]:
        """What narrows `experiment` to this line."""
        return ("norm", self.norm) if self.norm else ("method", self.method)


class Plan(NamedTuple):
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

    def heading(self, column: int) -> tuple[str, str]:
        """Return the names of a column's data set and setting."""
        dataset, alpha = self.columns[column]
        return DATASETS.get(dataset, dataset) + " as published" * self.faulty, f"Dir({alpha:g})"


def _methods(experiment: str) -> tuple[Line, ...]:
    lines = [Line(METHODS[method], method, experiment, known_as=method) for method in COMPARED]
    lines.insert(COMPARED.index("fedavg") + 1, Line("FedAvg+FT", "fedavg", experiment, measure=_tuned))
    return tuple(lines)


def _counted(label: str, measure: Measure, metric: str, kind: str) -> Line:
    return Line(label, "fedobp", "table2", measure=measure, known_as="fedobp", metric=metric, kind=kind)


def _ablation(label: str, known_as: str, norm: str) -> Line:
    fits = partial(own_score, norm=norm)
    return Line(label, "fedobp", "table5", fits, known_as=known_as, setting=published.ABLATION, norm=norm)


PLANS = {
    "table2": Plan(
        "FedOBP's Table II: q, and how many entries it makes personal per client",
        (
            _counted("q", _quantile, published.QUANTILE, "exact"),
            _counted("personal entries", _personal, published.PERSONAL, "entries"),
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
            Line(
                *("global, CLS", "fedobp", "table5_cls", partial(own_score, norm="global", classifier_only=True)),
                known_as="FedOBP GlobalNorm with CLS",
                setting=published.ABLATION,
            ),
        ),
        LARGE + SMALL,
        alphas=(0.1,),
    ),
}


def fill(
    name: str, gathered: Sequence[Group], rule: Rule = LAST, datasets: Sequence[str] = (), test: str = ""
) -> Table:
    """Fill table `name` from groups of runs.

    datasets: only these columns; by default the paper's, or those of the runs where none of the paper's is among them.
    test: t or wilcoxon, against the last line.
    """
    plan = PLANS[name]
    present = {group.runs[0].dataset_name: None for group in gathered}
    if datasets or not present.keys() & {*LARGE, *SMALL}:
        plan = plan._replace(datasets=tuple(datasets or present) or plan.datasets)
    places = [(i, j) for i in range(len(plan.lines)) for j in range(len(plan.columns))]
    speaking: dict[tuple[int, int], Group] = {}
    ambiguous: dict[str, None] = {}
    for i, j in places:
        own = sorted((group for group in gathered if _fits(group.runs[0], plan, i, j)), key=_rank, reverse=True)
        if own:
            speaking[i, j] = own[0]
        if len(own) > 1 and plan.lines[i].measure not in (_tuned, _quantile):
            ambiguous[own[0].title] = None
    values = {place: _values(speaking.get(place), plan.lines[place[0]], rule) for place in places}
    hollow = {place for place, group in speaking.items() if emptiness([group], rule.select, rule.every)}
    notes = [*departures(_once(group for place, group in speaking.items() if values[place])), *_mixed(plan, speaking)]
    notes += emptiness(_once(speaking[place] for place in hollow), rule.select, rule.every)
    if ambiguous:
        notes.append(
            f"Several configurations fit {few(ambiguous)}; shown is the one nearest to the paper's, then the longest."
        )
    reached = {place: group.status for place, group in speaking.items() if values[place] and not group.whole}
    if reached:
        told = few(dict.fromkeys(reached.values()))
        notes.append(f"° not all planned rounds: the last evaluation that there is ({told}).")
    differs: set[tuple[int, int]] = set()
    if test:
        notes.append(_compare(plan, values, test, differs))
    records, cells = [], {}
    headings = [plan.heading(j) for j in range(len(plan.columns))]
    for i, j in places:
        line, (dataset, setting) = plan.lines[i], headings[j]
        known = published.lookup(line.metric, line.known_as, plan.columns[j][0], line.setting or setting)
        mean, spread = over_seeds(list(values[i, j].values()))
        flag = "°" * ((i, j) in reached) + "†" * ((i, j) in differs)
        theirs, std = (known.value, known.std) if known else (math.nan, math.nan)
        apart = number({"percent": "difference", "entries": "change"}.get(line.kind, ""), mean - theirs)
        below = f"{number(line.kind, theirs)} {apart if line.kind != 'exact' else ''}".strip()
        cells[i, j] = Cell(mean, spread if line.kind == "percent" else math.nan, line.kind, flag=flag, below=below)
        record: dict[str, Any] = {"table": name, "row": line.label, "dataset": dataset, "setting": setting}
        record |= {"own": mean, "own_seed_std": spread, "seeds": " ".join(map(str, sorted(values[i, j])))}
        record |= {"unfinished": reached.get((i, j), ""), "published": theirs, "published_std": std}
        records.append(record | {"difference": mean - theirs})
    for j in range(len(headings)):
        ranked = [i for i, line in enumerate(plan.lines) if line.kind == "percent"]
        finished = [(i, j) in speaking and speaking[i, j].used[0].status == "finished" for i in ranked]
        mark([cells[i, j] for i in ranked], finished)
    for record, place in zip(records, places, strict=True):
        record["rank"] = {"best": 1, "second": 2}.get(cells[place].mark)
    return Table(
        "",
        (Column(""), *(Column(setting, "percent", dataset) for dataset, setting in headings)),
        [[Cell(line.label), *(cells[i, j] for j in range(len(headings)))] for i, line in enumerate(plan.lines)],
        pd.DataFrame(records),
        _caption(plan, values, rule),
        tuple(notes),
        below="published",
        commands=_missing(plan, [place for place in places if not values[place] and place not in hollow]),
    )


def one_each(gathered: Sequence[Group]) -> list[Group]:
    """Return of each method's configurations on a data set and partition the one that the paper's tables would show."""
    best: dict[tuple[str, str, str], Group] = {}
    for group in sorted(gathered, key=_rank):
        if _whole_norm(group.runs[0]):
            best[group.dataset, group.partition, group.runs[0].method_name] = group
    return list(best.values())


def _once(gathered: Iterable[Group]) -> list[Group]:
    return list({id(group): group for group in gathered}.values())


def _fits(run: Run, plan: Plan, i: int, j: int) -> bool:
    line, (dataset, alpha) = plan.lines[i], plan.columns[j]
    setting = f"Dir({alpha:g})", plan.faulty
    return (
        (run.method_name, run.dataset_name) == (line.method, dataset)
        and (published.setting(run), run.dataset.endswith("as published")) == setting
        and line.fits(run)
    )


def _rank(group: Group) -> tuple[Any, ...]:
    """Larger is nearer to what the table means."""
    run = group.runs[0]
    q = published.of_run(run, published.QUANTILE)
    return (
        run.q is None or q is None or run.q == q.value,
        run.get("method.variant") != "as_published",
        -len([key for key, *_ in setup_differences(run) if key != "rounds"]),
        run.get("partition.name") == "published",
        group.used[0].status == "finished",
        run.planned,
        max(used.reached for used in group.used),
        len(group.used),
    )


def _values(group: Group | None, line: Line, rule: Rule) -> dict[int, float]:
    """What the cell shows, by seed; nothing where a seed lacks it, as a mean of the others would not be the group's."""
    found = judged(group, rule.select, rule.every) if group else {}
    values = {run.seed: line.measure(run, row, rule) for run, row in found.items()}
    return {} if any(map(math.isnan, values.values())) else values


def _mixed(plan: Plan, speaking: dict[tuple[int, int], Group]) -> list[str]:
    """Say what of a column's runs is not as in most of them, but for the method."""
    told: dict[str, None] = {}
    for j in range(len(plan.columns)):
        shown = _once(group for place, group in speaking.items() if place[1] == j)
        for group, words in zip(shown, unlike(shown), strict=True):
            if words:
                told[f"{group.runs[0].called} on {', '.join(plan.heading(j))} ({', '.join(words)})"] = None
    return [f"Not alike in what a column should share: {few(told)}."] if told else []


def _compare(
    plan: Plan, values: dict[tuple[int, int], dict[int, float]], test: str, differs: set[tuple[int, int]]
) -> str:
    """Compare the last line with each other one, paired over seeds; collects what differs, and says how it went."""
    from fedpfl.report.compare import LEAST, paired_test

    last, counts = len(plan.lines) - 1, set()
    for (i, j), own in values.items():
        theirs = values[last, j]
        seeds = sorted(own.keys() & theirs.keys())
        if i != last and len(seeds) > 1:
            counts.add(len(seeds))
            if paired_test([own[seed] - theirs[seed] for seed in seeds], test) < 0.05:
                differs.add((i, j))
    against = plan.lines[last].label
    if not counts:
        return f"No paired test against {against}: no two of its seeds were run with another method."
    name = {"t": "t test", "wilcoxon": "Wilcoxon signed-rank test"}[test]
    few_seeds = f" (never met with fewer than {LEAST[test]})" if min(counts) < LEAST[test] else ""
    numbers = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return f"† differs from {against}: paired {name} over {numbers} seeds, p < 0.05{few_seeds}, not corrected for many."


def _caption(plan: Plan, values: dict[tuple[int, int], dict[int, float]], rule: Rule) -> str:
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
    seeds: dict[str, list[int]] = {}
    for i, line in enumerate(plan.lines):
        own = {j: sorted(values[i, j]) for j in range(len(plan.columns)) if values[i, j]}
        one = len({tuple(told) for told in own.values()}) == 1
        seeds |= {line.label if one else f"{line.label} on {', '.join(plan.heading(j))}": own[j] for j in own}
    return (
        f"{plan.title}. Test accuracy in percent, {which}, before fine-tuning but for FedAvg+FT, at {when}; "
        f"{over_which(seeds)}. Below: the published value, and own minus published; published values are described as "
        "means over clients; the authors' logs hold pooled ones, the best of rounds 100, 200, 300 and 400."
    )


def _missing(plan: Plan, empty: Sequence[tuple[int, int]]) -> tuple[str, ...]:
    """Make the commands that fill the empty cells, as few as say it."""
    if not empty:
        return ()
    jobs = {(*plan.columns[j], plan.lines[i].experiment, *plan.lines[i].sweep): None for i, j in empty}
    frame = pd.DataFrame([*jobs], columns=["dataset", "alpha", "experiment", "key", "value"])
    for column in ("value", "dataset", "alpha"):  # jobs that have all else in common become one
        others = [name for name in frame if name != column]
        frame = frame.groupby(others, sort=False)[column].agg(tuple).reset_index()
    commands = []
    for experiment, key, chosen, places, alphas in frame[["experiment", "key", "value", "dataset", "alpha"]].values:
        words = [f"experiment={experiment}"]
        if {*chosen} != {line.sweep[1] for line in plan.lines if (line.experiment, line.sweep[0]) == (experiment, key)}:
            words.append(f"{key}={','.join(chosen)}")
        if places != plan.datasets:
            words.append("dataset=" + ",".join(name + "_as_published" * plan.faulty for name in places))
        if alphas != plan.alphas:
            words.append(f"partition.alpha={','.join(f'{alpha:g}' for alpha in alphas)}")
        commands.append(f"python -m fedpfl.train {' '.join(words)}")
    return tuple(commands)
