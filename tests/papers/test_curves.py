"""Own curves beside published ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedpfl.ground.errors import FedpflError
from fedpfl.papers.curves import curve_table, draw_curves
from fedpfl.report import runs
from fedpfl.report.render import render
from tests.report import test_report

root = test_report.root


@pytest.fixture
def reference(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("reference") / "curves.csv"
    lines = ["method,round,accuracy_before,accuracy_after"]
    lines += [
        f"fedavg,{number},{50 + number + (-1) ** number},{59 + number}" for number in range(1, 5)
    ]
    lines += [f"fedobp_as_published_q0.9,{number},{number},{number}" for number in range(1, 5)]
    lines += ["fedper,1,2,3"]
    path.write_text("\n".join(lines) + "\n")
    return path


def test_distance_from_published_curves(root: Path, reference: Path) -> None:
    table = curve_table(runs(root), reference, spans=((1, 2), (3, 100)))
    rows = table.frame[table.frame["method"] == "FedAvg"].to_dict("records")
    assert [(row["first"], row["last"]) for row in rows] == [(1, 2), (3, 4)]
    for row in rows:
        assert row["before_absolute"] == 1.0
        assert row["before_signed"] == 0.0
        assert row["after_absolute"] == row["after_signed"] == 1.0
    assert set(table.frame["reference"]) == {"fedavg", "fedobp_as_published_q0.9"}
    assert "| FedAvg | 0 | fedavg | 1 | 2 | 1.00 | +0.00 | 1.00 | +1.00 |" in render(
        table, "markdown"
    )


def test_a_wrong_reference_is_named(root: Path, tmp_path: Path) -> None:
    wrong = tmp_path / "wrong.csv"
    wrong.write_text("method,round\n")
    with pytest.raises(FedpflError, match="lacks the column accuracy_before"):
        curve_table(runs(root), wrong)
    with pytest.raises(FedpflError, match="cannot be read"):
        curve_table(runs(root), tmp_path / "absent.csv")


def test_both_curves_are_drawn(root: Path, reference: Path, tmp_path: Path) -> None:
    written = draw_curves(runs(root), reference, tmp_path / "curves")
    assert [path.name for path in written] == ["curves.png", "curves.pdf"]
    assert all(path.is_file() for path in written)
