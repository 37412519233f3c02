"""Gather the seeds of each configuration, and say what tells configurations apart."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.identity import result_config
from fedpfl.report import labels
from fedpfl.report.filters import value_when_off
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.text import format_range, join_few

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one configuration that differ by seed only. method: a label unique within data
    set and partition.

    apart: the part of the label that says in what else than the method it differs from most of its
    setting.
    """

    dataset: str
    partition: str
    method: str
    runs: tuple[Run, ...]
    deviations: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        """Data set and partition."""
        return f"{self.dataset}, {self.partition}"

    @property
    def title(self) -> str:
        """Method, data set and partition."""
        return f"{self.method} on {self.setting}"

    @property
    def reported_runs(self) -> tuple[Run, ...]:
        """The runs that speak for the group: the finished ones if any; never a mixture of states."""
        first = min((run.status for run in self.runs), key=STATUSES.index)
        return tuple(run for run in self.runs if run.status == first)

    @property
    def is_complete(self) -> bool:
        """Whether the runs that speak are finished and played every planned round."""
        return all(
            run.status == "finished" and run.rounds_done >= run.rounds_planned
            for run in self.reported_runs
        )

    @property
    def status(self) -> str:
        """`finished`, or what else there is: `2 finished, 1 failed left out`, `running 40/400`,
        `finished 91/400`.
        """
        used = self.reported_runs
        word = used[0].status
        if not self.is_complete:
            word += f" {format_range([run.rounds_done for run in used])}/{used[0].rounds_planned}"
        others = Counter(run.status for run in self.runs if run not in used)
        if not others:
            return word
        left_out = ", ".join(f"{count} {status}" for status, count in others.items())
        return f"{len(used)} {word}, {left_out} left out"


def groups(runs: Iterable[Run]) -> list[Group]:
    """Gather the seeds of each configuration, ordered by data set, partition and method.

    A label names only what tells it apart from others here: `FedOBP (q=0.98)` where there is
    another q, what of the method differs between its configurations, and what else is not as in
    most of its data set and partition: `FedAvg (clients=30)` (see `worlds`).
    """
    settings: dict[tuple[str, str], list[list[Run]]] = defaultdict(list)
    quantiles: dict[str, set[float | None]] = defaultdict(set)
    for alike in group_by(runs, lambda run: run.identity).values():
        for members in _same_data(alike):
            first = members[0]
            settings[first.dataset, first.partition].append(
                sorted(members, key=lambda run: run.seed)
            )
            quantiles[first.method_name].add(first.q)
    found = []
    for (dataset, partition), rivals in settings.items():
        several = [len(quantiles[members[0].method_name]) > 1 for members in rivals]
        names = [
            labels.method_label(own[0].config["method"], q)
            for own, q in zip(rivals, several, strict=True)
        ]
        for members, (label, apart) in zip(
            rivals, _labelled(names, list(map(_values, rivals))), strict=True
        ):
            found.append(Group(dataset, partition, label, tuple(members), apart))
    order = list(METHOD_TITLES)

    def place(group: Group) -> tuple[str, str, int, str]:
        name = group.runs[0].method_name
        # Unknown methods stand before the last one, the method under study.
        at = order.index(name) * 2 if name in order else len(order) * 2 - 3
        return group.dataset, group.partition, at, group.method

    return sorted(found, key=place)


def shared_settings_note(gathered: Sequence[Group]) -> tuple[str, ...]:
    """Say what rows have whose labels do not tell, of all that is not alike among them; a line, or
    none.
    """
    values = [_values(group.runs) for group in gathered]
    by_setting = group_by(zip(gathered, values, strict=True), lambda one: one[0].setting)
    keys = [key for key in _differing(values) if not _in_titles(key)]
    parts = []
    for key in keys:
        where: dict[str, list[str]] = defaultdict(list)
        for setting, members in by_setting.items():
            usual = _majority([_text(config, key) for _, config in members])
            if usual is not ...:
                config = next(one for _, one in members if _text(one, key) == usual)
                where[_word(key, config, keys)].append(setting)
        for text, settings in where.items():
            parts.append(
                text if len(settings) == len(by_setting) else f"{text} ({join_few(settings, '; ')})"
            )
    return (f"Unless a row says otherwise: {', '.join(parts)}.",) if parts else ()


def find_deviations(gathered: Sequence[Group]) -> list[list[str]]:
    """Say of each group in what else than its method it differs from most of them:
    `["clients=30"]`.
    """
    values = [_values(group.runs) for group in gathered]
    return [
        [_word(key, own, keys) for key in keys]
        for keys, own in zip(_minority_keys(values), values, strict=True)
    ]


def canonical_text(value: Any) -> str:
    """Return text that is equal for the same choice: 1 and 1.0 are one, 1 and True are not."""
    return repr(float(value) if type(value) is int and abs(value) < 1 << 53 else value)


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by their key, in their order."""
    gathered: dict[Key, list[Item]] = {}
    for item in items:
        gathered.setdefault(key(item), []).append(item)
    return gathered


def _same_data(alike: Sequence[Run]) -> Iterable[list[Run]]:
    """The runs of one configuration, by the data that they read.

    Older runs recorded these together with their split, which most partitions draw by the seed:
    where every seed has another one, it says nothing about the data.
    """
    older = [run for run in alike if run.fingerprint and "read" not in run.summary]
    drawn = (
        len(older) == len({run.seed for run in older}) == len({run.fingerprint for run in older})
    )
    data = {run: "" if drawn and run in older else run.fingerprint for run in alike}
    # Where a run does not tell what it read, it belongs to the only data that are known, unless it
    # computed the mean or standard deviation: those were once of all samples.
    known, computed = (
        {*data.values()} - {""},
        None in map(alike[0].config["dataset"].get, ("mean", "std"), (0, 0)),
    )
    only = min(known) if len(known) == 1 and not computed else ""
    return group_by(alike, lambda run: data[run] or only).values()


def _labelled(
    names: Sequence[str], values: Sequence[dict[str, Any]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Each configuration's label, and the words in it that are not about the method.

    names: the methods' labels. values: of one data set and partition, by dotted key.
    """
    first, apart = [list[str]() for _ in names], _minority_keys(values)
    for alike in _places(names):
        for key in _differing([values[at] for at in alike]):
            for at in alike:
                first[at] += [key] if key.startswith("method.") and key in values[at] else []

    def words(at: int) -> list[str]:
        keys = first[at] + apart[at]
        return [_word(key, values[at], keys) for key in keys]

    for alike in _places(
        [labels.add_in_brackets(name, words(at)) for at, name in enumerate(names)]
    ):
        for key in _differing(
            [values[at] for at in alike]
        ):  # what is as in most may still be what tells two apart
            for at in alike:
                apart[at] += [key] if key in values[at] and key not in first[at] + apart[at] else []
    return [
        (labels.add_in_brackets(name, words(at)), tuple(words(at)[len(first[at]) :]))
        for at, name in enumerate(names)
    ]


def _values(members: Sequence[Run]) -> dict[str, Any]:
    """What tells a configuration apart, by dotted key."""
    data = next((run.fingerprint for run in members if run.fingerprint), "")
    return dict(flatten_keys(result_config(members[0].config))) | (
        {"data": data[:8]} if data else {}
    )


def _word(key: str, config: dict[str, Any], keys: Sequence[str]) -> str:
    return labels.setting_text(key, {key: value_when_off(key)} | config, keys)


def _in_titles(key: str) -> bool:
    """Whether labels of data sets, partitions and methods tell a key's value."""
    group, _, name = key.partition(".")
    return group in ("method", "dataset", "data") or (
        group == "partition" and name not in labels.SPLIT_DETAILS
    )


def _text(config: dict[str, Any], key: str) -> str | None:
    return canonical_text(config[key]) if key in config else None


def _differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The keys in which the configurations are not all alike."""
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({_text(config, key) for config in configs}) > 1]


def _minority_keys(configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each configuration the keys, but for the method's, in which it is not like most; without
    a majority all.
    """
    found: list[list[str]] = [[] for _ in configs]
    for key in _differing(configs):
        if key.startswith("method."):
            continue
        values = [_text(config, key) for config in configs]
        if key == "data":  # not to have recorded it is no difference
            values = [value or next(filter(None, values)) for value in values]
        usual = _majority(values)
        for place, value in enumerate(values):
            if value != usual and (value is not None or usual is not ...):
                found[place].append(key)

    def goes_without_saying(
        key: str, own: list[str]
    ) -> bool:  # that privacy=none has no privacy.clip
        named = f"{key.partition('.')[0]}.name"
        return key != named and named in own

    return [[key for key in own if not goes_without_saying(key, own)] for own in found]


def _majority(values: Sequence[str | None]) -> Any:
    """The most common value, ... where two are."""
    ranked = Counter(values).most_common(2)
    return ranked[0][0] if len(ranked) == 1 or ranked[0][1] > ranked[1][1] else ...


def _places(names: Sequence[str]) -> list[list[int]]:
    """The places of each name that occurs more than once."""
    return [
        places
        for places in group_by(range(len(names)), names.__getitem__).values()
        if len(places) > 1
    ]
