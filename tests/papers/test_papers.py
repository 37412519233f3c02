"""What conf/ runs is what each of the five papers or its public code says, and where."""

from __future__ import annotations

import csv
import functools
import json
import math
import re
from collections import Counter
from typing import Any

import pytest
import yaml

from fedpfl.config.resolution import resolve_config
from fedpfl.methods import METHODS
from fedpfl.papers import published
from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import QUANTILE, SOURCE
from fedpfl.report.names import DATASET_TITLES
from tests.conftest import ROOT, keep_quick
from tests.papers.test_experiments import EXPERIMENTS, composed, swept

SETTINGS = ROOT / "tests/papers/settings.txt"
EIGHT = ["cifar10", "cifar100", "emnist", "svhn", "mnist", "fmnist", "organamnist", "organcmnist"]
OF_NO_PAPER = "adapters/cifar100 fedobp/all_methods fedobp/alpha_sweep fedobp/q_sweep demo smoke"
PAPERS = [name for name in EXPERIMENTS if name not in OF_NO_PAPER.split()]
ALWAYS = "rounds clients participation partition.name model.name eval.finetune_epochs"
ALWAYS += " local.epochs local.batch_size local.lr local.momentum local.weight_decay"


@functools.cache
def rows() -> list[tuple[str, str, Any, str]]:
    """Return experiment, key, value and where it stands of each line of the table."""
    lines = [line for line in SETTINGS.read_text().splitlines() if line[0] != "#"]
    groups = dict(line.split(" = ", 1) for line in lines if " | " not in line)

    def expand(names: str) -> list[str]:
        kept, left = dict[str, None](), set[str]()
        for word in names.split():
            name = word.removeprefix("-")
            members = expand(groups[name]) if name in groups else [name]
            kept |= dict.fromkeys(members if name == word else ())
            left.update(members if name != word else ())
        return [name for name in kept if name not in left]

    table = [line.split(" | ") for line in lines if " | " in line]
    return [
        (name, key, json.loads(value), where)
        for names, key, value, where in table
        for name in expand(names)
    ]


@functools.cache
def sweep(experiment: str) -> dict[str, list[str]]:
    """What an experiment sweeps over."""
    return swept(composed(f"experiment={experiment}"))


@functools.cache
def settings(experiment: str, choice: str = "") -> dict[str, Any]:
    """An experiment's first job, or that of a method, or of a choice such as `paper=subflot`."""
    group, _, name = choice.rpartition("=")
    own = {key: values[0] for key, values in sweep(experiment).items()}
    if name:
        own[group or "method"] = name
    words = (f"{key}={value}" for key, value in own.items())
    return resolve_config(composed(f"experiment={experiment}", *words))


@pytest.mark.parametrize("experiment", keep_quick(PAPERS))
def test_an_experiment_has_the_papers_settings(experiment: str) -> None:
    wrong = {}
    for key, wanted, where in (row[1:] for row in rows() if row[0] == experiment):
        method, _, path = key.rpartition(": ")
        values, several = settings(experiment, method), sweep(experiment)
        found: Any = values
        for part in path.split("."):
            found = found.get(part) if isinstance(found, dict) else None
        if not method and path in several:
            found = ",".join(several[path]).lower()
        if found != wanted:
            wrong[key] = f"{found} instead of {wanted} ({where})"
        group, _, name = method.rpartition("=")
        if method and (group or "method") in several:
            assert name in several[group or "method"], key
    assert not wrong


@pytest.mark.parametrize("experiment", keep_quick(PAPERS))
def test_no_setting_of_an_experiment_is_left_out(experiment: str) -> None:
    told = {key for name, key, _, _ in rows() if name == experiment}
    of_methods = {key.rpartition(": ")[2] for key in told if key.endswith("momentum")}
    assert {*ALWAYS.split()} <= told | of_methods
    assert told & {"dataset", "dataset.name"}
    assert told >= {key for key in sweep(experiment) if key not in ("method", "seed")}
    if "alpha" in settings(experiment)["partition"]:
        assert "partition.alpha" in told
    has_one_seed = experiment.startswith(("fedselect", "subflot"))
    assert has_one_seed or ("seed" in told) == ("seed" in sweep(experiment))


def test_every_row_is_of_an_experiment() -> None:
    assert {name for name, *_ in rows()} == set(PAPERS)
    pairs = [(name, key) for name, key, *_ in rows()]
    assert len(set(pairs)) == len(pairs)


def test_subflots_pathological_split() -> None:
    """How many classes a client has is not stated; here a tenth of them, of CIFAR10's a fifth."""
    for name, classes in (("cifar10", 2), ("cifar100", 10), ("tiny_imagenet", 20)):
        split = composed(f"experiment=subflot/{name}", "partition=shards").partition
        assert (split.name, split.classes_per_client) == ("shards", classes)


@pytest.mark.full
@pytest.mark.parametrize("experiment", ["fedpurin/fmnist", "fedpurin/cifar100"])
def test_no_method_of_fedpurins_comparison_sends_running_statistics(experiment: str) -> None:
    for name in sweep(experiment)["method"]:
        values = {**settings(experiment, name)["method"]}
        del values["name"]
        assert METHODS[name](**values).buffers() == {"main": "local"}, name


def read_quantiles(name: str) -> dict[str, dict[float, float]]:
    """Return q by data set and alpha."""
    return yaml.safe_load((ROOT / f"conf/quantile/{name}.yaml").read_text())["table"]


def test_q_is_table_2s() -> None:
    table = read_quantiles("paper")
    for dataset, by_alpha in table.items():
        for alpha, q in by_alpha.items():
            key = (SOURCE + "II", QUANTILE, "fedobp", str(dataset), f"Dir({alpha:g})")
            known = published.lookup(key)
            assert known is not None
            assert known.value == q
    assert len(table) == 8


@pytest.mark.parametrize(
    ("name", "files", "kind"),
    [
        ("as_published", "tables", {}),
        ("ablation", "ablation", {"classifier_only": False}),
        ("ablation_cls", "ablation", {"classifier_only": True}),
        ("ablation", "moving average", {"classifier_only": False, "ema": 0.5}),
    ],
)
def test_q_is_that_of_the_public_files(name: str, files: str, kind: dict[str, Any]) -> None:
    table = read_quantiles(name)
    fitting = [
        log
        for log in logs.read_logs()
        if log.files == files and all(getattr(log, k) == v for k, v in kind.items())
    ]
    known = {(log.dataset, log.setting): log.q for log in fitting if log.method == "fedobp"}
    own = {
        (DATASET_TITLES[key], f"Dir({alpha:g})"): q
        for key, row in table.items()
        for alpha, q in row.items()
    }
    assert {key: own[key] for key in known} == known
    assert {dataset for dataset, _ in own} == {dataset for dataset, _ in known} | {"Digits"}


def test_the_weight_of_past_scores_is_that_of_the_public_files() -> None:
    """0.1 on CIFAR10, 0.3 on Fashion-MNIST at Dir(0.1), 0.5 else."""
    for dataset, alpha in (("cifar10", 0.5), ("fmnist", 0.1), ("cifar100", 0.1)):
        job = ("experiment=fedobp/as_published", f"dataset={dataset}", f"partition.alpha={alpha}")
        where = "tables", "fedobp", DATASET_TITLES[dataset], f"Dir({alpha})"
        [known] = [log.ema for log in logs.read_logs() if log[:4] == where]
        assert resolve_config(composed(*job))["method"]["ema"] == known


SCALED = {
    "mnist": ([0.1307], [0.3015]),
    "fmnist": ([0.286], [0.3205]),
    "emnist": ([0.1736], [0.3248]),
    "svhn": ([0.4377, 0.4438, 0.4728], [0.1201, 0.1231, 0.1052]),
    "cifar10": ([0.4914, 0.4822, 0.4465], [0.2023, 0.1994, 0.201]),
    "cifar100": ([0.5071, 0.4865, 0.4409], [0.2009, 0.1984, 0.2023]),
    "organamnist_as_published": ([118.7546], [62.3489]),
    "organcmnist_as_published": ([124.424], [58.8092]),
}
"""Constants of FedOBP's public code, a fork of FL-bench."""


def test_images_are_scaled_as_in_the_public_code() -> None:
    for name, scaling in SCALED.items():
        dataset = yaml.safe_load((ROOT / f"conf/dataset/{name}.yaml").read_text())
        assert (dataset["mean"], dataset["std"]) == scaling


def test_figure_6_has_as_many_personal_entries_as_its_code_divides_by() -> None:
    sizes = {"cifar10": 878_538, "svhn": 878_538, "cifar100": 924_708, "emnist": 608_702}
    sizes |= dict.fromkeys(["mnist", "fmnist", "digits"], 582_026)
    sizes |= dict.fromkeys(["organamnist", "organcmnist"], 582_539)
    counts = dict(zip(EIGHT, (44, 93, 61, 36, 6, 30, 30, 30), strict=True)) | {"digits": 583}
    table = read_quantiles("figure6")
    for dataset, count in counts.items():
        size = sizes[dataset]
        assert size - 1 - math.floor(round(table[dataset][0.1] * (size - 1), 9)) == count


# Published numbers


def head(experiment: str) -> str:
    return (ROOT / f"conf/experiment/{experiment}.yaml").read_text().split("defaults:")[0]


def quoted(experiment: str) -> list[str]:
    """The accuracies behind `Published` or `(published)`."""
    lines = re.findall(r"^# .*[Pp]ublished\b[^:]*: ?(.*)$", head(experiment), re.MULTILINE)
    plain = re.sub(r"\(?alpha [\d.]+|Dir\([\d.]+\)|q = [\d.]+", "", "\n".join(lines))
    return re.findall(r"(?<![\d.=])\d{1,2}\.\d{1,2}(?!\d)", plain)


def test_heads_quote_published_numbers() -> None:
    """Those that the report shows of their papers, and so many of each."""
    counts = Counter[str]()
    for experiment in PAPERS:
        paper = experiment.partition("/")[0]
        with (ROOT / f"fedpfl/papers/{paper}/published.csv").open(encoding="utf-8") as file:
            known = {float(row["value"]) for row in csv.DictReader(file)}
        numbers = quoted(experiment)
        assert {float(number) for number in numbers} <= known, experiment
        counts[paper] += len(numbers)
    assert counts == {"fedobp": 11, "fedselect": 68, "fedpurin": 81, "fedspu": 18, "subflot": 32}
