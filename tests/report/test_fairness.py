"""Who is helped and who is harmed, from synthetic run directories, against values computed by hand."""

import math
import statistics
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from fedpfl.ground.errors import FedpflError
from fedpfl.report.fairness import fairness_table
from fedpfl.report.load import runs
from fedpfl.report.table import Table
from tests.report.test_report import amend, row_of, write_run

FEDPER, LOCAL = {"name": "fedper"}, {"name": "local_only"}
PERSONAL = [40.0, 40, 67, 81, 92, 10, 20, 30, 40, 80]


def run(
    folder: Path,
    accuracy: list[float],
    ft: list[float] | None = None,
    data: str = "",
    **changes: Any,
) -> Path:
    """A run whose clients have these accuracies, and ten test samples each without `test`."""
    more = {key: changes.pop(key) for key in ("test", "unseen") if key in changes}
    write_run(folder, **changes)
    held = {"client": range(len(accuracy)), "train": 30, "test": 10, "label_0": 40}
    frame = pd.DataFrame({**held, "accuracy": accuracy})
    if ft:
        frame["ft_accuracy"] = ft
    frame.assign(**more).to_csv(folder / "clients.csv", index=False)
    return amend(folder, data=data) if data else folder


def table_of(root: Path) -> Table:
    return fairness_table(runs(root))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """FedPer harms 0, 1, 2 against FedAvg+FT and 9 against Local-Only; 5 to 8 keep theirs."""
    write_three(tmp_path)
    return tmp_path


def write_three(folder: Path) -> None:
    """A run of FedAvg+FT, of FedPer and of Local-Only."""
    tuned = [50.0, 60, 70, 80, 90, 10, 20, 30, 40, 50]
    run(folder / "fedavg/seed0", [0.0] * 10, tuned)
    run(folder / "fedper/seed0", PERSONAL, [99.0] * 10, method=FEDPER)
    run(folder / "local/seed0", [0.0] * 9 + [88.5], [1.0] * 10, method=LOCAL)


def test_harm_by_hand(root: Path) -> None:
    row = row_of(table_of(root), "FedPer")
    names = ("harmed", "loss", "change")  # the change is of the worst of ten
    assert [row[f"{name}_fedavg"] for name in names] == pytest.approx([30, 33 / 3, -20])
    assert [row[f"{name}_local_only"] for name in names] == [10, 8.5, -8.5]
    assert row["accuracy"] == 50
    assert row["accuracy_std"] == pytest.approx(statistics.pstdev(PERSONAL))
    assert row["accuracy_worst10"] == 10
    assert math.isnan(row["harmed_fedavg_seed_std"])


def test_means_over_seeds(root: Path) -> None:
    run(root / "fedavg/seed1", [0.0] * 10, [50.0] * 10, seed=1)
    run(root / "fedper/seed1", [40.0] * 5 + [60.0] * 5, method=FEDPER, seed=1)
    run(root / "fedavg/seed2", [0.0] * 10, [50.0] * 10, seed=2)
    run(root / "fedper/seed2", [60.0] * 10, method=FEDPER, seed=2)
    run(root / "fedper/seed3", [1.0] * 10, method=FEDPER, seed=3)
    table = table_of(root)
    row = row_of(table, "FedPer")
    assert row["harmed_fedavg"] == pytest.approx((30 + 50 + 0) / 3)
    assert row["harmed_fedavg_seed_std"] == pytest.approx(statistics.stdev([30, 50, 0]))
    # Of the seeds that have harmed clients
    assert row["loss_fedavg"] == pytest.approx((11 + 10) / 2)
    assert row["change_fedavg"] == pytest.approx((-20 - 10 + 10) / 3)
    seeds = [row[f"seed_list{of}"] for of in ("", "_fedavg", "_local_only")]
    assert seeds == ["0 1 2 3", "0 1 2", "0"]
    lacking = "FedPer on FMNIST, Dir(0.1) (seed 3)."
    assert f"No FedAvg+FT of the same data, split and seed: {lacking}" in table.notes


def test_only_the_same_split_and_seed_is_a_baseline(tmp_path: Path) -> None:
    changes: list[dict[str, Any]] = [{"test": 9}, {"seed": 7}, {"data": "b"}, {"dataset": "mnist"}]
    for number, change in enumerate([*changes, {"partition": {"alpha": 0.5}}]):
        run(tmp_path / str(number) / "fedper", [50.0], method=FEDPER, data="a")
        run(tmp_path / str(number) / "fedavg", [60.0], [60.0], **{"data": "a"} | change)
        with pytest.raises(FedpflError, match="no run here has FedAvg"):
            table_of(tmp_path / str(number))


def test_clients_that_never_take_part_or_have_no_test_samples_do_not_count(tmp_path: Path) -> None:
    kinds = {"unseen": [0, 0, 1, 0], "test": [10, 10, 10, 0]}
    run(tmp_path / "fedavg/seed0", [0.0] * 4, [50.0, 50, 99, math.nan], **kinds)
    run(tmp_path / "fedper/seed0", [40.0, 60, 0, math.nan], method=FEDPER, **kinds)
    row = row_of(table_of(tmp_path), "FedPer")
    assert (row["accuracy"], row["harmed_fedavg"], row["change_fedavg"]) == (50, 50, -10)


def test_the_nearest_baseline_is_taken_and_what_differs_told(root: Path) -> None:
    run(root / "far/seed0", [0.0] * 10, [100.0] * 10, local={"lr": 0.5, "epochs": 1})
    assert row_of(table_of(root), "FedPer")["harmed_fedavg"] == 30
    run(root / "near/seed0", [0.0] * 10, [100.0] * 10, method={"name": "fedavg", "mode": 1})
    table = table_of(root)
    assert math.isnan(row_of(table, "FedPer")["harmed_fedavg"])
    several = "Several FedAvg+FT fit, choose one by filters: "
    assert any(note.startswith(several) for note in table.notes)
