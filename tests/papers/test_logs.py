"""The authors' public result files, and own runs beside them."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from fedpfl.papers import published
from fedpfl.papers.fedobp import logs
from fedpfl.papers.fedobp.tables import COMPARED_METHODS, SOURCE, published_setting
from fedpfl.papers.layout import Selection
from fedpfl.papers.registry import TABLES
from fedpfl.report import groups, runs
from fedpfl.report.__main__ import main
from fedpfl.report.text import letters_and_digits
from tests.report.test_report import write_run

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


def test_files_are_what_the_tables_say() -> None:
    """FedOBP's best of four is not Table III's, whose files came later; Table V's are."""
    counts = Counter(log.files for log in logs.read_logs())
    assert counts == {"tables": 175, "ablation": 32, "moving average": 16, "scores": 154}
    best = {
        (log.dataset, log.norm, log.classifier_only): max(
            before for before, _ in log.accuracy.values()
        )
        for log in logs.read_logs()
        if log.files == "ablation"
    }
    names = {("none", False): "FedOBP NoNorm", ("layer", False): "FedOBP LayerNorm"}
    names |= {("global", False): "FedOBP GlobalNorm w/o CLS"}
    names |= {("global", True): "FedOBP GlobalNorm with CLS"}
    moving = (log for log in logs.read_logs() if log.files == "moving average")
    averaged = {log.dataset: log for log in moving if not log.classifier_only}
    metric = "mean test accuracy over clients (%)"
    for (dataset, *kind), value in best.items():
        name = letters_and_digits(names[*kind])
        known = published.published_numbers()[SOURCE + "V", metric, name, dataset, "ablation"]
        if kind == ["global", True] and dataset.endswith("MNIST") and dataset != "EMNIST":
            assert value != known.value
            value = max(before for before, _ in averaged[dataset].accuracy.values())
        assert value == pytest.approx(known.value, abs=0.051), (dataset, kind)
    assert {log.method for log in logs.read_logs()} == {*COMPARED_METHODS} - {"fedala", "fedselect"}


def test_runs_of_the_files_settings_stand_beside_them(tmp_path, capsys):
    add(tmp_path, "avg", 25.25, {"name": "fedavg"})
    add(tmp_path, "obp", 46.0, EARLIER | {"q": 0.99505, "ema": 0.5})
    others = [{"local": {"momentum": 0.0}}, {"seed": 1}]
    others += [{"partition": {"name": "dirichlet"}}, {"partition": {"alpha": 0.3}}]
    for number, changes in enumerate(others):
        add(tmp_path, str(number), 50.0, {"name": "fedavg"}, **changes)
    for name, changes in {
        "q": {"q": 0.9998},
        "ema": {"ema": 0.3},
        "score": {"score": "obp"},
    }.items():
        add(tmp_path, f"obp {name}", 50.0, EARLIER | {"q": 0.99505, "ema": 0.5} | changes)
    gathered = groups(runs(tmp_path))
    add(tmp_path, "flute", 20.0, {"name": "flute"})
    table = TABLES["fedobp/public_logs"].make(groups(runs(tmp_path)), Selection())
    assert any(note.startswith("FLUTE: ") for note in table.notes)
    frame = TABLES["fedobp/public_logs"].make(gathered, Selection()).frame
    assert frame["round"].tolist() == [100, 200] * 2
    avg = frame[frame["method"].str.startswith("FedAvg")].iloc[0]
    assert (avg["before"], avg["before_logged"], avg["after"], avg["after_logged"]) == (
        *(25.25, 25.48, 27.25, 49.14),
    )
    assert avg["before_difference"] == pytest.approx(25.25 - 25.48)
    obp = frame[frame["method"].str.startswith("FedOBP")]
    assert obp["before_logged"].tolist() == [45.95, 45.57]
    assert main(["paper", "fedobp/public_logs", str(tmp_path), "--format", "csv"]) == 0
    assert capsys.readouterr().out.count("CIFAR100") == 6


def test_medmnist_stands_beside_its_files_with_their_normalisation_alone(tmp_path: Path) -> None:
    faulty = {"name": "organamnist", "mean": [118.7546], "std": [62.3489]}
    for name, dataset in (
        ("sound", {"name": "organamnist", "mean": [0.46], "std": [0.24]}),
        ("faulty", faulty),
    ):
        add(tmp_path, name, 60.0, {"name": "fedper"}, dataset=dataset)
    [group] = logs.choose_logged(groups(runs(tmp_path)))
    assert group.runs[0].path.name == "faulty"
    assert published_setting(group.runs[0]) == "Dir(0.1)"
