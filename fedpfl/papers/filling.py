"""Fill a paper's table from runs: `python -m fedpfl.report paper table3 fedselect1`.

Every cell shows the own value above the published one and their difference; what is missing is listed with the command
that fills it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from fedpfl.papers import costs, published
from fedpfl.papers.beside import departures
from fedpfl.papers.tables import LAST, PLANS, SHOWN, Measure, Plan, Rule, quantile, rank, reckoned_hours, tuned
from fedpfl.report.grouping import Group, unlike
from fedpfl.report.table import Cell, Column, Table, mark, number, over_seeds
from fedpfl.report.tables import chosen_on, emptiness, judged, over_which
from fedpfl.report.text import few

Part = tuple[int, int, float | None]
"""Line, column and alpha of what a cell is the mean of."""


def fill(
    name: str,
    gathered: Sequence[Group],
    rule: Rule | None = LAST,
    datasets: Sequence[str] = (),
    test: str = "",
    device: costs.Device = costs.OURS,
) -> Table:
    """Fill table `name` from groups of runs.

    rule: None for the paper's own. datasets: only these columns; by default the paper's, or those of the runs where
    none of the papers' is among them. test: t or wilcoxon, against the last line. device: what hours are reckoned by.
    """
    plan = PLANS[name]
    rule = (rule or plan.rule)._replace(device=device)
    present = {group.runs[0].dataset_name: None for group in gathered}
    if datasets or (present and not present.keys() & SHOWN):
        plan = plan.on(datasets or tuple(present))
    cells_of = [(i, j) for i in range(len(plan.lines)) for j in range(len(plan.places))]
    speaking: dict[Part, Group] = {}
    ambiguous: dict[str, None] = {}
    for i, j in cells_of:
        for alpha in plan.places[j].alphas:
            own = [group for group in gathered if plan.fits(group.runs[0], i, j, alpha)]
            own.sort(key=lambda group: rank(group, plan.setup_of(group.runs[0], j)), reverse=True)
            if own:
                speaking[i, j, alpha] = own[0]
            if len(own) > 1 and plan.lines[i].measure not in (tuned, quantile):
                ambiguous[own[0].title] = None
    parts = {
        part: _values(group, plan.places[part[1]].measure or plan.lines[part[0]].measure, rule)
        for part, group in speaking.items()
    }
    values = {(i, j): _mean([parts.get((i, j, alpha), {}) for alpha in plan.places[j].alphas]) for i, j in cells_of}
    shown = {part: group for part, group in speaking.items() if values[part[:2]]}
    hollow = {part for part, group in speaking.items() if emptiness([group], rule.select, rule.every, rule.by)}
    notes = [*departures(_setups(plan, shown)), *_mixed(plan, speaking)]
    notes += chosen_on(rule.select) if any(line.kind == "percent" for line in plan.lines) else ()
    notes += emptiness(_once(speaking[part] for part in hollow), rule.select, rule.every, rule.by)
    if ambiguous:
        notes.append(
            f"Several configurations fit {few(ambiguous)}; shown is the one nearest to the paper's, then the longest."
        )
    reached = {part[:2]: group.status for part, group in shown.items() if not group.whole}
    if reached:
        told = few(dict.fromkeys(reached.values()))
        notes.append(f"° not all planned rounds: the last evaluation that there is ({told}).")
    if any(line.measure is reckoned_hours for line in plan.lines):
        whose = "ours, not the paper's" if device == costs.OURS else "as given"
        notes.append(f"Hours are reckoned (docs/report.md), for clients of {device}, {whose}.")
    untold = [(one.label, one.untold) for one in plan.lines] + [(one.setting, one.untold) for one in plan.places]
    for why in dict.fromkeys(why for _, why in untold if why):
        notes.append(f"Without own values: {', '.join(what for what, own in untold if own == why)}; {why}.")
    differs: set[tuple[int, int]] = set()
    if test:
        notes.append(_compare(plan, values, test, differs))
    records, cells = [], {}
    for i, j in cells_of:
        line, (dataset, setting) = plan.lines[i], plan.places[j].heading
        known = published.lookup(plan.key(i, j))
        mean, spread = over_seeds(list(values[i, j].values()))
        flag = "°" * ((i, j) in reached) + "†" * ((i, j) in differs)
        theirs, std = (known.value, known.std) if known else (math.nan, math.nan)
        kind = {"percent": "difference", "decimal": "difference", "entries": "change"}.get(line.kind, "")
        apart = number(kind, mean - theirs)
        below = f"{number(line.kind, theirs)} {apart if line.kind != 'exact' else ''}".strip()
        cells[i, j] = Cell(mean, spread if line.kind == "percent" else math.nan, line.kind, flag=flag, below=below)
        record: dict[str, Any] = {"table": name, "row": line.label, "dataset": dataset, "setting": setting}
        record |= {"own": mean, "own_seed_std": spread, "seeds": " ".join(map(str, sorted(values[i, j])))}
        record |= {"unfinished": reached.get((i, j), ""), "published": theirs, "published_std": std}
        records.append(record | {"difference": mean - theirs})
    for j in range(len(plan.places)):
        ranked = [i for i, line in enumerate(plan.lines) if line.kind == "percent"]
        groups_of = [[group for part, group in shown.items() if part[:2] == (i, j)] for i in ranked]
        finished = [bool(own) and all(group.used[0].status == "finished" for group in own) for own in groups_of]
        mark([cells[i, j] for i in ranked], finished)
    for record, at in zip(records, cells_of, strict=True):
        record["rank"] = {"best": 1, "second": 2}.get(cells[at].mark)
    headings = [place.heading for place in plan.places]
    absent = [
        (i, j, alpha)
        for i, j in cells_of
        for alpha in plan.places[j].alphas
        if not (values[i, j] or parts.get((i, j, alpha)) or (i, j, alpha) in hollow)
        if not (plan.lines[i].untold or plan.places[j].untold)
    ]
    return Table(
        "",
        (Column(""), *(Column(setting, "percent", dataset) for dataset, setting in headings)),
        [[Cell(line.label), *(cells[i, j] for j in range(len(headings)))] for i, line in enumerate(plan.lines)],
        pd.DataFrame(records),
        _caption(plan, values, rule),
        tuple(notes),
        below="published",
        commands=_missing(plan, PLANS[name], absent),
    )


def _once(gathered: Iterable[Group]) -> list[Group]:
    return list({id(group): group for group in gathered}.values())


def _setups(plan: Plan, shown: Mapping[Part, Group]) -> list[tuple[Group, Mapping[str, Any], str]]:
    """What `departures` takes, for every group once."""
    found: dict[int, tuple[Group, Mapping[str, Any], str]] = {}
    for (i, j, _), group in shown.items():
        known = published.lookup(plan.key(i, j))
        if known:
            found.setdefault(id(group), (group, plan.setup_of(group.runs[0], j), known.note))
    return list(found.values())


def _values(group: Group, measure: Measure, rule: Rule) -> dict[int, float]:
    """What the cell shows, by seed; nothing where a seed lacks it, as a mean of the others would not be the group's."""
    found = judged(group, rule.select, rule.every, rule.by)
    values = {run.seed: measure(run, row, rule) for run, row in found.items()}
    return {} if any(map(math.isnan, values.values())) else values


def _mean(parts: Sequence[dict[int, float]]) -> dict[int, float]:
    """Mean over the parts, by the seeds that all have."""
    seeds = [seed for seed in parts[0] if all(seed in part for part in parts)]
    return {seed: math.fsum(part[seed] for part in parts) / len(parts) for seed in seeds}


def _mixed(plan: Plan, speaking: Mapping[Part, Group]) -> list[str]:
    """Say what of a column's runs is not as in most of them, but for the method and what a line is about."""
    told: dict[str, None] = {}
    for j, place in enumerate(plan.places):
        for alpha in place.alphas:
            alike = [i for i, line in enumerate(plan.lines) if all(key.startswith("method.") for key in line.where)]
            shown = _once(speaking[i, j, alpha] for i in alike if (i, j, alpha) in speaking)
            for group, words in zip(shown, unlike(shown), strict=True):
                if words:
                    told[f"{group.runs[0].called} on {', '.join(place.heading)} ({', '.join(words)})"] = None
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
    below = "Below: the published value, and own minus published"
    if plan.lines[0].kind != "percent":
        note = f" {plan.about[0].upper()}{plan.about[1:]}." * (plan.setup is not None)
        return f"{plan.title}: own, below it the published number and the difference.{note}"
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
    for i, line in enumerate(plan.lines):
        own = {j: sorted(values[i, j]) for j in range(len(plan.places)) if values[i, j]}
        one = len({tuple(told) for told in own.values()}) == 1
        seeds |= {line.label if one else f"{line.label} on {', '.join(plan.places[j].heading)}": own[j] for j in own}
    both = any(line.measure is tuned for line in plan.lines) and not rule.accuracy.startswith("cohort_")
    what = which + ", before fine-tuning but for FedAvg+FT," * both
    return f"{plan.title}. Test accuracy in percent, {what} at {when}; {over_which(seeds)}. {below}; {plan.about}."


def _missing(plan: Plan, whole: Plan, empty: Sequence[Part]) -> tuple[str, ...]:
    """Make the commands that fill the empty cells, as few as say it. whole: with all columns."""
    swept: dict[tuple[str, str], set[str]] = {}
    for i, j in ((i, j) for i in range(len(whole.lines)) for j in range(len(whole.places)) if whole.swept):
        for alpha in whole.places[j].alphas:
            words = whole.words(i, j, alpha)
            for key, value in words.items():
                swept.setdefault((words["experiment"], key), set()).add(value)
    jobs: dict[tuple[str, ...], dict[tuple[str, ...], None]] = {}
    for part in empty:
        words = plan.words(*part)
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
