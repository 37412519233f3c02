"""Two configurations side by side: `python -m fedpfl.report compare A B`; see `--help`."""

from __future__ import annotations

import argparse
import csv
import io
import math
import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd

from fedpfl.errors import FedpflError
from fedpfl.identity import essence, identity
from fedpfl.report import layout
from fedpfl.report.figures import LABELS, finish, look, over_seeds, panels, style, told
from fedpfl.report.layout import Field
from fedpfl.report.load import Group, Run, flat, groups, runs, to_stderr
from fedpfl.report.text import csv_cell
from fedpfl.report.text import markdown as escaped

FORMATS = ("terminal", "markdown", "csv")
TESTS = ("wilcoxon", "t")
LEAST = {"wilcoxon": 6, "t": 3}
"""Pairs from which a test is made: with five, Wilcoxon's smallest two-sided p is 2/2^5 = 0.06."""

BEFORE, AFTER, COST = "Before fine-tuning, at the last evaluation", "After fine-tuning", "Training and cost"
_WORDS = {
    "accuracy": ("mean over clients, %", "percent"),
    "accuracy_pooled": ("pooled, %", "percent"),
    "accuracy_std": ("std over clients, %", "percent"),
    "accuracy_worst10": ("worst 10%, %", "percent"),
    "loss": ("test loss", "short"),
}
FINAL = {
    **{name: (BEFORE, *words) for name, words in _WORDS.items()},
    **{f"ft_{name}": (AFTER, *words) for name, words in _WORDS.items()},
    "train_loss": (COST, "cohort's loss", "short"),
    "values_down": (COST, "values down", "short"),
    "values_up": (COST, "values up", "short"),
    "bits_down": (COST, "bits down", "short"),
    "bits_up": (COST, "bits up", "short"),
    "seconds": (COST, "seconds per round", "short"),
    "hours": (COST, "hours", "short"),
}
"""What is compared at the end: in which table, how it is called, and how its numbers are written."""
_TRAFFIC = ("values_down", "values_up", "bits_down", "bits_up")


@dataclass(frozen=True)
class Difference:
    """A key in which A and B differ; None where it is not set. matters: whether it can change results."""

    key: str
    a: str | None
    b: str | None
    matters: bool = True


@dataclass(frozen=True)
class Measure:
    """One number of every seed of A and of B. kind: percent or short. tested: whether a p value means anything."""

    name: str
    words: str
    kind: str
    a: dict[int, float]
    b: dict[int, float]
    tested: bool = True

    @cached_property
    def mean_a(self) -> float:
        """Mean over the seeds of A, nan without any."""
        return _mean(self.a.values())

    @cached_property
    def mean_b(self) -> float:
        """Mean over the seeds of B, nan without any."""
        return _mean(self.b.values())

    @property
    def std_a(self) -> float:
        """Sample standard deviation over the seeds of A, nan with fewer than two."""
        return _std(self.a.values())

    @property
    def std_b(self) -> float:
        """Sample standard deviation over the seeds of B, nan with fewer than two."""
        return _std(self.b.values())

    @property
    def difference(self) -> float:
        """B - A of the means."""
        return self.mean_b - self.mean_a

    @property
    def pairs(self) -> list[float]:
        """B - A for every seed that both have, by seed."""
        return [self.b[seed] - self.a[seed] for seed in sorted(self.a.keys() & self.b.keys())]

    @property
    def paired(self) -> tuple[float, float]:
        """Mean of the pairs' differences and its standard error, nan with fewer than one and two pairs."""
        return _mean(self.pairs), _std(self.pairs) / math.sqrt(max(1, len(self.pairs)))

    def p(self, test: str | None) -> float:
        """Two-sided p value of the paired test over the seeds that both have, nan without (see `paired_test`)."""
        if not self.tested or test is None:
            return math.nan
        seeds = sorted(self.a.keys() & self.b.keys())
        return paired_test([self.a[seed] for seed in seeds], [self.b[seed] for seed in seeds], test)


@dataclass(frozen=True)
class Clients:
    """Of one pair of runs: how many clients are better in A, equal, and better in B, by one accuracy.

    seed: `3`, or `1 | 2` where the runs have different ones.
    """

    seed: str
    name: str
    a: int
    equal: int
    b: int


@dataclass(frozen=True, eq=False)
class Comparison:
    """Everything that is told of A and B. curve: `metric` at up to five common evaluations, by round."""

    a: Group
    b: Group
    settings: tuple[Difference, ...]
    environment: tuple[Difference, ...]
    final: tuple[Measure, ...]
    metric: str
    curve: dict[int, Measure]
    clients: tuple[Clients, ...]
    notes: tuple[str, ...]
    test: str | None


def paired_test(a: Sequence[float], b: Sequence[float], test: str) -> float:
    """Two-sided p value that pairs of numbers, such as one seed's accuracies in A and in B, differ by chance only.

    test: of TESTS. Equal pairs say nothing to Wilcoxon's test and are left out there. nan with fewer pairs than LEAST,
    and for `t` where all pairs differ by the same, which leaves no spread to judge by.
    """
    pairs = [right - left for left, right in zip(a, b, strict=True)]
    if test == "wilcoxon":
        pairs = [pair for pair in pairs if pair]
    if len(pairs) < LEAST[test]:
        return math.nan
    from scipy import stats  # slow to load

    if test == "wilcoxon":
        return float(stats.wilcoxon(pairs).pvalue)
    # Equal differences have a spread of rounding only.
    if _std(pairs) <= 1e-12 * max(map(abs, pairs)):
        return math.nan
    return float(stats.ttest_1samp(pairs, 0.0).pvalue)


def side(path: Path) -> Group:
    """The one configuration below a path: a run directory, or a folder that holds its seeds.

    Raises FedpflError where there is none, or more than one.
    """
    found = groups(runs(path))
    if not found:
        raise FedpflError(f"no readable run below {path}; name a run directory or the folder of a configuration")
    if len(found) > 1:
        shown = [f"{group.method} on {group.dataset}, {group.partition} ({_place(group.runs)})" for group in found]
        told = "; ".join(shown[:4]) + (f"; and {len(shown) - 4} more" if len(shown) > 4 else "")
        raise FedpflError(f"{path} holds {len(found)} configurations, name one of them: {told}")
    return found[0]


def compare(a: Group, b: Group, test: str | None = "t", metric: str = "accuracy") -> Comparison:
    """Everything about two configurations, from the runs that speak for each (see `Group.used`).

    test: of the paired differences over seeds, of TESTS, None for none. metric: of the curve, a column of rounds.csv.
    """
    labelled = {id(run): group for group in groups([*a.runs, *b.runs]) for run in group.runs}
    if identity(a.runs[0].config) != identity(b.runs[0].config):
        a, b = labelled[id(a.runs[0])], labelled[id(b.runs[0])]
    clients, strange = _clients(a, b)
    final = tuple(_final(a, b))
    return Comparison(
        a,
        b,
        tuple(_settings(a.used, b.used)),
        tuple(_environment(a.used, b.used)),
        final,
        metric,
        _curve(a, b, metric),
        clients,
        (*_about_runs(a, b), *strange, *_about_seeds(a, b, test, final)),
        test,
    )


def figure(compared: Comparison, path: Path) -> None:
    """Draw both curves of the metric with bands of one standard deviation over seeds.

    path: ends in .png or .pdf. Raises FedpflError where it does not.
    """
    if path.suffix not in (".png", ".pdf"):
        raise FedpflError(f"--out {path}: must end in .png or .pdf")
    with style():
        drawn, [ax] = panels(1, 1)
        tasks = dict.fromkeys(f"{group.dataset}, {group.partition}" for group in (compared.a, compared.b))
        ax.set_title(told(next(iter(tasks))) if len(tasks) == 1 else "")
        for place, (letter, group) in enumerate((("A", compared.a), ("B", compared.b))):
            over = over_seeds(group, compared.metric)
            if over.empty:
                continue
            own = look(place)
            step = max(1, len(over) // 10)
            name = group.method if len(tasks) == 1 else _title(group)
            ax.plot(over.index, over["mean"], label=told(f"{letter}: {name}"), markevery=step, zorder=3, **own)
            band = over[over["count"] > 1]
            if len(band):
                low, high = band["mean"] - band["std"], band["mean"] + band["std"]
                ax.fill_between(band.index, low, high, color=own["color"], alpha=0.15, linewidth=0, zorder=2)
        ax.set(xlabel="round", ylabel=LABELS.get(compared.metric, compared.metric))
        ax.set_xlim(left=0)
        finish(drawn, [ax])
        _save(drawn, path)


def render(compared: Comparison, form: str = "terminal", width: int | None = None) -> str:
    """The comparison in one of FORMATS. width: of the terminal, in characters; by default as wide as needed."""
    if form == "csv":
        return _csv(compared)
    parts = [(words, fields, rows) for words, fields, rows in _sections(compared) if rows]
    if form == "markdown":
        text = [f"### {escaped(words)}\n\n{layout.markdown(fields, rows)}" for words, fields, rows in parts]
        return "\n".join([*text, *(escaped(note) + "\n" for note in compared.notes)])
    text = [_terminal(words, fields, rows, width) for words, fields, rows in parts]
    return "\n".join([*text, "".join(layout.paragraph(note, width) for note in compared.notes)])


def main(words: Sequence[str]) -> int:
    """Run the command; returns the exit code. Raises FedpflError for a mistake of the user's."""
    options = _parser().parse_args(words)
    if options.out and options.out.suffix not in (".png", ".pdf"):
        raise FedpflError(f"--out {options.out}: must end in .png or .pdf")
    a, b = side(options.a), side(options.b)
    if {run.path.resolve() for run in a.runs} & {run.path.resolve() for run in b.runs}:
        raise FedpflError(f"{options.a} and {options.b} hold the same runs; name two different ones")
    compared = compare(a, b, None if options.test == "none" else options.test, options.metric)
    print(render(compared, options.format, layout.screen()), end="")
    if options.out:
        figure(compared, options.out)
        to_stderr(f"wrote {options.out}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m fedpfl.report compare",
        description="Two configurations side by side: settings, final numbers over seeds, curves, clients.",
    )
    parser.add_argument("a", metavar="A", type=Path, help="a run directory, or a folder that holds the seeds of one")
    parser.add_argument("b", metavar="B", type=Path, help="the same")
    parser.add_argument(
        "--test", choices=(*TESTS, "none"), default="t", help="paired over seeds, two-sided; default: t"
    )
    parser.add_argument("--metric", choices=LABELS, default="accuracy", help="of the curves; default: accuracy")
    parser.add_argument("--format", choices=FORMATS, default="terminal", help="default: terminal")
    parser.add_argument("--out", type=Path, metavar="FILE", help="draw the curves into this .png or .pdf")
    return parser


def _settings(a: Sequence[Run], b: Sequence[Run]) -> list[Difference]:
    """What can change results comes first."""
    ours, theirs = (dict(flat(essence(members[0].config))) for members in (a, b))
    found = [
        Difference(key, left, right, not _same(ours.get(key), theirs.get(key)))
        for key, left, right in _different([dict(flat(run.config)) for run in a], [dict(flat(run.config)) for run in b])
        if key != "seed"
    ]
    return sorted(found, key=lambda difference: not difference.matters)


def _environment(a: Sequence[Run], b: Sequence[Run]) -> list[Difference]:
    recorded = [[dict(flat(run.environment)) for run in members] for members in (a, b)]
    return [Difference(*told) for told in _different(*recorded)]


def _different(a: Sequence[dict[str, Any]], b: Sequence[dict[str, Any]]) -> list[tuple[str, str | None, str | None]]:
    """Keys whose values are not the same; where one side's runs differ among themselves, all its values."""
    keys = dict.fromkeys(key for values in (*a, *b) for key in values)
    told = []
    for key in keys:
        left, right = _values(a, key), _values(b, key)
        if len(left) != len(right) or not all(any(_same(one, other) for other in right) for one in left):
            told.append((key, _shown(left), _shown(right)))
    return told


_UNSET = object()


def _values(members: Sequence[dict[str, Any]], key: str) -> list[Any]:
    """The different values of a key."""
    different: list[Any] = []
    for values in members:
        value = values.get(key, _UNSET)
        if not any(_same(value, other) for other in different):
            different.append(value)
    return different


def _shown(values: list[Any]) -> str | None:
    texts = ["not set" if value is _UNSET else str(value) for value in values]
    return None if values == [_UNSET] else " / ".join(texts)


def _same(one: Any, other: Any) -> bool:
    """1 and 1.0 are the same choice, 1 and True are not."""
    return bool(one == other) and isinstance(one, bool) == isinstance(other, bool)


def _final(a: Group, b: Group) -> list[Measure]:
    found = []
    for name, (table, words, kind) in FINAL.items():
        of_a, of_b = ({run.seed: _number(run, name) for run in group.used} for group in (a, b))
        # As in tables, a mean that some seed lacks is no mean of the configuration.
        of_a, of_b = (values if not any(map(math.isnan, values.values())) else {} for values in (of_a, of_b))
        if of_a or of_b:
            found.append(Measure(name, words, kind, of_a, of_b, table != COST))
    return found


def _number(run: Run, name: str) -> float:
    """One run's final number, nan where it is not recorded."""
    if name == "hours":
        return run.fact("hours") or math.nan
    if name not in run.rounds:
        return math.nan
    if name in _TRAFFIC:
        return run.per_client(name)
    if name == "seconds":
        return float(run.rounds[name].median())
    if name == "train_loss":
        return float(run.rounds[name].iloc[-1])
    return float(run.evaluations[name].iloc[-1]) if len(run.evaluations) else math.nan


def _curve(a: Group, b: Group, metric: str) -> dict[int, Measure]:
    """The metric at the first, quartile and last of the evaluations that every run has."""
    members = [_having(group, metric) for group in (a, b)]
    if any(len(own) < len(group.used) for own, group in zip(members, (a, b), strict=True)):
        return {}
    series = [{run.seed: run.rounds.set_index("round")[metric].dropna() for run in own} for own in members]
    common = sorted(set.intersection(*(set(map(int, one.index)) for own in series for one in own.values())))
    chosen = sorted({common[round(quarter * (len(common) - 1) / 4)] for quarter in range(5)}) if common else []

    def at(number: int) -> Measure:
        of_a, of_b = ({seed: float(one.loc[number]) for seed, one in own.items()} for own in series)
        return Measure(metric, str(number), "short" if "loss" in metric else "percent", of_a, of_b)

    return {number: at(number) for number in chosen}


def _having(group: Group, metric: str) -> list[Run]:
    return [run for run in group.used if metric in run.rounds]


def _clients(a: Group, b: Group) -> tuple[tuple[Clients, ...], list[str]]:
    """The counts of every pair of runs with the same partition, and why others have none."""
    of_a, of_b = ({run.seed: run for run in group.used} for group in (a, b))
    pairs = [(str(seed), of_a[seed], of_b[seed]) for seed in sorted(of_a.keys() & of_b.keys())]
    if not pairs and len(of_a) == len(of_b) == 1:
        one, other = a.used[0], b.used[0]
        pairs = [(f"{one.seed} | {other.seed}", one, other)]
    counts: list[Clients] = []
    other_clients: list[str] = []
    strange: list[str] = []
    for seed, one, other in pairs:
        try:
            left, right = one.clients, other.clients
        except FedpflError as error:
            strange.append(f"Clients of seed {seed} are not compared: {error}")
            continue
        if not _same_partition(left, right):
            other_clients.append(seed)
            continue
        for name in ("accuracy", "ft_accuracy"):
            if name in left and name in right:
                gained = (right[name] - left[name]).dropna()
                silent = int(((left["test"] > 0) & (right[name] - left[name]).isna()).sum()) if "test" in left else 0
                if silent:
                    strange.append(
                        f"Seed {seed}: {silent} clients with test samples lack {name} in A or in B; they do not count."
                    )
                # Accuracies are ratios of counts: what differs, differs by far more than rounding.
                better, worse = int((gained > 1e-9).sum()), int((gained < -1e-9).sum())
                counts.append(Clients(seed, name, worse, len(gained) - better - worse, better))
    if other_clients:
        strange.append(
            f"Clients of seed {', '.join(other_clients)} are not compared: their label counts differ, so the "
            "partitions do."
        )
    return tuple(counts), strange


def _same_partition(left: pd.DataFrame, right: pd.DataFrame) -> bool:
    """Whether the clients have equally many samples of each class and in each part."""
    told, theirs = (
        sorted(name for name in frame if name in ("client", "train", "validation", "test") or name.startswith("label_"))
        for frame in (left, right)
    )
    return told == theirs and "client" in told and left[told].equals(right[told])


def _about_runs(a: Group, b: Group) -> list[str]:
    """What a reader must know of the runs."""
    told = []
    for letter, group in (("A", a), ("B", b)):
        if group.status != "finished":
            told.append(f"{letter} is not simply finished: {group.status}.")
    reached = [
        sorted({int(run.evaluations["round"].max()) for run in group.used if len(run.evaluations)}) for group in (a, b)
    ]
    if reached[0] != reached[1] or max(map(len, reached)) > 1:
        words = [", ".join(map(str, rounds)) or "none" for rounds in reached]
        told.append(f"The final numbers are of different rounds: A of {words[0]}, B of {words[1]}.")
    prints = [{run.fingerprint for run in group.runs} - {""} for group in (a, b)]
    if all(prints) and prints[0] != prints[1]:
        told.append("A and B did not read the same data: their fingerprints differ.")
    if (a.dataset, a.partition) != (b.dataset, b.partition):
        told.append("A and B are different tasks (data set or partition): their difference is not a method's.")
    return told


def _about_seeds(a: Group, b: Group, test: str | None, final: Sequence[Measure]) -> list[str]:
    of_a, of_b = ({run.seed for run in group.used} for group in (a, b))
    both = len(of_a & of_b)
    told = ["Values and bits: per client of the cohort and round, mean over rounds; seconds: median over rounds."]
    if max(len(of_a), len(of_b)) > 1:
        told[0] += " In brackets: sample standard deviation over seeds."
    if both > 1:
        told[0] += " ± error: standard error of the mean of B - A over the seeds that both have."
    told += [
        f"Only in {letter}: seeds {', '.join(map(str, sorted(own - other)))}."
        for letter, own, other in (("A", of_a, of_b), ("B", of_b, of_a))
        if own - other
    ]
    if both == 0:
        told.append("No seed is in both, so nothing can be paired, and no test is made.")
    elif both == 1:
        told.append(
            "One seed is in both: one pair has no standard error, and says nothing about how another seed would end."
        )
    elif test and both < LEAST[test]:
        why = f"from {LEAST[test]} pairs on one is made"
        if test == "wilcoxon":
            why = f"with {both} its p cannot fall below {2 / 2**both:.3g}, from {LEAST[test]} on it can fall below 0.05"
        told.append(f"{both} pairs of seeds are too few for {_TOLD[test]}: {why}.")
    elif test:
        told.append(f"p: {_TOLD[test]} of the {both} pairs of seeds, two-sided, not corrected for the number of rows.")
        if test == "wilcoxon" and any(m.tested and sum(map(bool, m.pairs)) < LEAST[test] for m in final):
            told.append("Where fewer than 6 pairs differ at all, there is no p.")
    return told


_TOLD = {"wilcoxon": "Wilcoxon's signed-rank test", "t": "the paired t-test, which takes the differences as normal,"}


def _sections(compared: Comparison) -> list[tuple[str, list[Field], list[list[str]]]]:
    """Title, columns and rows of every table."""
    sides = (("A", compared.a), ("B", compared.b))
    number = [Field("A", True), Field("B", True), Field("B - A", True)]
    of_a, of_b = ({run.seed for run in group.used} for _, group in sides)
    # Over the same seeds the paired difference is that of the means.
    alike = of_a == of_b
    number += [Field("± error", True)] if alike else [Field("paired", True), Field("± error", True)]
    columns = {"accuracy": "before", "ft_accuracy": "fine-tuned"}
    return [
        (
            "Runs",
            [Field(""), Field("method"), Field("data set"), Field("partition"), Field("seeds"), Field("path")],
            [
                [letter, group.method, group.dataset, group.partition, _seeds(group), str(_place(group.runs))]
                for letter, group in sides
            ],
        ),
        (
            "Configuration: what differs",
            [Field("key"), Field("A"), Field("B"), Field("")],
            [
                [one.key, _cell(one.a), _cell(one.b), "" if one.matters else "cannot change results"]
                for one in compared.settings
            ],
        ),
        (
            "Environment: what differs",
            [Field("what"), Field("A"), Field("B")],
            [[one.key, _cell(one.a), _cell(one.b)] for one in compared.environment],
        ),
        *(
            (
                table,
                [Field(""), *number, Field("p", True)],
                [_row(one, compared.test, alike) for one in compared.final if FINAL[one.name][0] == table],
            )
            for table in (BEFORE, AFTER, COST)
        ),
        (
            f"Over rounds: {LABELS.get(compared.metric, compared.metric)}",
            [Field("round", True), *number],
            [_row(one, None, alike)[:-1] for one in compared.curve.values()],
        ),
        (
            "Clients that are better, by their own accuracy",
            [Field("seed"), Field(""), Field("in A", True), Field("equal", True), Field("in B", True)],
            [
                [one.seed, columns[one.name], str(one.a), str(one.equal), str(one.b)]
                for one in _totalled(compared.clients)
            ],
        ),
    ]


def _totalled(counts: Sequence[Clients]) -> list[Clients]:
    """With the sums over seeds, where there are several."""
    sums = []
    for name in dict.fromkeys(one.name for one in counts):
        own = [one for one in counts if one.name == name]
        if len(own) > 1:
            total = (sum(one.a for one in own), sum(one.equal for one in own), sum(one.b for one in own))
            sums.append(Clients("all", name, *total))
    return [*counts, *sums]


def _terminal(words: str, fields: list[Field], rows: list[list[str]], width: int | None) -> str:
    """Where there is no room for paths, they stand below their rows."""
    if fields[-1].heading == "path" and not layout.fits(fields, rows, width):
        return layout.terminal(fields[:-1], [row[:-1] for row in rows], words, width, [row[-1] for row in rows])
    return layout.terminal(fields, rows, words, width)


def _row(one: Measure, test: str | None, alike: bool) -> list[str]:
    """alike: the seeds of A and B are the same."""
    paired, error = one.paired
    p = one.p(test)
    return [
        one.words,
        _spread(one.kind, one.mean_a, one.std_a),
        _spread(one.kind, one.mean_b, one.std_b),
        _signed(one.kind, one.difference),
        *([] if alike else [_signed(one.kind, paired) if len(one.pairs) > 1 else ""]),
        layout.percent(error) if one.kind == "percent" else layout.short(error, 2),
        "" if math.isnan(p) else "<0.001" if p < 0.001 else f"{p:.3f}",
    ]


def _spread(kind: str, value: float, spread: float) -> str:
    if kind == "percent":
        return layout.percent(value, spread)
    # What is the same for all seeds, such as traffic, needs no spread.
    return layout.short(value) + (f"({layout.short(spread, 2)})" if spread > 0 else "")


def _signed(kind: str, value: float) -> str:
    if math.isnan(value):
        return ""
    if kind == "percent":
        return f"{round(value, 2) + 0.0:+.2f}"  # no negative zero
    return ("-" if value < 0 else "+" if value > 0 else "") + layout.short(abs(value), 3)


def _cell(value: str | None) -> str:
    return "(not set)" if value is None else value


def _seeds(group: Group) -> str:
    return ", ".join(str(run.seed) for run in group.used) + ("" if group.status == "finished" else f"; {group.status}")


def _title(group: Group) -> str:
    return f"{group.method}, {group.dataset}, {group.partition}"


def _place(members: Sequence[Run]) -> Path:
    """The run's directory, or the deepest folder that holds all runs."""
    return Path(os.path.commonpath([run.path for run in members]))


def _csv(compared: Comparison) -> str:
    """One table for all: a section's rows fill the columns that they have."""
    names = ("section", "what", "at", "a", "a_seed_std", "a_seeds", "b", "b_seed_std", "b_seeds", "difference", "pairs")
    rows: list[dict[str, Any]] = []
    for letter, group in (("a", compared.a), ("b", compared.b)):
        seeds = " ".join(str(run.seed) for run in group.used)
        where = {letter: str(_place(group.runs)), f"{letter}_seeds": seeds, "note": group.status}
        rows.append({"section": "run", "what": _title(group)} | where)
    for section, differing in (("setting", compared.settings), ("environment", compared.environment)):
        for one in differing:
            note = "" if one.matters else "cannot change results"
            rows.append({"section": section, "what": one.key, "a": one.a, "b": one.b, "note": note})
    rows += [{"section": "final"} | _numbers(one, compared.test) for one in compared.final]
    rows += [{"section": "curve", "at": number} | _numbers(one, None) for number, one in compared.curve.items()]
    rows += [
        {"section": "clients", "what": one.name, "at": one.seed, "a": one.a, "equal": one.equal, "b": one.b}
        for one in compared.clients
    ]
    rows += [{"section": "note", "note": note} for note in compared.notes]
    buffer = io.StringIO()
    writer = csv.DictWriter(buffer, [*names, "paired", "paired_error", "p", "equal", "note"], lineterminator="\n")
    writer.writeheader()
    writer.writerows({key: csv_cell(value) for key, value in row.items()} for row in rows)
    return buffer.getvalue()


def _numbers(one: Measure, test: str | None) -> dict[str, Any]:
    paired, error = one.paired
    values: dict[str, Any] = {"a": one.mean_a, "a_seed_std": one.std_a, "b": one.mean_b, "b_seed_std": one.std_b}
    values |= {"difference": one.difference, "paired": paired, "paired_error": error, "p": one.p(test)}
    seeds = {"a_seeds": " ".join(map(str, sorted(one.a))), "b_seeds": " ".join(map(str, sorted(one.b)))}
    filled = {name: None if math.isnan(value) else value for name, value in values.items()}
    return {"what": one.name, "pairs": len(one.pairs), **filled, **seeds}


def _mean(values: Iterable[float]) -> float:
    every = list(values)
    return math.fsum(every) / len(every) if every else math.nan


def _std(values: Iterable[float]) -> float:
    """Sample standard deviation."""
    every = list(values)
    if len(every) < 2:
        return math.nan
    mean = _mean(every)
    return math.sqrt(math.fsum((value - mean) ** 2 for value in every) / (len(every) - 1))


def _save(drawn: Any, path: Path) -> None:
    """The old file or the new one, never half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".compare-") as folder:
        # No date inside, so that equal runs give equal files.
        metadata = {"CreationDate": None} if path.suffix == ".pdf" else None
        drawn.savefig(Path(folder) / path.name, metadata=metadata)
        (Path(folder) / path.name).replace(path)
