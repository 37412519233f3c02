"""Group the runs of each configuration, and say in which settings configurations differ."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from fedpfl.ground.dotted import flatten_keys
from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import result_config
from fedpfl.ground.tasks import CLASSIFICATION, Task, require_classification
from fedpfl.report import labels
from fedpfl.report.filters import value_when_off
from fedpfl.report.names import METHOD_TITLES
from fedpfl.report.run import STATUSES, Run
from fedpfl.report.text import format_range, join_few

Item = TypeVar("Item")
Key = TypeVar("Key", bound=Hashable)


def common_task(runs: Iterable[Run]) -> Task:
    """Return the task of all runs; classification without any.

    Raises:
        FedpflError: they are of several tasks, and scores of these are not comparable.
    """
    tasks = {run.task.name: run.task for run in runs} or {CLASSIFICATION.name: CLASSIFICATION}
    if len(tasks) > 1:
        raise FedpflError(
            f"these runs are of several tasks ({', '.join(sorted(tasks))}), which have no score in "
            f"common; choose some with task={min(tasks)}"
        )
    return next(iter(tasks.values()))


def require_classes(shown_groups: Iterable[Group], table: str) -> None:
    """Raise FedpflError where configurations are of a task that a table is not made for."""
    task = common_task(group.runs[0] for group in shown_groups)
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
            example = members[0]
            by_seed = sorted(members, key=lambda run: run.seed)
            configurations[example.dataset, example.partition].append(by_seed)
            quantiles[example.method_name].add(example.q)

    # ---- Step 2: a label within each data set and partition.
    all_groups = []
    for (dataset, partition), rivals in configurations.items():
        names = []
        for members in rivals:
            has_several_quantiles = len(quantiles[members[0].method_name]) > 1
            names.append(labels.method_label(members[0].config["method"], has_several_quantiles))
        labels_and_deviations = _unique_labels(names, list(map(_settings, rivals)))
        for members, (label, deviations) in zip(rivals, labels_and_deviations, strict=True):
            all_groups.append(Group(dataset, partition, label, tuple(members), deviations))

    # ---- Step 3: the order of tables.
    method_order = list(METHOD_TITLES)

    def sort_key(group: Group) -> tuple[str, str, int, str]:
        name = group.runs[0].method_name
        # Unknown methods stand before the last one, the method under study.
        if name in method_order:
            position = method_order.index(name) * 2
        else:
            position = len(method_order) * 2 - 3
        return group.dataset, group.partition, position, group.method

    return sorted(all_groups, key=sort_key)


def shared_settings_note(shown_groups: Sequence[Group]) -> tuple[str, ...]:
    """Name the differing settings that the labels of rows leave out.

    Returns:
        One line, or none.
    """
    settings = [_settings(group.runs) for group in shown_groups]
    by_setting = group_by(
        zip(shown_groups, settings, strict=True),
        lambda pair: pair[0].setting,
    )
    differing_keys = _differing_keys(settings)
    keys = [key for key in differing_keys if not _is_in_titles(key)]
    parts = []
    for key in keys:
        # ---- Step: the value that most rows of each data set and partition have.
        settings_by_text: dict[str, list[str]] = defaultdict(list)
        for setting, members in by_setting.items():
            majority = _majority([_value_text(values, key) for _, values in members])
            if majority is ... or (majority is None and _is_implied(key, differing_keys)):
                continue
            example = next(values for _, values in members if _value_text(values, key) == majority)
            settings_by_text[_setting_text(key, example, keys)].append(setting)

        # ---- Step: where not everywhere the same, name the data sets and partitions.
        for text, names in settings_by_text.items():
            is_everywhere = len(names) == len(by_setting)
            parts.append(text if is_everywhere else f"{text} ({join_few(names, '; ')})")
    return (f"Unless a row says otherwise: {', '.join(parts)}.",) if parts else ()


def find_deviations(compared_groups: Sequence[Group]) -> list[list[str]]:
    """Return of each group the settings other than its method's that differ from most.

    Such as `["clients=30"]`.
    """
    settings = [_settings(group.runs) for group in compared_groups]
    return [
        [_setting_text(key, values, keys) for key in keys]
        for keys, values in zip(_minority_keys(settings), settings, strict=True)
    ]


def canonical_text(value: Any) -> str:
    """Return text that is equal for the same choice: 1 and 1.0 are one, 1 and True are not."""
    # Beyond 2^53 not every whole number is a float. A bool is no int of this type.
    if type(value) is int and abs(value) < 1 << 53:
        value = float(value)
    return repr(value)


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
    names: Sequence[str], settings: Sequence[dict[str, Any]]
) -> list[tuple[str, tuple[str, ...]]]:
    """Return each configuration's label, and the settings in it that are not the method's.

    Args:
        names: the methods' labels.
        settings: of the configurations of one data set and partition, by dotted key.
    """
    method_keys: list[list[str]] = [[] for _ in names]
    other_keys = _minority_keys(settings)

    # ---- Step 1: settings of the method, where its configurations differ.
    for indices in _indices_of_repeated(names):
        for key in _differing_keys([settings[index] for index in indices]):
            for index in indices:
                if key.startswith("method.") and key in settings[index]:
                    method_keys[index].append(key)

    def setting_texts(index: int) -> list[str]:
        keys = method_keys[index] + other_keys[index]
        return [_setting_text(key, settings[index], keys) for key in keys]

    def label_of(index: int) -> str:
        return labels.add_in_brackets(names[index], setting_texts(index))

    # ---- Step 2: a common setting may still distinguish two.
    labels_so_far = [label_of(index) for index in range(len(names))]
    for indices in _indices_of_repeated(labels_so_far):
        for key in _differing_keys([settings[index] for index in indices]):
            for index in indices:
                is_named = key in method_keys[index] + other_keys[index]
                if key in settings[index] and not is_named:
                    other_keys[index].append(key)
    return [
        (label_of(index), tuple(setting_texts(index)[len(method_keys[index]) :]))
        for index in range(len(names))
    ]


def _settings(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the settings that distinguish a configuration, by dotted key."""
    settings = dict(flatten_keys(result_config(runs[0].config)))
    fingerprint = next((run.fingerprint for run in runs if run.fingerprint), "")
    if fingerprint:
        settings["data"] = fingerprint[:8]
    return settings


def _setting_text(key: str, settings: dict[str, Any], keys: Sequence[str]) -> str:
    return labels.setting_text(
        key,
        {key: value_when_off(key)} | settings,
        keys,
    )


def _is_in_titles(key: str) -> bool:
    """True if labels of data sets, partitions and methods name a key's value."""
    group, _, name = key.partition(".")
    if group == "partition":
        return name not in labels.SPLIT_DETAILS
    if key in labels.CONDITION_KEYS:
        return True
    return group in ("method", "dataset", "data", "shift")


def _value_text(settings: dict[str, Any], key: str) -> str | None:
    return canonical_text(settings[key]) if key in settings else None


def _differing_keys(settings: Sequence[dict[str, Any]]) -> list[str]:
    """Return the keys in which the configurations are not all equal."""
    keys = sorted({key for values in settings for key in values})
    return [key for key in keys if len({_value_text(values, key) for values in settings}) > 1]


def _minority_keys(settings: Sequence[dict[str, Any]]) -> list[list[str]]:
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
        majority = _majority(texts)
        for keys, text, values in zip(minority_keys, texts, settings, strict=True):
            # A key that is absent differs only where most have one.
            is_distinct = text != majority and (text is not None or majority is not ...)
            if is_distinct and not (text is None and _is_group_off(key, values, settings)):
                keys.append(key)
    return [[key for key in keys if not _is_implied(key, keys)] for keys in minority_keys]


def _is_implied(key: str, keys: Sequence[str]) -> bool:
    """True if the group's name implies it, as privacy=none has no privacy.clip."""
    name_key = f"{key.partition('.')[0]}.name"
    return key != name_key and name_key in keys


def _is_group_off(key: str, values: dict[str, Any], settings: Sequence[dict[str, Any]]) -> bool:
    """True if a configuration has nothing of a group that another one sets."""
    name_key = f"{key.partition('.')[0]}.name"
    is_chosen = any(name_key in candidate for candidate in settings)
    return key != name_key and is_chosen and name_key not in values


def _majority(texts: Sequence[str | None]) -> Any:
    """Return the most common text, ... where two are."""
    ranked = Counter(texts).most_common(2)
    is_unique = len(ranked) == 1 or ranked[0][1] > ranked[1][1]
    return ranked[0][0] if is_unique else ...


def _indices_of_repeated(names: Sequence[str]) -> list[list[int]]:
    """Return the indices of each name that occurs more than once."""
    indices_by_name = group_by(range(len(names)), names.__getitem__)
    return [indices for indices in indices_by_name.values() if len(indices) > 1]
