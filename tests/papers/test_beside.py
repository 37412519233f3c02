"""Published numbers, curves and result files beside own runs, and in what these depart from them."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedpfl.engine import draw_cohorts
from fedpfl.methods import METHODS
from fedpfl.models import MODELS, Net
from fedpfl.papers import published
from fedpfl.papers.curves import curve_table, draw_curves
from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import (
    published_beside,
    published_number,
    published_setting,
)
from fedpfl.papers.registry import TABLES
from fedpfl.report import groups, runs
from fedpfl.report.load import read_run
from fedpfl.report.render import render
from fedpfl.report.table import Table
from fedpfl.report.tables import accuracy_table
from fedpfl.runner.cost import count_submodel_costs
from tests.report import test_report
from tests.report.test_report import add_columns, row_of, write_run

root = test_report.root
DIFFERS = "Set-up that differs from the published one"


def table_of(folder: Path) -> Table:
    return accuracy_table(runs(folder), beside=partial(published_beside, everywhere=True))


def test_published_values_stand_beside_runs(root: Path, tmp_path_factory) -> None:
    """Of the papers' set-up alone, or of any with a note on what differs."""
    table = table_of(root)
    row = row_of(table, "FedOBP")
    assert (row["published"], row["published_seed_std"]) == (96.89, 0.03)
    assert row["difference"] == pytest.approx(95.0 - 96.89)
    assert row["difference_pooled"] == pytest.approx(96.0 - 96.89)
    assert table.notes[0].startswith(f"{DIFFERS}: rounds 4 (published 400)")
    assert "authors' logs pooled" in " ".join(table.prose("markdown"))
    tmp_path = tmp_path_factory.mktemp("runs")
    write_run(tmp_path / "0", rounds=400)
    write_run(tmp_path / "other", rounds=400, clients=10, method="fedper")
    beside = accuracy_table(runs(tmp_path), beside=published_beside)
    assert row_of(beside, "FedAvg (clients=100)")["published"] == 87.29
    assert math.isnan(row_of(beside, "FedPer (clients=10)")["difference"])
    assert "Set-up that differs" not in " ".join(beside.notes)
    method = {"name": "fedobp", "q": 0.1, "norm": "layer"}
    write_run(tmp_path / "layer", rounds=400, method=method, local={"momentum": 0.0})
    note = table_of(tmp_path).notes[0]
    label = "FedOBP (momentum=0.0)"
    assert (
        f"q 0.1 (published 0.99993) for {label}; norm layer (published global) for {label}" in note
    )


def test_published_values_match_by_method_data_set_and_setting(tmp_path: Path) -> None:
    known = [{"dataset": "organamnist", "method": "fedper"}, {"partition": ("published", 0.1)}]
    unknown = [{"method": "ditto"}, {"partition": {"alpha": 0.3}}, {"partition": ("iid", 0.1)}]
    for number, changes in enumerate([*known, {"method": "lg_fedavg"}, *unknown]):
        (group,) = groups([read_run(write_run(tmp_path / str(number), **changes))])
        assert (published_number(group.runs[0]) is not None) == (changes not in unknown), changes


# Own curves beside published ones


def test_curves_beside_published_ones(root: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    folder = tmp_path_factory.mktemp("reference")
    add_columns(root / "a/fedavg/k2/seed0", round=[19, 20, 21, 22])
    lines = ["method,round,accuracy_before,accuracy_after"]
    lines += [f"fedavg,{t + 18},{50 + t + (-1) ** t},{59 + t}" for t in range(1, 5)]
    lines += [f"fedobp_as_published_q0.9,{t},{t},{t}" for t in range(1, 5)]
    lines += ["fedper,1,2,3"]
    reference = folder / "published.csv"
    reference.write_text("\n".join(lines) + "\n")
    table = curve_table(runs(root), reference)
    assert set(table.frame["reference"]) == {"fedavg", "fedobp_as_published_q0.9"}
    text = render(table, "markdown")
    for span in ("19 | 20", "21 | 22"):
        assert f"| FedAvg | 0 | fedavg | {span} | 1.00 | +0.00 | 1.00 | +1.00 |" in text
    written = draw_curves(runs(root), reference, folder / "curves")
    assert [path.name for path in written] == ["curves.png", "curves.pdf"]


# The authors' public result files, and own runs beside them

EARLIER = {"name": "fedobp", "score": "obp_as_published", "scope": "all", "norm": "global"}
EARLIER["classifier_only"] = False
PUBLISHED = {"name": "published", "alpha": 0.1}
CIFAR100: dict[str, Any] = {"dataset": "cifar100", "rounds": 400, "seed": 42}


def add(root: Path, name: str, before: float, method: dict[str, Any], **changes: Any) -> Path:
    """A run of 200 rounds whose pooled accuracy is `before`, and two points more after fine-tuning."""
    changes = CIFAR100 | changes
    changes["partition"] = PUBLISHED | changes.get("partition", {})
    evaluations = {100: before - 1, 200: before - 1}
    return write_run(root / name, evaluations, reached=200, method=method, **changes)


def test_runs_of_the_files_settings_stand_beside_them(tmp_path: Path) -> None:
    """Not those of another momentum, seed, split, alpha or of another q, average or score."""
    add(tmp_path, "avg", 25.25, {"name": "fedavg"})
    add(tmp_path, "obp", 46.0, EARLIER | {"q": 0.99505, "ema": 0.5})
    add(tmp_path, "flute", 20.0, {"name": "flute"})
    others = [{"local": {"momentum": 0.0}}, {"seed": 1}]
    others += [{"partition": {"name": "dirichlet"}}, {"partition": {"alpha": 0.3}}]
    for number, changes in enumerate(others):
        add(tmp_path, str(number), 50.0, {"name": "fedavg"}, **changes)
    for name, value in {"q": 0.9998, "ema": 0.3, "score": "obp"}.items():
        add(tmp_path, name, 50.0, EARLIER | {"q": 0.99505, "ema": 0.5, name: value})
    table = TABLES["fedobp/public_logs"].make(groups(runs(tmp_path)))
    assert any(note.startswith("FLUTE: ") for note in table.notes)
    assert table.frame["round"].tolist() == [100, 200] * 3
    avg = table.frame.iloc[0]
    columns = ["before", "before_logged", "after", "after_logged"]
    assert avg[columns].tolist() == [25.25, 25.48, 27.25, 49.14]
    assert avg["before_difference"] == pytest.approx(25.25 - 25.48)
    obp = table.frame[table.frame["method"].str.startswith("FedOBP")]
    assert obp["before_logged"].tolist() == [45.95, 45.57]


def test_medmnist_stands_beside_its_files_with_their_normalisation_alone(tmp_path: Path) -> None:
    for name, mean, std in (("sound", 0.46, 0.24), ("faulty", 118.7546, 62.3489)):
        dataset = {"name": "organamnist", "mean": [mean], "std": [std]}
        add(tmp_path, name, 60.0, {"name": "fedper"}, dataset=dataset)
    [group] = logs.choose_logged(groups(runs(tmp_path)))
    assert group.runs[0].path.name == "faulty"
    assert published_setting(group.runs[0]) == "Dir(0.1)"


def test_public_curves_over_q_are_those_of_a_runs_score(tmp_path: Path) -> None:
    """FedOBP's file has a moving average on CIFAR100; Fisher's quantile is per tensor."""
    scores = {"obp_as_published": (0.993, 46.36), "fisher": (0.9, 40.93), "gradient": (0.9, 39.76)}
    for score, (q, best) in scores.items():
        path = add(tmp_path, score, 40.0, EARLIER | {"score": score, "q": q})
        curve = logs.accuracy_by_quantile(read_run(path))
        assert (max(curve, key=curve.get), max(curve.values())) == (q, best)


# Numbers that follow without runs


def test_computed_numbers_follow_from_networks_and_cohorts() -> None:
    """FedPURIN's traffic from parameters and masks; FedSPU's from widths and cohorts."""
    wanted: dict[tuple[str, str, str], float] = {}
    networks = {"FMNIST": ("resnet8", 1, 10), "CIFAR10": ("resnet8", 3, 10)}
    for dataset, (name, channels, classes) in (
        networks | {"CIFAR100": ("resnet10", 3, 100)}
    ).items():
        sizes = [leaf.numel() for leaf in MODELS[name]((channels, 32, 32), classes).parameters()]
        wanted[dataset, "fedavg", "uplink"] = wanted[dataset, "fedavg", "downlink"] = 4 * sum(sizes)
        wanted[dataset, "fedcac", "uplink"] = (4 + 1 / 8) * sum(sizes)
        wanted[dataset, "fedcac", "downlink after"] = 4 * sum(size - size // 2 for size in sizes)
    for key, number in published.published_numbers("computed.csv").items():
        source, metric, method, dataset, _ = key
        assert published.lookup(key) is not None
        if source.startswith("FedPURIN"):
            link = metric.split()[0]
            if method == "fedcac" and link == "downlink":
                method, link = (
                    ("fedcac", "downlink after") if "after" in metric else ("fedavg", link)
                )
            assert number.value * 2**20 == pytest.approx(wanted[dataset, method, link])
    inputs = {
        "EMNIST": ("emnist", 28, 62),
        "CIFAR10": ("cifar10", 32, 10),
        "Speech Commands": ("speech", 32, 35),
    }
    for dataset, (name, pixels, classes) in inputs.items():
        shape = (3 if dataset == "CIFAR10" else 1, pixels, pixels)
        net = Net(MODELS[f"fedspu_{name}"](shape, classes))
        entries = [row["entries"] for row in count_submodel_costs(METHODS["fedspu"](), net, shape)]
        cohorts = [cohort for seed in (1, 2, 3) for cohort in draw_cohorts(seed, 100, 0.1, 500)]
        volume = 64 * sum(entries[client // 20] for cohort in cohorts for client in cohort) / 3e9
        metric = "total transmitted parameters (GB)"
        key = ("FedSPU (AAAI 2025) Table 3", metric, "fedspu", dataset, "500 rounds")
        assert published.published_numbers("computed.csv")[key].value == pytest.approx(volume)
