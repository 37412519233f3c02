"""The settings of the five papers: what conf/ runs is what each paper or its public code says, and
where it says so.
"""

from __future__ import annotations

import csv
import functools
import itertools
import json
import math
import re
from typing import Any

import pytest

from fedpfl.config.plan import resolve_config
from fedpfl.methods import METHODS
from fedpfl.papers import published
from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import QUANTILE, SOURCE
from fedpfl.report.names import DATASET_TITLES
from tests.conftest import ROOT, keep_quick, read_cases
from tests.papers.test_experiments import EXPERIMENTS, composed, swept

SETTINGS = ROOT / "tests/papers/settings.txt"
EIGHT = ["cifar10", "cifar100", "emnist", "svhn", "mnist", "fmnist", "organamnist", "organcmnist"]
# In no paper
OTHERS = [
    "adapters/cifar100",
    "fedobp/all_methods",
    "fedobp/alpha_sweep",
    "fedobp/q_sweep",
    "demo",
    "smoke",
]
PAPERS = [name for name in EXPERIMENTS if name not in OTHERS]
ALWAYS = [
    "rounds",
    "clients",
    "participation",
    "partition.name",
    "model.name",
    "eval.finetune_epochs",
]
ALWAYS += ["local.epochs", "local.batch_size", "local.lr", "local.momentum", "local.weight_decay"]


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


@pytest.mark.parametrize("experiment", keep_quick(PAPERS, 2))
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


@pytest.mark.parametrize("experiment", keep_quick(PAPERS, 2))
def test_no_setting_of_an_experiment_is_left_out(experiment: str) -> None:
    told = {key for name, key, _, _ in rows() if name == experiment}
    of_methods = {key.rpartition(": ")[2] for key in told if key.endswith("momentum")}
    assert set(ALWAYS) <= told | of_methods
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
        for method in sweep(f"subflot/{name}")["method"][::3]:
            words = f"experiment=subflot/{name}", "partition=shards", f"method={method}"
            split = composed(*words).partition
            assert (split.name, split.classes_per_client) == ("shards", classes)


def test_fedspus_code_is_at_hand() -> None:
    """Its step sizes are said beside the paper's."""
    for name, lr in (("emnist", 0.0005), ("speech", 0.001), ("cifar10", 0.005)):
        assert f"local.lr={lr}" in head(f"fedspu/{name}")


@pytest.mark.parametrize("experiment", keep_quick(["fedpurin/fmnist", "fedpurin/cifar100"]))
def test_no_method_of_fedpurins_comparison_sends_running_statistics(experiment: str) -> None:
    for name in sweep(experiment)["method"]:
        values = {**settings(experiment, name)["method"]}
        del values["name"]
        assert METHODS[name](**values).buffers() == {"main": "local"}, name


def test_q_is_table_2s() -> None:
    table = composed("quantile=paper").quantile.table
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
    table = composed(f"quantile={name}", "dataset=mnist").quantile.table
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
    for dataset, alpha in itertools.product(("cifar10", "cifar100", "fmnist"), (0.1, 0.5)):
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
        dataset = composed(f"dataset={name}").dataset
        assert (dataset.mean, dataset.std) == scaling


def test_figure_6_has_as_many_personal_entries_as_its_code_divides_by() -> None:
    sizes = {"cifar10": 878_538, "svhn": 878_538, "cifar100": 924_708, "emnist": 608_702}
    sizes |= dict.fromkeys(["mnist", "fmnist", "digits"], 582_026)
    sizes |= dict.fromkeys(["organamnist", "organcmnist"], 582_539)
    counts = dict(zip(EIGHT, (44, 93, 61, 36, 6, 30, 30, 30), strict=True)) | {"digits": 583}
    table = composed("quantile=figure6").quantile.table
    for dataset, count in counts.items():
        size = sizes[dataset]
        assert size - 1 - math.floor(round(table[dataset][0.1] * (size - 1), 9)) == count


# Published numbers

QUOTED: dict[str, list[str]] = {}
for name, numbers in read_cases(
    """
    fedselect/cifar10 => 82.25 77.65 77.20 75.45 75.40 75.30 74.60 72.75 67.60 27.70
    fedselect/alpha => 80.10 82.25 82.20 81.40 68.30 70.60 72.05 71.40 37.60 37.84 38.69 34.51 78.46 80.51 76.08 76.65
    fedselect/ablation => 79.87 79.73 79.96 78.36 79.24 78.08 64.20 61.12 65.76 62.81 64.82 62.50 35.65 33.28 35.43 32.74
    fedselect/ablation => 33.33 34.91 78.23 76.33 77.06 79.08 79.64 79.11
    fedselect/cifar10c => 72.05 69.50 69.50 68.55 66.65 21.35
    fedselect/mini_imagenet => 38.69 37.72 36.68 34.98 30.78 8.06
    fedselect/office_home => 80.51 80.07 78.75 77.99 75.60 74.35
    fedspu/emnist => 73.42 69.09 67.42 67.34 66.26 7.66
    fedspu/cifar10 => 51.81 47.83 40.52 36.65 33.48 24.95
    fedspu/speech => 39.1 34.06 32.03 21.5 21.08 11.20
    fedpurin/fmnist => 96.55 92.15 89.50 96.80 92.12 89.42 97.17 92.80 90.23 95.65 88.52 85.30
    fedpurin/cifar10 => 85.90 71.53 65.50 86.48 71.10 63.23 85.52 69.47 62.62 84.75 67.38 61.97 81.97 60.78 52.42
    fedpurin/cifar100 => 83.07 54.23 34.92 82.87 52.47 33.73 82.63 54.98 34.78 82.07 52.93 31.55 83.60 51.47 33.67 81.32
    fedpurin/cifar100 => 46.93 23.43
    fedpurin/fmnist_ablation => 96.50 92.08 89.27 96.55 92.15 89.50 96.48 92.30 89.60 96.57 92.27 89.62
    fedpurin/cifar10_ablation => 85.27 72.13 65.08 85.90 71.53 65.50 85.62 70.77 65.27 86.27 71.45 65.63
    fedpurin/cifar100_ablation => 82.33 53.48 33.05 83.07 54.23 34.92 82.25 53.42 32.58 82.55 54.03 34.87
    subflot/cifar10 => 86.89 85.13 84.54 83.78
    subflot/cifar100 => 44.88 35.27 58.37 49.21 40.95
    subflot/tiny_imagenet => 29.30 22.23 19.68
    subflot/ag_news => 87.88 86.02 84.12
    subflot/har => 79.72 76.24 69.80
    subflot/digit5 => 92.58
    subflot/pacs => 41.58 20.17 19.27
    subflot/scalability => 39.20 32.61
    subflot/ablation => 83.78 83.21 82.77 81.41
    subflot/ablation_digit5 => 92.58 90.37 89.73 78.74
    fedobp/table3 => 87.02 70.22
    fedobp/table5 => 87.36 85.00 87.36
    fedobp/table5_cls => 87.37
    fedobp/table5_ema => 99.39
    fedobp/fmnist_dir01 => 96.89 87.29 96.24 94.93
    """
):
    QUOTED.setdefault(name, []).extend(numbers.split())
"""The accuracies that the heads of experiments quote."""


def head(experiment: str) -> str:
    return (ROOT / f"conf/experiment/{experiment}.yaml").read_text().split("defaults:")[0]


def quoted(experiment: str) -> list[str]:
    """The accuracies behind `Published` or `(published)`."""
    lines = re.findall(r"^# .*[Pp]ublished\b[^:]*: ?(.*)$", head(experiment), re.MULTILINE)
    plain = re.sub(r"\(?alpha [\d.]+|Dir\([\d.]+\)|q = [\d.]+", "", "\n".join(lines))
    return re.findall(r"(?<![\d.=])\d{1,2}\.\d{1,2}(?!\d)", plain)


def test_heads_quote_the_published_numbers() -> None:
    for experiment in PAPERS:
        assert quoted(experiment) == QUOTED.get(experiment, []), experiment


def test_quoted_numbers_are_among_those_the_report_shows() -> None:
    """Of the papers that its table has."""
    known: dict[str, set[float]] = {}
    for path in (ROOT / "fedpfl/papers").glob("*/published.csv"):
        with open(path, encoding="utf-8", newline="") as file:
            known[path.parent.name] = {float(row["value"]) for row in csv.DictReader(file)}
    assert "fedobp" in known
    for experiment, numbers in QUOTED.items():
        assert {float(number) for number in numbers} <= known[experiment.partition("/")[0]]
