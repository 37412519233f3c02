"""Group the runs of each configuration, and say in which settings configurations differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import result_config
from fedpfl.ground.records import Record, Values
from fedpfl.ground.tasks import CLASSIFICATION, Task, require_classification
from fedpfl.report import labels
from fedpfl.report.filters import value_when_off
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.text import format_range, join_few

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def common_task(members: Iterable[Run | Group]) -> Task:
    """Return the task of all runs or configurations; classification without any.

    Raises:
        FedpflError: they are of several tasks, and scores of these are not comparable.
    """
    tasks = {one.task.name: one.task for one in members} or {CLASSIFICATION.name: CLASSIFICATION}
    if len(tasks) > 1:
        raise FedpflError(
            f"these runs are of several tasks ({', '.join(sorted(tasks))}), which have no score in "
            f"common; choose some with task={min(tasks)}"
        )
    return next(iter(tasks.values()))


def require_classes(shown_groups: Iterable[Group], table: str) -> None:
    """Raise FedpflError where configurations are of a task that a table is not made for."""
    task = common_task(shown_groups)
    require_classification(task, table, "it is about accuracies")


def task_metric(metric: str, task: Task) -> str:
    """Return the column for a task of what classification has under `metric`: rmse for accuracy."""
    if task is CLASSIFICATION:
        return metric
    return metric.replace(CLASSIFICATION.score, task.score)


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one configuration, which differ by seed only.

    Attributes:
        dataset: the data set's name for people.
        partition: the partition's name for people, and under which attack, defence and shift.
        method: a label unique within data set and partition.
        runs: all runs, by seed.
        deviations: the settings in the label that are not the method's, in which it differs from
            most configurations of its data set and partition.
    """

    dataset: str
    partition: str
    method: str
    runs: tuple[Run, ...]
    deviations: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        """Return data set and partition."""
        return f"{self.dataset}, {self.partition}"

    @property
    def title(self) -> str:
        """Return method, data set and partition."""
        return f"{self.method} on {self.setting}"

    @property
    def task(self) -> Task:
        """Return the task of its labels."""
        return self.runs[0].task

    @property
    def method_name(self) -> str:
        """Return the method's name in the configuration."""
        return self.runs[0].method_name

    @property
    def method_title(self) -> str:
        """Return the method's name for people, without its settings."""
        return self.runs[0].method_title

    @property
    def is_upper_line(self) -> bool:
        """True if it trains on all samples together, which no federation could."""
        return self.method_name == "centralized"

    @property
    def reported_runs(self) -> tuple[Run, ...]:
        """Return the finished runs if any, else those of one other status, never a mixture."""
        # STATUSES begins with `finished`.
        reported_status = min((run.status for run in self.runs), key=STATUSES.index)
        return tuple(run for run in self.runs if run.status == reported_status)

    @property
    def is_complete(self) -> bool:
        """True if the reported runs are finished and have all planned rounds."""
        return all(
            run.status == "finished" and run.rounds_done >= run.rounds_planned
            for run in self.reported_runs
        )

    @property
    def status(self) -> str:
        """Return `finished`, `running 40/400`, or such as `2 finished, 1 failed left out`."""
        reported = self.reported_runs
        text = reported[0].status
        if not self.is_complete:
            progress = format_range([run.rounds_done for run in reported])
            text += f" {progress}/{reported[0].rounds_planned}"
        other_counts = Counter(run.status for run in self.runs if run not in reported)
        if not other_counts:
            return text
        left_out = ", ".join(f"{count} {status}" for status, count in other_counts.items())
        return f"{len(reported)} {text}, {left_out} left out"


def groups(runs: Iterable[Run]) -> list[Group]:
    """Group the seeds of each configuration, ordered by data set, partition and method.

    A label names only settings that distinguish it here: `FedOBP (q=0.98)` where there is
    another q, settings of the method that differ between its configurations, and other settings
    that are not as in most of its data set and partition: `FedAvg (clients=30)` (see
    `shared_settings_note`).
    """
    # ---- Step 1: runs that differ by seed only belong together.
    configurations: dict[tuple[str, str], list[list[Run]]] = defaultdict(list)
    quantiles: dict[str, set[float | None]] = defaultdict(set)
    for same_identity in group_by(runs, lambda run: run.identity).values():
        for members in _split_by_data(same_identity):
            members.sort(key=lambda run: run.seed)
            configurations[members[0].dataset, members[0].partition].append(members)
            quantiles[members[0].method_name].add(members[0].q)

    # ---- Step 2: a label within each data set and partition.
    all_groups = []
    for (dataset, partition), rivals in configurations.items():
        names = []
        for members in rivals:
            has_several_quantiles = len(quantiles[members[0].method_name]) > 1
            example = members[0]
            method = example.config["method"]
            names.append(labels.method_label(method, has_several_quantiles, example.own_title))
        labelled = zip(
            rivals, *_unique_labels(names, list(map(_list_settings, rivals))), strict=True
        )
        for members, label, deviations in labelled:
            all_groups.append(Group(dataset, partition, label, tuple(members), deviations))

    # ---- Step 3: the order of tables. Unknown methods stand before the last, the one under study.
    positions = {name: 2 * index for index, name in enumerate(METHOD_TITLES)}
    before_last = 2 * len(positions) - 3

    def sort_key(group: Group) -> tuple[str, str, int, str]:
        position = positions.get(group.method_name, before_last)
        return group.dataset, group.partition, position, group.method

    return sorted(all_groups, key=sort_key)


def shared_settings_note(shown_groups: Sequence[Group]) -> tuple[str, ...]:
    """Name the differing settings that the labels of rows leave out.

    Returns:
        One line, or none.
    """
    differing_keys = _differing_keys([_list_settings(group.runs) for group in shown_groups])
    keys = [key for key in differing_keys if not _is_in_titles(key)]
    by_setting = group_by(shown_groups, lambda group: group.setting)
    parts = []
    for key in keys:
        # ---- Step: the value that most rows of each data set and partition have.
        settings_by_text: dict[str, list[str]] = defaultdict(list)
        for setting, members in by_setting.items():
            values = [_list_settings(group.runs) for group in members]
            texts = [_value_text(one, key) for one in values]
            majority = _find_majority(texts)
            if majority is ... or (majority is None and _is_implied(key, differing_keys)):
                continue
            example = values[texts.index(majority)]
            settings_by_text[_setting_text(key, example, keys)].append(setting)

        # ---- Step: where not everywhere the same, name the data sets and partitions.
        for text, names in settings_by_text.items():
            is_everywhere = len(names) == len(by_setting)
            parts.append(text if is_everywhere else f"{text} ({join_few(names, '; ')})")
    return (f"Unless a row says otherwise: {', '.join(parts)}.",) if parts else ()


def canonical_text(value: Any) -> str:
    """Return text that is equal for the same choice: 1 and 1.0 are one, 1 and True are not."""
    # Beyond 2^53 not every whole number is a float. A bool is no int of this type.
    if type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    return repr(value)


def differing_values(a: Values, b: Values) -> dict[str, list[str]]:
    """Return the values of both sides as text, by each differing key but the seed."""
    sides = [dict(flatten_keys(values)) for values in (a, b)]
    differing = {}
    for key in sides[0] | sides[1]:
        # A key that is absent is as if it were None.
        texts = {canonical_text(values.get(key)) for values in sides}
        if key != "seed" and len(texts) > 1:
            differing[key] = [str(values.get(key, "(not set)")) for values in sides]
    return differing


def group_by(items: Iterable[Item], key: Callable[[Item], Key]) -> dict[Key, list[Item]]:
    """Return the items by their key, in their order."""
    items_by_key: dict[Key, list[Item]] = {}
    for item in items:
        items_by_key.setdefault(key(item), []).append(item)
    return items_by_key


def _split_by_data(runs: Sequence[Run]) -> Iterable[list[Run]]:
    """Split the runs of one configuration by the data that they read.

    A run that has not recorded them belongs to the data of the rest, if these agree.
    """
    fingerprints = {run.fingerprint for run in runs} - {""}
    only_fingerprint = min(fingerprints) if len(fingerprints) == 1 else ""
    return group_by(runs, lambda run: run.fingerprint or only_fingerprint).values()


def _unique_labels(
    names: Sequence[str], settings: Sequence[Record]
) -> tuple[list[str], list[tuple[str, ...]]]:
    """Return each configuration's label, and the settings in it that are not the method's.

    Args:
        names: the methods' labels.
        settings: of the configurations of one data set and partition, by dotted key.
    """
    # ---- Step 1: settings of the method, where its configurations differ.
    other_keys = _minority_keys(settings)
    method_keys: list[list[str]] = [[] for _ in names]
    for index, key in _distinguishing_keys(names, settings):
        if key.startswith("method."):
            method_keys[index].append(key)

    def list_texts() -> list[list[str]]:
        texts = []
        for of_method, others, values in zip(method_keys, other_keys, settings, strict=True):
            keys = of_method + others
            texts.append([_setting_text(key, values, keys) for key in keys])
        return texts

    # ---- Step 2: a common setting may still distinguish two.
    labels_so_far = list(map(labels.add_in_brackets, names, list_texts()))
    for index, key in _distinguishing_keys(labels_so_far, settings):
        if key not in method_keys[index] + other_keys[index]:
            other_keys[index].append(key)
    texts = list_texts()
    deviations = [
        tuple(own[len(of_method) :]) for own, of_method in zip(texts, method_keys, strict=True)
    ]
    return list(map(labels.add_in_brackets, names, texts)), deviations


def _distinguishing_keys(
    names: Sequence[str], settings: Sequence[Record]
) -> Iterator[tuple[int, str]]:
    """Yield the keys in which configurations of equal names differ, with each one's index."""
    for indices in group_by(range(len(names)), names.__getitem__).values():
        for key in _differing_keys([settings[index] for index in indices]):
            for index in indices:
                if key in settings[index]:
                    yield index, key


def _list_settings(runs: Sequence[Run]) -> Record:
    """Return the settings that distinguish a configuration, by dotted key."""
    settings = dict(flatten_keys(result_config(runs[0].config)))
    fingerprint = next((run.fingerprint for run in runs if run.fingerprint), "")
    if fingerprint:
        settings["data"] = fingerprint[:8]
    return settings


def _setting_text(key: str, settings: Record, keys: Sequence[str]) -> str:
    return labels.setting_text(key, {key: value_when_off(key)} | settings, keys)


def _is_in_titles(key: str) -> bool:
    """True if labels of data sets, partitions and methods name a key's value."""
    group, _, name = key.partition(".")
    if group == "partition":
        return name not in labels.SPLIT_DETAILS
    if key in labels.CONDITION_KEYS:
        return True
    return group in ("method", "dataset", "data", "shift")


def _value_text(settings: Record, key: str) -> str | None:
    return canonical_text(settings[key]) if key in settings else None


def _differing_keys(settings: Sequence[Record]) -> list[str]:
    """Return the keys in which the configurations are not all equal."""
    keys = sorted({key for values in settings for key in values})
    return [key for key in keys if len({_value_text(values, key) for values in settings}) > 1]


def _minority_keys(settings: Sequence[Record]) -> list[list[str]]:
    """Return each configuration's keys, but for the method's, that differ from the majority.

    Without a majority these are all keys that differ.
    """
    minority_keys: list[list[str]] = [[] for _ in settings]
    for key in _differing_keys(settings):
        if key.startswith("method."):
            continue
        texts = [_value_text(values, key) for values in settings]
        if key == "data":  # not to have recorded it is no difference
            texts = [text or next(filter(None, texts)) for text in texts]
        majority = _find_majority(texts)
        for keys, text in zip(minority_keys, texts, strict=True):
            # A key that is absent differs only where most have one.
            if text != majority and (text is not None or majority is not ...):
                keys.append(key)
    return [[key for key in keys if not _is_implied(key, keys)] for keys in minority_keys]


def _is_implied(key: str, keys: Sequence[str]) -> bool:
    """True if the group's name implies it, as privacy=none has no privacy.clip."""
    name_key = f"{key.partition('.')[0]}.name"
    return key != name_key and name_key in keys


def _find_majority(texts: Sequence[str | None]) -> Any:
    """Return the most common text, ... where two are."""
    ranked = Counter(texts).most_common(2)
    is_unique = len(ranked) == 1 or ranked[0][1] > ranked[1][1]
    return ranked[0][0] if is_unique else ...
