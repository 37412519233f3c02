"""Figures of what methods come to, from synthetic run directories, against values by hand."""

from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from fedpfl.report import figures, outcomes, styles
from fedpfl.report.__main__ import main
from fedpfl.report.grouping import groups
from fedpfl.report.load import runs
from fedpfl.report.page import drawing
from tests.report.test_fairness import FEDPER, PERSONAL, run, write_three
from tests.report.test_report import write_run


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """FedAvg+FT, FedPer and Local-Only with two seeds each, the second of equal clients."""
    write_three(tmp_path)
    run(tmp_path / "fedavg/seed1", [0.0] * 10, [50.0] * 10, seed=1)
    run(tmp_path / "fedper/seed1", [60.0] * 10, method=FEDPER, seed=1)
    return tmp_path


def draw(kind: str, root: Path, monkeypatch: pytest.MonkeyPatch, *words: str) -> dict[str, Any]:
    """Return each label's line of one panel."""
    drawn: dict[str, Any] = {}

    def panels(members: Any, path: Path, draw_panel: Any) -> list[Path]:
        ax = Figure().subplots()
        for shown in members.values():
            draw_panel(ax, shown)
        drawn.update({str(line.get_label()): line.get_xydata() for line in ax.get_lines()})
        return []

    monkeypatch.setattr(outcomes, "draw_panels", panels)
    assert main(["figures", str(root), "--kind", kind, *words]) == 0
    return drawn


def test_sorted_clients_and_their_gains_by_hand(root, monkeypatch):
    """Client i of ten stands at 10 i + 5 percent; the line is the mean over seeds."""
    clients = draw("clients", root, monkeypatch)
    assert {"FedAvg+FT", "FedPer", "Local-Only"} == {*clients}
    places = [5 + 10 * client for client in range(10)]
    sorted_values = sorted(PERSONAL)
    assert clients["FedPer"][places, 1] == pytest.approx([(y + 60) / 2 for y in sorted_values])
    gains = draw("gains", root, monkeypatch)
    differences = sorted([-10, -20, -3, 1, 2, 0, 0, 0, 0, 30])
    assert gains["FedPer"][places, 1] == pytest.approx([(y + 10) / 2 for y in differences])
    assert "FedAvg+FT" not in gains


# ---- one look everywhere


def test_a_method_looks_alike_in_figures_and_on_pages(tmp_path):
    """Frequent methods in any company, users' methods in any company without their colour."""
    names = ["fedavg", "ditto", "knn_per", "mine_a", "mine_b"]
    for name in names:
        write_run(tmp_path / name / "seed0", method={"name": name})
    found = groups(runs(tmp_path))
    together = styles.number_styles(found)
    assert styles.number_styles(reversed(found)) == together
    for group in found:
        if group.method != "kNN-Per":  # which shares Ditto's colour alone
            assert styles.number_styles([group])[group.method] == together[group.method]
    assert len({number % len(styles.COLORS) for number in together.values()}) == len(names)
    assert len(figures.MARKERS) == len(drawing._SYMBOLS)
