"""Fill a paper's table from runs: `python -m fedpfl.report paper fedobp/table3 fedselect/table1`.

Every cell shows the own value above the published one and their difference; what is missing is
listed with the command that fills it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import pandas as pd

from fedpfl.papers import published
from fedpfl.papers.layout import LAST, Layout, Measure, Selection, rank, tuned
from fedpfl.papers.registry import TABLES, datasets
from fedpfl.report.grouping import Group, unlike
from fedpfl.report.table import Cell, Column, Table, mark, number, over_seeds
from fedpfl.report.tables import chosen_on, emptiness, judged, over_which
from fedpfl.report.text import few

Part = tuple[int, int, float | None]
"""Line, column and alpha of what a cell is the mean of."""
Place = tuple[int, int]
"""Line and column."""
DIFFERENCES = {"percent": "difference", "decimal": "difference", "entries": "change"}
"""How own minus published is shown, by the kind of number."""


@dataclass
class Filled:
    """What runs say of a layout's cells.

    speaking: the groups that fill the parts. parts, values: numbers by seed, of parts and of cells.
    reached: the state of cells whose runs are not whole. ambiguous: groups that are one of several
    that fit.
    """

    layout: Layout
    rule: Selection
    speaking: dict[Part, Group] = field(default_factory=dict)
    parts: dict[Part, dict[int, float]] = field(default_factory=dict)
    values: dict[Place, dict[int, float]] = field(default_factory=dict)
    reached: dict[Place, str] = field(default_factory=dict)
    ambiguous: dict[str, None] = field(default_factory=dict)

    @property
    def places(self) -> list[Place]:
        """All cells, line by line."""
        return [
            (i, j) for i in range(len(self.layout.lines)) for j in range(len(self.layout.places))
        ]

    @property
    def shown(self) -> dict[Part, Group]:
        """The groups that a number is shown of."""
        return {part: group for part, group in self.speaking.items() if self.values[part[:2]]}

    @property
    def hollow(self) -> set[Part]:
        """The parts whose runs hold no number where they are judged."""
        rule = self.rule
        return {
            part
            for part, group in self.speaking.items()
            if emptiness([group], rule.select, rule.every, rule.by)
        }

    def absent(self) -> Iterator[Part]:
        """Yield the parts that runs would fill."""
        hollow = self.hollow
        for i, j in self.places:
            untold = self.layout.lines[i].untold or self.layout.places[j].untold
            for alpha in () if untold or self.values[i, j] else self.layout.places[j].alphas:
                if not self.parts.get((i, j, alpha)) and (i, j, alpha) not in hollow:
                    yield i, j, alpha


def fill(
    name: str,
    gathered: Sequence[Group],
    rule: Selection | None = LAST,
    only: Sequence[str] = (),
    test: str = "",
) -> Table:
    """Fill table `paper/name` from groups of runs.

    rule: None for the paper's own. only: columns of these data sets; by default the paper's, or
    those of the runs where none of the papers' is among them. test: t or wilcoxon, against the last
    line.
    """
    whole = TABLES[name]
    assert isinstance(whole, Layout)
    present = {group.runs[0].dataset_name: None for group in gathered}
    other = present and not present.keys() & datasets()
    layout = whole.on(only or tuple(present)) if only or other else whole
    filled = _filled(layout, gathered, rule or layout.rule)
    differs: set[Place] = set()
    notes = [*_notes(filled), *([_compare(filled, test, differs)] if test else [])]
    cells = {place: _cell(filled, place, differs) for place in filled.places}
    _mark(filled, cells)
    frame = pd.DataFrame([_record(name, filled, place, cells[place]) for place in filled.places])
    return Table(
        "",
        (
            Column(""),
            *(Column(place.heading[1], "percent", place.heading[0]) for place in layout.places),
        ),
        [
            [Cell(line.label), *(cells[i, j] for j in range(len(layout.places)))]
            for i, line in enumerate(layout.lines)
        ],
        frame,
        _caption(filled),
        tuple(notes),
        below="published",
        commands=_missing(layout, whole, [*filled.absent()]),
    )


def _filled(layout: Layout, gathered: Sequence[Group], rule: Selection) -> Filled:
    filled = Filled(layout, rule)
    for i, j in filled.places:
        place, line = layout.places[j], layout.lines[i]
        for alpha in place.alphas:
            own = [group for group in gathered if layout.fits(group.runs[0], i, j, alpha)]
            if own:
                best = max(own, key=lambda group: rank(group, layout.setup_of(group.runs[0], j)))
                filled.speaking[i, j, alpha] = best
                filled.parts[i, j, alpha] = _values(best, place.measure or line.measure, rule)
            if len(own) > 1:
                filled.ambiguous[best.title] = None
        filled.values[i, j] = _mean([filled.parts.get((i, j, alpha), {}) for alpha in place.alphas])
    filled.reached = {
        part[:2]: group.status for part, group in filled.shown.items() if not group.whole
    }
    return filled


def _notes(filled: Filled) -> Iterator[str]:
    """What a reader must know beside the caption."""
    layout, rule = filled.layout, filled.rule
    yield from published.departures(_setups(layout, filled.shown))
    yield from _mixed(layout, filled.speaking)
    yield from (
        chosen_on(rule.select) if any(line.kind == "percent" for line in layout.lines) else ()
    )
    yield from emptiness(
        _once(filled.speaking[part] for part in filled.hollow), rule.select, rule.every, rule.by
    )
    if filled.ambiguous:
        which = few(filled.ambiguous)
        yield f"Several configurations fit {which}; shown is the one nearest to the paper's, then the longest."
    if filled.reached:
        told = few(dict.fromkeys(filled.reached.values()))
        yield f"° not all planned rounds: the last evaluation that there is ({told})."
    yield from filter(None, [layout.note])
    untold = [(one.label, one.untold) for one in layout.lines] + [
        (one.setting, one.untold) for one in layout.places
    ]
    for why in dict.fromkeys(why for _, why in untold if why):
        yield f"Without own values: {', '.join(what for what, own in untold if own == why)}; {why}."


def _published(filled: Filled, place: Place) -> tuple[float, float]:
    """The published number of a cell and its deviation."""
    known = published.lookup(filled.layout.key(*place))
    return (known.value, known.std) if known else (math.nan, math.nan)


def _cell(filled: Filled, place: Place, differs: set[Place]) -> Cell:
    kind, (theirs, _) = filled.layout.lines[place[0]].kind, _published(filled, place)
    mean, spread = over_seeds(list(filled.values[place].values()))
    flag = ("°" if place in filled.reached else "") + ("†" if place in differs else "")
    apart = "" if kind == "exact" else number(DIFFERENCES[kind], mean - theirs)
    below = f"{number(kind, theirs)} {apart}".strip()
    return Cell(mean, spread if kind == "percent" else math.nan, kind, flag=flag, below=below)


def _record(name: str, filled: Filled, place: Place, cell: Cell) -> dict[str, Any]:
    dataset, setting = filled.layout.places[place[1]].heading
    (theirs, std), values = _published(filled, place), filled.values[place]
    mean, spread = over_seeds(list(values.values()))
    return {
        "table": name,
        "row": filled.layout.lines[place[0]].label,
        "dataset": dataset,
        "setting": setting,
        "own": mean,
        "own_seed_std": spread,
        "seeds": " ".join(map(str, sorted(values))),
        "unfinished": filled.reached.get(place, ""),
        "published": theirs,
        "published_std": std,
        "difference": mean - theirs,
        "rank": {"best": 1, "second": 2}.get(cell.mark),
    }


def _mark(filled: Filled, cells: Mapping[Place, Cell]) -> None:
    """Mark the best and the second of each column, among accuracies."""
    ranked = [i for i, line in enumerate(filled.layout.lines) if line.kind == "percent"]
    for j in range(len(filled.layout.places)):
        groups = [
            [group for part, group in filled.shown.items() if part[:2] == (i, j)] for i in ranked
        ]
        finished = [
            bool(own) and all(group.used[0].status == "finished" for group in own) for own in groups
        ]
        mark([cells[i, j] for i in ranked], finished)


def _once(gathered: Iterable[Group]) -> list[Group]:
    return list({id(group): group for group in gathered}.values())


def _setups(
    layout: Layout, shown: Mapping[Part, Group]
) -> list[tuple[Group, Mapping[str, Any], str]]:
    """What `departures` takes, for every group once."""
    found: dict[int, tuple[Group, Mapping[str, Any], str]] = {}
    for (i, j, _), group in shown.items():
        known = published.lookup(layout.key(i, j))
        if known:
            found.setdefault(id(group), (group, layout.setup_of(group.runs[0], j), known.note))
    return list(found.values())


def _values(group: Group, measure: Measure, rule: Selection) -> dict[int, float]:
    """What the cell shows, by seed; nothing where a seed lacks it, as a mean of the others would
    not be the group's.
    """
    found = judged(group, rule.select, rule.every, rule.by)
    values = {run.seed: measure(run, row, rule) for run, row in found.items()}
    return {} if any(map(math.isnan, values.values())) else values


def _mean(parts: Sequence[dict[int, float]]) -> dict[int, float]:
    """Mean over the parts, by the seeds that all have."""
    seeds = [seed for seed in parts[0] if all(seed in part for part in parts)]
    return {seed: math.fsum(part[seed] for part in parts) / len(parts) for seed in seeds}


def _mixed(layout: Layout, speaking: Mapping[Part, Group]) -> list[str]:
    """Say what of a column's runs is not as in most of them, but for the method and what a line is
    about.
    """
    told: dict[str, None] = {}
    for j, place in enumerate(layout.places):
        for alpha in place.alphas:
            alike = [
                i
                for i, line in enumerate(layout.lines)
                if all(key.startswith("method.") for key in line.where)
            ]
            shown = _once(speaking[i, j, alpha] for i in alike if (i, j, alpha) in speaking)
            for group, words in zip(shown, unlike(shown), strict=True):
                if words:
                    told[
                        f"{group.runs[0].called} on {', '.join(place.heading)} ({', '.join(words)})"
                    ] = None
    return [f"Not alike in what a column should share: {few(told)}."] if told else []


def _compare(filled: Filled, test: str, differs: set[Place]) -> str:
    """Compare the last line with each other one, paired over seeds; collects what differs, and says
    how it went.
    """
    from fedpfl.report.compare import LEAST, paired_test

    last, counts = len(filled.layout.lines) - 1, set()
    for (i, j), own in filled.values.items():
        theirs = filled.values[last, j]
        seeds = sorted(own.keys() & theirs.keys())
        if i != last and len(seeds) > 1:
            counts.add(len(seeds))
            if paired_test([own[seed] - theirs[seed] for seed in seeds], test) < 0.05:
                differs.add((i, j))
    against = filled.layout.lines[last].label
    if not counts:
        return (
            f"No paired test against {against}: no two of its seeds were run with another method."
        )
    name = {"t": "t test", "wilcoxon": "Wilcoxon signed-rank test"}[test]
    few_seeds = f" (never met with fewer than {LEAST[test]})" if min(counts) < LEAST[test] else ""
    numbers = " to ".join(map(str, sorted({min(counts), max(counts)})))
    return f"† differs from {against}: paired {name} over {numbers} seeds, p < 0.05{few_seeds}, not corrected for many."


def _caption(filled: Filled) -> str:
    layout, values, rule = filled.layout, filled.values, filled.rule
    below = "Below: the published value, and own minus published"
    if layout.lines[0].kind != "percent":
        about = f" {layout.about[0].upper()}{layout.about[1:]}." if layout.about else ""
        return f"{layout.title}: own, below it the published number and the difference.{about}"
    which = {
        "accuracy": "mean over clients",
        "accuracy_pooled": "pooled over all clients' test samples",
        "accuracy_worst10": "mean over the worst decile of clients",
        "cohort_after": "right after local training, pooled over the round's clients",
    }.get(rule.accuracy, rule.accuracy)
    when = "the last evaluation of each run"
    if rule.select == "best-checkpoint":
        when = f"the best evaluation of each run (every {rule.every})"
    elif rule.select == "validation":
        when = "each run's first evaluation of the best validation accuracy"
    seeds: dict[str, list[int]] = {}
    for i, line in enumerate(layout.lines):
        own = {j: sorted(values[i, j]) for j in range(len(layout.places)) if values[i, j]}
        one = len({tuple(told) for told in own.values()}) == 1
        seeds |= {
            line.label if one else f"{line.label} on {', '.join(layout.places[j].heading)}": own[j]
            for j in own
        }
    both = any(line.measure is tuned for line in layout.lines) and not rule.accuracy.startswith(
        "cohort_"
    )
    what = f"{which}, before fine-tuning but for FedAvg+FT," if both else which
    return f"{layout.title}. Test accuracy in percent, {what} at {when}; {over_which(seeds)}. {below}; {layout.about}."


def _missing(layout: Layout, whole: Layout, empty: Sequence[Part]) -> tuple[str, ...]:
    """Make the commands that fill the empty cells, as few as say it. whole: with all columns."""
    swept: dict[tuple[str, str], set[str]] = {}
    for i, j in (
        (i, j) for i in range(len(whole.lines)) for j in range(len(whole.places)) if whole.swept
    ):
        for alpha in whole.places[j].alphas:
            words = whole.words(i, j, alpha)
            for key, value in words.items():
                swept.setdefault((words["experiment"], key), set()).add(value)
    jobs: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for part in empty:
        words = layout.words(*part)
        jobs.setdefault(tuple(words), {})[tuple(words.values())] = None
    commands = []
    for keys, found in jobs.items():
        frame = pd.DataFrame([*found], columns=keys)
        for key in keys[1:]:  # jobs that have all else in common become one
            others = [name for name in frame if name != key]
            frame = frame.groupby(others, sort=False)[key].agg(tuple).reset_index()
        for experiment, *chosen in frame[[*keys]].values:
            told = [
                f"{key}={','.join(values)}"
                for key, values in zip(keys[1:], chosen, strict=True)
                if {*values} != swept.get((experiment, key))
            ]
            commands.append(" ".join([f"python -m fedpfl.train experiment={experiment}", *told]))
    return tuple(commands)
