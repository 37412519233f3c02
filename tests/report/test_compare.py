"""Two configurations side by side, from synthetic run directories, against values computed by hand."""

import math
from pathlib import Path
from typing import Any

import pytest

from fedpfl.report.compare import compare_groups, find_sides, paired_test
from fedpfl.report.table import Table
from tests.report.test_report import write_run

OBP = {"name": "fedobp", "q": 0.9}


def seeds(folder: Path, accuracies: dict[int, float], **changes: Any) -> Path:
    for seed, accuracy in accuracies.items():
        write_run(folder / f"seed{seed}", {2: accuracy - 10, 4: accuracy}, seed=seed, **changes)
    return folder


def between(a: Path, b: Path, **options: Any) -> list[Table]:
    return compare_groups(*find_sides([a, b]), **options)


def rows(compared: list[Table], section: str) -> list[dict[str, Any]]:
    """The exact numbers of a section, without what is empty."""
    every = [row for table in compared for row in table.frame.to_dict("records")]
    return [
        {key: value for key, value in row.items() if value == value}
        for row in every
        if row["section"] == section
    ]


def final(compared: list[Table], name: str) -> dict[str, Any]:
    (found,) = (row for row in rows(compared, "final") if row["what"] == name)
    return found


def notes(compared: list[Table]) -> list[str]:
    assert not any(table.notes for table in compared[:-1])
    return list(compared[-1].notes)


@pytest.fixture
def ab(tmp_path: Path) -> tuple[Path, Path]:
    """FedAvg and FedOBP over seeds 0, 1, 2: B is better by 1, 2 and 3 points."""
    a = seeds(tmp_path / "a", {0: 70.0, 1: 72.0, 2: 74.0})
    return a, seeds(tmp_path / "b", {0: 71.0, 1: 74.0, 2: 77.0}, method=OBP)


def test_final_numbers(ab: tuple[Path, Path]) -> None:
    accuracy = final(between(*ab), "accuracy")
    of_a = {"a": 72.0, "a_seed_std": 2.0, "a_seeds": "0 1 2"}
    of_b = {"b": 74.0, "b_seed_std": 3.0, "b_seeds": "0 1 2"}
    paired = {"difference": 2.0, "pairs": 3, "paired": 2.0, "section": "final", "what": "accuracy"}
    # t = 2 sqrt 3 with two degrees of freedom, whose distribution is 1/2 + t / (2 sqrt(2 + t^2)).
    p, error = (pytest.approx(value) for value in (1 - 12**0.5 / 14**0.5, 1 / 3**0.5))
    assert accuracy == {**of_a, **of_b, **paired, "paired_error": error, "p": p}
    (note,) = notes(between(*ab))
    assert note.startswith("p: the paired t-test of the 3 pairs of seeds, two-sided, not corrected")


def test_only_common_seeds_are_paired(tmp_path: Path) -> None:
    a = seeds(tmp_path / "a", {0: 70.0, 1: 72.0, 2: 74.0})
    b = seeds(tmp_path / "b", {1: 75.0, 2: 76.0, 3: 95.0}, method=OBP)
    compared = between(a, b)
    accuracy = final(compared, "accuracy")
    assert (accuracy["paired"], accuracy["paired_error"]) == (2.5, pytest.approx(0.5))  # of 3 and 2
    assert accuracy["difference"] == 10.0  # 82 - 72, over all seeds
    assert "p" not in accuracy
    assert "No test: the paired t-test needs 3 seeds that both have, and there are 2." in notes(
        compared
    )


def test_too_few_differences_have_no_p() -> None:
    """Five that differ for Wilcoxon's test, whose p is tried with the ranks."""
    for few in ([0.1, 0.3, 0.4, 0.5, 0.6], [0.1, 0.0, 0.3, 0.4, 0.5, 0.6], [0.0] * 8):
        assert math.isnan(paired_test(few, "wilcoxon"))
    for few in ([1.0, 2.0], [0.3, 0.3, 0.3]):  # the t-test needs three pairs and a spread
        assert math.isnan(paired_test(few, "t"))


def test_what_differs_in_the_configuration(tmp_path: Path) -> None:
    a = seeds(tmp_path / "a", {0: 70.0, 1: 70.0}, local={"lr": 0.01, "momentum": 0}, validation=0.0)
    changes = {"local": {"lr": 0.05, "momentum": 0.0}, "device": "cuda", "logger": "wandb"}
    b = seeds(tmp_path / "b", {0: 70.0}, method=OBP, dataset="mnist", **changes)
    compared = between(a, b)
    assert any(note.startswith("A and B are different tasks") for note in notes(compared))
    found = [row for row in rows(compared, "setting") if row["what"] != "dataset.name"]
    told = [(row["what"], row["a"], row["b"], not row["note"]) for row in found]
    assert told[:3] == [
        ("local.lr", "0.01", "0.05", True),
        ("method.name", "fedavg", "fedobp", True),
        ("method.q", "(not set)", "0.9", True),
    ]
    assert sorted(told[3:]) == [
        ("device", "cpu", "cuda", False),
        ("logger.name", "none", "wandb", False),
        ("validation", "0.0", "(not set)", False),  # came later; all runs before had this value
    ]
