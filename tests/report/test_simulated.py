"""Tables and figures over simulated time, from run directories made by hand."""

import math
import re
from pathlib import Path

import pytest

from fedpfl.ground.errors import FedpflError
from fedpfl.report import runs
from fedpfl.report.tables import accuracy_table
from tests.report.test_html import ACCURACY, page_of
from tests.report.test_report import add_columns, read_refusal, row_of, write_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, each in (("fedavg", 1800.0), ("fedper", 3600.0)):
        last = 70.0 if name == "fedavg" else 90.0
        path = write_run(tmp_path / name, {2: 80.0, 4: last}, method=name)
        add_columns(path, sim_seconds=[each, 0.0, each, 2 * each], dropped=1, late=0)
    return tmp_path


def test_tables_tell_simulated_hours_and_those_to_a_target(root: Path) -> None:
    keys = ["sim_hours", "sim_hours@80", "sim_hours@80.5", "dropped"]
    frame = accuracy_table(runs(root), chosen=keys).frame.set_index("method")
    assert frame.loc["FedAvg", keys].tolist() == pytest.approx([2.0, 0.5, math.nan, 1], nan_ok=True)
    assert frame.loc["FedPer", keys].tolist() == pytest.approx([4.0, 1.0, 4.0, 1])
    add_columns(root / "fedper", sim_seconds=[1.0, None, 1.0, 1.0])
    row = row_of(accuracy_table(runs(root), chosen=keys), "FedPer")
    assert math.isnan(row["sim_hours"]), "a round without a record makes the sum unknown"
    best = accuracy_table(runs(root), select="best-checkpoint", chosen=keys)
    assert row_of(best, "FedAvg")["sim_hours"] == 0.5
    with pytest.raises(FedpflError, match=r"no such column: one of .*, got 'sim_hours@high'"):
        accuracy_table(runs(root), chosen=["sim_hours@high"])


def test_curves_run_over_simulated_hours(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (line,) = page_of(root).traces("curves", "FedPer", ACCURACY, "simulated hours")
    assert line["x"] == [1.0, 4.0]
    write_run(root / "without" / "fedavg")
    line = read_refusal(capsys, "figures", root / "without", "--over", "simulated")
    assert line == "no run here tells simulated hours; choose another --over"


def test_what_a_target_costs_has_an_interval_over_seeds(tmp_path: Path) -> None:
    """Seconds are 1, 9, 2, 2, and evaluations took 1.8 and 3.6 of them after rounds 2 and 4."""
    for seed, accuracy in enumerate(({2: 80.0, 4: 70.0}, {2: 70.0, 4: 80.0})):
        path = write_run(tmp_path / f"seed{seed}", accuracy, seed=seed)
        add_columns(path, eval_seconds=[None, 1.8, None, 3.6], flops=[1e12, 2e12, 0, 5e12])
    keys = ["rounds@80", "hours@80", "gb@80", "tflops@80", "hours@81", "hours"]
    table = accuracy_table(runs(tmp_path), chosen=keys, interval="seed")
    row = table.frame.iloc[0]
    spent = {"rounds@80": (2, 4), "hours@80": (11.8 / 3600, 19.4 / 3600)}
    spent |= {"gb@80": (1.152e6 / 8e9, 2.176e6 / 8e9), "tflops@80": (3, 8)}
    for key, (less, more) in spent.items():
        assert row[key] == pytest.approx((less + more) / 2)
        # Student's t of two seeds, 12.706, times their deviation over the root of two.
        assert row[f"{key}_seed_ci95"] == pytest.approx(12.7062 * (more - less) / 2, rel=1e-4)
        text = table.rows[0][3 + keys.index(key)].text(table.columns[3 + keys.index(key)])
        assert re.fullmatch(r"[\d.e-]+\[[\d.e-]+\]", text)
    assert math.isnan(row["hours@81"])
    assert math.isnan(row["hours"]), "of the summary, which has none"
