"""Tables and figures over simulated time, from run directories made by hand."""

import math
from pathlib import Path

import pandas as pd
import pytest

from fedpfl.ground.errors import FedpflError
from fedpfl.report import groups, runs
from fedpfl.report.__main__ import main
from fedpfl.report.figures import accuracy_figure
from fedpfl.report.html import write_pages
from fedpfl.report.page.data import spent_by_round
from fedpfl.report.tables import accuracy_table
from tests.report.test_html import Page
from tests.report.test_report import write_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for name, each in (("fedavg", 1800.0), ("fedper", 3600.0)):
        path = write_run(
            tmp_path / name, {2: 80.0, 4: 70.0 if name == "fedavg" else 90.0}, method=name
        )
        rounds = pd.read_csv(path / "rounds.csv")
        rounds.assign(sim_seconds=[each, 0.0, each, 2 * each], dropped=1, late=0).to_csv(
            path / "rounds.csv", index=False
        )
    return tmp_path


def test_tables_tell_simulated_hours_and_those_to_a_target(root: Path) -> None:
    keys = ["sim_hours", "sim_hours@80", "sim_hours@80.5", "dropped"]
    frame = accuracy_table(runs(root), chosen=keys).frame.set_index("method")
    assert frame.loc["FedAvg", keys].tolist() == pytest.approx([2.0, 0.5, math.nan, 1], nan_ok=True)
    assert frame.loc["FedPer", keys].tolist() == pytest.approx([4.0, 1.0, 4.0, 1])
    best = accuracy_table(runs(root), select="best-checkpoint", chosen=keys).frame.set_index(
        "method"
    )
    assert best.loc["FedAvg", "sim_hours"] == 0.5
    with pytest.raises(FedpflError, match=r"no such column: one of .*, got 'sim_hours@high'"):
        accuracy_table(runs(root), chosen=["sim_hours@high"])


def test_curves_run_over_simulated_hours(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (group,) = groups(runs(root / "fedavg"))
    assert spent_by_round(group)["simulated"].tolist() == [0.5, 0.5, 1.0, 2.0]
    assert accuracy_figure(runs(root), root / "figure", along="simulated")
    (path,) = write_pages([root], root / "report", warn=print)
    (line,) = Page(path).traces(
        "curves", "FedPer", "mean test accuracy over clients (%)", "simulated hours"
    )
    assert line["x"] == [1.0, 4.0]
    assert Page(path).row("cost", "FedPer")[-1] == "4"
    write_run(root / "without" / "fedavg")
    assert main(["figures", str(root / "without"), "--over", "simulated"]) == 2
    assert (
        capsys.readouterr().err
        == "fedpfl: no run here tells simulated hours; choose another --over\n"
    )
    (path,) = write_pages([root / "without"], root / "without" / "report", warn=print)
    assert "simulated hours" not in path.read_text()


def test_curves_run_over_rounds_since_the_last_shift(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = write_run(tmp_path / "a/fedavg", {1: 80.0, 2: 70.0, 3: 40.0, 4: 60.0})
    rounds = pd.read_csv(folder / "rounds.csv").assign(since_shift=[math.nan, 1, 1, 2])
    rounds.to_csv(folder / "rounds.csv", index=False)
    assert accuracy_figure(runs(tmp_path / "a"), tmp_path / "figure", along="since_shift")
    (path,) = write_pages([tmp_path / "a"], tmp_path / "report", warn=print)
    (line,) = Page(path).traces(
        "curves", "FedAvg", "mean test accuracy over clients (%)", "rounds since the last shift"
    )
    # The round after which clients shift is the last in which they are as before.
    drawn = zip(line["x"], line["y"], strict=True)
    assert [point for point in drawn if point[0] is not None] == [(0, 70), (1, 40), (2, 60)]
    write_run(tmp_path / "b/fedavg")
    assert main(["figures", str(tmp_path / "b"), "--over", "since_shift"]) == 2
    assert "no run here tells rounds since the last shift" in capsys.readouterr().err
