"""Read run directories: one `Run` per seed, one `Group` per configuration."""

from __future__ import annotations

import io
import json
import os
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pandas as pd
import yaml

from fedpfl.errors import FedpflError
from fedpfl.identity import essence, identity

# The C loader reads a config some ten times faster; a thousand runs are a common sweep.
_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

_FILES = {"config.yaml", "rounds.csv", "summary.json", "state.pt"}
_NEEDED = ("round", "accuracy")
_SPLIT_DETAILS = {
    *("seed", "test_fraction", "min_samples", "samples_per_client", "test_samples_per_client", "max_attempts"),
}
STATUSES = ("finished", "running", "failed", "diverged")

# In the order of the paper's tables, the method under study last.
METHODS = {
    "local_only": "Local-Only",
    "fedavg": "FedAvg",
    "fedprox": "FedProx",
    "scaffold": "SCAFFOLD",
    "fedper": "FedPer",
    "apfl": "APFL",
    "lg_fedavg": "LG-FedAvg",
    "fedrep": "FedRep",
    "fedbabu": "FedBABU",
    "fedbn": "FedBN",
    "fedrod": "FedRoD",
    "ditto": "Ditto",
    "pfedme": "pFedMe",
    "per_fedavg": "Per-FedAvg",
    "fedpac": "FedPAC",
    "pfedfda": "pFedFDA",
    "flute": "FLUTE",
    "feddpa": "FedDPA",
    "floco": "FLOCO",
    "fedala": "FedALA",
    "fedselect": "FedSelect",
    "pspfl": "Update magnitude",
    "seqfededt": "SeqFedEDT",
    "random_dropout": "Random dropout",
    "fjord": "FjORD",
    "heterofl": "HeteroFL",
    "fedrolex": "FedRolex",
    "flexfl": "FlexFL",
    "hermes": "Hermes",
    "fedmp": "FedMP",
    "prunefl": "PruneFL",
    "fedspu": "FedSPU",
    "pfedsd": "pFedSD",
    "fedcac": "FedCAC",
    "fedpurin": "FedPURIN",
    "subflot": "SubFLOT",
    "fedobp": "FedOBP",
}
DATASETS = {
    "digits": "Digits",
    "mnist": "MNIST",
    "fmnist": "FMNIST",
    "emnist": "EMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
    "svhn": "SVHN",
    "organamnist": "OrganAMNIST",
    "organcmnist": "OrganCMNIST",
    "cifar10_c": "CIFAR10-C",
    "tiny_imagenet": "Tiny-ImageNet",
    "mini_imagenet": "Mini-ImageNet",
    "office_home": "OfficeHome",
    "pacs": "PACS",
    "digit5": "Digit5",
    "speech_commands": "Speech Commands",
    "ag_news": "AG News",
    "har": "HAR",
}


@dataclass(frozen=True, eq=False)
class Run:
    """One run directory.

    config: the resolved configuration. summary: `summary.json`.
    """

    path: Path
    config: dict[str, Any]
    summary: dict[str, Any]

    @cached_property
    def rounds(self) -> pd.DataFrame:
        """One row per round, ascending. Raises FedpflError where the file cannot be read."""
        frame = _read_csv(self.path / "rounds.csv")
        missing = [name for name in _NEEDED if name not in frame]
        if missing:
            raise FedpflError(f"{self.path}: rounds.csv lacks the column {missing[0]}")
        for name, kind in frame.dtypes.items():
            if kind.kind not in "if":  # a column of numbers, as pandas reads it, is left alone: there are many files
                frame[name] = pd.to_numeric(frame[name], errors="coerce")
        if frame["round"].notna().all() and frame["round"].is_monotonic_increasing and frame["round"].is_unique:
            return frame
        # A round written twice (killed between row and checkpoint, then resumed) counts once, as last written.
        return (
            frame.dropna(subset="round").drop_duplicates("round", keep="last").sort_values("round", ignore_index=True)
        )

    @cached_property
    def clients(self) -> pd.DataFrame:
        """One row per client. Raises FedpflError where the file cannot be read."""
        return _read_csv(self.path / "clients.csv")

    @property
    def evaluations(self) -> pd.DataFrame:
        """The rounds after which all clients were evaluated."""
        return self.rounds[self.rounds["accuracy"].notna()]

    @property
    def dataset(self) -> str:
        """The data set's name for people."""
        values = self.config["dataset"]
        name = str(values["name"])
        if name == "npz" and values.get("path"):
            return Path(values["path"]).stem
        # No pixel of x / 255 is above 1: statistics of 0..255 pixels are the published fault, chosen by name.
        faulty = any(mean > 1 for mean in values.get("mean") or ())
        return DATASETS.get(name, name) + (" as published" if faulty else "")

    @property
    def partition(self) -> str:
        """`Dir(0.1)`, `Dir(0.1) published`, `IID`, `Shards(2)`, `Groups`, or the name with its values."""
        values = {key: value for key, value in self.config["partition"].items() if key not in _SPLIT_DETAILS}
        name = str(values.pop("name"))
        if name == "dirichlet" and "alpha" in values:
            return f"Dir({values['alpha']:g})"
        if name == "published" and "alpha" in values:
            return f"Dir({values['alpha']:g}) published"
        if name == "fixed_dirichlet" and "alpha" in values:
            return f"Dir({values['alpha']:g}) of fixed sizes"
        if name == "iid":
            return "IID"
        if name == "shuffled_shards":
            name = "shuffled shards"
        numbers = [f"{value:g}" for value in values.values() if isinstance(value, int | float) and value is not True]
        return f"{name.capitalize()}({', '.join(numbers)})" if numbers else name.capitalize()

    @property
    def method(self) -> str:
        """The method's name and what it is first told apart by: `FedOBP (q=0.9998)`. See `groups` for the rest."""
        values = self.config["method"]
        told = [f"q={self.q:.10g}"] if self.q is not None else []
        if values.get("score", "obp") != "obp":
            told.append(f"score={values['score']}")
        if values.get("ema"):
            told.append(f"ema={values['ema']:g}")
        if values.get("classifier_only"):
            told.append("classifier only")
        if values.get("variant") not in (None, "default", "paper"):
            told.append(str(values["variant"]))
        return _with(METHODS.get(self.method_name, self.method_name), told)

    @property
    def method_name(self) -> str:
        """The method's name in the configuration."""
        return str(self.config["method"]["name"])

    @property
    def q(self) -> float | None:
        """The quantile of element-wise methods, None for others."""
        value = self.config["method"].get("q")
        return float(value) if isinstance(value, int | float) else None

    @property
    def seed(self) -> int:
        """The seed."""
        return int(self.config["seed"])

    @property
    def status(self) -> str:
        """`finished`, `running`, `failed` or `diverged`."""
        return str(self.summary.get("status", "running"))

    @property
    def planned(self) -> int:
        """Rounds asked for."""
        return int(self.config.get("rounds") or self.rounds["round"].max())

    @property
    def cohort(self) -> int:
        """Clients per round."""
        if self.summary.get("cohort"):
            return int(self.summary["cohort"])
        return max(1, int(self.config.get("clients", 1) * self.config.get("participation", 1.0) + 1e-9))


@dataclass(frozen=True, eq=False)
class Group:
    """The runs of one configuration that differ by seed only. method: a label unique within data set and partition."""

    dataset: str
    partition: str
    method: str
    runs: tuple[Run, ...]

    @property
    def used(self) -> tuple[Run, ...]:
        """The runs that speak for the group: the finished ones if any; never a mixture of states."""
        for status in (*STATUSES, *sorted({run.status for run in self.runs})):
            chosen = tuple(run for run in self.runs if run.status == status)
            if chosen:
                return chosen
        return self.runs

    @property
    def status(self) -> str:
        """`finished`, or what else there is: `2 finished, 1 failed left out`, `running 40/400`."""
        used = self.used
        word = used[0].status
        if word != "finished":
            reached = sorted({int(run.rounds["round"].max()) for run in used})
            word += f" {_span(reached)}/{used[0].planned}"
        others = Counter(run.status for run in self.runs if run not in used)
        if not others:
            return word
        left_out = ", ".join(f"{count} {status}" for status, count in others.items())
        return f"{len(used)} {word}, {left_out} left out"


def to_stderr(line: str) -> None:
    """Print one line for the user where it does not mix with tables."""
    print(line, file=sys.stderr)


def runs(*roots: str | Path, warn: Callable[[str], None] = to_stderr) -> list[Run]:
    """All readable runs below the roots, ordered by path; one call of `warn` for each directory that is skipped.

    Raises FedpflError where a root does not exist.
    """
    found: dict[Path, Run] = {}
    for root in roots:
        if not Path(root).is_dir():
            raise FedpflError(f"no such directory: {root}; give the folder that holds the runs, such as outputs")
        for path in run_directories(Path(root)):
            if path.resolve() in found:
                continue
            try:
                found[path.resolve()] = read(path)
            except FedpflError as error:
                warn(f"skipped {error}")
    return _without_copies(sorted(found.values(), key=lambda run: str(run.path)), warn)


def read(path: Path) -> Run:
    """Read one run directory. Raises FedpflError, in one line, where it is broken or holds no round yet."""
    run = begun(path)
    if run.rounds.empty:
        raise FedpflError(f"{path}: no round recorded yet")
    return run


def begun(path: Path) -> Run:
    """Read configuration and summary of one run directory, which need not hold a round. Raises as `read`."""
    try:
        config = yaml.load((path / "config.yaml").read_text(encoding="utf-8"), _Loader)
        summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise FedpflError(f"{path}: no {Path(error.filename).name}; the run never started or is half written") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark else ""
        raise FedpflError(f"{path}: config.yaml is not valid YAML{where}") from None
    except json.JSONDecodeError as error:
        raise FedpflError(f"{path}: summary.json is not valid JSON (line {error.lineno})") from None
    except (OSError, UnicodeDecodeError) as error:
        raise FedpflError(f"{path}: {_one_line(error)}") from None
    if not isinstance(config, dict) or not isinstance(summary, dict):
        raise FedpflError(f"{path}: config.yaml and summary.json must hold keys and values")
    for key in ("dataset", "partition", "method"):
        if not isinstance(config.get(key), dict) or "name" not in config[key]:
            raise FedpflError(f"{path}: config.yaml lacks {key}.name")
    run = Run(path, config, summary)
    try:
        _ = run.seed, run.dataset, run.partition, run.method, run.planned, run.cohort
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise FedpflError(f"{path}: config.yaml or summary.json holds no usable value: {_one_line(error)}") from None
    return run


def groups(runs: Iterable[Run]) -> list[Group]:
    """Gather the seeds of each configuration, ordered by data set, partition and method.

    Where two configurations would carry one label, what differs is added: `FedOBP (q=0.9998, norm=layer)`.
    """
    same: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        same[identity(run.config)].append(run)
    alike: dict[tuple[str, str, str], list[list[Run]]] = defaultdict(list)
    for members in same.values():
        first = members[0]
        alike[first.dataset, first.partition, first.method].append(sorted(members, key=lambda run: run.seed))

    result = []
    for (dataset, partition, method), rivals in alike.items():
        for members, differing in zip(rivals, _differences([essence(m[0].config) for m in rivals]), strict=True):
            result.append(Group(dataset, partition, _with(method, differing), tuple(members)))
    order = list(METHODS)

    def place(group: Group) -> tuple[str, str, int, str]:
        name = group.runs[0].method_name
        # Unknown methods stand before the last one, the method under study.
        return (
            group.dataset,
            group.partition,
            order.index(name) * 2 if name in order else len(order) * 2 - 3,
            group.method,
        )

    return sorted(result, key=place)


def run_directories(root: Path) -> Iterator[Path]:
    """Every folder below `root` that a run has begun to fill."""
    for folder, subfolders, files in os.walk(root):
        if _FILES & set(files):
            subfolders.clear()
            yield Path(folder)
        else:
            # .hydra and wandb hold a config.yaml of their own.
            subfolders[:] = sorted(name for name in subfolders if not name.startswith(".") and name != "wandb")


def _read_csv(path: Path) -> pd.DataFrame:
    try:
        text = path.read_text(encoding="utf-8")
        if text and not text.endswith("\n"):
            # The run was caught while it wrote its last line.
            text = text[: text.rfind("\n") + 1]
        return pd.read_csv(io.StringIO(text))
    except FileNotFoundError:
        raise FedpflError(f"{path.parent}: no {path.name}; the run never started or is half written") from None
    except (OSError, ValueError) as error:  # pandas' parser errors are ValueErrors
        raise FedpflError(f"{path.parent}: {path.name} cannot be read: {_one_line(error)}") from None


def _without_copies(found: list[Run], warn: Callable[[str], None]) -> list[Run]:
    """Of runs with one configuration and one seed (a sweep copied or begun twice), the one furthest along."""
    best: dict[tuple[str, int], Run] = {}
    for run in found:
        key = identity(run.config), run.seed
        other = best.get(key)
        if other is None:
            best[key] = run
            continue
        better, worse = sorted((other, run), key=_progress, reverse=True)
        best[key] = better
        warn(f"skipped {worse.path}: same configuration and seed as {better.path}")
    return list(best.values())


def _progress(run: Run) -> tuple[bool, float]:
    return run.status == "finished", float(run.rounds["round"].max())


def _differences(configs: list[dict[str, Any]]) -> list[list[str]]:
    """For each configuration, its values of the keys in which they are not all alike."""
    values = [dict(flat(config)) for config in configs]
    keys = sorted({key for config in values for key in config})
    differing = [key for key in keys if len({repr(config.get(key)) for config in values}) > 1]
    ends = Counter(key.rsplit(".", 1)[-1] for key in differing)

    def short(key: str) -> str:
        parts = key.split(".")
        if parts[-1] == "name" and len(parts) > 1:
            return parts[-2]
        return parts[-1] if ends[parts[-1]] == 1 else key

    return [[f"{short(key)}={config[key]}" for key in differing if key in config] for config in values]


def flat(value: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Every value of nested mappings with its dotted key."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from flat(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value


def _with(label: str, told: list[str]) -> str:
    """Add to a label's brackets: `A (b)` and `c` give `A (b, c)`."""
    if not told:
        return label
    inside = ", ".join(told)
    return f"{label[:-1]}, {inside})" if label.endswith(")") else f"{label} ({inside})"


def _span(numbers: list[int]) -> str:
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}–{numbers[-1]}"


def _one_line(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())
