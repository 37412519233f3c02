"""Read run directories: one `Run` per seed, one `Group` per configuration, a `State` of each, whole or broken."""

from __future__ import annotations

import contextlib
import io
import json
import math
import os
import stat
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
import yaml

from fedpfl.ground.errors import FedpflError
from fedpfl.ground.identity import essence, identity, present
from fedpfl.ground.lock import living, verdict
from fedpfl.report.filters import choose, since
from fedpfl.report.names import DATASETS, METHODS
from fedpfl.report.text import clip, plain

# The C loader reads a config some ten times faster; a thousand runs are a common sweep.
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_SIGNS = frozenset({"config.yaml", "rounds.csv", "summary.json", "state.pt", "run.lock"})
_NEEDED = ("round", "accuracy")
_SPLIT_DETAILS = frozenset(
    {"seed", "test_fraction", "min_samples", "samples_per_client", "test_samples_per_client", "max_attempts"}
)
_VAGUE = frozenset({"seed", "every", "early"})
_UNUSABLE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError, RecursionError)
_LARGEST = 1 << 24  # bytes of a config.yaml or summary.json
_DEEPEST = 32
STATUSES = ("finished", "running", "interrupted", "failed", "diverged", "broken")
"""The first that a configuration's seeds have speaks for it."""
QUIET = 600.0
"""Seconds: where no lock tells, a directory that has not changed for longer is nobody's."""


class Mask(NamedTuple):
    """How the masks of several clients lie to each other in a tensor.

    entries: of the tensor. held: how many of them 0, 1, ... clients hold. both: how many clients i and j both hold,
    `[clients, clients]`; at i = j those of i.
    """

    entries: float
    held: np.ndarray
    both: np.ndarray

    def overlaps(self, chance: bool = False) -> np.ndarray:
        """Return intersection over union of every two clients, nan where both hold nothing.

        chance: what it would be about if masks of these sizes were independent.
        """
        first, second = np.triu_indices(len(self.both), 1)
        sizes = self.both.diagonal()
        both = sizes[first] * sizes[second] / max(self.entries, 1) if chance else self.both[first, second]
        union = sizes[first] + sizes[second] - both
        return np.divide(both, union, out=np.full(len(both), math.nan), where=union > 0)


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory.

    config: the resolved configuration. summary: `summary.json`. held: whether a living process holds it, None where no
    lock can tell. changed: when a file of it last was written, in seconds since 1970. method, dataset, partition: names
    for people, the method's with what it is first told apart by (see `groups` for the rest); method_name, dataset_name:
    those of the configuration. q: the quantile of element-wise methods. cohort: clients per round, as planned.
    identity: a hash of what the run computes, the same for all seeds. fingerprint: a hash of the data that it read, of
    older runs also of who holds which samples; empty if there is none.
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]
    held: bool | None
    changed: float
    seed: int
    method: str
    method_name: str
    dataset: str
    dataset_name: str
    partition: str
    q: float | None
    cohort: int
    identity: str
    fingerprint: str

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round, ascending; nan where a cell is empty. Raises FedpflError where the file is damaged."""
        if not os.path.lexists(self.path / "rounds.csv"):
            return pd.DataFrame(columns=_NEEDED, dtype=float)
        frame = _read_csv(self.path / "rounds.csv")
        for name in _NEEDED:
            if name not in frame:
                raise FedpflError(f"{self.path}: rounds.csv lacks the column {name}")
        # A round written twice (killed between row and checkpoint, then resumed) counts once, as last written.
        number = frame["round"]
        if not (number.notna() & (number == number.round()) & (number > 0)).all():
            raise FedpflError(f"{self.path}: rounds.csv holds a round that is no whole number")
        if number.is_monotonic_increasing and number.is_unique:
            return frame
        return frame.drop_duplicates("round", keep="last").sort_values("round", ignore_index=True)

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client. Raises FedpflError where the file cannot be read."""
        frame = _read_csv(self.path / "clients.csv")
        if "client" not in frame or frame["client"].isna().any():
            raise FedpflError(f"{self.path}: clients.csv lacks the column client, or a client its number")
        if "unseen" in frame and not frame["unseen"].isin([0, 1]).all():
            raise FedpflError(f"{self.path}: clients.csv does not say of every client whether it is unseen, by 0 or 1")
        return frame

    @property
    def participating(self) -> pd.DataFrame:
        """The rows of `clients` that are about those which may take part. Raises as `clients`."""
        return self.clients[self.clients["unseen"] == 0] if "unseen" in self.clients else self.clients

    @cached_property
    def evaluations(self) -> pd.DataFrame:
        """The rounds after which all clients were evaluated; without an accuracy where a model was not finite."""
        judged = self.rounds["accuracy"].notna()
        if "eval_seconds" in self.rounds:
            judged |= self.rounds["eval_seconds"].notna()
        return self.rounds[judged]

    @cached_property
    def personal(self) -> pd.DataFrame:
        """Personalised entries of all clients that took part, by round and tensor."""
        found = self.rounds.set_index("round").filter(regex="^personal/")
        return found.rename(columns=lambda name: name.removeprefix("personal/"))

    @cached_property
    def masks(self) -> dict[str, Mask]:
        """Clients' masks in the end, by tensor; {} where there are none. Raises FedpflError where they are damaged."""
        path = self.path / "masks.json"
        if not os.path.lexists(path):
            return {}
        told = _parsed(path, json.loads)
        try:
            count = len(told["clients"])
            found = {
                name: Mask(float(own["entries"]), np.array(own["held"], float), np.array(own["both"], float))
                for name, own in told["tensors"].items()
            }
            for name, (entries, held, both) in found.items():
                if held.shape != (count + 1,) or both.shape != (count, count):
                    raise ValueError(f"{clip(name)} is not of {count} clients")
                sizes, times = np.minimum.outer(both.diagonal(), both.diagonal()), np.arange(count + 1)
                counted = held.sum() == entries and held @ times == both.trace()
                if not (counted and held.min() >= 0 <= both.min() and (both <= sizes).all()):
                    raise ValueError(f"the numbers of {clip(name)} fit no masks")
        except _UNUSABLE as error:
            raise FedpflError(f"{self.path}: masks.json holds no usable value: {_one_line(error)}") from None
        return found

    @cached_property
    def status(self) -> str:
        """Of STATUSES, as it was when the directory was read."""
        return verdict(_told_status(self.summary), self.held, self.quiet)

    @property
    def quiet(self) -> bool:
        """Whether it has not changed for so long that nobody can be writing it."""
        # A round may take long; three of the last one are given.
        last = [own.iloc[-1:].get(key) for own, key in ((self.rounds, "seconds"), (self.evaluations, "eval_seconds"))]
        seconds = math.fsum(value for own in last if own is not None for value in own if not math.isnan(value))
        return time.time() - self.changed > max(QUIET, 3 * seconds)

    @property
    def words(self) -> str:
        """The status, and how far it is: `running 40/400`."""
        whole = self.status == "finished" and self.reached >= self.planned
        return self.status if whole else f"{self.status} {self.reached}/{self.planned}"

    @property
    def called(self) -> str:
        """The method's name for people, without its values."""
        return METHODS.get(self.method_name, plain(self.method_name))

    @property
    def planned(self) -> int:
        """Rounds asked for."""
        return int(self.config.get("rounds") or self.reached)

    @cached_property
    def reached(self) -> int:
        """Rounds recorded."""
        return 0 if self.rounds.empty else int(self.rounds["round"].iloc[-1])

    @cached_property
    def participants(self) -> pd.Series:
        """Clients that took part in each round; the planned number in runs that did not record it."""
        return self.rounds.reindex(columns=["participants"])["participants"].astype(float).fillna(float(self.cohort))

    def per_client(self, column: str) -> float:
        """Return what one client of the cohort moves in a round, mean over all that took part; nan if not recorded."""
        if column not in self.rounds:
            return math.nan
        values = self.rounds[column]
        count = float(self.participants[values.notna()].sum())
        return float(values.sum()) / count if count > 0 else math.nan

    @property
    def seconds(self) -> float:
        """Median seconds of a round without evaluation; nan where not recorded."""
        return float(self.rounds["seconds"].median()) if "seconds" in self.rounds else math.nan

    def get(self, key: str) -> Any:
        """Return the configuration's value of a dotted key, None where there is none."""
        value: Any = self.config
        for part in key.split("."):
            value = value.get(part) if isinstance(value, Mapping) else None
        return value

    def fact(self, key: str) -> float:
        """Return a number of summary.json, nan where there is none."""
        value = self.summary.get(key)
        if isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e300:
            return float(value)
        return math.nan

    @property
    def environment(self) -> dict[str, Any]:
        """What summary.json says of versions and machine."""
        found = self.summary.get("environment")
        return found if isinstance(found, dict) else {}


@dataclass(frozen=True, eq=False)
class State:
    """One run directory, whatever is wrong in it.

    status: of STATUSES. changed, held: as in `Run`. run: None where it cannot be read. reason: why it is broken, failed
    or diverged.
    """

    path: Path
    status: str
    changed: float
    run: Run | None = None
    reason: str = ""
    held: bool | None = None

    @property
    def words(self) -> str:
        """The status, and how far it is: `running 40/400`."""
        return self.run.words if self.run else self.status

    @property
    def last(self) -> pd.Series:
        """The last row of rounds.csv, empty without any."""
        return self.run.rounds.iloc[-1] if self.run and self.run.reached else pd.Series(dtype=float)

    @property
    def judged(self) -> pd.Series:
        """The last row after which all clients were evaluated, empty without any."""
        return self.run.evaluations.iloc[-1] if self.run and len(self.run.evaluations) else pd.Series(dtype=float)

    @property
    def hours(self) -> float:
        """Hours of all its processes, of a run that has not finished those of its recorded rounds; nan if unknown."""
        if self.run is None or self.status == "finished":
            return self.run.fact("hours") if self.run else math.nan
        return float(self.run.rounds.reindex(columns=["seconds", "eval_seconds"]).sum().sum()) / 3600

    @property
    def quiet(self) -> bool:
        """Whether it has not changed for so long that nobody can be writing it."""
        return self.run.quiet if self.run else time.time() - self.changed > QUIET


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one configuration that differ by seed only. method: a label unique within data set and partition.

    apart: the part of the label that says in what else than the method it differs from most of its setting.
    """

    dataset: str
    partition: str
    method: str
    runs: tuple[Run, ...]
    apart: tuple[str, ...] = ()

    @property
    def setting(self) -> str:
        """Data set and partition."""
        return f"{self.dataset}, {self.partition}"

    @property
    def title(self) -> str:
        """Method, data set and partition."""
        return f"{self.method} on {self.setting}"

    @property
    def used(self) -> tuple[Run, ...]:
        """The runs that speak for the group: the finished ones if any; never a mixture of states."""
        first = min((run.status for run in self.runs), key=STATUSES.index)
        return tuple(run for run in self.runs if run.status == first)

    @property
    def whole(self) -> bool:
        """Whether the runs that speak are finished and played every planned round."""
        return all(run.status == "finished" and run.reached >= run.planned for run in self.used)

    @property
    def status(self) -> str:
        """`finished`, or what else there is: `2 finished, 1 failed left out`, `running 40/400`, `finished 91/400`."""
        used = self.used
        word = used[0].status
        if not self.whole:
            word += f" {span([run.reached for run in used])}/{used[0].planned}"
        others = Counter(run.status for run in self.runs if run not in used)
        if not others:
            return word
        left_out = ", ".join(f"{count} {status}" for status, count in others.items())
        return f"{len(used)} {word}, {left_out} left out"


def to_stderr(line: str) -> None:
    """Print one line for the user where it does not mix with tables."""
    print(plain(line), file=sys.stderr)


def nothing_below(roots: Iterable[Path]) -> FedpflError:
    """Return the error of a command that found no runs."""
    below = ", ".join(map(str, roots))
    return FedpflError(f"no runs found below {below}; run `python -m fedpfl.train` first or name another folder")


def runs(*roots: str | Path, where: Sequence[str] = (), warn: Callable[[str], None] = to_stderr) -> list[Run]:
    """Read all readable runs below the roots, ordered by path; one call of `warn` for each directory that is skipped.

    where: filters, such as `method=fedobp`. Raises FedpflError where a root does not exist, or no run is let through.
    """
    found: list[Run] = []
    every = [look(path) for path in directories(*map(Path, roots), warn=warn)]
    kept = set(chosen([seen.run for seen in every if seen.run], where))
    for seen in every:
        if seen.run is None or seen.run in kept:
            try:
                found.append(_usable(seen))
            except FedpflError as error:
                warn(f"skipped {error}")
    return _without_copies(sorted(found, key=lambda run: str(run.path)), warn)


def states(*roots: Path, where: Sequence[str] = ()) -> list[State]:
    """Look at every run directory below the roots, broken ones too unless there are filters. Raises as `runs`."""
    every = [look(path) for path in directories(*roots)]
    kept = set(chosen([seen.run for seen in every if seen.run], where))
    return [seen for seen in every if seen.run in kept] if where else every


def chosen(found: Sequence[Run], where: Sequence[str]) -> list[Run]:
    """Return the runs that filters let through. Raises FedpflError for what no run is."""
    named = [{"method": run.called, "dataset": run.dataset} for run in found]
    kept = choose([run.config for run in found], where, named)
    return [run for run, own in zip(found, kept, strict=True) if own]


def directories(*roots: Path, warn: Callable[[str], None] = to_stderr) -> Iterator[Path]:
    """Yield every run directory below the roots once, whole or not, ordered by path; links are not followed.

    Raises FedpflError where a root does not exist.
    """
    seen: set[Path] = set()
    for root in roots:
        if not root.is_dir():
            raise FedpflError(f"no such directory: {root}; give the folder that holds the runs, such as outputs")
        for folder, subfolders, files in os.walk(
            root, onerror=lambda error: warn(f"skipped {error.filename}: {error.strerror}")
        ):
            subfolders.sort()
            if _SIGNS.isdisjoint(files):
                # .hydra and wandb hold a config.yaml of their own.
                subfolders[:] = [name for name in subfolders if not name.startswith(".") and name != "wandb"]
                continue
            subfolders.clear()
            path = Path(folder)
            if path.resolve() not in seen:
                seen.add(path.resolve())
                yield path


def look(path: Path, held: Callable[[Path], bool | None] = living) -> State:
    """Look at one run directory; never raises for what is wrong in it, which makes it `broken`. held: as in `begun`."""
    known, changed = held(path), _changed(path)
    try:
        run = begun(path, lambda _: known)
        if run.status == "finished" and not run.reached:
            raise FedpflError(f"{path}: finished, but {_without_rounds(path)}")
    except FedpflError as error:
        reason = str(error).removeprefix(f"{path}: ")
        return State(path, "running" if known else "broken", changed, None, reason, known)
    reason = " ".join(str(run.summary.get("error") or "").split()) if run.status in ("failed", "diverged") else ""
    return State(path, run.status, run.changed, run, reason, run.held)


def read(path: Path) -> Run:
    """Read one run directory. Raises FedpflError, in one line, where it is broken or holds no round yet."""
    return _usable(look(path))


def _usable(seen: State) -> Run:
    if seen.run is None or not seen.run.reached:
        raise FedpflError(f"{seen.path}: {seen.words}: {seen.reason or _without_rounds(seen.path)}")
    return seen.run


def begun(path: Path, held: Callable[[Path], bool | None] = living) -> Run:
    """Read configuration and summary of one run directory, which need not hold a round. Raises as `read`.

    held: says whether a living process holds it.
    """
    # The lock before the summary: a run that ends in between reads as finished, not as interrupted.
    known, changed = held(path), _changed(path)
    config, summary = _parsed(path / "config.yaml", _yaml), _parsed(path / "summary.json", json.loads)
    for key in ("dataset", "partition", "method"):
        if not isinstance(config.get(key), dict) or "name" not in config[key]:
            raise FedpflError(f"{path}: config.yaml lacks {key}.name")
    config["method"] = present(config["method"])
    if (status := _told_status(summary)) not in ("finished", "running", "failed", "diverged"):
        raise FedpflError(f"{path}: summary.json holds an unknown status, {clip(repr(status))}")
    try:
        q, clients = config["method"].get("q"), config.get("clients", 1) * config.get("participation", 1.0)
        run = Run(
            *(path, config, summary, known, changed),
            seed=int(config["seed"]),
            method=_method(config["method"]),
            method_name=str(config["method"]["name"]),
            dataset=_dataset(config["dataset"]),
            dataset_name=str(config["dataset"]["name"]),
            partition=_partition(config["partition"]),
            q=float(q) if isinstance(q, int | float) else None,
            cohort=max(1, int(summary.get("cohort") or clients + 1e-9)),
            identity=identity(config),
            fingerprint=str(summary.get("read") or summary.get("data") or ""),
        )
        _ = run.planned, run.reached
    except _UNUSABLE as error:
        raise FedpflError(f"{path}: config.yaml or summary.json holds no usable value: {_one_line(error)}") from None
    return run


def _told_status(summary: Mapping[str, Any]) -> str:
    return str(summary.get("status") or "running")


def _without_rounds(path: Path) -> str:
    return "no round recorded yet" if os.path.lexists(path / "rounds.csv") else "no rounds.csv; no round was played"


def _changed(path: Path) -> float:
    """When a file in the directory was last written; a directory that is gone meanwhile changed now."""
    try:
        with os.scandir(path) as entries:
            times = [entry.stat(follow_symlinks=False).st_mtime for entry in entries]
        return max(times, default=path.stat().st_mtime)
    except OSError:
        return time.time()


def _dataset(values: Mapping[str, Any]) -> str:
    name = str(values["name"])
    if name == "npz" and values.get("path"):
        return plain(Path(values["path"]).stem)
    # No pixel of x / 255 is above 1: statistics of 0..255 pixels are the published fault, chosen by name.
    faulty = any(mean > 1 for mean in values.get("mean") or ())
    return DATASETS.get(name, plain(name)) + (" as published" if faulty else "")


def _partition(values: Mapping[str, Any]) -> str:
    """`Dir(0.1)`, `Dir(0.1) published`, `IID`, `Shards(2)`, `Groups`, or the name with its values."""
    name = plain(values["name"])
    after = {"dirichlet": "", "published": " published", "fixed_dirichlet": " of fixed sizes"}
    if name in after and "alpha" in values:
        return f"Dir({values['alpha']:g}){after[name]}"
    if name == "iid":
        return "IID"
    if name == "file":
        return f"File({plain(Path(str(values['path'])).name)})"
    name = name.replace("shuffled_", "shuffled ").capitalize()
    told = [value for key, value in values.items() if key not in ("name", *_SPLIT_DETAILS) and value is not True]
    numbers = [f"{value:g}" for value in told if isinstance(value, int | float)]
    return f"{name}({', '.join(numbers)})" if numbers else name


def _method(values: Mapping[str, Any], quantile: bool = True) -> str:
    """The name and what it is first told apart by: `FedOBP (q=0.9998)`, or without the quantile."""
    q = values.get("q")
    told = [f"q={float(q):.10g}"] if quantile and isinstance(q, int | float) else []
    if isinstance(q, list):
        told.append("adaptive q")
    if values.get("score", "obp") != "obp":
        told.append(f"score={values['score']}")
    if values.get("ema"):
        told.append(f"ema={values['ema']:g}")
    if values.get("classifier_only"):
        told.append("classifier only")
    if values.get("variant") not in (None, "default", "paper"):
        told.append(str(values["variant"]))
    return _with(METHODS.get(str(values["name"]), plain(values["name"])), told)


def summary_of(path: Path) -> dict[str, Any]:
    """Return what a summary.json holds, whatever else is wrong with the directory; nothing where it is broken."""
    try:
        return _parsed(path / "summary.json", json.loads)
    except FedpflError:
        return {}


def groups(runs: Iterable[Run]) -> list[Group]:
    """Gather the seeds of each configuration, ordered by data set, partition and method.

    A label names only what tells it apart from others here: `FedOBP (q=0.98)` where there is another q, what of the
    method differs between its configurations, and what else is not as in most of its data set and partition:
    `FedAvg (clients=30)` (see `worlds`).
    """
    every = list(runs)
    read = _read(every)
    known: dict[str, set[str]] = defaultdict(set)
    for run in every:
        known[run.identity] |= {read[run]} - {""}
    same: dict[tuple[str, str], list[Run]] = defaultdict(list)
    for run in every:
        # Where a run does not tell what it read, it belongs to the only data that are known.
        only = next(iter(known[run.identity])) if len(known[run.identity]) == 1 else ""
        same[run.identity, read[run] or only].append(run)
    settings: dict[tuple[str, str], list[list[Run]]] = defaultdict(list)
    quantiles: dict[str, set[float | None]] = defaultdict(set)
    for members in same.values():
        members.sort(key=lambda run: run.seed)
        settings[members[0].dataset, members[0].partition].append(members)
        quantiles[members[0].method_name].add(members[0].q)
    result = []
    for (dataset, partition), rivals in settings.items():
        told = [_told(members) for members in rivals]
        several = [len(quantiles[members[0].method_name]) > 1 for members in rivals]
        names = [_method(own[0].config["method"], q) for own, q in zip(rivals, several, strict=True)]
        apart, first = _apart(told), [list[str]() for _ in rivals]
        for alike in _places(names):
            keys = [key for key in _differing([told[at] for at in alike]) if key.startswith("method.")]
            for at in alike:
                first[at] = [key for key in keys if key in told[at]]
        labels = [_with(names[at], _words(told[at], first[at], apart[at])) for at in range(len(rivals))]
        for alike in _places(labels):  # what is as in most may still be what tells two apart
            for key in _differing([told[at] for at in alike]):
                for at in alike:
                    apart[at] += [key] if key in told[at] and key not in first[at] + apart[at] else []
        for at, members in enumerate(rivals):
            words = _words(told[at], first[at], apart[at])
            label, others = _with(names[at], words), tuple(words[len(first[at]) :])
            result.append(Group(dataset, partition, label, tuple(members), others))
    order = list(METHODS)

    def place_of(group: Group) -> tuple[str, str, int, str]:
        name = group.runs[0].method_name
        # Unknown methods stand before the last one, the method under study.
        at = order.index(name) * 2 if name in order else len(order) * 2 - 3
        return group.dataset, group.partition, at, group.method

    return sorted(result, key=place_of)


def _read(runs: Sequence[Run]) -> dict[Run, str]:
    """What each run read, as far as it is known.

    Older runs recorded it together with their split, which most partitions draw by the seed: where every seed of a
    configuration has another one, it says nothing about the data.
    """
    older: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        if run.fingerprint and "read" not in run.summary:
            older[run.identity].append(run)
    drawn = {
        identity
        for identity, own in older.items()
        if len(own) == len({run.seed for run in own}) == len({run.fingerprint for run in own})
    }
    return {run: "" if run in older[run.identity] and run.identity in drawn else run.fingerprint for run in runs}


def worlds(gathered: Sequence[Group]) -> tuple[str, ...]:
    """Say what rows have whose labels do not tell, of all that is not alike among them; a line, or none."""
    told = [_told(group.runs) for group in gathered]
    by_setting: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for group, own in zip(gathered, told, strict=True):
        by_setting[group.setting].append(own)
    titled = ("method.", "dataset.", "data")
    keys = [
        key
        for key in _differing(told)
        if not key.startswith(titled)
        and (not key.startswith("partition.") or key.removeprefix("partition.") in _SPLIT_DETAILS)
    ]
    parts = []
    for key in keys:
        found: dict[str, list[str]] = defaultdict(list)
        for setting, configs in by_setting.items():
            usual = _usual([canonical(config[key]) if key in config else None for config in configs])
            if usual is not ...:
                config = next(one for one in configs if (canonical(one[key]) if key in one else None) == usual)
                found[_short(key, {key: since(key)} | config, keys)].append(setting)
        for text, where in found.items():
            parts.append(text if len(where) == len(by_setting) else f"{text} ({few(where, '; ')})")
    return (f"Unless a row says otherwise: {', '.join(parts)}.",) if parts else ()


def few(words: Iterable[str], between: str = ", ") -> str:
    """Join words; a sweep must not turn a note into a list of its values."""
    every = list(words)
    return between.join(every) if len(every) <= 4 else f"{between.join(every[:3])} and {len(every) - 3} more"


def unlike(gathered: Sequence[Group]) -> list[list[str]]:
    """Say of each group in what else than its method it differs from most of them: `["clients=30"]`."""
    told = [_told(group.runs) for group in gathered]
    return [[_short(key, own, keys) for key in keys] for own, keys in zip(told, _apart(told), strict=True)]


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield every value of nested mappings with its dotted key."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def span(numbers: Collection[int]) -> str:
    """Return `3`, or `3–7` for the least and the greatest of different numbers; nothing for none."""
    low, high = (min(numbers), max(numbers)) if numbers else ("", "")
    return str(low) if low == high else f"{low}–{high}"


def _told(members: Sequence[Run]) -> dict[str, Any]:
    """What tells a configuration apart, by dotted key."""
    data = next((run.fingerprint for run in members if run.fingerprint), "")
    return dict(flat(essence(members[0].config))) | ({"data": data[:8]} if data else {})


def canonical(value: Any) -> str:
    """Return text that is equal for the same choice: 1 and 1.0 are one, 1 and True are not."""
    return repr(float(value) if type(value) is int and abs(value) < 1 << 53 else value)


def _differing(configs: Sequence[dict[str, Any]]) -> list[str]:
    """The keys in which the configurations are not all alike."""
    keys = sorted({key for config in configs for key in config})
    return [key for key in keys if len({canonical(config[key]) if key in config else None for config in configs}) > 1]


def _apart(configs: Sequence[dict[str, Any]]) -> list[list[str]]:
    """For each configuration the keys, but for the method's, in which it is not like most; without a majority all."""
    found: list[list[str]] = [[] for _ in configs]
    for key in _differing(configs):
        if key.startswith("method."):
            continue
        values = [canonical(config[key]) if key in config else None for config in configs]
        if key == "data":  # not to have recorded it is no difference
            values = [value or next(filter(None, values)) for value in values]
        usual = _usual(values)
        for place, value in enumerate(values):
            if value != usual and (value is not None or usual is not ...):
                found[place].append(key)
    return found


def _usual(values: Sequence[str | None]) -> Any:
    """The most common value, ... where two are."""
    ranked = Counter(values).most_common(2)
    return ranked[0][0] if len(ranked) == 1 or ranked[0][1] > ranked[1][1] else ...


def _places(labels: Sequence[str]) -> list[list[int]]:
    """The places of each label that occurs more than once."""
    found: dict[str, list[int]] = defaultdict(list)
    for at, label in enumerate(labels):
        found[label].append(at)
    return [places for places in found.values() if len(places) > 1]


def _words(told: Mapping[str, Any], first: Sequence[str], apart: Sequence[str]) -> list[str]:
    return [_short(key, told, [*first, *apart]) for key in (*first, *apart)]


def _short(key: str, config: Mapping[str, Any], keys: Sequence[str]) -> str:
    """`lr=0.1`; the whole key where another of `keys` ends alike, or its end alone says too little."""
    *_, end = parts = key.split(".")
    if end == "name" and len(parts) > 1:
        end = parts[-2]
    elif end in _VAGUE or sum(other.rsplit(".", 1)[-1] == end for other in keys) > 1:
        end = key
    value = config.get(key, ...)
    return f"{end} not set" if value in (None, ...) else f"{end}={clip(value, 40)}"


def _with(label: str, told: Sequence[str]) -> str:
    """Add to a label's brackets: `A (b)` and `c` give `A (b, c)`."""
    if not told:
        return label
    inside = ", ".join(map(plain, told))
    return f"{label[:-1]}, {inside})" if label.endswith(")") else f"{label} ({inside})"


@contextlib.contextmanager
def _reading(path: Path, most: float = math.inf) -> Iterator[str]:
    """Yield a regular file's text; what is wrong with it, or found to be while it is parsed, becomes one line."""
    try:
        # Nothing else, such as a pipe that nobody writes, is waited for.
        with open(os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0)), encoding="utf-8") as file:
            found = os.fstat(file.fileno())
            if not stat.S_ISREG(found.st_mode):
                raise ValueError("it is no regular file")
            if found.st_size > most:
                raise ValueError("it is larger than any run writes it")
            text = file.read()
        yield text
        return
    except FileNotFoundError:
        why = f"no {path.name}; the run never started or is half written"
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        why = f"{path.name} is not valid YAML" + (f" (line {mark.line + 1})" if mark else "")
    except json.JSONDecodeError as error:
        why = f"{path.name} is not valid JSON (line {error.lineno})"
    except (OSError, *_UNUSABLE) as error:
        why = f"{path.name} cannot be read: {_one_line(error)}"
    raise FedpflError(f"{path.parent}: {why}")


def _yaml(text: str) -> Any:
    depth = 0
    for event in yaml.parse(text, _Loader):
        # A few aliases of aliases are billions of values; fedpfl writes none.
        if isinstance(event, yaml.AliasEvent) or getattr(event, "anchor", None):
            raise ValueError("it holds anchors or aliases, which no run writes")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > _DEEPEST:
            raise ValueError("it is nested deeper than any run writes it")
    return yaml.load(text, _Loader)


def _parsed(path: Path, parse: Callable[[str], Any]) -> dict[str, Any]:
    with _reading(path, _LARGEST) as text:
        found = parse(text)
        if not isinstance(found, dict):
            raise ValueError("it must hold keys and values")
    return found


def _read_csv(path: Path) -> pd.DataFrame:
    """A table of numbers; nan where a cell is empty or not finite."""
    with _reading(path) as text:
        if text and not text.endswith("\n"):
            text = text[: text.rfind("\n") + 1]  # the run was caught while it wrote its last line
        frame = pd.read_csv(io.StringIO(text))
        for name, kind in frame.dtypes.items():
            if kind.kind in "if":
                continue
            numbers = pd.to_numeric(frame[name].astype("str"), errors="coerce")
            strange = frame[name][numbers.isna() & frame[name].notna()]
            if len(strange):
                raise ValueError(f"{strange.iloc[0]!r} under {name} is no number")
            frame[name] = numbers
    return frame.replace([np.inf, -np.inf], np.nan) if np.isinf(frame.to_numpy(float)).any() else frame


def _without_copies(found: list[Run], warn: Callable[[str], None]) -> list[Run]:
    """Of runs with one configuration, one seed and the same data (a sweep begun twice), the one furthest along."""
    best: dict[tuple[str, int, str], Run] = {}
    for run in found:
        key = run.identity, run.seed, run.fingerprint
        other = best.setdefault(key, run)
        if other is not run:
            better, worse = sorted((other, run), key=lambda run: (run.status == "finished", run.reached), reverse=True)
            best[key] = better
            warn(f"skipped {worse.path}: same configuration and seed as {better.path}")
    return list(best.values())


def _one_line(error: Exception) -> str:
    return clip(" ".join(f"{type(error).__name__}: {error}".split()), 200)
